"""Which block hashes were seen of late, in memory that is taken once and never grows. Pure; forgets, never guesses.

A set-associative table of tags: each hash has a few places, and where all of them are taken the oldest one yields. A
dict of the same hashes moves to new, larger memory again and again as they come and go, and leaves holes behind.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from transfer.errors import InvalidValue

WAYS = 8
"""Places of one hash: in a table half full 1 in 100 is forgotten early, in one a quarter full next to none."""


class RecentHashes:
    """12 bytes a place. A hash that was not seen passes for one that was with odds of WAYS / 2^63."""

    def __init__(self, num_places: int, keep_s: float) -> None:
        """num_places: a multiple of WAYS. keep_s: what was seen longer ago counts as not seen (in whole seconds)."""
        if num_places < WAYS or num_places % WAYS:
            raise InvalidValue(f"num_places must be a multiple of {WAYS}, got {num_places}")
        self._num_places, self._keep_s = num_places, keep_s
        self._tags = array("Q")
        self._seen_s = array("I")

    def see(self, hashes: Sequence[bytes], now: float) -> None:
        """Each was seen now. Hashes have 16 bytes at least, and are evenly distributed (a digest's are)."""
        if not self._tags:  # who has nothing to remember takes no memory
            self._tags, self._seen_s = array("Q", (0,)) * self._num_places, array("I", (0,)) * self._num_places
        for h in hashes:
            first, tag = self._place(h)
            place = self._find(first, tag)
            if place is None:
                seen_s = self._seen_s[first : first + WAYS]
                place = first + seen_s.index(min(seen_s))
                self._tags[place] = tag
            self._seen_s[place] = int(now)

    def num_leading(self, hashes: Sequence[bytes], now: float) -> int:
        """How many of the first hashes were seen of late, up to the first that was not."""
        if not self._tags:
            return 0
        for index, h in enumerate(hashes):
            place = self._find(*self._place(h))
            if place is None or now - self._seen_s[place] > self._keep_s:
                return index
        return len(hashes)

    def count(self, now: float) -> int:
        """Hashes that count as seen. O(num_places)."""
        return sum(
            1 for tag, seen_s in zip(self._tags, self._seen_s, strict=True) if tag and now - seen_s <= self._keep_s
        )

    def clear(self) -> None:
        self._tags, self._seen_s = array("Q"), array("I")

    def _place(self, h: bytes) -> tuple[int, int]:
        """Its first place, and its tag, which is never 0: that is a free place."""
        first = int.from_bytes(h[:8], "little") % (self._num_places // WAYS) * WAYS
        return first, int.from_bytes(h[8:16], "little") | 1

    def _find(self, first: int, tag: int) -> int | None:
        try:
            return self._tags.index(tag, first, first + WAYS)
        except ValueError:
            return None
