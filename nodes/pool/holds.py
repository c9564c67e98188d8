"""Who keeps which content from eviction, and until when: leases of reads, and named pins. Pure; counts by hash."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass


@dataclass(slots=True)
class Hold:
    """hashes: what is kept. ended: it is not kept any more."""

    hashes: list[bytes]
    deadline: float
    ended: bool = False


class Holds:
    """Several holds may have one key. Ending is idempotent: an unknown key does nothing."""

    def __init__(self) -> None:
        self._by_key: dict[Hashable, list[Hold]] = {}
        self._counts: dict[bytes, int] = {}
        self._num = 0

    def __len__(self) -> int:
        return self._num

    def __contains__(self, h: bytes) -> bool:
        return h in self._counts

    @property
    def hashes(self) -> Iterable[bytes]:
        """Everything kept, each once."""
        return self._counts.keys()

    def add(self, key: Hashable, hashes: Sequence[bytes], deadline: float) -> Hold:
        hold = Hold(list(hashes), deadline)
        self._by_key.setdefault(key, []).append(hold)
        self._num += 1
        for h in hold.hashes:
            self._counts[h] = self._counts.get(h, 0) + 1
        return hold

    def shrink(self, hold: Hold, count: int) -> None:
        """Keep its leading `count` hashes only."""
        self._uncount(hold.hashes[count:])
        del hold.hashes[count:]

    def end(self, key: Hashable) -> None:
        """End one hold of this key: the shortest, so that what another one of the key still reads stays kept."""
        holds = self._by_key.get(key)
        if holds:
            self._end(key, min(holds, key=lambda hold: len(hold.hashes)))

    def take(self, key: Hashable) -> Hold | None:
        """End and return one hold of this key."""
        holds = self._by_key.get(key)
        if not holds:
            return None
        hold = holds[0]
        self._end(key, hold)
        return hold

    def end_overdue(self, now: float) -> int:
        """End those whose deadline has passed; returns how many."""
        late = [(key, hold) for key, holds in self._by_key.items() for hold in holds if hold.deadline <= now]
        for key, hold in late:
            self._end(key, hold)
        return len(late)

    def check(self) -> int:
        """Counts that do not match the holds. Must be 0. O(everything)."""
        counts: dict[bytes, int] = {}
        holds = [hold for group in self._by_key.values() for hold in group]
        for hold in holds:
            for h in hold.hashes:
                counts[h] = counts.get(h, 0) + 1
        return int(counts != self._counts) + abs(len(holds) - self._num)

    def _end(self, key: Hashable, hold: Hold) -> None:
        holds = self._by_key[key]
        holds[:] = [other for other in holds if other is not hold]
        if not holds:
            del self._by_key[key]
        self._num -= 1
        hold.ended = True
        self._uncount(hold.hashes)

    def _uncount(self, hashes: Sequence[bytes]) -> None:
        for h in hashes:
            if self._counts[h] == 1:
                del self._counts[h]
            else:
                self._counts[h] -= 1
