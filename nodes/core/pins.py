"""Cached blocks kept as they are while they are copied to a pool. Every pin has a lease, so none outlives its copy."""

from __future__ import annotations

from nodes.core.blocks import BlockPool, BlockTable
from nodes.core.events import Effect, Pin, Pinned, Unpinned


class Pins:
    """A pin is a block table without a sequence. Pinning a name again replaces it; unpinning is idempotent."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._pins: dict[str, tuple[BlockTable, float]] = {}

    def pin(self, event: Pin, now: float, effects: list[Effect]) -> None:
        self.unpin(event.name)
        table = BlockTable()
        self._pool.share(table, self._pool.find(event.hashes))
        if table.blocks:
            self._pins[event.name] = (table, now + event.lease_s)
        effects.append(Pinned(name=event.name, blocks=list(table.blocks)))

    def unpin(self, name: str) -> None:
        table, _ = self._pins.pop(name, (None, 0.0))
        if table is not None:
            self._pool.release(table)

    def expire(self, now: float, effects: list[Effect]) -> None:
        over = [name for name, (_, deadline) in self._pins.items() if now >= deadline]
        for name in over:
            self.unpin(name)
            effects.append(Unpinned(name=name))

    def lease_over(self, now: float) -> bool:
        return any(now >= deadline for _, deadline in self._pins.values())

    def tables(self) -> list[BlockTable]:
        return [table for table, _ in self._pins.values()]
