"""Fetching leading blocks from a pool: what is there arrives verified, what is pinned is unpinned, exactly once."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from kv_helpers import (
    LAYOUT,
    TIMEOUT_S,
    Pair,
    Proxy,
    block_bytes,
    make_fetch,
    proxied,
    until,
)

from transfer.errors import InvalidValue, KvCorrupt, KvTransferFailed
from transfer.kv.links import sending
from transfer.kv.port import KvFetch

VIAS = ("tcp", "shm")
NAMES = [bytes([number]) * 32 for number in range(8)]


class Pool(Pair):
    """The pair the other way round: `decode` is the pool, whose source arena holds the blocks; `prefill` fetches."""

    def __init__(self, *, via: str = "tcp", **options: object) -> None:
        super().__init__(24, via=via, **options)
        self.prefill._context.arena, self.decode._context.arena = self.target, self.source
        self.role.pool = {name: 23 - 2 * number for number, name in enumerate(NAMES)}

    @property
    def held(self) -> list[int]:
        return list(self.role.pool.values())


@pytest.mark.parametrize("via", VIAS)
@pytest.mark.parametrize(("num_known", "num_asked"), [(8, 8), (8, 3), (3, 8), (1, 1)])
async def test_leading_blocks_arrive_and_are_unpinned(via: str, num_known: int, num_asked: int):
    async with Pool(via=via) as pair:
        for name in NAMES[num_known:]:
            del pair.role.pool[name]
        target = [3, 4, 9, 8, 20, 0, 1, 2][:num_asked]
        fetch = make_fetch(NAMES[:num_asked])
        count = await pair.prefill.fetch(pair.peer, fetch, target, TIMEOUT_S)
        assert count == min(num_known, num_asked)
        assert pair.same(pair.held[:count], target[:count])
        untouched = [block for block in range(24) if block not in target[:count]]
        assert all(block_bytes(pair.target, block) == bytes(LAYOUT.block_bytes) for block in untouched)
        await until(lambda: pair.role.served == [fetch])
        assert pair.role.wanted == [fetch]


def hold_after_the_fetch(pair: Pair, proxy: Proxy) -> None:
    """Once the pool was asked, nothing the fetcher says reaches it."""
    asked = pair.role.kv_wanted

    def wanted(fetch: KvFetch) -> Sequence[int]:
        proxy.hold_at = proxy.passed
        return asked(fetch)

    pair.role.kv_wanted = wanted  # type: ignore[method-assign]


@pytest.mark.parametrize("via", VIAS)
async def test_blocks_that_changed_hands_since_they_were_found_are_not_served(via: str):
    """The lease of a slow reader is over: somebody else's bytes have checksums and generations that are right."""
    async with Pool(via=via) as pair:
        asked, loop = pair.role.kv_wanted, asyncio.get_running_loop()

        def given_away() -> None:
            for block in pair.held:
                pair.source.bump(block)
                for layer in range(LAYOUT.num_layers):
                    for half in pair.source.views(layer, block, 1):
                        half[:] = bytes(half.nbytes)

        def wanted(fetch: KvFetch) -> object:
            loop.call_soon(given_away)  # before the fetcher can have granted
            return asked(fetch)

        pair.role.kv_wanted = wanted  # type: ignore[method-assign, assignment]
        with pytest.raises(KvTransferFailed, match="changed hands"):
            await pair.prefill.fetch(pair.peer, make_fetch(NAMES), list(range(8)), TIMEOUT_S)
        await until(lambda: len(pair.role.served) == 1)


async def test_a_miss_is_no_error():
    async with Pool() as pair:
        fetch = make_fetch([b"x" * 32])
        assert await pair.prefill.fetch(pair.peer, fetch, [0], TIMEOUT_S) == 0
        assert pair.role.served == [fetch]


async def test_eight_fetches_at_once():
    async with Pool(window_bytes=1) as pair:
        counts = await asyncio.gather(
            *(
                pair.prefill.fetch(pair.peer, make_fetch(NAMES[:3]), [at, at + 1, at + 2], TIMEOUT_S)
                for at in range(0, 24, 3)
            )
        )  # fmt: skip
        assert counts == [3] * 8
        assert pair.same(pair.held[:3] * 8, list(range(24)))
        await until(lambda: len(pair.role.served) == 8)


@pytest.mark.parametrize(
    ("changes", "words"), [({"target_epoch": 3}, "is in epoch 11"), ({"fingerprint": b"f" * 32}, "KV fingerprint")]
)
async def test_a_fetch_that_does_not_fit_is_refused(changes, words: str):
    async with Pool(fingerprint=bytes(range(32))) as pair:
        with pytest.raises(KvTransferFailed, match=words):
            await pair.prefill.fetch(pair.peer, make_fetch(NAMES[:2], **changes), [0, 1], TIMEOUT_S)
        assert pair.role.wanted == []


async def test_wrong_arguments_are_told():
    async with Pool() as pair:
        with pytest.raises(InvalidValue, match="1 block ids"):
            await pair.prefill.fetch(pair.peer, make_fetch(NAMES[:2]), [0], TIMEOUT_S)
        with pytest.raises(InvalidValue, match=r"0\.\.23"):
            await pair.prefill.fetch(pair.peer, make_fetch(NAMES[:1]), [24], TIMEOUT_S)


@pytest.mark.parametrize("via", VIAS)
async def test_a_lost_pool_is_told_and_the_pool_unpins(via: str):
    async with Pool(via=via, window_bytes=1) as pair, proxied(pair) as (proxy, peer):
        hold_after_the_fetch(pair, proxy)
        task = asyncio.create_task(pair.prefill.fetch(peer, make_fetch(NAMES), list(range(8)), TIMEOUT_S))
        await until(lambda: len(pair.role.wanted) == 1)
        proxy.cut()
        with pytest.raises(KvTransferFailed):
            await task
        await until(lambda: len(pair.role.served) == 1)


async def test_a_late_pool_is_told_and_writes_no_more():
    async with Pool(window_bytes=1) as pair, proxied(pair) as (proxy, peer):
        await pair.prefill.fetch(peer, make_fetch([b"x" * 32]), [0], TIMEOUT_S)
        proxy.hold_at = proxy.passed + 600  # the fetch passes, at some point the credit does not
        with pytest.raises(KvTransferFailed, match=r"did not finish the fetch within 0\.3 s"):
            await pair.prefill.fetch(peer, make_fetch(NAMES), list(range(8)), 0.3)
        before = bytes(pair.target.buffer)
        proxy.released.set()
        await until(lambda: len(pair.role.served) == 2)
        assert bytes(pair.target.buffer) == before


async def test_a_cancelled_fetch_writes_no_more():
    async with Pool(window_bytes=1) as pair, proxied(pair) as (proxy, peer):
        await pair.prefill.fetch(peer, make_fetch([b"x" * 32]), [0], TIMEOUT_S)
        proxy.hold_at = proxy.passed + 600
        task = asyncio.create_task(pair.prefill.fetch(peer, make_fetch(NAMES), list(range(8)), TIMEOUT_S))
        await until(lambda: len(pair.role.wanted) == 2)
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert pair.prefill.num_streams == 0
        before = bytes(pair.target.buffer)
        proxy.released.set()
        await until(lambda: len(pair.role.served) == 2)
        assert bytes(pair.target.buffer) == before


async def test_a_fetcher_that_hangs_is_unpinned_in_time():
    async with Pool(window_bytes=1, stall_s=0.4) as pair, proxied(pair) as (proxy, peer):
        await pair.prefill.fetch(peer, make_fetch([b"x" * 32]), [0], TIMEOUT_S)
        hold_after_the_fetch(pair, proxy)
        with pytest.raises(KvTransferFailed, match="was silent for"):
            await pair.prefill.fetch(peer, make_fetch(NAMES), list(range(8)), 10.0)
        await until(lambda: len(pair.role.served) == 2)
        proxy.released.set()


async def test_bytes_that_change_on_the_way_are_not_taken(monkeypatch: pytest.MonkeyPatch):
    async with Pool() as pair:
        monkeypatch.setattr(sending, "checksum", lambda parts: 12345)
        with pytest.raises(KvCorrupt, match="does not match its checksum"):
            await pair.prefill.fetch(pair.peer, make_fetch(NAMES), list(range(8)), TIMEOUT_S)
        await until(lambda: len(pair.role.served) == 1)


async def test_a_port_without_a_role_serves_nothing():
    async with Pool() as pair:
        pair.decode.delegate = None
        with pytest.raises(KvTransferFailed, match="has no role yet"):
            await pair.prefill.fetch(pair.peer, make_fetch(NAMES), list(range(8)), TIMEOUT_S)
