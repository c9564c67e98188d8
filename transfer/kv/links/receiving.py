"""The receiving side of a stream: frames become bytes in an arena, checked before anybody is told.

Payload from a socket lands in the blocks by itself; a mapped slab is copied once, out of the sender's memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from transfer.errors import KvCorrupt, KvError
from transfer.kv.arena import KvArena, MappedArena
from transfer.kv.frames import Slab, scratch
from transfer.kv.links.memory import checksum, halves, pieces
from transfer.kv.links.shm import copy_slab
from transfer.kv.port import KvOffer, KvTrailer
from transfer.kv.stream import RecvStream

PROGRESS_S = 1.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """Who hears how a stream goes. commit: None accepts, a sentence refuses. One of commit and fail is called, once."""

    commit: Callable[[KvTrailer | None], str | None]
    fail: Callable[[KvError], None]
    progress: Callable[[], None]


class Receiving:
    """A RecvStream and the arena it writes. offer: of a push, None for a fetch. mapped: the sender's memory."""

    def __init__(
        self, machine: RecvStream, arena: KvArena, outcome: Outcome, now: float,
        *, offer: KvOffer | None = None, mapped: MappedArena | None = None,
    ) -> None:  # fmt: skip
        self.machine, self.outcome, self.offer = machine, outcome, offer
        self._arena, self._mapped = arena, mapped
        self._told_s = now
        self._pieces: list[memoryview] | None = None  # of the slab whose payload is arriving; None for a repeat

    def open_slab(self, slab: Slab, payload_bytes: int, now: float) -> list[memoryview]:
        """Where the payload goes: all K, then all V; that of a repeat goes to scratch."""
        if not self.machine.expect(slab, payload_bytes, now):
            self._pieces = None
            return scratch(payload_bytes)
        runs = self.machine.table.runs(slab.first, slab.count)
        self._pieces = pieces(halves(self._arena, slab.layer), runs, self.machine.layout.slab_bytes)
        return self._pieces

    def close_slab(self, slab: Slab, now: float) -> None:
        """The payload is in place: verify and account it. Raises KvCorrupt."""
        if self._pieces is not None:
            self._finish(slab, checksum(self._pieces) if self.machine.checksums else None, now)

    def take_mapped(self, slab: Slab, now: float) -> None:
        """Copy a slab out of the sender's memory, verify and account it. Raises KvCorrupt."""
        if self.machine.expect(slab, 0, now):
            runs = self.machine.table.runs(slab.first, slab.count)
            self._finish(slab, copy_slab(slab, runs, self._mapped, self._arena), now)

    def _finish(self, slab: Slab, found: int | None, now: float) -> None:
        if found != slab.checksum:
            raise KvCorrupt(
                f"layer {slab.layer} of blocks {slab.first}..{slab.first + slab.count} does not match its checksum"
            )
        if self.machine.landed(slab):
            self._arena.commit_write(slab.layer, self.machine.wanted)
        if now - self._told_s >= PROGRESS_S:
            self._told_s = now
            self.outcome.progress()
