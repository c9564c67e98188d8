"""Segment files of the SSD tier: one KV blob (transfer/kv/blob.py) a slot.

A blob is read only as what was asked for: key, layout, length and checksums must all match, so another's, a torn or a
rotten one is a KvCorrupt, never bytes. Nothing is synced: after power loss a
record may be missing or torn, which the same checks find; then it is computed again.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from nodes.pool.disk import Disk, read_all, write_all
from nodes.pool.slots import Place
from transfer.errors import KvCorrupt
from transfer.kv.blob import HEADER_BYTES, BlobHeader, encode_header, parse_header

SEGMENT_PREFIX, SEGMENT_SUFFIX = "segment-", ".kv"
MAX_DIGITS = 16
"""Larger numbers are not ours; the journal has room for them and for those that follow."""


def segment_path(directory: Path, number: int) -> Path:
    return directory / f"{SEGMENT_PREFIX}{number:08d}{SEGMENT_SUFFIX}"


def segment_number(path: Path) -> int | None:
    """None for what is not a segment."""
    digits = path.name.removeprefix(SEGMENT_PREFIX).removesuffix(SEGMENT_SUFFIX)
    whole = path.name == f"{SEGMENT_PREFIX}{digits}{SEGMENT_SUFFIX}"
    return int(digits) if whole and digits.isascii() and digits.isdigit() and len(digits) <= MAX_DIGITS else None


class SegmentFiles:
    """Blocking file work, called from several threads at once: each call has a slot of its own. Raises OSError.

    num_bytes: of one block's payload.
    """

    def __init__(self, disk: Disk, directory: Path, layout: bytes, num_bytes: int) -> None:
        self._disk, self._directory, self._layout, self.num_bytes = disk, directory, layout, num_bytes
        self._open: dict[int, int] = {}
        self._lock, self._local = threading.Lock(), threading.local()

    @property
    def record_bytes(self) -> int:
        return HEADER_BYTES + self.num_bytes

    def write(self, place: Place, key: bytes, payload: Sequence[memoryview]) -> None:
        record = self._scratch()
        at = HEADER_BYTES
        for part in payload:
            record[at : at + len(part)] = part
            at += len(part)
        self._write(place, key, record)

    def read(self, place: Place, key: bytes, payload: Sequence[memoryview]) -> None:
        """Fill `payload`. Raises KvCorrupt, having written nothing there, when the record is not that of `key`."""
        record = self._read(place, key)
        at = HEADER_BYTES
        for part in payload:
            part[:] = record[at : at + len(part)]
            at += len(part)

    def copy(self, old: Place, new: Place, key: bytes) -> None:
        """Write a record again elsewhere. Raises KvCorrupt as read."""
        self._write(new, key, self._read(old, key))

    def scan(self, number: int, size: int) -> Iterator[tuple[int, bytes]]:
        """(slot, key) of all whole records with a valid header; payloads are checked when they are read."""
        fd = self._file(number)
        for slot in range(size // self.record_bytes):
            header = bytearray(HEADER_BYTES)
            read_all(self._disk, fd, [header], slot * self.record_bytes)
            with contextlib.suppress(KvCorrupt):
                found = self._of_this_layout(bytes(header))
                yield slot, found.block_hash

    def remove(self, number: int) -> None:
        """Nobody reads or writes it any more."""
        with self._lock:
            fd = self._open.pop(number, None)
        if fd is not None:
            self._disk.close(fd)
        self._disk.unlink(segment_path(self._directory, number))

    def close(self) -> None:
        with self._lock:
            files, self._open = list(self._open.values()), {}
        for fd in files:
            self._disk.close(fd)

    def _read(self, place: Place, key: bytes) -> memoryview:
        record = self._scratch()
        where = f"slot {place.slot} of segment {place.segment}"
        if read_all(self._disk, self._file(place.segment), [record], place.slot * len(record)) != len(record):
            raise KvCorrupt(f"{where} ends early")
        try:
            header = parse_header(bytes(record[:HEADER_BYTES]))
            header.require(key, self._layout, self.num_bytes)
            header.check(record[HEADER_BYTES:])
        except KvCorrupt as error:
            raise KvCorrupt(f"{where} is not served: {error}") from None
        return record

    def _write(self, place: Place, key: bytes, record: memoryview) -> None:
        record[:HEADER_BYTES] = encode_header(key, self._layout, record[HEADER_BYTES:])
        write_all(self._disk, self._file(place.segment), [record], place.slot * len(record))

    def _scratch(self) -> memoryview:
        """A record's worth of memory for this thread: one piece, so that reading, writing and summing it up do not hold
        the interpreter, which the event loop needs."""
        if not hasattr(self._local, "record"):
            self._local.record = memoryview(bytearray(self.record_bytes))
        record: memoryview = self._local.record
        return record

    def _file(self, number: int) -> int:
        with self._lock:
            if number not in self._open:
                self._open[number] = self._disk.open(segment_path(self._directory, number))
            return self._open[number]

    def _of_this_layout(self, data: bytes) -> BlobHeader:
        header = parse_header(data)
        header.require(header.block_hash, self._layout, self.num_bytes)
        return header
