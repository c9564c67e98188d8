"""What an earlier life left on SSD: found again at start, or removed and counted. Runs in a thread; serves nothing yet.

The journal says what was where; segments that it does not know to the end are scanned by their headers. Payloads are
verified when they are read, so a start takes time by the number of blocks, not of bytes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Container
from dataclasses import dataclass, field
from pathlib import Path

from nodes.pool.disk import Disk
from nodes.pool.journal import JOURNAL_NAME, TEMPORARY_SUFFIX, VERSION, Journal, JournalReader, Op
from nodes.pool.segments import SegmentFiles, segment_number, segment_path
from nodes.pool.slots import Place, SlotIndex
from nodes.pool.ssd import SsdConfig
from transfer.kv.blob import layout_digest
from transfer.terms import KvLayout

LOCK_NAME = "lock"


@dataclass(slots=True)
class Recovered:
    """Counts of one start. num_scanned: blocks found in segments that the journal did not know to the end.
    num_dropped: blocks it knew whose segment is missing or too short. num_leftovers: temporary or unreadable files and
    segments without a usable block, removed. torn_bytes: cut from the journal's end."""

    num_blocks: int = 0
    num_scanned: int = 0
    num_dropped: int = 0
    num_leftovers: int = 0
    torn_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Opened:
    """A directory that is ours. lock: give it to Disk.release at the end."""

    index: SlotIndex
    files: SegmentFiles
    journal: Journal
    lock: int
    found: Recovered


@dataclass(slots=True)
class _Known:
    """What the journal says. sealed: segments whose blocks are all in it."""

    places: dict[bytes, Place] = field(default_factory=dict)
    sealed: dict[int, None] = field(default_factory=dict)


def open_directory(config: SsdConfig, layout: KvLayout) -> Opened:
    """Own the directory and find what is in it. Raises ConfigError when another pool uses it, InvalidValue when the
    tier is too small, OSError when the directory cannot be made or read."""
    disk, directory, digest = config.disk, config.directory, layout_digest(layout)
    files = SegmentFiles(disk, directory, digest, layout.block_bytes)
    index = SlotIndex(config.num_blocks, max(1, config.segment_bytes // files.record_bytes))
    journal = Journal(disk, directory, digest)
    lock = disk.lock(directory / LOCK_NAME)
    try:
        return Opened(index, files, journal, lock, recover(disk, directory, digest, files, index, journal))
    except BaseException:
        files.close()
        disk.release(lock)
        raise


def recover(
    disk: Disk, directory: Path, layout: bytes, files: SegmentFiles, index: SlotIndex, journal: Journal
) -> Recovered:
    """Fill `index` and begin `journal` anew. A disk that cannot be read or written costs its content, not the start."""
    counts = Recovered()
    segments: dict[int, int] = {}
    for path in disk.files(directory):
        number = segment_number(path)
        if number is not None:
            segments[number] = disk.size(path)
        elif path.suffix == TEMPORARY_SUFFIX:
            disk.unlink(path)
            counts.num_leftovers += 1
    known = _read_journal(disk, directory, layout, counts)
    by_segment: dict[int, dict[int, bytes]] = {}
    for h, place in known.places.items():
        size = segments.get(place.segment, 0)
        if place.slot < 0 or (place.slot + 1) * files.record_bytes > size:
            counts.num_dropped += 1
        else:
            by_segment.setdefault(place.segment, {})[place.slot] = h
    for number in sorted(segments):
        live = by_segment.get(number, {})
        if number not in known.sealed:
            counts.num_scanned += _scan(files, number, segments[number], live, known.places)
        index.recover(number, sorted(live.items()), segments[number] // files.record_bytes)
    _make_fit(disk, directory, index, counts)
    counts.num_blocks = len(index)
    try:
        journal.rewrite(index.places(), index.sealed())
    except OSError:
        journal.close()  # it stays broken: the tier tries again, and until then a start scans
    return counts


def _read_journal(disk: Disk, directory: Path, layout: bytes, counts: Recovered) -> _Known:
    known = _Known()
    if directory / JOURNAL_NAME not in disk.files(directory):
        return known
    reader = JournalReader(disk, directory)
    try:
        for number, record in enumerate(reader):
            if number == 0 and record != (Op.HEAD, VERSION, layout):
                return known  # of another layout: scanning finds nothing usable either, and the files go
            _apply(known, record)
    except OSError:
        return _Known()
    counts.torn_bytes = reader.num_torn
    return known


def _apply(known: _Known, record: tuple[object, ...]) -> None:
    match record:
        case (Op.PUT, bytes(h), int(segment), int(slot)):
            known.places[h] = Place(segment, slot)
        case (Op.DROP, bytes(h)):
            known.places.pop(h, None)
        case (Op.SEALED, int(segment)):
            known.sealed[segment] = None
        case (Op.GONE, int(segment)):
            known.sealed.pop(segment, None)


def _scan(files: SegmentFiles, number: int, size: int, live: dict[int, bytes], known: Container[bytes]) -> int:
    """Add what the journal does not know of this segment."""
    before = len(live)
    with contextlib.suppress(OSError):  # what could be read is kept; the rest of the segment is as good as lost
        for slot, key in files.scan(number, size):
            if key not in known and slot not in live:
                live[slot] = key
    return len(live) - before


def _make_fit(disk: Disk, directory: Path, index: SlotIndex, counts: Recovered) -> None:
    """Remove segments without content and, beyond the size cap, the oldest. One that stays for now is tried again."""
    surplus = index.num_segments - index.max_segments
    for number in index.sealed()[: max(0, surplus)]:
        for h in index.live(number):
            index.remove(h)
    for number in index.take_empty():
        disk.unlink(segment_path(directory, number))
        index.gone(number)
        counts.num_leftovers += 1
