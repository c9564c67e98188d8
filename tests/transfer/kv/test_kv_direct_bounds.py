"""What peers of a direct transfer may name and how much, and how a port that has one closes."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from kv_direct_cases import SOURCE, TARGET, bad_slab, begun
from kv_direct_helpers import DirectPair, FakeReader
from kv_helpers import (
    LAYOUT,
    TIMEOUT_S,
    TRAILER,
    Pair,
    make_offer,
    peer_of,
    push,
    push_all,
    until,
)

from transfer.errors import ConfigError, KvTransferFailed
from transfer.kv.frames import Grant, Slab
from transfer.kv.links.direct import make_reader, register, whole_arena
from transfer.kv.links.tcp import TcpKvPort


async def test_memory_and_reads_are_bounded_however_much_is_named():
    async with DirectPair(24) as pair:
        blocks = list(range(24))
        pair.reader.open.clear()
        pair.role.granted = list(blocks)
        sender = await pair.prefill.open(pair.peer, make_offer(24), blocks, TIMEOUT_S)
        push_all(sender, 0, 24)
        commit = asyncio.create_task(sender.commit(TRAILER, TIMEOUT_S))
        ring = pair.ring
        await until(lambda: len(ring._queue) > 10)
        await asyncio.sleep(0.05)
        assert pair.reader.num_reads == pair.reader.running == 2
        assert ring._staging.nbytes == 2 * ring.slab_bytes == 512 << 10
        pair.reader.open.set()
        await commit
        assert pair.same(blocks, blocks)
        assert pair.reader.most_running == 2


@pytest.mark.parametrize(
    ("slabs", "sentence"),
    [
        ([bad_slab(runs=((15, 2),))], "not in its arena"),
        ([bad_slab(runs=((-1, 2),))], "not in its arena"),
        ([bad_slab(runs=((0, 1),))], "not in its arena"),
        ([bad_slab(checksum=None)], "checksums are on"),
        ([bad_slab(generations=b"")], "generation bytes"),
        ([bad_slab(count=12, runs=((0, 12),), generations=bytes(96))], "262144 bytes may be read at once"),
        ([bad_slab(), bad_slab(first=1)], "blocks 1..3 of layer 0 twice"),
        ([bad_slab(layer=layer, count=8, runs=((0, 8),), generations=bytes(64)) for layer in range(30)], "window"),
    ],
)
async def test_what_a_sender_may_not_name(slabs: list[Slab], sentence: str):
    async with DirectPair() as pair:
        pair.decode._context.mapped_window_bytes = 2 << 20
        pair.reader.open.clear()
        sender = await pair.prefill.open(pair.peer, make_offer(16), list(range(16)), TIMEOUT_S)
        (session,) = pair.prefill._sessions
        for slab in slabs:
            session._wire.send(slab)
        await until(lambda: len(pair.role.failed) == 1)
        assert sentence in pair.role.failed[0][1]
        sender.abort("it was a lie")


@pytest.mark.parametrize(
    "changes", [{"mapped": True}, {"checksums": False}, {"direct": 100}, {"direct": 1 << 20}], ids=str
)  # fmt: skip
async def test_a_receiver_cannot_ask_for_what_was_not_offered(changes: dict[str, Any]):
    async with DirectPair() as pair:
        pair.role.granted = []
        sender = await pair.prefill.open(pair.peer, make_offer(0, request_id="warm"), [], TIMEOUT_S)
        ring, context = pair.prefill._context.direct, pair.prefill._context
        if changes == {"direct": 1 << 20}:
            context.direct = None
        (session,) = pair.decode._sessions
        opened = session._inbound.grant
        session._inbound.grant = lambda frame: None  # type: ignore[method-assign]
        opening = asyncio.create_task(pair.prefill.open(pair.peer, make_offer(2, request_id="r2"), [0, 1], TIMEOUT_S))
        await asyncio.sleep(0.05)
        values: dict[str, Any] = {
            "stream": 2, "window": 8 << 20, "skip": (), "mapped": False, "checksums": True, "direct": 1 << 20
        }  # fmt: skip
        session._wire.send(Grant(**(values | changes)))
        with pytest.raises(KvTransferFailed, match="wants to read"):
            await opening
        session._inbound.grant, context.direct = opened, ring  # type: ignore[method-assign]
        sender.abort("done")


async def test_a_port_that_closes_waits_for_reads_and_keeps_the_memory_of_those_that_hang(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr("transfer.kv.links.direct_ring.STOP_S", 0.2)
    async with DirectPair() as pair:
        _, commit = await begun(pair)
        await pair.decode.close()
        with pytest.raises(KvTransferFailed):
            await commit
        assert pair.reader.num_stops == 0  # it still writes there
        pair.reader.open.set()
        await until(lambda: pair.reader.running == 0)
    assert [reader.num_stops for reader in pair.readers] == [1, 0]


async def test_a_port_that_closes_in_order_stops_its_backend_once():
    async with DirectPair() as pair:
        await push(pair, SOURCE, TARGET)
        await pair.decode.close()
        await pair.decode.close()
    assert [reader.num_stops for reader in pair.readers] == [1, 1]


async def test_a_backend_that_cannot_start_is_said_at_the_start():
    pair = DirectPair()
    pair.readers[0].refuse_start = True
    with pytest.raises(ConfigError, match="the backend fake cannot start here"):
        await pair.prefill.start()
    await pair.prefill.close()
    assert pair.readers[0].num_stops == 0


async def test_backends_have_names_and_say_what_is_missing(monkeypatch: pytest.MonkeyPatch):
    made: list[FakeReader] = []

    def make(host: str) -> FakeReader:
        made.append(FakeReader(host))
        return made[0]

    register("named", make)
    arena = Pair(2).source
    port = TcpKvPort(instance_id="i", epoch=1, arena=arena, direct="named", advertise="kv.example")
    assert made[0].name == "kv.example"  # where peers reach it
    await port.start()
    await port.close()
    with pytest.raises(ConfigError, match="must be tcp, mooncake or nixl, got 'rdma'"):
        make_reader("rdma", "127.0.0.1")
    for name, package in (("mooncake", "mooncake-transfer-engine-non-cuda"), ("nixl", "nixl")):
        monkeypatch.setitem(__import__("sys").modules, name, None)
        port = TcpKvPort(instance_id="i", epoch=1, arena=arena, direct=name)
        with pytest.raises(ConfigError, match=f"{name} cannot be loaded here .*; install {package}"):
            await port.start()
        await port.close()


def test_the_whole_arena_is_its_blocks_and_nothing_else():
    pair = Pair(3)
    whole = whole_arena(pair.source)
    assert whole is not None
    assert bytes(whole) == bytes(pair.source.buffer)
    whole[-1] ^= 1
    assert bytes(whole) == bytes(pair.source.buffer)

    class Scattered:
        layout, num_blocks = LAYOUT, 3

        def views(self, layer: int, first: int, count: int) -> tuple[memoryview, memoryview]:
            return pair.source.views(layer, first, count)[::-1]

    assert whole_arena(Scattered()) is None  # type: ignore[arg-type]


async def test_a_handle_too_long_is_not_offered(caplog: pytest.LogCaptureFixture):
    async with DirectPair() as pair:
        reader = FakeReader()
        real = reader.start
        reader.start = lambda *args: real(*args) + bytes(70_000)  # type: ignore[method-assign]
        port = TcpKvPort(instance_id="other", epoch=7, arena=pair.source, host_id="here", shm=False, direct=reader)
        await port.start()
        pair.role.granted = list(TARGET)
        sender = await port.open(peer_of(pair.decode), make_offer(6), SOURCE, TIMEOUT_S)
        push_all(sender, 0, 6)
        await sender.commit(TRAILER, TIMEOUT_S)
        await port.close()
        assert pair.same(SOURCE, TARGET)
        assert pair.reader.num_reads == 0
        assert "peers cannot read this arena by fake" in caplog.text
