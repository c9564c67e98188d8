"""What a simulated instance tells the directory of its cache: nodes/roles/cache.py in simulated time."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from transfer.wire.messages import CacheEvents

if TYPE_CHECKING:
    from controlplane.sim.node import SimNode
    from controlplane.sim.world import World

EVERY_S = 0.05


class CacheFeed:
    """Changes are told together, within EVERY_S. Sequence numbers count from 1 in each life."""

    def __init__(self, world: World, node: SimNode) -> None:
        self._world, self._node = world, node
        self._seq = 0
        self._stored: dict[bytes, None] = {}
        self._on_ssd: dict[bytes, None] = {}
        self._removed: dict[bytes, None] = {}
        self._waits = False

    def change(self, stored: Iterable[bytes], removed: Iterable[bytes], stored_ssd: Iterable[bytes] = ()) -> None:
        """Each hash is in one of the three."""
        self._take(removed, self._removed, self._stored, self._on_ssd)
        self._take(stored_ssd, self._on_ssd, self._stored, self._removed)
        self._take(stored, self._stored, self._removed, self._on_ssd)
        if not self._waits:
            self._waits = True
            self._world.heap.at(self._world.now + EVERY_S, self._flush)

    def snapshot(self, hashes: tuple[bytes, ...], ssd_hashes: tuple[bytes, ...] = ()) -> None:
        for changes in (self._stored, self._on_ssd, self._removed):
            changes.clear()
        self._tell(hashes, (), ssd_hashes, snapshot=True)

    def _take(self, hashes: Iterable[bytes], to: dict[bytes, None], *others: dict[bytes, None]) -> None:
        """The last word on a hash counts."""
        if not hashes:
            return
        for other in others:
            if other:
                for h in hashes:
                    other.pop(h, None)
        to.update(dict.fromkeys(hashes))

    def _flush(self) -> None:
        self._waits = False
        if self._node.alive and (self._stored or self._removed or self._on_ssd):
            stored, removed, on_ssd = tuple(self._stored), tuple(self._removed), tuple(self._on_ssd)
            for changes in (self._stored, self._on_ssd, self._removed):
                changes.clear()
            self._tell(stored, removed, on_ssd)

    def _tell(
        self, stored: tuple[bytes, ...], removed: tuple[bytes, ...], stored_ssd: tuple[bytes, ...],
        snapshot: bool = False,
    ) -> None:  # fmt: skip
        if not self._node.spec.shares_kv:
            return  # what it caches is its own
        self._seq += 1
        self._node.send(
            CacheEvents(
                epoch=self._node.epoch, seq=self._seq, stored=stored, removed=removed, snapshot=snapshot,
                stored_ssd=stored_ssd,
            )
        )  # fmt: skip
