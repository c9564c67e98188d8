"""Pushes over loopback sockets and shared memory: the bytes arrive; what goes wrong is told once and harms nothing."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import threading
from typing import Any

import msgspec
import pytest
import uvloop
from kv_helpers import (
    LAYOUT,
    TIMEOUT_S,
    TINY,
    TRAILER,
    VIAS,
    Pair,
    RecordingRole,
    block_bytes,
    make_arena,
    make_offer,
    peer_of,
    push,
    push_all,
    until,
)

from transfer.errors import ConfigError, InvalidValue, KvTransferFailed
from transfer.kv.links.tcp import TcpKvPort
from transfer.kv.port import KvKind, KvTrailer
from transfer.wire.messages import KvPeer


def shuffled(num_blocks: int, seed: int) -> list[int]:
    blocks = list(range(num_blocks))
    random.Random(seed).shuffle(blocks)
    return blocks


async def round_trip(via: str) -> None:
    source, target = shuffled(24, 1)[:20], shuffled(24, 2)[:20]
    async with Pair(24, via=via) as pair:
        stats = await push(pair, source, target, first_block=5)
        assert pair.same(source, target)
        untouched = [block for block in range(24) if block not in target]
        assert all(block_bytes(pair.target, block) == bytes(LAYOUT.block_bytes) for block in untouched)
        assert stats.num_bytes == 20 * LAYOUT.block_bytes
        assert 0 < stats.exposed_s <= stats.transfer_s
        assert pair.role.arrived == [(make_offer(20, first_block=5), TRAILER)]
        assert pair.role.failed == []


@pytest.mark.parametrize("via", VIAS)
async def test_scattered_blocks_arrive_byte_for_byte(via: str):
    await round_trip(via)


@pytest.mark.parametrize("via", VIAS)
def test_it_works_under_uvloop(via: str):
    uvloop.run(round_trip(via))


@pytest.mark.parametrize("via", VIAS)
@pytest.mark.parametrize("checksum", [True, False])
async def test_layers_and_chunks_in_any_order(via: str, checksum: bool):
    async with Pair(16, via=via, checksum=checksum, shm_checksum=checksum, slab_bytes=60_000) as pair:
        source, target = list(range(16)), list(range(15, -1, -1))
        pair.role.granted = target
        sender = await pair.prefill.open(pair.peer, make_offer(16), source, TIMEOUT_S)
        pieces = [(layer, first) for layer in range(LAYOUT.num_layers) for first in (0, 5, 11)]
        random.Random(4).shuffle(pieces)
        for number, (layer, first) in enumerate(pieces):
            sender.push(layer, first, {0: 5, 5: 6, 11: 5}[first])
            if number % 20 == 0:
                await asyncio.sleep(0)
        await sender.commit(TRAILER, TIMEOUT_S)
        assert pair.same(source, target)


@pytest.mark.parametrize("via", VIAS)
async def test_sixteen_streams_at_once_on_one_connection(via: str):
    async with Pair(64, via=via, window_bytes=100_000) as pair:
        blocks = shuffled(64, 3)

        async def one(number: int) -> None:
            mine = blocks[4 * number : 4 * number + 4]
            offer = make_offer(4, request_id=f"r{number}", first_block=number)
            sender = await pair.prefill.open(pair.peer, offer, mine, TIMEOUT_S)
            for layer in range(LAYOUT.num_layers):
                sender.push(layer, number, 4)
                await asyncio.sleep(0)
            await sender.commit(KvTrailer(num_tokens=number), TIMEOUT_S)

        await asyncio.gather(*map(one, range(16)))
        assert len(pair.prefill._sessions) == len(pair.decode._sessions) == 1
        assert sorted(trailer.num_tokens for _, trailer in pair.role.arrived) == list(range(16))
        granted = {offer.first_block: number for number, offer in enumerate(pair.role.offered)}
        for number in range(16):
            at = 4 * granted[number]
            assert pair.same(blocks[4 * number : 4 * number + 4], list(range(at, at + 4)))


@pytest.mark.parametrize("via", VIAS)
async def test_a_layout_of_tiny_blocks(via: str):
    async with Pair(300, via=via, layout=TINY) as pair:
        source, target = shuffled(300, 1), shuffled(300, 2)
        await push(pair, source, target)
        assert pair.same(source, target)


async def test_a_push_of_no_blocks():
    async with Pair(2) as pair:
        stats = await push(pair, [], [])
        assert stats.num_bytes == 0
        assert len(pair.role.arrived) == 1


async def test_a_migration_carries_tokens():
    async with Pair(4) as pair:
        trailer = KvTrailer(num_tokens=3, tokens=os.urandom(200_000), num_output=2)
        pair.role.granted = [3]
        sender = await pair.prefill.open(pair.peer, make_offer(1, kind=KvKind.MIGRATION), [0], TIMEOUT_S)
        push_all(sender, 0, 1)
        await sender.commit(trailer, TIMEOUT_S)
        assert pair.role.arrived[0][1] == trailer


@pytest.mark.parametrize("via", VIAS)
async def test_a_store_skips_what_is_there(via: str):
    async with Pair(4, via=via) as pair:
        stats = await push(pair, [0, 1, 2, 3], [-1, 3, -1, 2], kind=KvKind.STORE, hashes=tuple([b"h" * 32] * 4))
        assert stats.num_bytes == 2 * LAYOUT.block_bytes
        assert pair.same([1, 3], [3, 2])
        assert block_bytes(pair.target, 0) == bytes(LAYOUT.block_bytes)


async def test_pushes_from_the_engines_thread_share_wakeups():
    async with Pair(8) as pair:
        pair.role.granted = list(range(8))
        sender = await pair.prefill.open(pair.peer, make_offer(8), list(range(8)), TIMEOUT_S)
        loop = asyncio.get_running_loop()
        wakeups = 0
        real = loop.call_soon_threadsafe

        def counting(*args: Any, **kwargs: Any) -> Any:
            nonlocal wakeups
            wakeups += 1
            return real(*args, **kwargs)

        loop.call_soon_threadsafe = counting  # type: ignore[method-assign]
        thread = threading.Thread(target=push_all, args=(sender, 0, 8))
        thread.start()
        thread.join()  # the loop is blocked meanwhile, so that all pushes fall into one of its turns
        assert wakeups == 1
        await sender.commit(TRAILER, TIMEOUT_S)
        assert pair.same(list(range(8)), list(range(8)))


async def test_prepare_and_commit_bracket_what_is_read_and_written():
    async with Pair(6) as pair:
        read, written = [], []
        pair.source.prepare_read = lambda layer, blocks: read.append((layer, tuple(blocks)))  # type: ignore[method-assign]
        pair.target.commit_write = lambda layer, blocks: written.append((layer, tuple(blocks)))  # type: ignore[method-assign]
        await push(pair, [5, 3], [0, 4])
        assert read == [(layer, (5, 3)) for layer in range(LAYOUT.num_layers)]
        assert written == [(layer, (0, 4)) for layer in range(LAYOUT.num_layers)]


# --- refusals ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"target_epoch": 12}, "is in epoch 11, the peer was told 12"),
        ({"fingerprint": bytes(32)}, "another KV fingerprint"),
        ({"hashes": (b"h" * 32,)}, "needs 0 hashes"),
        ({"kind": KvKind.STORE}, "needs 2 hashes"),
        ({"kind": KvKind.STORE, "hashes": (b"h" * 32, b"short")}, "of 32 bytes"),
    ],
)
async def test_an_offer_that_does_not_fit_is_refused(changes: dict[str, Any], words: str):
    async with Pair(4, fingerprint=bytes(range(32))) as pair:
        with pytest.raises(KvTransferFailed, match=words):
            await pair.prefill.open(pair.peer, make_offer(2, **changes), [0, 1], TIMEOUT_S)
        assert pair.role.offered == []


async def test_the_roles_refusal_reaches_the_sender():
    async with Pair(4) as pair:
        pair.role.refuse_offer = "request r1 has no reservation here"
        with pytest.raises(KvTransferFailed, match="has no reservation here"):
            await pair.prefill.open(pair.peer, make_offer(2), [0, 1], TIMEOUT_S)
        assert pair.role.failed == []


async def test_a_port_without_a_role_refuses():
    async with Pair(4) as pair:
        pair.decode.delegate = None
        with pytest.raises(KvTransferFailed, match="has no role yet"):
            await pair.prefill.open(pair.peer, make_offer(2), [0, 1], TIMEOUT_S)


async def test_another_layout_is_refused_with_what_differs():
    async with Pair(4) as pair:
        other = make_arena(4, layout=msgspec.structs.replace(LAYOUT, block_size=32, num_kv_heads=6))
        port = TcpKvPort(instance_id="other", epoch=1, arena=other, host_id="here")
        with pytest.raises(KvTransferFailed, match="num_kv_heads 6 against 3, block_size 32 against 16"):
            await port.open(pair.peer, make_offer(2), [0, 1], TIMEOUT_S)
        await port.close()


@pytest.mark.parametrize("granted", [[0], [0, 0], [0, 4], [0, -1], [-2, 1]])
async def test_a_role_that_grants_what_is_not_its_own_is_told(granted: list[int]):
    async with Pair(4) as pair:
        pair.role.granted = granted
        with pytest.raises(KvTransferFailed, match="the receiver's role granted"):
            await pair.prefill.open(pair.peer, make_offer(2), [0, 1], TIMEOUT_S)
        assert len(pair.role.failed) == 1


async def test_a_refused_arrival_is_a_nack():
    async with Pair(4) as pair:
        pair.role.refuse_arrival = "its lease is over"
        with pytest.raises(KvTransferFailed, match="its lease is over"):
            await push(pair, [0, 1], [2, 3])
        assert pair.role.failed == []  # the role itself said no


async def test_wrong_arguments_are_told_before_anything_is_sent():
    async with Pair(4) as pair:
        with pytest.raises(InvalidValue, match="1 block ids"):
            await pair.prefill.open(pair.peer, make_offer(2), [0], TIMEOUT_S)
        with pytest.raises(InvalidValue, match=r"0\.\.3"):
            await pair.prefill.open(pair.peer, make_offer(2), [0, 4], TIMEOUT_S)
        sender = await pair.prefill.open(pair.peer, make_offer(2), [0, 1], TIMEOUT_S)
        with pytest.raises(InvalidValue, match="were not offered"):
            sender.push(0, 1, 2)
        sender.abort("the test is over")


async def test_a_commit_of_less_than_was_offered_ends_the_push_on_both_sides():
    async with Pair(4) as pair:
        sender = await pair.prefill.open(pair.peer, make_offer(2), [0, 1], TIMEOUT_S)
        sender.push(0, 0, 2)
        with pytest.raises(KvTransferFailed, match="never pushed"):
            await sender.commit(TRAILER, TIMEOUT_S)
        await until(lambda: len(pair.role.failed) == 1)


async def test_a_stranger_on_the_socket_is_turned_away(caplog: pytest.LogCaptureFixture):
    async with Pair(4) as pair:
        host, port = pair.decode.endpoint.removeprefix("tcp://").split(":")
        for words in (b"GET / HTTP/1.1\r\n\r\n", b"\x05\0hello", os.urandom(64)):
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(words)
            writer.write_eof()
            with contextlib.suppress(ConnectionError):
                async with asyncio.timeout(5):
                    await reader.read()
            writer.close()
        await until(lambda: caplog.text.count("turned a KV connection away") == 3)
        await push(pair, [0], [1])


@pytest.mark.parametrize(
    "endpoint", ["tcp://127.0.0.1:1", "inproc://decode", "tcp://127.0.0.1", "nonsense", "tcp://[::1:3"]
)
async def test_an_endpoint_nobody_is_at(endpoint: str):
    async with Pair(4) as pair:
        peer = KvPeer(instance_id="decode", epoch=11, data_endpoint=endpoint, host_id="here")
        with pytest.raises(KvTransferFailed, match=r"cannot connect|is not a KV endpoint"):
            await pair.prefill.open(peer, make_offer(1), [0], TIMEOUT_S)


async def test_a_port_in_use_is_told():
    async with Pair(4) as pair:
        used = int(pair.decode.endpoint.rsplit(":", 1)[1])
        with pytest.raises(ConfigError, match="cannot listen for KV"):
            await TcpKvPort(instance_id="x", epoch=1, arena=pair.target, port=used).start()


async def test_ipv6_endpoints():
    arena = make_arena(2, seed=3)
    role = RecordingRole([1])
    decode = TcpKvPort(instance_id="decode", epoch=11, arena=arena, delegate=role, host="::1")
    prefill = TcpKvPort(instance_id="prefill", epoch=7, arena=arena)
    try:
        await decode.start()
    except ConfigError as error:
        pytest.skip(f"no IPv6 here: {error}")
    sender = await prefill.open(peer_of(decode), make_offer(1), [0], TIMEOUT_S)
    push_all(sender, 0, 1)
    await sender.commit(TRAILER, TIMEOUT_S)
    assert block_bytes(arena, 0) == block_bytes(arena, 1)
    await prefill.close()
    await decode.close()
