"""Which block of a pool's arena holds which content: hash -> block id, least recently used out first.

A block is written once between `reserve` and `commit`, visible only after, never changed, never evicted while
pinned or being written. Holds ids only: the bytes are the arena's, moving them is the port's.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from transfer.errors import InvalidValue, Refused

SKIP = -1
"""In a reservation: this content is here already (or on its way), nothing is to be sent."""


@dataclass(frozen=True, slots=True)
class Reserved:
    """blocks: one id for each hash, or SKIP. evicted: hashes that had to go. taken: ids that change hands."""

    blocks: list[int]
    evicted: tuple[bytes, ...]
    taken: list[int]


@dataclass(slots=True)
class _Write:
    blocks: dict[bytes, int]
    deadline: float


@dataclass(slots=True)
class _Pin:
    blocks: list[int]
    deadline: float


class PoolStore:
    """`commit`, `release` and `unpin` are idempotent: an unknown key does nothing. Deadlines: on the caller's clock."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise InvalidValue(f"a KV pool needs at least one block, got {num_blocks}; raise its memory")
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._stored: dict[bytes, int] = {}  # least recently used first
        self._writing: dict[bytes, int] = {}
        self._writes: dict[Hashable, _Write] = {}
        self._pins: dict[Hashable, list[_Pin]] = {}
        self._pinned: dict[int, int] = {}  # block -> how many pins
        self.num_evicted = 0

    @property
    def cached_blocks(self) -> int:
        return len(self._stored)

    @property
    def writing_blocks(self) -> int:
        return len(self._writing)

    @property
    def pinned_blocks(self) -> int:
        return len(self._pinned)

    @property
    def free_blocks(self) -> int:
        """Blocks a reservation could get: free ones and those that may be evicted."""
        return len(self._free) + len(self._stored) - len(self._pinned)

    def hashes(self) -> tuple[bytes, ...]:
        """Everything that can be fetched."""
        return tuple(self._stored)

    def reserve(self, key: Hashable, hashes: Sequence[bytes], deadline: float) -> Reserved:
        """Room for what is new among `hashes`. Raises Refused, having changed nothing, when there is not enough."""
        if key in self._writes:
            raise Refused("this write to the pool is under way already")
        new = [h for h in dict.fromkeys(hashes) if h not in self._stored and h not in self._writing]
        keep = {h for h in hashes if h in self._stored}
        evictable = [] if len(new) <= len(self._free) else self._evictable(len(new) - len(self._free), keep)
        if len(new) > len(self._free) + len(evictable):
            raise Refused(
                f"the pool has no room for {len(new)} blocks: the others are pinned, written or just asked for"
            )
        for h in evictable:
            self._free.append(self._stored.pop(h))
        self.num_evicted += len(evictable)
        self._touch([h for h in hashes if h in keep])
        blocks = {h: self._free.pop() for h in new}
        self._writing |= blocks
        self._writes[key] = _Write(blocks, deadline)
        pending = dict(blocks)  # a hash given twice is sent once
        return Reserved([pending.pop(h, SKIP) for h in hashes], tuple(evictable), list(blocks.values()))

    def renew(self, key: Hashable, deadline: float) -> None:
        """The write makes progress."""
        if write := self._writes.get(key):
            write.deadline = deadline

    def commit(self, key: Hashable) -> tuple[bytes, ...]:
        """Make the reservation's blocks visible; returns their hashes."""
        write = self._writes.pop(key, None)
        if write is None:
            return ()
        for h in reversed(write.blocks):  # the head of a prefix outlives its tail
            self._stored[h] = self._writing.pop(h)
        return tuple(write.blocks)

    def release(self, key: Hashable) -> None:
        """Give a reservation up. The caller has made sure that nobody writes into its blocks any more."""
        write = self._writes.pop(key, None)
        if write is not None:
            for h in write.blocks:
                self._free.append(self._writing.pop(h))

    def pin(self, key: Hashable, hashes: Sequence[bytes], deadline: float) -> list[int]:
        """Block ids of the leading `hashes` that are here, kept until unpin(key) or the deadline."""
        found: list[bytes] = []
        for h in hashes:
            if h not in self._stored:
                break
            found.append(h)
        self._touch(found)
        blocks = [self._stored[h] for h in found]
        for block in blocks:
            self._pinned[block] = self._pinned.get(block, 0) + 1
        self._pins.setdefault(key, []).append(_Pin(blocks, deadline))
        return blocks

    def unpin(self, key: Hashable) -> None:
        """End one pin of this key, the oldest."""
        pins = self._pins.get(key)
        if not pins:
            return
        self._unpin(pins.pop(0))
        if not pins:
            del self._pins[key]

    def overdue_writes(self, now: float) -> list[Hashable]:
        """Reservations whose deadline has passed: revoke them at the port, then release."""
        return [key for key, write in self._writes.items() if write.deadline <= now]

    def drop_overdue_pins(self, now: float) -> int:
        """End pins whose deadline has passed (a reader that late is warned by the arena's generations)."""
        dropped = 0
        for key in list(self._pins):
            late = [pin for pin in self._pins[key] if pin.deadline <= now]
            dropped += len(late)
            for pin in late:
                self._pins[key].remove(pin)
                self._unpin(pin)
            if not self._pins[key]:
                del self._pins[key]
        return dropped

    def leaked_blocks(self) -> int:
        """Blocks that are neither free, stored nor being written. Must be 0. Cheap: counts only, see check."""
        return abs(self.num_blocks - len(self._free) - len(self._stored) - len(self._writing))

    def check(self) -> int:
        """Blocks leaked, or known twice. Must be 0. O(num_blocks)."""
        known = [*self._free, *self._stored.values(), *self._writing.values()]
        writes = [h for write in self._writes.values() for h in write.blocks]
        twice = len(known) - len(set(known))
        return self.leaked_blocks() + twice + abs(len(writes) - len(self._writing))

    def _unpin(self, pin: _Pin) -> None:
        for block in pin.blocks:
            self._pinned[block] -= 1
            if not self._pinned[block]:
                del self._pinned[block]

    def _touch(self, hashes: Sequence[bytes]) -> None:
        for h in reversed(hashes):
            if h in self._stored:
                self._stored[h] = self._stored.pop(h)

    def _evictable(self, count: int, keep: set[bytes]) -> list[bytes]:
        victims: list[bytes] = []
        for h, block in self._stored.items():
            if len(victims) == count:
                break
            if block not in self._pinned and h not in keep:
                victims.append(h)
        return victims
