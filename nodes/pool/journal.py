"""The SSD tier's index on disk: a stream of MessagePack records, each with a checksum, appended and read back at start.

It only saves time: what it does not know is found by scanning segments, and every record is verified when it is read.
So nothing is synced, and a journal that cannot be written is given up until it can.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import IntEnum
from pathlib import Path
from typing import Any

import msgpack
import xxhash

from nodes.pool.disk import Disk, write_all
from nodes.pool.slots import Place
from transfer.kv.block import HASH_BYTES

VERSION = 1
READ_BYTES = 1 << 20
MAX_RECORD_BYTES = 4096
JOURNAL_NAME = "journal"
TEMPORARY_SUFFIX = ".tmp"


class Op(IntEnum):
    HEAD = 0
    """version, layout digest"""
    PUT = 1
    """key, segment, slot"""
    DROP = 2
    """key"""
    SEALED = 3
    """segment: all its records are in the journal"""
    GONE = 4
    """segment"""


Record = tuple[Any, ...]


class Journal:
    """One writer. Raises OSError; after that, `broken` until it has been rewritten."""

    def __init__(self, disk: Disk, directory: Path, layout: bytes) -> None:
        self._disk, self._path, self._layout = disk, directory / JOURNAL_NAME, layout
        self._fd: int | None = None
        self._size = 0
        self.num_records = 0
        self.broken = True

    def rewrite(self, places: Iterable[tuple[bytes, Place]], sealed: Iterable[int]) -> None:
        """Begin a new file with this state; it takes the old one's place when it is whole."""
        self.broken = True
        self.close()
        temporary = self._path.with_suffix(TEMPORARY_SUFFIX)
        self._disk.unlink(temporary)
        self._fd, self._size, self.num_records = self._disk.open(temporary), 0, 0
        self._write([(Op.HEAD, VERSION, self._layout)])
        batch: list[Record] = []
        for h, place in places:
            batch.append((Op.PUT, h, place.segment, place.slot))
            if len(batch) >= 4096:
                self._write(batch)
                batch = []
        self._write([*batch, *((Op.SEALED, number) for number in sealed)])
        self._disk.rename(temporary, self._path)
        self.broken = False

    def append(self, records: list[Record]) -> None:
        if self.broken:
            return
        try:
            self._write(records)
        except OSError:
            self.broken = True
            raise

    def close(self) -> None:
        if self._fd is not None:
            self._disk.close(self._fd)
            self._fd = None

    def _write(self, records: list[Record]) -> None:
        assert self._fd is not None
        data = b"".join(map(_pack, records))
        if data:
            write_all(self._disk, self._fd, [data], self._size)
        self._size += len(data)
        self.num_records += len(records)


class JournalReader:
    """Streams an earlier life's records. Afterwards num_bytes, num_torn say how much was good and how much was cut."""

    def __init__(self, disk: Disk, directory: Path) -> None:
        self._disk, self._path = disk, directory / JOURNAL_NAME
        self.num_bytes = self.num_torn = 0

    def __iter__(self) -> Iterator[Record]:
        """Up to the first record that is not whole or does not match its checksum."""
        size, at = self._disk.size(self._path), 0
        unpacker = msgpack.Unpacker(raw=True, max_buffer_size=READ_BYTES + 2 * MAX_RECORD_BYTES)
        fd = self._disk.open(self._path)
        try:
            while at < size:
                buffer = bytearray(min(READ_BYTES, size - at))
                count = self._disk.read(fd, [buffer], at)
                if count <= 0:
                    break
                at += count
                unpacker.feed(memoryview(buffer)[:count])
                for item in unpacker:
                    record = _unpack(item)
                    if record is None:
                        return
                    self.num_bytes = unpacker.tell()
                    yield record
        except (ValueError, msgpack.UnpackException):
            return
        finally:
            self._disk.close(fd)
            self.num_torn = size - self.num_bytes


def _pack(record: Record) -> bytes:
    body = msgpack.packb(record)
    packed: bytes = msgpack.packb((xxhash.xxh3_64_intdigest(body), body))
    return packed


def _unpack(item: object) -> Record | None:
    """None when it is not a record as _pack makes them."""
    match item:
        case [int(checksum), bytes(body)] if xxhash.xxh3_64_intdigest(body) == checksum:
            record: Record = msgpack.unpackb(body, use_list=False, raw=True)
            match record:
                case (Op.HEAD, int(), bytes()) | (Op.SEALED | Op.GONE, int()):
                    return record
                case (Op.PUT, bytes(h), int(), int()) | (Op.DROP, bytes(h)) if len(h) == HASH_BYTES:
                    return record
    return None
