"""Shared memory on one host: the receiver maps the sender's arena and copies out of it; only names cross the wire.

A copy counts only if the blocks' generations are, after it, still those the sender named.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from pathlib import Path

from transfer.errors import InvalidValue, KvCorrupt, ProtocolError
from transfer.kv.arena import ArenaHandle, KvArena, MappedArena
from transfer.kv.frames import Slab
from transfer.kv.links.context import PortContext, log
from transfer.kv.links.memory import copy_runs, halves
from transfer.kv.table import Run

MAX_MAPPED = 16
"""Arenas of one peer: each keeps a file open and memory in use; what comes from more of them comes over the wire."""
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def local_host_id() -> str:
    """Equal for processes that may share memory: host name and boot. Where mapping fails all the same, TCP is used."""
    boot = BOOT_ID.read_text().strip() if BOOT_ID.exists() else "no-boot-id"
    return f"{socket.gethostname()}/{boot}"


class Mappings:
    """Arenas of the peer on one connection, mapped once each and closed with the connection. Never our own: a peer
    learns its token with every fetch, and would have us copy what it cannot ask for."""

    def __init__(self, context: PortContext) -> None:
        self._context = context
        self._mapped: dict[str, MappedArena] = {}

    def get(self, handle: ArenaHandle | None) -> MappedArena | None:
        """The peer's arena, or None when its bytes must come over the wire."""
        own = self._context.arena.handle
        if handle is None or not self._context.shm or handle.layout != self._context.arena.layout:
            return None
        if own is not None and handle.name == own.name:
            return None
        mapped = self._mapped.get(handle.name)
        if mapped is None:
            if len(self._mapped) >= MAX_MAPPED:
                return None
            try:
                mapped = MappedArena(handle)
            except (KvCorrupt, InvalidValue, OSError) as error:
                log.info("KV will come over the wire, the peer's memory cannot be mapped: %s", error)
                return None
            self._mapped[handle.name] = mapped
        return mapped

    def close(self) -> None:
        for mapped in self._mapped.values():
            mapped.close()
        self._mapped.clear()


def copy_slab(slab: Slab, runs: Sequence[Run], mapped: MappedArena | None, arena: KvArena) -> int | None:
    """Copy a mapped slab to `runs`, then check the generations. Raises KvCorrupt when a block changed hands.

    Returns the checksum of what is now in `runs`, None when the slab has none to compare it with.
    """
    if mapped is None or not runs_inside(slab, mapped.num_blocks):
        raise ProtocolError(f"the sender named blocks {slab.runs} for {slab.count} blocks; they are not in its arena")
    source, target = halves(mapped, slab.layer), halves(arena, slab.layer)
    summed = slab.checksum is not None
    found_sum = copy_runs(source, slab.runs, target, runs, arena.layout.slab_bytes, summed=summed)
    if b"".join(mapped.generations(first, count) for first, count in slab.runs) != slab.generations:
        raise KvCorrupt(f"the sender's blocks {slab.runs} changed hands while layer {slab.layer} was copied")
    return found_sum


def runs_inside(slab: Slab, num_blocks: int) -> bool:
    """Whether the runs a slab names are its blocks, all within an arena of `num_blocks`."""
    total = sum(count for _, count in slab.runs)
    return total == slab.count and all(first >= 0 and 0 < count <= num_blocks - first for first, count in slab.runs)
