"""The pool's index: visible after commit only, LRU, never out while pinned, and no block lost by any order of calls."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nodes.pool.store import SKIP, PoolStore
from transfer.errors import InvalidValue, Refused

A, B, C, D, E = (bytes([i]) * 32 for i in range(5))


def put(store: PoolStore, *hashes: bytes, key: object = "w") -> list[int]:
    blocks = store.reserve(key, hashes, 10.0).blocks
    store.commit(key)
    return blocks


def test_content_is_invisible_until_committed_and_kept_once() -> None:
    store = PoolStore(4)
    first = store.reserve("w1", [A, B], 10.0)
    assert SKIP not in first.blocks
    assert store.pin("r", [A, B], 10.0) == []
    assert store.reserve("w2", [A, B, C], 10.0).blocks[:2] == [SKIP, SKIP]
    assert store.commit("w1") == (A, B)
    assert store.commit("w1") == ()
    assert store.pin("r2", [A, B, C], 10.0) == first.blocks
    assert store.reserve("w3", [D, D], 10.0).blocks[1] == SKIP
    assert store.leaked_blocks() == 0


def test_a_failed_write_leaves_nothing() -> None:
    store = PoolStore(2)
    store.reserve("w", [A, B], 10.0)
    with pytest.raises(Refused, match="under way"):
        store.reserve("w", [C], 10.0)
    with pytest.raises(Refused, match="no room for 1"):
        store.reserve("x", [C], 10.0)
    store.release("w")
    store.release("w")
    assert store.commit("w") == ()
    assert (store.free_blocks, store.cached_blocks, store.leaked_blocks()) == (2, 0, 0)


def test_the_least_recently_used_goes_and_a_prefix_outlives_its_tail() -> None:
    store = PoolStore(4)
    put(store, A, B)
    put(store, C, D)
    store.pin("r", [A, B], 10.0)
    store.unpin("r")
    reserved = store.reserve("w", [E], 10.0)
    assert reserved.evicted == (D,)
    assert len(reserved.taken) == 1
    assert store.hashes() == (C, B, A)
    assert store.num_evicted == 1


def test_a_pinned_block_stays_until_its_pin_ends() -> None:
    store = PoolStore(2)
    put(store, A, B)
    store.pin("r", [A, B], 5.0)
    store.pin("r", [A], 9.0)
    with pytest.raises(Refused, match="pinned"):
        store.reserve("w", [C], 10.0)
    assert store.free_blocks == 0
    store.unpin("r")
    assert store.reserve("w", [C], 10.0).evicted == (B,)
    assert store.drop_overdue_pins(8.9) == 0
    assert store.drop_overdue_pins(9.0) == 1
    assert store.pinned_blocks == 0


def test_what_a_write_builds_on_is_not_evicted_for_it() -> None:
    store = PoolStore(2)
    put(store, A, B)
    with pytest.raises(Refused):
        store.reserve("w", [A, B, C], 10.0)
    assert set(store.hashes()) == {A, B}


def test_overdue_writes_are_told() -> None:
    store = PoolStore(2)
    store.reserve("w", [A], 3.0)
    assert store.overdue_writes(2.9) == []
    assert store.overdue_writes(3.0) == ["w"]
    with pytest.raises(InvalidValue):
        PoolStore(0)


@given(st.lists(st.tuples(st.sampled_from("rcxpuo"), st.integers(0, 3), st.lists(st.integers(0, 9), max_size=6))))
def test_no_block_is_lost_or_shared_whatever_the_order(calls: list[tuple[str, int, list[int]]]) -> None:
    store, pinned = PoolStore(5), dict[int, list[int]]()
    for now, (call, key, contents) in enumerate(calls):
        hashes = [bytes([c]) * 32 for c in contents]
        if call == "r":
            try:
                reserved = store.reserve(key, hashes, now + 5.0)
            except Refused:
                continue
            held = {block for blocks in pinned.values() for block in blocks}
            assert not held & set(reserved.taken)
        elif call == "c":
            store.commit(key)
        elif call == "x":
            store.release(key)
        elif call == "p" and key not in pinned:
            pinned[key] = store.pin(key, hashes, 1e9)
        elif call == "u" and pinned.pop(key, None) is not None:
            store.unpin(key)
        else:
            for late in store.overdue_writes(now):
                store.release(late)
        assert store.check() == store.leaked_blocks() == 0
        assert store.free_blocks + store.writing_blocks + store.pinned_blocks == store.num_blocks
