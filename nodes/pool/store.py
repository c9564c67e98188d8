"""The pool's index as its users see it: puts, gets and pins of content over the two tiers. Pure: no I/O, no clock.

Content is named by the whole 32-byte hash of its chain (transfer/kv/block.py). A block is written once between
`reserve` and `commit` (from a peer) or between `lease` and `loaded` (from SSD), is visible only after, never changed,
and never evicted while somebody keeps it. Holds ids only: the bytes are the arena's and the SSD's.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from nodes.pool.holds import Hold
from nodes.pool.index import StoreLimits, TierIndex
from nodes.pool.policy import EvictionPolicy
from transfer.errors import Refused

SKIP = -1
"""In a reservation: this content is here already (or on its way), nothing is to be sent."""
RENEWALS = 10
"""A write that makes progress may take so many times its first term in all."""


@dataclass(frozen=True, slots=True)
class Reserved:
    """blocks: one id for each hash, or SKIP. taken: ids that change hands."""

    blocks: list[int]
    taken: list[int]


@dataclass(frozen=True, slots=True)
class Lease:
    """Leading content found. blocks: its ids. loads: (hash, block) that the caller is to read from SSD now, each
    answered by `loaded`. waiting: hashes that cannot be read yet, those of other leases' loads included."""

    hold: Hold
    blocks: list[int]
    loads: list[tuple[bytes, int]]
    waiting: list[bytes]


@dataclass(slots=True)
class _Write:
    blocks: dict[bytes, int]
    parents: dict[bytes, bytes | None]
    deadline: float
    latest: float
    """However it progresses: a writer that trickles must not keep its blocks for ever."""
    user: str | None


class PoolStore(TierIndex):
    """commit, release, unlease and unpin are idempotent: an unknown key does nothing.

    now and deadlines: seconds on the caller's clock. user: the request that a put or get is for, if known.
    """

    def __init__(
        self, num_blocks: int, policy: EvictionPolicy | None = None, *, ssd_blocks: int = 0,
        limits: StoreLimits | None = None,
    ) -> None:  # fmt: skip
        super().__init__(num_blocks, policy, ssd_blocks=ssd_blocks, limits=limits)
        self._writes: dict[Hashable, _Write] = {}
        self.num_hits = self.num_misses = 0

    # --- puts: reserve (PutStart), commit (PutEnd), release ---------------------------------------------------

    def reserve(
        self, key: Hashable, hashes: Sequence[bytes], now: float, deadline: float, user: str | None = None
    ) -> Reserved:
        """Room for what is new among `hashes`. Raises Refused, having changed nothing, when there is not enough."""
        if key in self._writes:
            raise Refused("this write to the pool is under way already")
        if len(self._writes) >= self._limits.writes:
            raise Refused(f"the pool has {len(self._writes)} writes under way, as many as it takes; try again later")
        dram = self._dram
        new = [h for h in dict.fromkeys(hashes) if h not in dram and not self._here(h) and h not in self._writing]
        if not self._make_room(len(new), frozenset(hashes) if new else frozenset()):
            raise Refused(
                f"the pool has no room for {len(new)} blocks: the others are pinned, written or just asked for"
            )
        for h in reversed(hashes):
            if h in self._dram:
                self._hit(h, now, user)
        blocks = {h: self._free.pop() for h in new}
        self._writing |= blocks
        before = dict(zip(hashes[1:], hashes, strict=False))
        latest = now + RENEWALS * (deadline - now)
        self._writes[key] = _Write(blocks, {h: before.get(h) for h in new}, deadline, latest, user)
        pending = dict(blocks)  # a hash given twice is sent once
        return Reserved([pending.pop(h, SKIP) for h in hashes], list(blocks.values()))

    def renew(self, key: Hashable, deadline: float) -> None:
        """The write makes progress; RENEWALS times its first term is all it ever gets."""
        if write := self._writes.get(key):
            write.deadline = min(deadline, write.latest)

    def commit(self, key: Hashable, now: float) -> tuple[bytes, ...]:
        """Make the reservation's blocks visible; returns their hashes."""
        write = self._writes.pop(key, None)
        if write is None:
            return ()
        for h in reversed(write.blocks):  # the head of a prefix outlives its tail
            self._visible(h, self._writing.pop(h), write.parents[h], now, write.user)
        return tuple(write.blocks)

    def release(self, key: Hashable) -> None:
        """Give a reservation up. The caller has made sure that nobody writes into its blocks any more."""
        write = self._writes.pop(key, None)
        if write is not None:
            for h in write.blocks:
                self._free.append(self._writing.pop(h))

    def overdue_writes(self, now: float) -> list[Hashable]:
        """Reservations whose deadline has passed: revoke them at the port, then release."""
        return [key for key, write in self._writes.items() if write.deadline <= now]

    # --- gets: lease, loaded, resident, unlease ---------------------------------------------------------------

    def lease(
        self, key: Hashable, hashes: Sequence[bytes], now: float, deadline: float, user: str | None = None
    ) -> Lease:
        """Keep the leading `hashes` that are here until unlease(key) or the deadline; what is on SSD only gets a DRAM
        block to be read into. Fewer are found when there is no room for that, or too much is loading."""
        run = self._leading(hashes) if len(self._leases) < self._limits.leases else []
        hold = self._leases.add(key, run, deadline)
        lease = Lease(hold, [], [], [])
        for h in run:
            block = self._dram.get(h, self._loading.get(h))
            if block is None:
                block = self._begin_load(h)
                if block is None:
                    break
                lease.loads.append((h, block))
            if h in self._loading:
                lease.waiting.append(h)
            lease.blocks.append(block)
        self._leases.shrink(hold, len(lease.blocks))
        for h in reversed(hold.hashes):
            self._hit(h, now, user)
        self.num_hits += len(lease.blocks)
        self.num_misses += len(hashes) - len(lease.blocks)
        return lease

    def resident(self, lease: Lease, deadline: float) -> list[int]:
        """Blocks of the lease's leading content that is in DRAM now, after its loads have ended: now they are read, so
        its time starts anew."""
        blocks: list[int] = []
        if lease.hold.ended:
            return blocks
        lease.hold.deadline = deadline
        for h in lease.hold.hashes:
            if h not in self._dram:
                break
            blocks.append(self._dram[h])
        return blocks

    def unlease(self, key: Hashable) -> None:
        """End one lease of this key."""
        self._leases.end(key)

    # --- named pins ------------------------------------------------------------------------------------------

    def pin(self, name: Hashable, hashes: Sequence[bytes], deadline: float) -> int:
        """Keep the leading `hashes` that are here, in any tier, until unpin or the deadline; a name's earlier pin ends.
        Returns how many. Raises Refused, the earlier pin still in force, beyond the share that pins may keep."""
        old = self._pins.take(name)
        run = self._leading(hashes)
        self._pins.add(name, list(dict.fromkeys(run)), deadline)
        refusal = self._too_many_pins()
        if refusal is not None:
            self._pins.end(name)
            if old is not None:
                self._pins.add(name, old.hashes, old.deadline)
            raise Refused(refusal)
        return len(run)

    def unpin(self, name: Hashable) -> None:
        self._pins.end(name)

    def end_overdue(self, now: float) -> int:
        """End leases and pins whose deadline has passed (a reader that late is warned by the arena's generations)."""
        return self._leases.end_overdue(now) + self._pins.end_overdue(now)

    # --- integrity --------------------------------------------------------------------------------------------

    def leaked_blocks(self) -> int:
        """DRAM blocks that are in no state at all. Must be 0. Cheap: counts only, see check."""
        known = len(self._free) + len(self._dram) + len(self._writing) + len(self._loading)
        return abs(self.num_blocks - known)

    def check(self) -> int:
        """Blocks leaked or known twice, and books that do not agree. Must be 0. O(num_blocks)."""
        known = [*self._free, *self._dram.values(), *self._writing.values(), *self._loading.values()]
        writes = [h for write in self._writes.values() for h in write.blocks]
        wrong = self.leaked_blocks() + len(known) - len(set(known)) + abs(len(writes) - len(self._writing))
        wrong += sum(h not in self._dram for h in (*self._spilling, *self._unexamined))
        wrong += sum(h in self._dram for h in self._loading) + int(sorted(self._policy.victims()) != sorted(self._dram))
        return wrong + self._leases.check() + self._pins.check()

    def _too_many_pins(self) -> str | None:
        share, kept = self._limits.pin_share, list(self._pins.hashes)
        in_dram_only = sum(h not in self._ssd for h in kept)
        for count, room, what in (
            (in_dram_only, self.num_blocks, "memory"),
            (len(kept), self.num_blocks + self.ssd_capacity, "memory and SSD"),
        ):
            if count > share * room:
                return (
                    f"pins may keep {share:.0%} of the pool's {room} blocks of {what}, with this one they would keep "
                    f"{count}; unpin something, or pin less"
                )
        if len(self._pins) > self._limits.pins:
            return f"the pool has {self._limits.pins} pins, as many as it takes; unpin something"
        return None
