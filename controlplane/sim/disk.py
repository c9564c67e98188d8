"""The SSD of a simulated pool: the tier's own slot index, and one queue each for what is read and written."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from nodes.pool.slots import Place, SlotIndex

if TYPE_CHECKING:
    from controlplane.sim.world import World

SEGMENT_BYTES = 256 << 20


class SimDisk:
    """removed: told of each content that is dropped for room. pinned: what must not be."""

    def __init__(self, world: World, num_blocks: int, removed: Callable[[bytes], None]) -> None:
        self._world, self._removed = world, removed
        self._block_bytes = world.num_bytes(1)
        self._index = SlotIndex(num_blocks, max(1, int(SEGMENT_BYTES // self._block_bytes)))
        self._block_s = self._block_bytes / world.config.core.ssd_bytes_per_s
        self._read_until = self._written_until = 0.0
        self._reads: dict[bytes, Place] = {}
        self.pinned: Callable[[bytes], bool] = lambda h: False

    @property
    def capacity(self) -> int:
        return self._index.max_segments * self._index.slots

    def read(self, h: bytes) -> float:
        """When it will have been read; reads wait for reads only. Answered by has_read."""
        place = self._index.begin_read(h)
        if place is not None:
            self._reads[h] = place
        self._read_until = max(self._read_until, self._world.now) + self._block_s
        return self._read_until

    def has_read(self, h: bytes) -> None:
        place = self._reads.pop(h, None)
        if place is not None:
            self._index.end_read(place)
            self._take_empty()

    def write(self, h: bytes, written: Callable[[bytes, bool], None]) -> None:
        """`written(h, ok)` follows: at once with False when there is no room."""
        place = self._index.allocate()
        self._make_room()
        if place is None:
            self._world.heap.at(self._world.now, written, h, False)
            return
        self._written_until = max(self._written_until, self._world.now) + self._block_s
        self._world.heap.at(self._written_until, self._has_written, h, place, written)

    def _has_written(self, h: bytes, place: Place, written: Callable[[bytes, bool], None]) -> None:
        self._index.commit(h, place)
        self._take_empty()
        written(h, True)

    def _make_room(self) -> None:
        """Reclaim a segment when room will be short: what was read since is written again, the rest is dropped."""
        plan = self._index.reclaim(self.pinned)
        if plan is None:
            return
        for h in plan.again:
            new = self._index.allocate(again=True)
            if new is not None:
                self._index.commit(h, new)
                self._written_until = max(self._written_until, self._world.now) + self._block_s
        for h in self._index.live(plan.segment):
            if not self.pinned(h):
                self._index.remove(h)
                self._removed(h)
        if self._index.live(plan.segment):
            self._index.give_up(plan.segment)
        self._take_empty()

    def _take_empty(self) -> None:
        for number in self._index.take_empty():
            self._index.gone(number)
