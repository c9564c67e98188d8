"""The receiving side of a stream: frames become bytes in an arena, checked before anybody is told.

Payload from a socket lands in the blocks by itself; a mapped slab is copied once, out of the sender's memory; one that
a backend reads goes through staging memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from transfer.errors import KvCorrupt, KvError
from transfer.kv.arena import KvArena, MappedArena
from transfer.kv.frames import Commit, RemoteHandle, Slab, scratch
from transfer.kv.links.direct_ring import DirectRead
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
    layer: Callable[[int], None] = lambda layer: None
    """Every block of this layer is in place and verified; layers may be told in any order."""


class Receiving:
    """A RecvStream and the arena it writes. offer: of a push, None for a fetch. mapped: the sender's memory.

    remote: how a backend reads the sender's memory, if one does. reads: what it was asked for and has not ended.
    """

    def __init__(
        self, machine: RecvStream, arena: KvArena, outcome: Outcome, now: float,
        *, offer: KvOffer | None = None, mapped: MappedArena | None = None, remote: RemoteHandle | None = None,
    ) -> None:  # fmt: skip
        self.machine, self.outcome, self.offer = machine, outcome, offer
        self.mapped, self.remote = mapped, remote
        self.reads: list[DirectRead] = []
        self._arena = arena
        self._told_s = now
        self.commit: Commit | None = None
        """The sender's last word, if it came before the last slab."""
        self._open: dict[int, tuple[Slab, list[memoryview]]] = {}  # link -> whose payload is arriving, and where

    def overtaken(self, slab: Slab) -> list[int]:
        """Links on which some of the same blocks are arriving, and must no longer write them: a block has one writer.

        A slab comes a second time only because its first link does badly.
        """
        found = [link for link, (other, _) in self._open.items() if _overlap(other, slab)]
        for link in found:
            del self._open[link]
        return found

    def open_slab(self, slab: Slab, payload_bytes: int, now: float, link: int) -> list[memoryview]:
        """Where the payload goes: all K, then all V; that of a repeat goes to scratch."""
        if not self.machine.expect(slab, payload_bytes, now):
            self._open.pop(link, None)
            return scratch(payload_bytes)
        runs = self.machine.table.runs(slab.first, slab.count)
        where = pieces(halves(self._arena, slab.layer), runs, self.machine.layout.slab_bytes)
        self._open[link] = slab, where
        return where

    def close_slab(self, slab: Slab, now: float, link: int) -> None:
        """The payload is in place: verify and account it. Raises KvCorrupt."""
        opened = self._open.pop(link, None)
        if opened is not None:
            self._finish(slab, checksum(opened[1]) if self.machine.checksums else None, now)

    def link_lost(self, link: int) -> None:
        """The rest of what was arriving on it will not come."""
        self._open.pop(link, None)

    def take_mapped(self, slab: Slab, now: float, _link: int) -> None:
        """Copy a slab out of the sender's memory, verify and account it. Raises KvCorrupt."""
        if self.machine.expect(slab, 0, now):
            runs = self.machine.table.runs(slab.first, slab.count)
            self._finish(slab, copy_slab(slab, runs, self.mapped, self._arena), now)

    def take_read(self, staged: memoryview, slab: Slab, now: float, _link: int) -> None:
        """Copy a slab that was read and verified from staging memory to its blocks, and account it."""
        runs, start = self.machine.table.runs(slab.first, slab.count), 0
        for piece in pieces(halves(self._arena, slab.layer), runs, self.machine.layout.slab_bytes):
            piece[:] = staged[start : start + piece.nbytes]
            start += piece.nbytes
        self._finish(slab, slab.checksum, now)

    def cancel_reads(self) -> None:
        """The stream is over: what is still being read goes nowhere."""
        for read in self.reads:
            read.cancel()
        self.reads.clear()

    def _finish(self, slab: Slab, found: int | None, now: float) -> None:
        if found != slab.checksum:
            raise KvCorrupt(
                f"layer {slab.layer} of blocks {slab.first}..{slab.first + slab.count} does not match its checksum"
            )
        if self.machine.landed(slab):
            self._arena.commit_write(slab.layer, self.machine.wanted)
            self.outcome.layer(slab.layer)
        if now - self._told_s >= PROGRESS_S:
            self._told_s = now
            self.outcome.progress()


def _overlap(one: Slab, other: Slab) -> bool:
    return one.layer == other.layer and one.first < other.first + other.count and other.first < one.first + one.count
