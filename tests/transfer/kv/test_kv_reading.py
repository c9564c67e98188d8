"""A fetch whose blocks are read from a slower tier first, and layers told in order as they become complete."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kv_helpers import LAYOUT, TIMEOUT_S, VIAS, Pair, make_fetch, proxied, until

from transfer.errors import KvCorrupt, KvTransferFailed
from transfer.kv.links import reading
from transfer.kv.links.inbound import FetchCall
from transfer.kv.port import KvFetch

NAMES = [bytes([number]) * 32 for number in range(8)]
BLOCKS = [23 - 2 * number for number in range(8)]


class SlowPool(Pair):
    """`decode` is a pool that reads until `read` is set; `prefill` fetches."""

    def __init__(self, *, via: str = "tcp", **options: object) -> None:
        super().__init__(24, via=via, **options)
        self.prefill._context.arena, self.decode._context.arena = self.target, self.source
        self.read = asyncio.Event()
        self.failure: Exception | None = None
        self.found: Sequence[int] = BLOCKS
        self.log: list[str] = []
        self.role.kv_wanted = self._wanted  # type: ignore[method-assign]
        self.role.kv_served = lambda fetch: self.log.append("served")  # type: ignore[method-assign]

    async def _wanted(self, fetch: KvFetch) -> Sequence[int]:
        self.log.append("wanted")
        try:
            await self.read.wait()
            if self.failure is not None:
                raise self.failure
            return self.found[: len(fetch.hashes)]
        except asyncio.CancelledError:
            await asyncio.sleep(0.05)  # a thread that reads cannot stop at once
            raise
        finally:
            self.log.append("ended")

    def fetch(self, timeout_s: float = TIMEOUT_S, **changes: object) -> asyncio.Task[int]:
        peer = changes.pop("peer", self.peer)
        work = self.prefill.fetch(peer, make_fetch(NAMES), list(range(8)), timeout_s, **changes)  # type: ignore[arg-type]
        return asyncio.create_task(work)


@pytest.mark.parametrize("via", VIAS)
async def test_the_port_awaits_the_blocks_and_tells_the_role_once(via: str):
    async with SlowPool(via=via) as pool:
        task = pool.fetch()
        await until(lambda: pool.log == ["wanted"])
        assert (pool.decode.num_streams, task.done()) == (1, False)
        pool.read.set()
        assert await task == 8
        assert pool.same(BLOCKS, list(range(8)))
        await until(lambda: pool.log == ["wanted", "ended", "served"])


async def test_nothing_found_after_reading_is_a_miss():
    async with SlowPool() as pool:
        pool.found = []
        pool.read.set()
        assert await pool.fetch() == 0
        assert pool.log == ["wanted", "ended", "served"]


async def test_reading_longer_than_a_stall_is_not_taken_for_death():
    async with SlowPool(stall_s=0.2) as pool:
        task = pool.fetch()
        await asyncio.sleep(0.8)
        assert not task.done()
        pool.read.set()
        assert await task == 8


@pytest.mark.parametrize("how", ["deadline", "cancel"])
async def test_a_fetch_given_up_cancels_the_read(how: str):
    async with SlowPool() as pool:
        task = pool.fetch(0.2 if how == "deadline" else TIMEOUT_S)
        await until(lambda: pool.log == ["wanted"])
        if how == "cancel":
            task.cancel()
        with pytest.raises((KvTransferFailed, asyncio.CancelledError)):
            await task
        await until(lambda: pool.log == ["wanted", "ended", "served"])
        assert pool.decode.num_streams == 0


async def test_a_lost_connection_cancels_the_read():
    async with SlowPool() as pool, proxied(pool) as (proxy, peer):
        task = pool.fetch(peer=peer)
        await until(lambda: pool.log == ["wanted"])
        proxy.cut()
        with pytest.raises(KvTransferFailed):
            await task
        await until(lambda: pool.log == ["wanted", "ended", "served"])


async def test_closing_the_port_waits_until_the_read_has_ended():
    async with SlowPool() as pool:
        task = pool.fetch()
        await until(lambda: pool.log == ["wanted"])
        await pool.decode.close()
        assert pool.log == ["wanted", "ended", "served"]
        with pytest.raises(KvTransferFailed):
            await task


async def test_a_read_cancelled_before_it_began_still_unpins():
    async with SlowPool() as pool:
        began = pool.role.kv_wanted

        def wanted(fetch: KvFetch) -> object:
            found = began(fetch)
            asyncio.get_running_loop().call_soon(pool.decode._lose_all, KvTransferFailed("lost"))
            return found

        pool.role.kv_wanted = wanted  # type: ignore[method-assign, assignment]
        with pytest.raises(KvTransferFailed):
            await pool.fetch()
        await until(lambda: pool.log[-1:] == ["served"])
        assert pool.log.count("served") == 1


@pytest.mark.parametrize(
    ("failure", "words"), [(KvCorrupt("the record is torn"), "is torn"), (OSError("disk"), "role behind .* OSError")]
)
async def test_a_read_that_fails_is_told_and_unpinned(failure: Exception, words: str):
    async with SlowPool() as pool:
        pool.failure = failure
        pool.read.set()
        with pytest.raises(KvTransferFailed, match=words):
            await pool.fetch()
        assert pool.log == ["wanted", "ended", "served"]


async def test_a_read_has_a_longest_time(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(reading, "READ_S", 0.1)
    async with SlowPool() as pool:
        with pytest.raises(KvTransferFailed, match=r"did not read the blocks within 0\.1 s"):
            await pool.fetch()
        assert pool.log == ["wanted", "ended", "served"]


async def test_a_pool_that_falls_silent_while_it_reads_is_told_in_time():
    async with SlowPool(stall_s=0.3) as pool:
        task = pool.fetch()
        await until(lambda: pool.log == ["wanted"])
        assert pool.decode._timer is not None
        pool.decode._timer.cancel()  # it hangs
        with pytest.raises(KvTransferFailed, match=r"silent for 0\.3 s after it was asked"):
            await task
        await until(lambda: pool.log[-1] == "served")


# --- layers ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("via", VIAS)
async def test_layers_are_told_in_order_when_they_are_in_place(via: str):
    async with SlowPool(via=via, window_bytes=1) as pool:
        pool.read.set()
        told: list[tuple[int, int]] = []

        def on_layer(layer: int, num_blocks: int) -> None:
            told.append((layer, num_blocks))
            if layer >= 0:
                for theirs, own in zip(BLOCKS, range(8), strict=True):
                    for a, b in zip(pool.source.views(layer, theirs, 1), pool.target.views(layer, own, 1), strict=True):
                        assert bytes(a) == bytes(b)

        assert await pool.fetch(on_layer=on_layer) == 8
        assert told == [(layer, 8) for layer in range(-1, LAYOUT.num_layers)]


@given(st.permutations(range(-1, 6)))
def test_layers_complete_in_any_order_are_told_in_theirs(completed: list[int]):
    told: list[tuple[int, int]] = []
    call = FetchCall(1, (), None, 0.0, lambda *layer: told.append(layer), num_blocks=3)  # type: ignore[arg-type]
    for number, layer in enumerate(completed):
        call.layer_complete(layer)
        here = set(completed[: number + 1])
        in_order = next(at for at in range(-1, 7) if at not in here)
        assert told == [(at, 3) for at in range(-1, in_order)]


async def test_no_layer_is_told_of_a_miss_or_after_the_end():
    async with SlowPool(window_bytes=1) as pool:
        told: list[int] = []
        pool.found = []
        pool.read.set()
        assert await pool.fetch(on_layer=lambda layer, _: told.append(layer)) == 0
        assert told == []
        pool.found = BLOCKS
        task: asyncio.Task[int]

        def stop_at_two(layer: int, _num_blocks: int) -> None:
            told.append(layer)
            if layer == 2:
                task.cancel()

        task = pool.fetch(on_layer=stop_at_two)
        with pytest.raises(asyncio.CancelledError):
            await task
        seen = list(told)
        await until(lambda: pool.log.count("served") == 2)
        assert told == seen
        assert told[:4] == [-1, 0, 1, 2]
