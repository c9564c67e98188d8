"""The pool's index: visible after commit only, never out while anybody keeps it, and no block lost by any order of
calls, in memory or on SSD."""

from __future__ import annotations

import time

import pytest
from pool_store_harness import ALL, A, B, C, D, E, h, put, spill_all

from nodes.pool.index import StoreLimits
from nodes.pool.policy import LruPolicy
from nodes.pool.policy_reuse import ReusePolicy
from nodes.pool.store import SKIP, PoolStore
from transfer.errors import InvalidValue, Refused

# --- puts and gets in memory ----------------------------------------------------------------------------------------


def test_content_is_invisible_until_committed_and_kept_once() -> None:
    store = PoolStore(4)
    first = store.reserve("w1", [A, B], 0.0, 10.0)
    assert SKIP not in first.blocks
    assert store.lease("r", [A, B], 0.0, 10.0).blocks == []
    assert store.lookup([A, B]) == 0
    assert store.reserve("w2", [A, B, C], 0.0, 10.0).blocks[:2] == [SKIP, SKIP]
    assert store.commit("w1", 0.0) == (A, B)
    assert store.commit("w1", 0.0) == ()
    assert store.lease("r2", [A, B, C], 0.0, 10.0).blocks == first.blocks
    assert store.reserve("w3", [D, D], 0.0, 10.0).blocks[1] == SKIP
    assert store.check() == 0


def test_a_failed_write_leaves_nothing() -> None:
    store = PoolStore(2)
    store.reserve("w", [A, B], 0.0, 10.0)
    with pytest.raises(Refused, match="under way"):
        store.reserve("w", [C], 0.0, 10.0)
    with pytest.raises(Refused, match="no room for 1"):
        store.reserve("x", [C], 0.0, 10.0)
    store.release("w")
    store.release("w")
    assert store.commit("w", 0.0) == ()
    assert (store.free_blocks, store.cached_blocks, store.check()) == (2, 0, 0)


def test_the_least_recently_used_goes_and_a_prefix_outlives_its_tail() -> None:
    store = PoolStore(4, limits=ALL)
    put(store, A, B)
    put(store, C, D)
    store.lease("r", [A, B], 0.0, 10.0)
    store.unlease("r")
    store.take_changes()
    reserved = store.reserve("w", [E], 0.0, 10.0)
    changes = store.take_changes()
    assert changes is not None
    assert changes.removed == [D]
    assert len(reserved.taken) == 1
    assert store.hashes() == (C, B, A)
    assert store.num_evicted == 1


def test_a_leased_block_stays_until_its_lease_ends() -> None:
    store = PoolStore(2)
    put(store, A, B)
    store.lease("r", [A, B], 0.0, 5.0)
    store.lease("r", [A], 0.0, 9.0)
    with pytest.raises(Refused, match="pinned"):
        store.reserve("w", [C], 0.0, 10.0)
    assert store.free_blocks == 0
    store.unlease("r")
    with pytest.raises(Refused, match="pinned"):  # the shorter ended: what the other reads is all kept
        store.reserve("w", [C], 0.0, 10.0)
    assert store.end_overdue(4.9) == 0
    assert store.end_overdue(5.0) == 1
    put(store, C)
    assert store.pinned_blocks == 0


def test_what_a_write_builds_on_is_not_evicted_for_it() -> None:
    store = PoolStore(2)
    put(store, A, B)
    with pytest.raises(Refused):
        store.reserve("w", [A, B, C], 0.0, 10.0)
    assert set(store.hashes()) == {A, B}


def test_overdue_writes_are_told() -> None:
    store = PoolStore(2)
    store.reserve("w", [A], 0.0, 3.0)
    assert store.overdue_writes(2.9) == []
    assert store.overdue_writes(3.0) == ["w"]
    store.renew("w", 5.0)
    assert store.overdue_writes(4.9) == []
    store.renew("w", 1000.0)  # a writer that trickles
    assert store.overdue_writes(29.9) == []
    assert store.overdue_writes(30.0) == ["w"]
    with pytest.raises(InvalidValue):
        PoolStore(0)


def test_parents_are_told_to_the_policy() -> None:
    told: list[tuple[bytes, bytes | None]] = []

    class Policy(LruPolicy):
        def stored(self, h: bytes, parent: bytes | None, now: float, user: str | None = None) -> None:
            told.append((h, parent))
            super().stored(h, parent, now, user)

    store = PoolStore(4, Policy())
    put(store, A, B, C)
    assert told == [(C, B), (B, A), (A, None)]


# --- watermark ------------------------------------------------------------------------------------------------------


def test_above_the_high_watermark_blocks_are_freed_down_to_the_low_one() -> None:
    store = PoolStore(100)
    put(store, *map(h, range(95)))
    assert store.trim() == []
    assert store.cached_blocks == 95
    put(store, h(95))
    store.lease("r", [h(95)], 0.0, 10.0)
    store.pin("p", [h(94)], 10.0)
    assert store.trim() == []
    assert store.cached_blocks == 90
    assert store.lookup([h(95)]) == store.lookup([h(94)]) == 1
    assert store.check() == 0


# --- SSD ------------------------------------------------------------------------------------------------------------


def test_worthy_blocks_are_written_ahead_and_leave_memory_only_when_there() -> None:
    store = PoolStore(8, ssd_blocks=100, limits=StoreLimits(high=0.375, low=0.25))
    put(store, A, B)
    spills = store.next_spills()
    assert [one for one, _ in spills] == [B, A]
    assert store.next_spills() == []
    store.spilled(A, True)
    store.spilled(A, True)
    store.spilled(B, False)
    assert (store.on_ssd(A), store.on_ssd(B)) == (True, False)
    put(store, C, D)
    store.take_changes()
    assert [one for one, _ in store.trim()] == [B]  # A is there already and goes; B is written first
    assert (store.cached_blocks, store.spilling_blocks) == (3, 1)
    store.spilled(B, True)
    changes = store.take_changes()
    assert changes is not None
    assert (sorted(changes.stored_ssd), changes.removed) == ([A, B], [])
    assert sorted(store.ssd_hashes()) == [A, B]
    assert store.check() == 0


def test_what_the_filter_does_not_want_is_never_written() -> None:
    class Never(LruPolicy):
        def wanted(self, h: bytes) -> bool:
            return False

    store = PoolStore(4, Never(), ssd_blocks=100, limits=StoreLimits(high=0.5, low=0.25))
    put(store, A, B, C)
    assert store.next_spills() == store.trim() == []
    assert store.cached_blocks == 1
    assert [one for one, _ in store.flush_spills()] == [A]


def test_all_that_a_later_request_uses_goes_to_ssd_though_nothing_new_is_stored() -> None:
    """Two conversations' blocks are all there is, so that the last ones are put and used again in one epoch."""
    store = PoolStore(1456, ReusePolicy(1456), ssd_blocks=10_000)
    hashes = [h(number) for number in range(74)]
    for start in range(0, 74, 4):
        store.reserve(start, hashes[start : start + 4], 0.0, 10.0, f"a{start}")
        store.commit(start, 0.0)
    spill_all(store)
    assert store.ssd_blocks == 0, "used by one request each"
    store.lease("r", hashes[:50], 60.0, 70.0, "b")  # fetched
    store.unlease("r")
    store.reserve("q", hashes[50:], 60.0, 70.0, "c")  # computed again, and put again
    store.commit("q", 60.0)
    spill_all(store)
    assert store.ssd_blocks == 74
    assert store.check() == 0


def test_what_is_not_settled_yet_is_told() -> None:
    store = PoolStore(64, ReusePolicy(64 * 64), ssd_blocks=100, limits=ALL)
    assert store.unsettled_blocks == 0
    store.reserve("w", [A, B, C], 0.0, 10.0, "first")
    assert store.unsettled_blocks == 3, "being put"
    store.commit("w", 0.0)
    assert store.unsettled_blocks == 3, "not looked at"
    assert store.next_spills() == []
    assert store.unsettled_blocks == 0
    store.lease("r", [A, B], 0.0, 10.0, "second")
    assert store.unsettled_blocks == 2
    assert [one for one, _ in store.next_spills()] == [B, A]
    assert store.unsettled_blocks == 2, "being written"
    store.spilled(A, True)
    store.spilled(B, False)
    assert store.unsettled_blocks == 0
    plain = PoolStore(64)
    put(plain, A, B)
    assert plain.unsettled_blocks == 0, "there is no SSD to wait for"


def test_a_slow_ssd_holds_a_part_of_memory_only() -> None:
    store = PoolStore(16, ssd_blocks=100)
    put(store, *map(h, range(16)))
    assert len([*store.trim(), *store.next_spills()]) == 4
    assert store.free_blocks == 12
    for i in range(100, 112):
        put(store, h(i))
    assert store.check() == 0


def test_what_is_on_ssd_leaves_memory_before_what_would_be_lost() -> None:
    store = PoolStore(8, ssd_blocks=100)
    put(store, *map(h, range(8)))
    store.lease("r", [h(7)], 0.0, 10.0)
    store.unlease("r")
    store.ssd_recovered([h(4), h(5)])
    put(store, h(100), h(101))
    assert [store.lookup([h(i)]) for i in range(8)] == [1] * 8
    put(store, h(102))  # nothing else is on SSD: the next victim is lost
    assert [store.lookup([h(i)]) for i in range(8)] == [1, 1, 1, 1, 1, 1, 0, 1]
    assert store.check() == 0


def test_a_spilling_block_is_not_evicted() -> None:
    store = PoolStore(1, ssd_blocks=100)
    put(store, A)
    store.next_spills()
    with pytest.raises(Refused):
        store.reserve("w", [B], 0.0, 10.0)
    store.spilled(A, True)
    put(store, B)
    assert store.lookup([A]) == 1
    assert store.check() == 0


def test_content_on_ssd_is_loaded_once_for_all_who_ask_and_read_by_nobody_before() -> None:
    store = PoolStore(4, ssd_blocks=100)
    store.ssd_recovered([A, B])
    first = store.lease("r1", [A, B, C], 0.0, 10.0)
    assert [one for one, _ in first.loads] == first.waiting == [A, B]
    second = store.lease("r2", [A], 0.0, 10.0)
    assert (second.loads, second.waiting, second.blocks) == ([], [A], first.blocks[:1])
    assert store.resident(first, 30.0) == []
    store.loaded(A, True, 0.0)
    store.loaded(A, True, 0.0)
    store.loaded(B, False, 0.0)
    assert store.resident(first, 30.0) == first.blocks[:1] == store.resident(second, 30.0)
    assert store.end_overdue(29.0) == 0  # however long the disk took, the reading has its time
    assert (store.cached_blocks, store.loading_blocks, store.check()) == (1, 0, 0)
    store.unlease("r1")
    assert store.resident(first, 30.0) == []


def test_what_waited_for_a_disk_that_hung_is_looked_through_soon() -> None:
    """Not in the square of its number: the event loop stands still meanwhile."""

    class Picky(LruPolicy):
        def wanted(self, h: bytes) -> bool:
            return False

    num = 60_000
    store = PoolStore(num, Picky(), ssd_blocks=100)
    for start in range(0, num, 1000):
        store.reserve(start, [h(number) for number in range(start, start + 1000)], 0.0, 10.0)
        store.commit(start, 0.0)
    started, turns = time.perf_counter(), 0
    while store._unexamined:
        assert store.next_spills() == []
        turns += 1
    assert time.perf_counter() - started < 0.25
    assert turns > 10, "others have their turn in between"


def test_a_bad_record_is_gone_from_the_index() -> None:
    store = PoolStore(2, ssd_blocks=100)
    store.ssd_recovered([A])
    store.take_changes()
    store.lease("r", [A], 0.0, 10.0)
    store.ssd_removed(A)
    store.loaded(A, False, 0.0)
    store.ssd_removed(A)
    changes = store.take_changes()
    assert changes is not None
    assert (changes.stored, changes.removed) == ([], [A])
    assert (store.lookup([A]), store.free_blocks, store.check()) == (0, 2, 0)


def test_loads_are_bounded_and_take_no_leased_block() -> None:
    store = PoolStore(4, ssd_blocks=100, limits=StoreLimits(loading=3))
    store.ssd_recovered(map(h, range(10)))
    lease = store.lease("r", [h(i) for i in range(10)], 0.0, 10.0)
    assert len(lease.blocks) == 3
    for i in range(3):
        store.loaded(h(i), True, 0.0)
    more = store.lease("r2", [h(i) for i in range(3, 10)], 0.0, 10.0)
    assert len(more.blocks) == 1
    assert store.check() == 0
