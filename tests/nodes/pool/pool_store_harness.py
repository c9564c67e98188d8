"""A store with few blocks, for tests."""

from __future__ import annotations

from hypothesis import strategies as st

from nodes.pool.index import StoreLimits
from nodes.pool.store import PoolStore

A, B, C, D, E = (bytes([i]) * 32 for i in range(5))
ALL = StoreLimits(high=1.0, low=1.0)
"""No eviction ahead of need."""


def h(number: int) -> bytes:
    return number.to_bytes(32, "big")


def put(store: PoolStore, *hashes: bytes, key: object = "w", now: float = 0.0) -> list[int]:
    blocks = store.reserve(key, hashes, now, now + 10.0).blocks
    store.commit(key, now)
    return blocks


def spill_all(store: PoolStore) -> None:
    while spilling := [h for h, _ in (*store.trim(), *store.next_spills())]:
        for one in spilling:
            store.spilled(one, True)


CALLS = st.lists(
    st.tuples(st.sampled_from("rcxpuolsfdnz"), st.integers(0, 3), st.lists(st.integers(0, 9), max_size=6)), max_size=60
)
