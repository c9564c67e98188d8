"""Pins and bounds of the pool's store: what stays, how long, and what is never exceeded."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
from hypothesis import given
from pool_store_harness import CALLS, A, B, C, D, E, h, put, spill_all

from nodes.pool.index import StoreLimits
from nodes.pool.policy import LruPolicy
from nodes.pool.store import PoolStore
from transfer.errors import Refused

# --- pins: LMCache#2017, LMCache#987 ---------------------------------------------------------------------------------


def test_pins_never_released_end_with_their_time_to_live() -> None:
    store = PoolStore(4)
    put(store, A, B)
    for round_ in range(1000):
        store.pin(f"p{round_}", [A], float(round_ + 1))
        store.end_overdue(float(round_))
    assert store.pinned_blocks == 1
    assert store.end_overdue(1000.0) == 1
    assert store.pinned_blocks == 0
    put(store, C, D, E, key="w2")
    assert store.check() == 0


def test_a_repeated_pin_starts_its_time_anew_and_a_double_unpin_does_nothing() -> None:
    store = PoolStore(4)
    put(store, A, B)
    assert store.pin("p", [A, B, C], 5.0) == 2
    assert store.pin("p", [A], 9.0) == 1
    assert store.end_overdue(8.0) == 0
    store.pin("q", [A], 20.0)
    store.unpin("p")
    store.unpin("p")
    assert store.pinned(A)
    assert not store.pinned(B)
    store.unpin("q")
    assert store.pinned_blocks == store.check() == 0


def test_a_pin_of_one_content_many_times_costs_as_much_as_once() -> None:
    store = PoolStore(4)
    put(store, A)
    assert store.pin("p", [A] * 1000, 5.0) == 1000
    (hold,) = store._pins._by_key["p"]
    assert hold.hashes == [A]
    store.unpin("p")
    assert store.pinned_blocks == store.check() == 0


def test_pins_keep_a_share_at_most_and_a_refused_one_changes_nothing() -> None:
    store = PoolStore(4, ssd_blocks=4)
    put(store, A, B, C)
    store.pin("p", [A], 5.0)
    with pytest.raises(Refused, match=r"pins may keep 50% of the pool's 4 blocks of memory, with this one .* keep 3"):
        store.pin("p", [A, B, C], 9.0)
    assert (store.pinned(A), store.pinned(B)) == (True, False)
    assert store.end_overdue(5.0) == 1
    spill_all(store)
    assert store.pin("p", [A, B, C], 9.0) == 3  # they are on SSD too, and leave memory free
    assert store.free_blocks == 4


def test_a_pinned_block_leaves_memory_only_for_ssd() -> None:
    store = PoolStore(2, ssd_blocks=10)
    put(store, A)
    store.pin("p", [A], 5.0)
    with pytest.raises(Refused):
        store.reserve("w", [B, C], 0.0, 10.0)
    spill_all(store)
    put(store, B, C)
    assert store.lookup([A]) == 1


# --- bounds: Mooncake#3452, LMCache#2942 ----------------------------------------------------------------------------


def test_metadata_is_capped_whatever_is_asked() -> None:
    store = PoolStore(4, ssd_blocks=8, limits=StoreLimits(writes=3, leases=3, pins=3))
    put(store, A)
    for i in range(3):
        store.reserve(f"w{i}", [A], 0.0, 10.0)
        store.lease(f"l{i}", [A], 0.0, 10.0)
        store.pin(f"p{i}", [A], 10.0)
    with pytest.raises(Refused, match="3 writes under way"):
        store.reserve("w3", [A], 0.0, 10.0)
    with pytest.raises(Refused, match="has 3 pins"):
        store.pin("p3", [A], 10.0)
    assert store.lease("l3", [A], 0.0, 10.0).blocks == []
    for i in range(3):
        store.commit(f"w{i}", 0.0)
    for i in range(1000):
        put(store, h(i))
        spill_all(store)
        store.take_changes()
    assert len(store.hashes()) <= 4


def test_allocation_does_not_loop_when_nothing_can_be_evicted() -> None:
    """One pass over the victims, then a refusal."""

    class Counted(LruPolicy):
        seen = 0

        def victims(self) -> Iterator[bytes]:
            for victim in super().victims():
                self.seen += 1
                yield victim

    policy = Counted()
    store = PoolStore(50, policy)
    put(store, *map(h, range(50)))
    store.lease("r", [h(i) for i in range(50)], 0.0, 10.0)
    with pytest.raises(Refused, match="no room"):
        store.reserve("w", [h(1000)], 0.0, 10.0)
    assert policy.seen == 50
    assert store.trim() == []
    assert policy.seen == 100


@given(CALLS)
def test_no_block_is_lost_or_shared_whatever_the_order(calls: list[tuple[str, int, list[int]]]) -> None:
    store, leased = PoolStore(5, ssd_blocks=8), dict[int, list[int]]()
    loading, spilling = list[bytes](), list[bytes]()
    for now, (call, key, contents) in enumerate(calls):
        hashes = [bytes([c]) * 32 for c in contents]
        held = {block for blocks in leased.values() for block in blocks}
        match call:
            case "r":
                with contextlib.suppress(Refused):
                    assert not held & set(store.reserve(key, hashes, now, now + 5.0).taken)
            case "c":
                store.commit(key, now)
            case "x":
                store.release(key)
            case "p" if key not in leased:
                lease = store.lease(key, hashes, now, 1e9)
                leased[key] = lease.blocks
                loading += [one for one, _ in lease.loads]
                assert not held & {block for _, block in lease.loads}
            case "u" if leased.pop(key, None) is not None:
                store.unlease(key)
            case "l" if loading:
                store.loaded(loading.pop(0), key > 0, now)
            case "s":
                spilling += [one for one, _ in (*store.trim(), *store.next_spills())]
            case "f" if spilling:
                store.spilled(spilling.pop(0), key > 0)
            case "d" if hashes and hashes[0] not in spilling:
                store.ssd_removed(hashes[0])
            case "n":
                with contextlib.suppress(Refused):
                    store.pin(key, hashes, now + 3.0)
            case "z":
                store.unpin(key)
            case _:
                for late in store.overdue_writes(now):
                    store.release(late)
        assert store.check() == store.leaked_blocks() == 0
        assert 0 <= store.free_blocks <= store.num_blocks
