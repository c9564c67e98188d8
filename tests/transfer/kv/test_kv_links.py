"""A session over several links: each carries slabs, any may fail, hang or change bits, and the bytes are right."""

from __future__ import annotations

import asyncio
import socket
import time

import pytest
from kv_helpers import (
    LAYOUT,
    TIMEOUT_S,
    TRAILER,
    Pair,
    make_fetch,
    make_offer,
    proxied_links,
    push_all,
    until,
)
from kv_link_helpers import QUICK, SLAB, all_same, bundle_of, joined, links_pair, push_over

from transfer.errors import KvCorrupt, KvTransferFailed
from transfer.kv.frames import Slab
from transfer.kv.links.choice import LinkLimits
from transfer.kv.links.sending import OutFrame


async def test_every_link_carries_its_share():
    async with links_pair(64) as pair, proxied_links(pair, 3) as (proxies, peer):
        await joined(pair, peer, 3)
        await push_over(pair, peer)
        assert all_same(pair)
        total = sum(proxy.passed for proxy in proxies)
        assert min(proxy.passed for proxy in proxies) > total / 10
        assert (len(pair.role.arrived), pair.role.failed) == (1, [])


@pytest.mark.parametrize("key", [None, b"a long enough secret of 32 bytes"])
async def test_several_connections_to_one_endpoint(key: bytes | None):
    async with links_pair(links=4, auth_key=key) as pair:
        await joined(pair, pair.peer, 4)
        await push_over(pair, pair.peer)
        assert all_same(pair)
        assert len(pair.decode._sessions) == 1


async def test_a_port_on_several_addresses_names_them_all():
    async with links_pair(host="127.0.0.1,127.0.0.2") as pair:
        assert pair.decode.endpoint.count("tcp://127.0.0.") == 2
        await joined(pair, pair.peer, 2)
        await push_over(pair, pair.peer)
        assert all_same(pair)


async def test_the_first_endpoint_may_be_dead():
    async with links_pair() as pair, proxied_links(pair, 3) as (proxies, peer):
        proxies[0].refusing = True
        await joined(pair, peer, 2)
        await push_over(pair, peer)
        assert all_same(pair)
        proxies[0].refusing = False
        await until(lambda: len(bundle_of(pair).lanes) == 3)


async def test_a_link_cut_in_the_middle_of_a_slab():
    async with links_pair(64) as pair, proxied_links(pair, 3) as (proxies, peer):
        await joined(pair, peer, 3)
        proxies[1].hold_at = proxies[1].passed + SLAB + SLAB // 2
        task = asyncio.create_task(push_over(pair, peer))
        await until(lambda: proxies[1].hold_at is None)
        proxies[1].cut()
        proxies[1].refusing = True
        await task
        assert all_same(pair)
        assert (len(pair.role.arrived), pair.role.failed) == (1, [])


async def test_a_black_hole_is_routed_around_and_comes_back():
    async with links_pair(64) as pair, proxied_links(pair, 3) as (proxies, peer):
        bundle = await joined(pair, peer, 3)
        hole = proxies[2]
        hole.refusing = True
        hole.hold_at = hole.passed + SLAB // 2
        started = time.monotonic()
        await push_over(pair, peer)
        assert time.monotonic() - started < 3.0
        assert all_same(pair)
        assert (len(pair.role.arrived), pair.role.failed) == (1, [])
        assert len(bundle.lanes) == 2
        hole.released.set()
        hole.refusing = False
        await until(lambda: len(bundle.lanes) == 3)
        before = hole.passed
        await push_over(pair, peer, "r2")
        assert hole.passed - before > 2 * SLAB


async def test_the_last_slab_in_a_black_hole_is_noticed_though_all_else_is_idle():
    async with links_pair(2) as pair, proxied_links(pair, 2) as (proxies, peer):
        await joined(pair, peer, 2)
        proxies[0].hold_at = proxies[0].passed
        proxies[0].refusing = True
        started = time.monotonic()
        await push_over(pair, peer)
        assert time.monotonic() - started < 3.0
        assert all_same(pair)


@pytest.mark.parametrize("after", [0, 30, 5_000, SLAB, 3 * SLAB])
async def test_a_flipped_bit_costs_a_link_but_never_a_byte(after: int):
    async with links_pair(64) as pair, proxied_links(pair, 3) as (proxies, peer):
        await joined(pair, peer, 3)
        proxies[0].flip_at = proxies[0].passed + after
        await push_over(pair, peer)
        assert proxies[0].passed > proxies[0].flip_at
        assert all_same(pair)
        assert (len(pair.role.arrived), pair.role.failed) == (1, [])


async def test_bits_that_flip_on_every_link_are_told_as_such(monkeypatch: pytest.MonkeyPatch):
    from transfer.kv.links import sending

    async with links_pair() as pair, proxied_links(pair, 3) as (_, peer):
        await joined(pair, peer, 3)
        monkeypatch.setattr(sending, "checksum", lambda parts: 12345)
        with pytest.raises(KvCorrupt):
            await push_over(pair, peer)
        await until(lambda: len(pair.role.failed) == 1)
        assert pair.role.arrived == []


async def test_late_bytes_of_a_link_given_up_touch_nothing():
    """Half a slab hangs on one link, the slab arrives on the other; then the rest comes, with a bit changed."""
    async with links_pair(8) as pair, proxied_links(pair, 2) as (proxies, peer):
        pair.decode._context.link_limits = LinkLimits(stuck_s=60.0)  # it would hang up on the link by itself
        await joined(pair, peer, 2)
        late = proxies[0]
        late.refusing = True
        late.hold_at = late.passed + 10_000
        sender = await pair.prefill.open(peer, make_offer(8), list(range(8)), TIMEOUT_S)
        sender.push(0, 0, 4)  # one slab; the first link is tried first
        await until(lambda: late.hold_at is None)
        late.flip_at = late.passed + 1000
        await until(lambda: pair.same_layer(0, 4))
        before = late.passed
        late.released.set()
        await until(lambda: late.passed > before + 1000)
        await asyncio.sleep(0.1)
        assert pair.same_layer(0, 4)
        push_all(sender, 0, 8)
        await sender.commit(TRAILER, TIMEOUT_S)
        assert all_same(pair)


async def test_all_links_cut_fail_the_session_at_once():
    async with links_pair(stall_s=60.0) as pair, proxied_links(pair, 3) as (proxies, peer):
        await joined(pair, peer, 3)
        sender = await pair.prefill.open(peer, make_offer(4), [0, 1, 2, 3], TIMEOUT_S)
        sender.push(0, 0, 4)
        for proxy in proxies:
            proxy.cut()
        push_all(sender, 0, 4)
        with pytest.raises(KvTransferFailed):
            await sender.commit(TRAILER, TIMEOUT_S)
        await until(lambda: len(pair.role.failed) == 1)
        await until(lambda: not pair.prefill._sessions and not pair.decode._sessions)
        await push_over(pair, peer, "r2")  # a new session
        assert all_same(pair)


async def test_after_a_revoke_no_link_writes_a_byte():
    async with links_pair(64) as pair, proxied_links(pair, 3) as (proxies, peer):
        await joined(pair, peer, 3)
        for proxy in proxies:
            proxy.hold_at = proxy.passed + SLAB // 2
        task = asyncio.create_task(push_over(pair, peer))
        await until(lambda: all(proxy.hold_at is None for proxy in proxies))
        await asyncio.sleep(0.02)
        pair.decode.revoke("r1", 1)
        before = bytes(pair.target.buffer)
        assert before.strip(b"\0")
        for proxy in proxies:
            proxy.released.set()
        with pytest.raises(KvTransferFailed, match="no longer wants"):
            await task
        await until(lambda: pair.prefill.num_streams == 0)
        assert bytes(pair.target.buffer) == before


async def test_after_an_abort_no_link_reads_a_byte():
    async with links_pair(64, window_bytes=64 << 20) as pair, proxied_links(pair, 3) as (proxies, peer):
        bundle = await joined(pair, peer, 3)
        sender = await pair.prefill.open(peer, make_offer(64), list(range(64)), TIMEOUT_S)
        for number, proxy in enumerate(proxies):
            proxy.hold_at = proxy.passed + SLAB // 2
            bundle.lanes[number].connection._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 100_000)
        sender.push(0, 0, 64)
        sender.push(1, 0, 64)
        await until(lambda: all(proxy.hold_at is None for proxy in proxies))
        push_all(sender, 0, 64)
        for number in range(4):
            out = Slab(stream=sender.machine.stream, layer=9, first=4 * number, count=4, checksum=None)
            bundle._send_slab(number % 3, OutFrame(out.stream, [memoryview(b"")], SLAB, slab=out), 1)
        waiting = [out for lane in bundle.lanes.values() for out in lane._queue if out.slab is not None]
        assert waiting
        sender.abort("the client left")
        waiting = [out for lane in bundle.lanes.values() for out in lane._queue if out.slab is not None]
        assert waiting == []
        pair.source.buffer[:] = bytes(pair.source.buffer.nbytes)  # somebody else's now
        for proxy in proxies:
            proxy.released.set()
        await until(lambda: len(pair.role.failed) == 1)
        assert "the client left" in pair.role.failed[0][1]  # not: a checksum did not match
        assert len(bundle.lanes) == 3
        pair.role.failed.clear()
        await push_over(pair, peer, "r2")
        assert all_same(pair)


async def test_an_abort_while_a_link_is_lost_sends_nothing_again():
    async with links_pair(64, window_bytes=64 << 20) as pair, proxied_links(pair, 2) as (proxies, peer):
        await joined(pair, peer, 2)
        sender = await pair.prefill.open(peer, make_offer(64), list(range(64)), TIMEOUT_S)
        for proxy in proxies:
            proxy.hold_at = proxy.passed + SLAB // 2
        push_all(sender, 0, 64)
        await until(lambda: all(proxy.hold_at is None for proxy in proxies))
        sender.abort("the client left")
        pair.source.buffer[:] = bytes(pair.source.buffer.nbytes)
        proxies[0].cut()
        proxies[1].released.set()
        await until(lambda: len(pair.role.failed) == 1)
        assert "the client left" in pair.role.failed[0][1]


async def test_a_fetch_is_striped_too_and_layers_come_in_order():
    async with links_pair(16) as pair, proxied_links(pair, 3) as (proxies, peer):
        pair.prefill._context.arena, pair.decode._context.arena = pair.target, pair.source
        names = [bytes([number]) * 32 for number in range(16)]
        pair.role.pool = {name: number for number, name in enumerate(names)}
        await joined(pair, peer, 3)
        proxies[0].hold_at = proxies[0].passed + 1
        proxies[0].refusing = True
        told: list[int] = []

        def on_layer(layer: int, _num_blocks: int) -> None:
            told.append(layer)
            if layer >= 0:
                for a, b in zip(pair.source.views(layer, 0, 16), pair.target.views(layer, 0, 16), strict=True):
                    assert bytes(a) == bytes(b)

        assert await pair.prefill.fetch(peer, make_fetch(names), list(range(16)), TIMEOUT_S, on_layer) == 16
        assert told == list(range(-1, LAYOUT.num_layers))
        assert all_same(pair)
        await until(lambda: len(pair.role.served) == 1)


async def test_mapped_memory_works_over_several_links():
    async with Pair(16, via="shm", links=3, link_limits=QUICK) as pair:
        await joined(pair, pair.peer, 3)
        await push_over(pair, pair.peer)
        assert all_same(pair)
