"""How pushes end when somebody aborts, revokes, dies, hangs or changes bytes: told once, at once, harming nothing."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import socket
from typing import Any

import pytest
from kv_helpers import (
    LAYOUT,
    TIMEOUT_S,
    TRAILER,
    VIAS,
    Pair,
    RecordingRole,
    make_arena,
    make_offer,
    proxied,
    push,
    push_all,
    until,
)

from transfer.errors import KvCorrupt, KvTransferFailed
from transfer.kv.arena import remove_stale_arenas
from transfer.kv.links import base
from transfer.kv.links.tcp import TcpKvPort
from transfer.wire.messages import KvPeer


@pytest.mark.parametrize("via", VIAS)
async def test_abort_ends_both_sides_and_reads_no_more(via: str):
    async with Pair(32, via=via, window_bytes=1 << 20) as pair:
        sender = await pair.prefill.open(pair.peer, make_offer(32), list(range(32)), TIMEOUT_S)
        push_all(sender, 0, 32)
        for _ in range(3):
            await asyncio.sleep(0)
        sender.abort("the client left")
        sender.abort("again")
        pair.source.buffer[:] = bytes(pair.source.buffer.nbytes)  # somebody else's now
        for block in range(32):
            pair.source.bump(block)
        await until(lambda: len(pair.role.failed) == 1)
        if via == "tcp":  # in shared memory the change of hands may be noticed first
            assert "the client left" in pair.role.failed[0][1]
        assert pair.role.arrived == []
        with pytest.raises(KvTransferFailed, match="the client left"):
            await sender.commit(TRAILER, TIMEOUT_S)
        sender.push(0, 0, 1)  # harmless
        pair.source.buffer[:] = os.urandom(pair.source.buffer.nbytes)
        await push(pair, [1, 2], [3, 4], request_id="r2")  # the connection is as good as before
        assert pair.same([1, 2], [3, 4])


async def test_abort_in_the_middle_of_a_frame_sends_the_rest_from_a_copy():
    async with Pair(48, window_bytes=64 << 20) as pair, proxied(pair) as (proxy, peer):
        sender = await pair.prefill.open(peer, make_offer(48), list(range(48)), TIMEOUT_S)
        (session,) = pair.prefill._sessions
        link = session._wire.link
        link._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 100_000)  # less than a frame
        proxy.hold_at = proxy.passed + 1000
        push_all(sender, 0, 48)
        await until(lambda: bool(link._out) and link._out[0].begun and link._writing)
        sender.abort("the client left")
        assert len(link._out) == 1  # the rest of this frame; the abort follows
        pair.source.buffer[:] = bytes(pair.source.buffer.nbytes)  # somebody else's now
        proxy.released.set()
        await until(lambda: len(pair.role.failed) == 1)
        assert "the client left" in pair.role.failed[0][1]  # not: a checksum did not match


async def test_small_frames_do_not_wait_for_acknowledgements():
    async with Pair(2) as pair:
        await push(pair, [0], [1])
        for port in (pair.prefill, pair.decode):
            (session,) = port._sessions
            assert session._wire.link._sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


@pytest.mark.parametrize("via", VIAS)
async def test_after_a_revoke_memory_is_untouched(via: str):
    async with Pair(32, via=via, window_bytes=1 << 20) as pair:
        sender = await pair.prefill.open(pair.peer, make_offer(32, generation=3), list(range(32)), TIMEOUT_S)
        for layer in range(10):
            sender.push(layer, 0, 32)
        await until(lambda: bytes(pair.target.views(0, 0, 32)[0]) == bytes(pair.source.views(0, 0, 32)[0]))
        pair.decode.revoke("r1", 2)  # an older generation: nothing
        pair.decode.revoke("r2", 9)
        await asyncio.sleep(0.01)
        assert pair.decode.num_streams == 1
        pair.decode.revoke("r1", 3)
        before = bytes(pair.target.buffer)
        for layer in range(10, LAYOUT.num_layers):
            sender.push(layer, 0, 32)
        with pytest.raises(KvTransferFailed, match="no longer wants generation 3 of request r1"):
            await sender.commit(TRAILER, TIMEOUT_S)
        assert bytes(pair.target.buffer) == before
        assert pair.role.failed == pair.role.arrived == []


async def test_a_revoke_in_the_middle_of_a_slab_stops_at_this_byte():
    async with Pair(32) as pair, proxied(pair) as (proxy, peer):
        sender = await pair.prefill.open(peer, make_offer(32), list(range(32)), TIMEOUT_S)
        proxy.hold_at = proxy.passed + 100_000
        sender.push(0, 0, 16)
        await until(lambda: bytes(pair.target.views(0, 0, 1)[0]) == bytes(pair.source.views(0, 0, 1)[0]))
        await asyncio.sleep(0.05)
        pair.decode.revoke("r1", 1)
        before = bytes(pair.target.buffer)
        proxy.released.set()
        await until(lambda: pair.prefill.num_streams == 0)
        assert before.strip(b"\0") != b""
        assert bytes(pair.target.buffer) == before
        await push(pair, [3], [9], request_id="r2")
        assert pair.same([3], [9])


@pytest.mark.parametrize("after", [0, 400, 1_000, 200_000, 2_000_000])
async def test_a_changed_byte_on_the_wire_is_found_and_told(after: int):
    async with Pair(8) as pair, proxied(pair) as (proxy, peer):
        warm = await pair.prefill.open(peer, make_offer(1, request_id="warm"), [0], TIMEOUT_S)
        warm.abort("only to connect")
        await until(lambda: pair.decode.num_streams == 0)
        pair.role.failed.clear()
        sender = await pair.prefill.open(peer, make_offer(7), list(range(7)), TIMEOUT_S)
        proxy.flip_at = proxy.passed + after
        push_all(sender, 0, 7)
        with pytest.raises(KvCorrupt):
            await sender.commit(TRAILER, TIMEOUT_S)
        assert [offer.request_id for offer, _ in pair.role.failed] == ["r1"]
        assert pair.role.arrived == []


async def test_a_changed_byte_without_checksums_goes_through():
    """Shows that the test above tests the checksum."""
    async with Pair(8, checksum=False) as pair, proxied(pair) as (proxy, peer):
        sender = await pair.prefill.open(peer, make_offer(8), list(range(8)), TIMEOUT_S)
        proxy.flip_at = proxy.passed + 200_000
        push_all(sender, 0, 8)
        await sender.commit(TRAILER, TIMEOUT_S)
        assert not pair.same(list(range(8)), list(range(8)))


async def test_a_cut_connection_fails_all_its_streams_at_once():
    async with Pair(8, stall_s=60.0) as pair, proxied(pair) as (proxy, peer):
        senders = [
            await pair.prefill.open(peer, make_offer(2, request_id=f"r{i}"), [2 * i, 2 * i + 1], TIMEOUT_S)
            for i in range(3)
        ]
        for sender in senders:
            sender.push(0, 0, 2)
        proxy.cut()
        for sender in senders:
            push_all(sender, 0, 2)
            with pytest.raises(KvTransferFailed):
                await sender.commit(TRAILER, TIMEOUT_S)
        await until(lambda: len(pair.role.failed) == 3)
        await push(pair, [0], [1], request_id="again")
        assert pair.same([0], [1])


@pytest.mark.parametrize("via", VIAS)
async def test_closing_a_port_fails_its_peers(via: str):
    async with Pair(8, via=via) as pair:
        sender = await pair.prefill.open(pair.peer, make_offer(8), list(range(8)), TIMEOUT_S)
        push_all(sender, 0, 8)
        await pair.decode.close()
        await pair.decode.close()
        assert len(pair.role.failed) == 1
        with pytest.raises(KvTransferFailed, match="decode closed its KV port"):
            await sender.commit(TRAILER, TIMEOUT_S)
        with pytest.raises(KvTransferFailed, match="cannot connect"):
            await pair.prefill.open(pair.peer, make_offer(8), list(range(8)), TIMEOUT_S)
        await pair.prefill.close()
        with pytest.raises(KvTransferFailed, match="is closed"):
            await pair.prefill.open(pair.peer, make_offer(8), list(range(8)), TIMEOUT_S)


async def test_a_silent_sender_fails_at_the_receiver_in_time():
    async with Pair(8, stall_s=0.4) as pair, proxied(pair) as (proxy, peer):
        sender = await pair.prefill.open(peer, make_offer(8), list(range(8)), TIMEOUT_S)
        proxy.hold_at = proxy.passed
        push_all(sender, 0, 8)
        started = asyncio.get_running_loop().time()
        await until(lambda: len(pair.role.failed) == 1)
        assert 0.3 < asyncio.get_running_loop().time() - started < 1.5
        assert "the sender was silent" in pair.role.failed[0][1]
        with pytest.raises(KvTransferFailed, match="the sender was silent"):
            await sender.commit(TRAILER, TIMEOUT_S)


async def test_a_silent_receiver_fails_at_the_sender_in_time():
    async with Pair(32, stall_s=0.4) as pair, proxied(pair) as (proxy, peer):
        sender = await pair.prefill.open(peer, make_offer(32), list(range(32)), TIMEOUT_S)
        (session,) = pair.decode._sessions
        link = session._wire.link
        link._loop.remove_reader(link._fd)  # the instance hangs: nothing is read, nothing answered
        pair.decode._timer.cancel()
        push_all(sender, 0, 32)
        with pytest.raises(KvTransferFailed, match="the receiver was silent"):
            await sender.commit(TRAILER, 30.0)
        proxy.cut()
        link._loop.add_reader(link._fd, link._readable)


async def test_a_slow_engine_is_not_taken_for_a_dead_one():
    async with Pair(4, stall_s=0.3) as pair:
        pair.role.granted = [2, 3]
        sender = await pair.prefill.open(pair.peer, make_offer(2), [0, 1], TIMEOUT_S)
        sender.push(0, 0, 2)
        await asyncio.sleep(1.0)
        assert pair.role.failed == []
        push_all(sender, 0, 2)
        await sender.commit(TRAILER, TIMEOUT_S)
        assert pair.same([0, 1], [2, 3])


async def test_a_commit_nobody_acknowledges_ends_at_its_deadline():
    async with Pair(4) as pair, proxied(pair) as (proxy, peer):
        sender = await pair.prefill.open(peer, make_offer(2), [0, 1], TIMEOUT_S)
        push_all(sender, 0, 2)
        proxy.hold_at = proxy.passed
        with pytest.raises(KvTransferFailed, match=r"did not acknowledge within 0\.2 s"):
            await sender.commit(TRAILER, 0.2)
        assert pair.prefill.num_streams == 0
        proxy.released.set()


async def test_an_offer_nobody_answers_ends_at_its_deadline():
    async with Pair(4) as pair, proxied(pair) as (proxy, peer):
        (await pair.prefill.open(peer, make_offer(0), [], TIMEOUT_S)).abort("only to connect")
        proxy.hold_at = proxy.passed
        with pytest.raises(KvTransferFailed, match=r"did not answer the offer within 0\.2 s"):
            await pair.prefill.open(peer, make_offer(2), [0, 1], 0.2)
        proxy.released.set()


async def test_a_cancelled_commit_reads_no_more():
    async with Pair(4) as pair, proxied(pair) as (proxy, peer):
        sender = await pair.prefill.open(peer, make_offer(2), [0, 1], TIMEOUT_S)
        proxy.hold_at = proxy.passed
        push_all(sender, 0, 2)
        task = asyncio.create_task(sender.commit(TRAILER, TIMEOUT_S))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert pair.prefill.num_streams == 0
        proxy.released.set()
        await until(lambda: len(pair.role.failed) + len(pair.role.arrived) == 1)


async def test_an_idle_connection_is_closed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(base, "IDLE_S", 0.2)
    async with Pair(4, stall_s=0.4) as pair:
        await push(pair, [0], [1])
        assert len(pair.prefill._sessions) == 1
        await until(lambda: not pair.prefill._sessions and not pair.decode._sessions)
        assert pair.prefill._timer is None
        await push(pair, [2], [3], request_id="r2")
        assert pair.same([2], [3])


async def test_a_role_that_fails_takes_only_its_connection_down(caplog: pytest.LogCaptureFixture):
    async with Pair(4) as pair:
        pair.role.kv_arrived = None  # type: ignore[method-assign, assignment]
        with pytest.raises(KvTransferFailed, match="the role behind the KV port failed"):
            await push(pair, [0, 1], [2, 3])
        assert "a role failed" in caplog.text
        pair.decode.delegate = pair.role = RecordingRole()
        await push(pair, [0, 1], [2, 3], request_id="r2")
        assert pair.same([0, 1], [2, 3])


# --- death ---------------------------------------------------------------------------------------------------


def doomed_sender(endpoint: str, ready: Any) -> None:
    """A process that pushes half of what it offered and waits to be killed."""

    async def main() -> None:
        arena = make_arena(8, seed=1, shared=True)
        port = TcpKvPort(instance_id="prefill", epoch=7, arena=arena, host_id="here")
        peer = KvPeer(instance_id="decode", epoch=11, data_endpoint=endpoint, host_id="here")
        sender = await port.open(peer, make_offer(8), list(range(8)), TIMEOUT_S)
        for layer in range(15):
            sender.push(layer, 0, 8)
        await asyncio.sleep(0.2)
        ready.set()
        await asyncio.sleep(60)

    asyncio.run(main())


@pytest.mark.parametrize("via", VIAS)
async def test_a_sender_killed_mid_stream_is_noticed_at_once(via: str):
    async with Pair(8, via=via, stall_s=60.0) as pair:
        spawn = multiprocessing.get_context("spawn")
        ready = spawn.Event()
        process = spawn.Process(target=doomed_sender, args=(pair.decode.endpoint, ready))
        process.start()
        await until(ready.is_set, within_s=30)
        assert (pair.decode.num_streams, pair.role.failed) == (1, [])
        assert process.pid
        os.kill(process.pid, signal.SIGKILL)
        await until(lambda: len(pair.role.failed) == 1, within_s=2)
        before = bytes(pair.target.buffer)
        await asyncio.to_thread(process.join, 10)
        remove_stale_arenas()
        assert before.strip(b"\0") != b""
        assert bytes(pair.target.buffer) == before
