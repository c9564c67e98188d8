"""Which content is in which slot of which SSD segment, and which segment goes when room is needed. Pure: no I/O.

Segments are written front to back and never changed; one is open, the others are sealed. Room comes by reclaiming a
whole segment, the emptiest when nearly empty, else the oldest (FIFO): what was read since it was written, and what is
pinned, is written again into the open segment, the rest is dropped. Half a segment at most is written again for having
been read, so every reclaim gains room, and one segment of the cap is kept for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from transfer.errors import InvalidValue

MIN_SEGMENTS = 8
"""A smaller tier has smaller segments, so that reclaiming one takes only a part of it."""
MAX_SEGMENTS = 256
"""A larger one has larger segments: each is an open file."""


class Place(NamedTuple):
    segment: int
    slot: int


@dataclass(slots=True)
class _Segment:
    """used: slots given out. writing, busy: writes, reads and writes under way. live: slot -> content."""

    used: int = 0
    writing: int = 0
    busy: int = 0
    live: dict[int, bytes] = field(default_factory=dict)
    sealed: bool = False
    reclaiming: bool = False
    noted: bool = False


@dataclass(frozen=True, slots=True)
class Reclaim:
    """again: what is to be written again, before the rest of the segment is dropped."""

    segment: int
    again: list[bytes]


class SlotIndex:
    """Each allocate and begin_read is answered once; remove is idempotent.

    num_blocks: the cap; raises InvalidValue when it is below MIN_SEGMENTS.
    """

    def __init__(self, num_blocks: int, slots_per_segment: int) -> None:
        if num_blocks < MIN_SEGMENTS:
            raise InvalidValue(f"an SSD tier takes at least {MIN_SEGMENTS} blocks, got {num_blocks}; raise --ssd-gib")
        slots = max(min(slots_per_segment, num_blocks // MIN_SEGMENTS), -(-num_blocks // MAX_SEGMENTS))
        self.slots, self.max_segments = slots, num_blocks // slots
        self._places: dict[bytes, Place] = {}
        self._segments: dict[int, _Segment] = {}  # by number, ascending
        self._open: int | None = None
        self._next = 0
        self._read: dict[bytes, None] = {}  # since it was written
        self._going: dict[int, None] = {}  # segments whose files are being removed

    def __len__(self) -> int:
        return len(self._places)

    @property
    def num_segments(self) -> int:
        """Files on disk."""
        return len(self._segments) + len(self._going)

    def places(self) -> list[tuple[bytes, Place]]:
        """All contents, the oldest segment first."""
        return [(h, Place(n, slot)) for n, s in self._segments.items() for slot, h in s.live.items()]

    def sealed(self) -> list[int]:
        """Segments that take nothing new; in the newest something may be on its way still."""
        return [number for number, segment in self._segments.items() if segment.sealed]

    def complete(self) -> list[int]:
        """Sealed segments with nothing on its way."""
        return [number for number, segment in self._segments.items() if segment.sealed and not segment.busy]

    def completed(self, number: int) -> bool:
        """It is complete and that was not yet told: true once for each segment."""
        segment = self._segments.get(number)
        if segment is None or not segment.sealed or segment.busy or segment.noted:
            return False
        segment.noted = True
        return True

    # --- reading and writing ------------------------------------------------------------------------------------

    def allocate(self, *, again: bool = False) -> Place | None:
        """A slot to write into, answered by commit or fail; None when there is no room yet. again: for reclaim."""
        segment = self._segments[self._open] if self._open is not None else None
        if segment is None or segment.used >= self.slots:
            if self.num_segments >= self.max_segments - (0 if again else 1):
                return None
            segment = self._begin()
        assert self._open is not None
        place = Place(self._open, segment.used)
        segment.used += 1
        segment.writing += 1
        segment.busy += 1
        return place

    def commit(self, h: bytes, place: Place) -> None:
        """It is written. An older place of the same content is given up."""
        self._written(place)
        self.remove(h)
        self._places[h] = place
        self._segments[place.segment].live[place.slot] = h

    def fail(self, place: Place) -> None:
        """The write failed: the slot stays unused."""
        self._written(place)

    def begin_read(self, h: bytes, *, counts: bool = True) -> Place | None:
        """Where it is, kept there until end_read. counts: the read shows that it is worth keeping."""
        place = self._places.get(h)
        if place is not None:
            self._segments[place.segment].busy += 1
            if counts:
                self._read[h] = None
        return place

    def end_read(self, place: Place) -> None:
        self._segments[place.segment].busy -= 1

    def place(self, h: bytes) -> Place | None:
        return self._places.get(h)

    def remove(self, h: bytes) -> None:
        place = self._places.pop(h, None)
        self._read.pop(h, None)
        if place is not None:
            del self._segments[place.segment].live[place.slot]

    def recover(self, number: int, live: Iterable[tuple[int, bytes]], used: int) -> None:
        """A segment of an earlier life, in ascending order: sealed as it is. Content known already is not taken."""
        segment = self._segments[number] = _Segment(used=used, sealed=True, noted=True)
        for slot, h in live:
            if h not in self._places:
                self._places[h] = Place(number, slot)
                segment.live[slot] = h
        self._next = max(self._next, number + 1)

    # --- room ---------------------------------------------------------------------------------------------------

    def reclaim(self, pinned: Callable[[bytes], bool], *, now: bool = False) -> Reclaim | None:
        """What to reclaim, when room will be needed soon: only one segment at a time. now: at once, without anything
        that was read, and never a segment with something pinned (the disk takes no writes)."""
        full = self.num_segments >= self.max_segments - 1
        if any(segment.reclaiming for segment in self._segments.values()) or not (full or now):
            return None
        best: tuple[bool, int] | None = None
        for number, segment in self._segments.items():
            if segment.writing:
                continue  # what lands after its end would keep it for ever
            if segment.sealed and not (now and any(map(pinned, segment.live.values()))):
                rank = (len(segment.live) > self.slots // MIN_SEGMENTS, number)
                best = rank if best is None else min(best, rank)
        if best is None:
            return None
        segment = self._segments[best[1]]
        segment.reclaiming = True
        kept = [h for h in segment.live.values() if pinned(h)]
        room = 0 if now else self.slots // 2 - len(kept)
        read = [h for h in segment.live.values() if h in self._read and not pinned(h)]
        return Reclaim(best[1], kept + read[: max(0, room)])

    def live(self, number: int) -> list[bytes]:
        """Contents of a segment."""
        return list(self._segments[number].live.values()) if number in self._segments else []

    def give_up(self, number: int) -> None:
        """It could not be reclaimed now."""
        if number in self._segments:
            self._segments[number].reclaiming = False

    def take_empty(self) -> list[int]:
        """Sealed segments without content or reader: their files are to be removed, then told to `gone`."""
        empty = [n for n, segment in self._segments.items() if segment.sealed and not (segment.live or segment.busy)]
        for number in empty:
            del self._segments[number]
            self._going[number] = None
        return empty

    def gone(self, number: int) -> None:
        self._going.pop(number, None)

    def check(self) -> int:
        """Places that the segments do not know, and slots given out twice. Must be 0."""
        wrong = sum(self._segments[p.segment].live.get(p.slot) != h for h, p in self._places.items())
        wrong += abs(len(self._places) - sum(len(segment.live) for segment in self._segments.values()))
        return wrong + sum(h not in self._places for h in self._read)

    def busy(self) -> int:
        """Reads and writes under way."""
        return sum(segment.busy for segment in self._segments.values())

    # --- helpers ------------------------------------------------------------------------------------------------

    def _written(self, place: Place) -> None:
        self._segments[place.segment].writing -= 1
        self._segments[place.segment].busy -= 1

    def _begin(self) -> _Segment:
        if self._open is not None:
            self._segments[self._open].sealed = True
        self._open, self._next = self._next, self._next + 1
        self._segments[self._open] = _Segment()
        return self._segments[self._open]
