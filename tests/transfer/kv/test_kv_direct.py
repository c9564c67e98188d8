"""KV that another project's engine moves: never into a block that changed hands; what fails falls back to TCP."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest
from kv_direct_cases import SOURCE, TARGET, begun, one_slab, push_other
from kv_direct_helpers import QUICK_RING, DirectPair, num_slabs
from kv_helpers import (
    LAYOUT,
    TIMEOUT_S,
    TRAILER,
    block_bytes,
    make_fetch,
    make_offer,
    proxied,
    push,
    push_all,
    until,
)

from transfer.errors import KvCorrupt, KvTransferFailed
from transfer.kv.frames import Commit
from transfer.kv.links.direct_ring import MAX_FAILURES, RingLimits


async def test_a_push_is_read_by_the_backend_and_only_names_cross_the_wire():
    async with DirectPair() as pair, proxied(pair) as (proxy, peer):
        pair.role.granted = list(TARGET)
        sender = await pair.prefill.open(peer, make_offer(6), SOURCE, TIMEOUT_S)
        push_all(sender, 0, 6)
        stats = await sender.commit(TRAILER, TIMEOUT_S)
        assert pair.same(SOURCE, TARGET)
        assert stats.num_bytes == 6 * LAYOUT.block_bytes
        assert pair.reader.num_reads == num_slabs(6)
        assert proxy.passed < 20_000
        assert [block_bytes(pair.target, block) for block in (0, 1)] == [bytes(LAYOUT.block_bytes)] * 2


async def test_a_fetch_is_read_by_the_asker_layer_by_layer():
    async with DirectPair() as pair:
        names = [bytes([number]) * 32 for number in range(4)]
        pair.role.pool = dict(zip(names, [7, 8, 2, 5], strict=True))
        pair.target.buffer[:] = bytes(range(256)) * (pair.target.buffer.nbytes // 256)
        told: list[tuple[int, int]] = []
        count = await pair.prefill.fetch(
            pair.peer, make_fetch(names), [0, 1, 2, 3], TIMEOUT_S, lambda *layer: told.append(layer)
        )  # fmt: skip
        assert count == 4
        assert pair.same([0, 1, 2, 3], [7, 8, 2, 5])
        assert told == [(layer, 4) for layer in range(-1, LAYOUT.num_layers)]
        assert pair.readers[0].num_reads == LAYOUT.num_layers
        await until(lambda: len(pair.role.served) == 1)


@pytest.mark.parametrize("links", [1, 3])
async def test_many_pushes_at_once_over_one_or_several_links(links: int):
    async with DirectPair(32, links=links) as pair:

        async def one(number: int) -> None:
            sender = await pair.prefill.open(
                pair.peer, make_offer(4, request_id=f"r{number}"), blocks(number), TIMEOUT_S
            )
            push_all(sender, 0, 4)
            await sender.commit(TRAILER, TIMEOUT_S)

        def blocks(number: int) -> list[int]:
            return list(range(4 * number, 4 * number + 4))

        await one(0)  # connects
        await asyncio.gather(*(one(number) for number in range(1, 8)))
        granted = {offer.request_id: 4 * place for place, offer in enumerate(pair.role.offered)}
        for number in range(8):
            start = granted[f"r{number}"]
            assert pair.same(blocks(number), list(range(start, start + 4)))
        assert pair.reader.num_reads == 8 * LAYOUT.num_layers
        assert pair.reader.most_running <= QUICK_RING.num_slots


@pytest.mark.parametrize("how", ["revoke", "abort", "lost"])
async def test_a_read_in_flight_never_writes_blocks_that_changed_hands(how: str):
    async with DirectPair() as pair:
        sender, commit = await begun(pair)
        if how == "revoke":
            pair.decode.revoke("r1", 1)
        elif how == "abort":
            sender.abort("no longer wanted")
            await until(lambda: len(pair.role.failed) == 1)
        else:
            for session in list(pair.decode._sessions):
                session.close(KvTransferFailed("cut"))
        pair.target.buffer[:] = b"\x5a" * pair.target.buffer.nbytes  # somebody else's from now on
        num_reads = pair.reader.num_reads
        pair.reader.open.set()
        with pytest.raises(KvTransferFailed):
            await commit
        await until(lambda: pair.reader.running == 0)
        assert await push_other(pair)
        assert pair.reader.num_reads == num_reads + LAYOUT.num_layers  # what waited for a slot was not read
        assert {bytes(block_bytes(pair.target, block)) for block in TARGET} == {b"\x5a" * LAYOUT.block_bytes}
        assert len(pair.role.failed) == (how != "revoke")
        assert len(pair.role.arrived) == 1


@pytest.mark.parametrize("when", ["before", "while"])
async def test_a_sender_whose_blocks_were_reused_is_found_by_the_checksum(when: str):
    async with DirectPair() as pair:
        if when == "before":
            real = pair.reader.read

            def read(descriptor: bytes, spans: Any) -> None:
                pair.source.buffer[spans[0].remote] ^= 1
                real(descriptor, spans)

            pair.reader.read = read  # type: ignore[method-assign]
        else:
            pair.reader.wrong = True
        with pytest.raises(KvCorrupt, match="does not match its checksum, read by fake"):
            await push(pair, SOURCE, TARGET)
        assert pair.role.arrived == []
        assert len(pair.role.failed) == 1
        assert not any(block_bytes(pair.target, 15))  # nothing unverified reached a block


@pytest.mark.parametrize("error", [KvTransferFailed("the network card is on fire"), OSError("no such device")])
async def test_after_a_few_failures_a_peer_is_served_over_tcp(error: Exception, caplog: pytest.LogCaptureFixture):
    async with DirectPair() as pair, proxied(pair):
        pair.reader.failing, pair.reader.error = True, error
        with caplog.at_level(logging.WARNING, "transfer.kv"):
            failures = 0
            while pair.usable:
                with pytest.raises(KvTransferFailed, match=r"network card|OSError"):
                    await push(pair, SOURCE, TARGET, request_id=f"bad{failures}")
                failures += 1
                await until(lambda: not pair.ring._running)
            assert failures == MAX_FAILURES
            num_reads = pair.reader.num_reads
            for number in range(3):
                await push(pair, SOURCE, TARGET, request_id=f"good{number}")
        assert pair.same(SOURCE, TARGET)
        assert pair.reader.num_reads == num_reads
        assert sum("comes over TCP from now on" in record.message for record in caplog.records) == 1


async def test_a_success_forgives_failures():
    async with DirectPair() as pair:
        for number in range(2 * MAX_FAILURES):
            pair.reader.failing = True
            sender = await one_slab(pair, f"bad{number}")
            await until(lambda number=number: len(pair.role.failed) == number + 1)
            sender.abort("failed")
            pair.reader.failing = False
            await push(pair, SOURCE, TARGET, request_id=f"good{number}")
        assert pair.reader.num_reads == 2 * MAX_FAILURES * (1 + num_slabs(6))


async def test_a_late_read_fails_its_stream_and_keeps_its_slot_until_it_ends():
    async with DirectPair(ring_limits=RingLimits(num_slots=2, slot_bytes=256 << 10, read_s=0.2)) as pair:
        _, commit = await begun(pair)
        with pytest.raises(KvTransferFailed, match=r"did not read the KV within 0\.2 s"):
            await commit
        pair.target.buffer[:] = b"\x5a" * pair.target.buffer.nbytes
        ring = pair.ring
        num_reads = pair.reader.num_reads
        assert len(ring._idle) == 0
        await until(lambda: not pair.usable)
        await push(pair, [0, 1], [0, 1], request_id="over tcp")  # its peer has reads that hang
        assert pair.same([0, 1], [0, 1])
        assert pair.reader.num_reads == num_reads
        pair.reader.open.set()
        await until(lambda: len(ring._idle) == 2)
        assert {bytes(block_bytes(pair.target, block)) for block in TARGET} == {b"\x5a" * LAYOUT.block_bytes}
        await push(pair, SOURCE, TARGET, request_id="direct again")
        assert pair.same(SOURCE, TARGET)
        assert pair.reader.num_reads == num_reads + num_slabs(6)


async def test_one_read_that_hangs_is_enough_to_ask_its_peer_for_no_more():
    async with DirectPair(ring_limits=RingLimits(num_slots=2, slot_bytes=256 << 10, read_s=0.2)) as pair:
        first = await one_slab(pair, "r1", push=False)
        second = await one_slab(pair, "r2", push=False)
        pair.reader.open.clear()
        first.push(0, 0, 1)
        await until(lambda: len(pair.role.failed) == 1)
        assert not pair.usable
        second.push(0, 0, 1)
        await until(lambda: len(pair.role.failed) == 2)
        assert "cannot be read by fake just now" in pair.role.failed[1][1]
        assert pair.reader.num_reads == 1
        assert len(pair.ring._idle) == 1
        pair.reader.open.set()
        await until(lambda: pair.usable)


async def test_checksums_are_on_where_they_are_off_over_tcp():
    async with DirectPair(checksum=False) as pair:
        await push(pair, SOURCE, TARGET)
        assert pair.same(SOURCE, TARGET)
        pair.reader.wrong = True
        with pytest.raises(KvCorrupt):
            await push(pair, SOURCE, TARGET, request_id="r2")


async def test_each_span_stays_in_its_slot():
    async with DirectPair() as pair:
        await push(pair, SOURCE, TARGET)
        for spans in pair.reader.done:
            starts = {span.local // QUICK_RING.slot_bytes for span in spans}
            ends = {(span.local + span.num_bytes - 1) // QUICK_RING.slot_bytes for span in spans}
            assert starts == ends
            assert len(starts) == 1


@pytest.mark.parametrize("why", ["shared memory", "another backend", "receiver has none", "sender has none"])
async def test_where_it_is_not_for_both_the_kv_comes_another_way(why: str):
    names = ("other", "fake") if why == "another backend" else ("fake", "fake")
    async with DirectPair(via="shm" if why == "shared memory" else "tcp", names=names) as pair:
        for port, without in ((pair.decode, "receiver has none"), (pair.prefill, "sender has none")):
            if why == without:
                assert port._context.direct is not None
                await port._context.direct.close()
                port._context.direct = None
        await push(pair, SOURCE, TARGET)
        assert pair.same(SOURCE, TARGET)
        assert pair.reader.num_reads == 0


async def test_a_commit_waits_for_reads_but_not_for_slabs_that_were_never_named():
    async with DirectPair() as pair:
        pair.reader.open.clear()
        pair.role.granted = list(TARGET)
        sender = await pair.prefill.open(pair.peer, make_offer(6), SOURCE, TIMEOUT_S)
        sender.push(0, 0, 6)
        await until(lambda: pair.reader.running == 1)
        (session,) = pair.prefill._sessions
        session._wire.send(Commit(stream=1, trailer=TRAILER))
        await asyncio.sleep(0.05)
        assert pair.role.failed == []
        pair.reader.open.set()
        await until(lambda: len(pair.role.failed) == 1)
        assert "slabs are missing at the commit" in pair.role.failed[0][1]
        sender.abort("it was a lie")


async def test_a_slab_named_again_while_it_is_read_is_read_once():
    async with DirectPair() as pair:
        pair.reader.open.clear()
        sender = await one_slab(pair, "r1")
        await until(lambda: pair.reader.running == 1)
        (session,) = pair.prefill._sessions
        (sending,) = session._outbound._streams.values()
        again = sending.slab_frame(0, 0, 1).slab
        assert again is not None
        session._wire.send(again)
        await asyncio.sleep(0.05)
        pair.reader.open.set()
        for layer in range(1, LAYOUT.num_layers):
            sender.push(layer, 0, 1)
        await sender.commit(TRAILER, TIMEOUT_S)
        assert pair.same([0], [0])
        assert pair.reader.num_reads == LAYOUT.num_layers
