"""Which content is in which DRAM block and which on SSD, and what moves between the two. Pure: no I/O, no clock.

    DRAM -trim, next_spills-> spilling -spilled-> both -trim-> SSD;    SSD -load-> loading -loaded-> both

Nothing leaves a tier while it is leased, pinned, written, loaded or spilled. Whatever fails returns the block and
leaves the tiers that were good.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from nodes.pool.holds import Holds
from nodes.pool.policy import EvictionPolicy, LruPolicy
from transfer.errors import InvalidValue

SPILLING_SHARE = 4
"""At most this part (1/n) of memory waits for the SSD at once: however slow that is, puts find room."""


EXAMINED_AT_ONCE = 4096
"""After a disk has hung, all of memory may wait for this, and the event loop for its end."""
LOOK_AHEAD = 4
"""So many victims are looked at for each block that is needed at once."""


@dataclass(frozen=True, slots=True)
class StoreLimits:
    """high, low: DRAM use at which eviction ahead of need begins, and down to which it goes. pin_share: of the blocks,
    what named pins may keep. The rest bounds what callers can have under way at once."""

    high: float = 0.95
    low: float = 0.90
    pin_share: float = 0.5
    writes: int = 4096
    leases: int = 16_384
    pins: int = 4096
    loading: int = 1024
    spilling: int = 64


@dataclass(slots=True)
class Changes:
    """What moved between tiers since it was last asked, each hash once. stored_ssd: on SSD only."""

    stored: list[bytes] = field(default_factory=list)
    stored_ssd: list[bytes] = field(default_factory=list)
    removed: list[bytes] = field(default_factory=list)


class TierIndex:
    """The two tiers and who keeps what. loaded, spilled and ssd_removed are idempotent.

    ssd_blocks: how many the SSD tier may hold, 0 without one.
    """

    def __init__(
        self, num_blocks: int, policy: EvictionPolicy | None = None, *, ssd_blocks: int = 0,
        limits: StoreLimits | None = None,
    ) -> None:  # fmt: skip
        if num_blocks < 1:
            raise InvalidValue(f"a KV pool needs at least one block, got {num_blocks}; raise its memory")
        self.num_blocks, self.ssd_capacity = num_blocks, ssd_blocks
        self._limits = limits or StoreLimits()
        self._high, self._low = int(self._limits.high * num_blocks), int(self._limits.low * num_blocks)
        self._max_spilling = max(1, min(self._limits.spilling, num_blocks // SPILLING_SHARE))
        self._policy: EvictionPolicy = policy if policy is not None else LruPolicy()
        self._free = list(range(num_blocks - 1, -1, -1))
        self._dram: dict[bytes, int] = {}
        self._writing: dict[bytes, int] = {}
        self._loading: dict[bytes, int] = {}
        self._spilling: dict[bytes, bool] = {}  # True: leaves DRAM once it is written
        self._ssd: dict[bytes, None] = {}
        self._unexamined: OrderedDict[bytes, None] = OrderedDict()  # in DRAM only, not asked yet if worth a write
        self._leases, self._pins = Holds(), Holds()
        self._changed: dict[bytes, None] = {}
        self.num_evicted = 0

    # --- what there is --------------------------------------------------------------------------------------

    @property
    def cached_blocks(self) -> int:
        return len(self._dram)

    @property
    def writing_blocks(self) -> int:
        return len(self._writing)

    @property
    def loading_blocks(self) -> int:
        return len(self._loading)

    @property
    def spilling_blocks(self) -> int:
        return len(self._spilling)

    @property
    def unsettled_blocks(self) -> int:
        """Blocks that are being put, or that SSD may yet get, or that are being written there. 0 again soon after the
        last put or get, unless the disk hangs."""
        undecided = len(self._unexamined) if self.ssd_capacity else 0
        return len(self._writing) + undecided + len(self._spilling)

    @property
    def ssd_blocks(self) -> int:
        """Blocks that can be read from SSD, those also in DRAM included."""
        return len(self._ssd)

    @property
    def pinned_blocks(self) -> int:
        """Contents kept by a lease or a pin."""
        return len({*self._leases.hashes, *self._pins.hashes})

    @property
    def free_blocks(self) -> int:
        """DRAM blocks a reservation could get: free ones and those that may be evicted."""
        kept = {*self._leases.hashes, *self._pins.hashes, *self._spilling}
        return len(self._free) + len(self._dram) - sum(h in self._dram and not self._evictable(h) for h in kept)

    def hashes(self) -> tuple[bytes, ...]:
        """All that is in DRAM, the next to be evicted first."""
        return tuple(self._policy.victims())

    def ssd_hashes(self) -> tuple[bytes, ...]:
        """All that is on SSD only, the oldest first."""
        return tuple(h for h in self._ssd if h not in self._dram)

    def on_ssd(self, h: bytes) -> bool:
        return h in self._ssd

    def pinned(self, h: bytes) -> bool:
        """A named pin keeps it."""
        return h in self._pins

    def lookup(self, hashes: Sequence[bytes]) -> int:
        """How many leading `hashes` are here, in any tier."""
        return len(self._leading(hashes))

    def take_changes(self) -> Changes | None:
        """What moved between tiers since the last call; None when nothing did."""
        if not self._changed:
            return None
        changes = Changes()
        for h in self._changed:
            tier = changes.stored if h in self._dram else changes.stored_ssd if h in self._ssd else changes.removed
            tier.append(h)
        self._changed.clear()
        return changes

    # --- between the tiers --------------------------------------------------------------------------------------

    def trim(self) -> list[tuple[bytes, int]]:
        """Above the high watermark: free blocks down to the low one, as the policy says. Returns (hash, block) to be
        written to SSD first, each answered by `spilled`."""
        used = self.num_blocks - len(self._free)
        surplus = used - self._low - sum(self._spilling.values())
        if used <= self._high or surplus <= 0:
            return []
        evict: list[bytes] = []
        spills: list[tuple[bytes, int]] = []
        for h in self._policy.victims():
            if len(evict) + len(spills) >= surplus:
                break
            if not self._evictable(h):
                continue
            if h in self._ssd or not self.ssd_capacity or not self._policy.wanted(h):
                evict.append(h)
            elif len(self._spilling) + len(spills) < self._max_spilling:
                spills.append((h, self._dram[h]))
            else:
                break  # the SSD is busy: what does not fit the low watermark now is looked at again
        for h in evict:
            self._evict(h)
        for h, _ in spills:
            self._begin_spill(h, leaves=True)
        return spills

    def next_spills(self) -> list[tuple[bytes, int]]:
        """Content worth a write to SSD ahead of its eviction, as much as may be written and looked at at once."""
        spills: list[tuple[bytes, int]] = []
        for _ in range(EXAMINED_AT_ONCE):
            if not self._unexamined or len(self._spilling) >= self._max_spilling or not self.ssd_capacity:
                break
            h = self._unexamined.popitem(last=False)[0]
            if self._policy.wanted(h):
                self._begin_spill(h, leaves=False)
                spills.append((h, self._dram[h]))
        return spills

    def flush_spills(self) -> list[tuple[bytes, int]]:
        """As next_spills at the end of a life: everything not on SSD, the last to be evicted first."""
        spills: list[tuple[bytes, int]] = []
        for h in reversed(self.hashes()):
            if len(self._spilling) >= self._max_spilling or not self.ssd_capacity:
                break
            if h not in self._ssd and h not in self._spilling:
                self._begin_spill(h, leaves=False)
                spills.append((h, self._dram[h]))
        return spills

    def spilled(self, h: bytes, ok: bool) -> None:
        """The write to SSD has ended."""
        leaves = self._spilling.pop(h, None)
        if leaves is None:
            return
        if ok:
            self._ssd[h] = None
        used = self.num_blocks - len(self._free)
        if leaves and used > self._low and self._evictable(h):
            self._evict(h)

    def loaded(self, h: bytes, ok: bool, now: float) -> None:
        """The read from SSD has ended. What was bad is told apart, by ssd_removed."""
        block = self._loading.pop(h, None)
        if block is None:
            return
        if ok:
            self._visible(h, block, None, now)
        else:
            self._free.append(block)

    def ssd_removed(self, h: bytes) -> None:
        """Its record on SSD is gone: dropped for room, or bad. What is in memory too is not written again before it is
        used again or leaves, or a small SSD would be written for ever."""
        if h in self._ssd:
            del self._ssd[h]
            self._changed[h] = None

    def ssd_recovered(self, hashes: Iterable[bytes]) -> None:
        """What an earlier life left on SSD, oldest first."""
        for h in hashes:
            self._ssd[h] = None
            self._changed[h] = None

    # --- helpers ----------------------------------------------------------------------------------------------

    def _here(self, h: bytes) -> bool:
        return h in self._dram or h in self._ssd or h in self._loading

    def _leading(self, hashes: Sequence[bytes]) -> list[bytes]:
        run: list[bytes] = []
        dram = self._dram
        for h in hashes:
            if h not in dram and not self._here(h):
                break
            run.append(h)
        return run

    def _evictable(self, h: bytes) -> bool:
        return h not in self._spilling and h not in self._leases and (h in self._ssd or h not in self._pins)

    def _make_room(self, count: int, keep: frozenset[bytes]) -> bool:
        """At least `count` free blocks, evicting none of `keep`; False, with nothing changed, when that cannot be.

        Among the next victims those go first that are on SSD or not worth a write: nothing is lost with them."""
        missing = count - len(self._free)
        if missing <= 0:
            return True
        cheap: list[bytes] = []
        dear: list[bytes] = []
        for h in self._policy.victims():
            if h in keep or not self._evictable(h):
                continue
            spared = self.ssd_capacity and h not in self._ssd and self._policy.wanted(h)
            (dear if spared else cheap).append(h)
            if len(cheap) >= missing or len(cheap) + len(dear) >= LOOK_AHEAD * missing:
                break
        evict = [*cheap, *dear][:missing]
        if len(evict) < missing:
            return False
        for h in evict:
            self._evict(h)
        return True

    def _evict(self, h: bytes) -> None:
        self._free.append(self._dram.pop(h))
        self._policy.removed(h)
        self._unexamined.pop(h, None)
        self._changed[h] = None
        self.num_evicted += 1

    def _visible(self, h: bytes, block: int, parent: bytes | None, now: float, user: str | None = None) -> None:
        self._dram[h] = block
        self._policy.stored(h, parent, now, user)
        self._changed[h] = None
        if h not in self._ssd:
            self._unexamined[h] = None

    def _hit(self, h: bytes, now: float, user: str | None) -> None:
        self._policy.hit(h, now, user)
        if h in self._dram and h not in self._ssd and h not in self._spilling:
            self._unexamined[h] = None  # it may be worth a write now

    def _begin_load(self, h: bytes) -> int | None:
        if len(self._loading) >= self._limits.loading or not self._make_room(1, frozenset()):
            return None
        self._loading[h] = self._free.pop()
        return self._loading[h]

    def _begin_spill(self, h: bytes, *, leaves: bool) -> None:
        self._spilling[h] = leaves
        self._unexamined.pop(h, None)
