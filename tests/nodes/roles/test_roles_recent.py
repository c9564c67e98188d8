"""The table of hashes seen of late: what it remembers, for how long, and that its memory does not move."""

from __future__ import annotations

import hashlib
import tracemalloc

import pytest

from nodes.roles.recent import WAYS, RecentHashes
from transfer.errors import InvalidValue

KEEP_S = 60.0


def digests(first: int, count: int) -> list[bytes]:
    return [hashlib.sha256(index.to_bytes(8, "big")).digest() for index in range(first, first + count)]


def test_leading_hashes_are_known_up_to_the_first_that_was_not_seen() -> None:
    recent, names = RecentHashes(1024, KEEP_S), digests(0, 20)
    assert recent.num_leading(names, 5.0) == 0
    recent.see([*names[:7], *names[8:]], 5.0)
    assert recent.num_leading(names, 6.0) == 7
    assert recent.num_leading(names[8:], 6.0) == 12
    assert recent.count(6.0) == 19
    recent.clear()
    assert recent.num_leading(names, 6.0) == recent.count(6.0) == 0


def test_what_was_seen_too_long_ago_is_not_known_and_seeing_it_again_counts() -> None:
    recent, names = RecentHashes(1024, KEEP_S), digests(0, 2)
    recent.see(names, 100.0)
    recent.see(names[1:], 130.0)
    assert recent.num_leading(names, 100.0 + KEEP_S) == 2
    assert recent.num_leading(names, 101.0 + KEEP_S) == 0
    assert recent.num_leading(names[1:], 101.0 + KEEP_S) == 1
    assert recent.count(101.0 + KEEP_S) == 1


def test_the_oldest_of_a_hashs_places_yields() -> None:
    recent, names = RecentHashes(WAYS, KEEP_S), digests(0, WAYS + 1)  # one set: all hashes share its places
    for now, name in enumerate(names[:WAYS]):
        recent.see([name], float(now))
    recent.see(names[:1], 20.0)
    recent.see(names[WAYS:], 21.0)
    assert recent.num_leading(names[1:2], 21.0) == 0
    assert all(recent.num_leading([name], 21.0) == 1 for name in (names[0], *names[2:]))


def test_few_are_forgotten_before_their_time_below_half_full() -> None:
    recent, names = RecentHashes(1 << 14, KEEP_S), digests(0, 1 << 13)
    recent.see(names[: 1 << 12], 1.0)
    assert recent.count(1.0) >= 0.9995 * (1 << 12)
    recent.see(names[1 << 12 :], 1.0)
    assert recent.count(1.0) >= 0.97 * (1 << 13)


def test_memory_is_taken_once_however_many_hashes_come() -> None:
    recent = RecentHashes(1 << 12, KEEP_S)
    recent.see(digests(0, 10), 0.0)
    tracemalloc.start()
    try:
        for turn in range(20):
            recent.see(digests(turn << 12, 1 << 12), float(turn))
        grown, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert grown < 2048, f"{grown} bytes more than after 10 hashes"


@pytest.mark.parametrize("num_places", [0, WAYS - 1, WAYS + 1])
def test_sizes_that_do_not_divide_are_refused(num_places: int) -> None:
    with pytest.raises(InvalidValue, match="multiple"):
        RecentHashes(num_places, KEEP_S)
