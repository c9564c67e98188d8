"""The default eviction policy: gives up first what, by how often and when it was used, promises the fewest hits.

Knows no trace and no clock: it learns as it goes how soon content is used again, and ranks as LRU until it has.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator
from dataclasses import dataclass

from nodes.pool.reuse import CAPACITIES_FOLLOWED, EPOCHS_A_CAPACITY, ReuseModel
from transfer.sketch import CountMin

MAX_USES = 10
"""Content used more often is taken together."""
FIT_EVERY_EPOCHS = 8
FIT_EVERY_BLOCKS = 1024
MIN_SKETCH_WIDTH, MAX_SKETCH_WIDTH = 1 << 17, 1 << 22
"""Counters of a row: 1 MiB in all for small pools, since what they evict comes back after many times their size."""
USES_A_COUNTER = 4
"""Past uses fade to half when so many were counted for each counter of a row: later, they would blur."""

_Group = tuple[int, int]  # (uses up to MAX_USES, epoch of the last one)


@dataclass(slots=True)
class _Entry:
    """user: the first to be known. again: there was another."""

    uses: int
    group: _Group
    user: str | None
    again: bool = False


class ReusePolicy:
    """O(1) amortised a call: blocks used equally often and in the same epoch form a group; groups are ranked once an
    epoch. Uses in one epoch count once (the correlated references of LRU-K, SIGMOD'93): fetching a prefix and storing
    it again is one use. But an epoch lasts until its blocks are stored, and for ever where nothing new comes; so what
    SSD is to keep goes by who used it: two requests are two uses, however close.

    Memory: an entry a stored block, a bounded sample of evicted hashes, and a sketch of past uses.
    """

    def __init__(self, num_blocks: int) -> None:
        """num_blocks: of the pool; sets how finely age is told and how far back is remembered."""
        self._num_blocks = max(1, num_blocks)
        self._epoch_blocks = max(1, self._num_blocks // EPOCHS_A_CAPACITY)
        self._epoch_end = self._epoch_blocks
        self._model = ReuseModel(self._num_blocks, MAX_USES)
        width = 1 << (4 * self._num_blocks).bit_length()
        self._sketch_width = min(MAX_SKETCH_WIDTH, max(MIN_SKETCH_WIDTH, width))
        self._sketch = CountMin(self._sketch_width)
        self._entries: dict[bytes, _Entry] = {}
        self._groups: dict[_Group, dict[bytes, None]] = {}
        self._ranking: list[tuple[float, int, int]] | None = None  # (worth, epoch, uses), the least first
        self._epoch = self._num_stored = self._fitted_at = self._num_counted = 0

    def stored(self, h: bytes, parent: bytes | None, now: float, user: str | None = None) -> None:
        if h in self._entries:
            self.removed(h)
        self._num_stored += 1
        if self._num_stored >= self._epoch_end:
            self._advance()
        self._enter(h, self._count(h), user)

    def hit(self, h: bytes, now: float, user: str | None = None) -> None:
        entry = self._entries.get(h)
        if entry is None:
            return
        first = entry.user if entry.user is not None else user
        again = entry.again or (user is not None and first != user)
        if entry.group[1] != self._epoch:
            self._count(h)
            self.removed(h)
            self._enter(h, entry.uses + 1, first, again)
        else:
            entry.user, entry.again = first, again

    def removed(self, h: bytes) -> None:
        entry = self._entries.pop(h, None)
        if entry is not None:
            members = self._groups[entry.group]
            del members[h]
            if not members and entry.group[1] != self._epoch:
                del self._groups[entry.group]

    def victims(self) -> Iterator[bytes]:
        """Best victim first; nothing may change while it is read."""
        for _, epoch, uses in self._ranked():
            yield from self._groups.get((uses, epoch), ())

    def wanted(self, h: bytes) -> bool:
        """Used twice of late, counting the time before it was last evicted."""
        entry = self._entries.get(h)
        return (entry is not None and (entry.again or entry.uses > 1)) or self._sketch.estimate(h) > 1

    def _count(self, h: bytes) -> int:
        self._num_counted += 1
        if self._num_counted >= USES_A_COUNTER * self._sketch_width:
            self._num_counted = 0
            self._sketch.age()
        return self._sketch.add(h)

    def _enter(self, h: bytes, uses: int, user: str | None, again: bool = False) -> None:
        kind, epoch = uses if uses < MAX_USES else MAX_USES, self._epoch
        group = (kind, epoch)
        self._entries[h] = _Entry(uses, group, user, again)
        members = self._groups.get(group)
        if members is None:
            members = self._groups[group] = {}
            if self._ranking is not None:
                insort(self._ranking, (self._model.worth(kind - 1, 0), epoch, kind))
        members[h] = None
        self._model.use(h, kind - 1, epoch)

    def _advance(self) -> None:
        """As many blocks are stored as an epoch has: time goes on."""
        for kind in range(1, MAX_USES + 1):
            if not self._groups.get((kind, self._epoch), True):
                del self._groups[kind, self._epoch]
        self._epoch += 1
        self._epoch_end = (self._epoch + 1) * self._epoch_blocks
        self._ranking = None
        since = self._num_stored - self._fitted_at
        if since >= max(FIT_EVERY_BLOCKS, FIT_EVERY_EPOCHS * self._epoch_blocks):
            self._fitted_at = self._num_stored
            self._model.fit(0.5 ** (since / (CAPACITIES_FOLLOWED * self._num_blocks)), self._epoch)

    def _ranked(self) -> list[tuple[float, int, int]]:
        if self._ranking is None:
            self._ranking = sorted(
                (self._model.worth(kind - 1, self._epoch - epoch), epoch, kind) for kind, epoch in self._groups
            )
        return self._ranking
