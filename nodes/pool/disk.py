"""The file operations of the SSD tier, in one object that tests replace by one that fails. Decides nothing.

All of it may block and runs in the tier's threads. Nothing is synced: what power loss takes is found by checksum.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Sequence
from pathlib import Path

from transfer.errors import ConfigError

Buffer = bytes | bytearray | memoryview
MAX_BUFFERS = 1024
"""Of one vectored call (IOV_MAX on Linux)."""
FLAGS = os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
"""Whoever may write to the directory must not lead us to write elsewhere."""


class Disk:
    """Thin: each call is one or few system calls. Raises OSError as they do."""

    def lock(self, path: Path) -> int:
        """Own the directory of `path` until release; dies with the process. Raises ConfigError when another has it."""
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(path, FLAGS, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            raise ConfigError(
                f"another KV pool uses {path.parent}; give each pool an instance id or an --ssd-dir of its own"
            ) from None
        return fd

    def release(self, fd: int) -> None:
        os.close(fd)

    def files(self, directory: Path) -> list[Path]:
        return sorted(path for path in directory.iterdir() if path.is_file())

    def open(self, path: Path) -> int:
        return os.open(path, FLAGS, 0o600)

    def close(self, fd: int) -> None:
        os.close(fd)

    def size(self, path: Path) -> int:
        return path.stat().st_size

    def write(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        """Bytes written, maybe fewer than given."""
        return os.pwritev(fd, buffers[:MAX_BUFFERS], offset)

    def read(self, fd: int, buffers: Sequence[bytearray | memoryview], offset: int) -> int:
        """Bytes read, maybe fewer than asked for; 0 at the end of the file."""
        return os.preadv(fd, buffers[:MAX_BUFFERS], offset)

    def truncate(self, fd: int, size: int) -> None:
        os.ftruncate(fd, size)

    def rename(self, old: Path, new: Path) -> None:
        old.replace(new)

    def unlink(self, path: Path) -> None:
        with contextlib.suppress(FileNotFoundError):
            path.unlink()


def write_all(disk: Disk, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
    """Write everything; returns how much that was. A disk that takes part of it is asked again for the rest.

    Raises OSError, also when the disk takes nothing more."""
    left = [memoryview(buffer).cast("B") for buffer in buffers if len(buffer)]
    at = offset
    while left:
        done = disk.write(fd, left, at)
        if done <= 0:
            raise OSError(f"the disk took none of {sum(map(len, left))} bytes")
        at += done
        left = _after(left, done)
    return at - offset


def read_all(disk: Disk, fd: int, buffers: Sequence[bytearray | memoryview], offset: int) -> int:
    """Fill the buffers; returns the bytes read, fewer than asked for only at the end of the file. Raises OSError."""
    left = [memoryview(buffer).cast("B") for buffer in buffers if len(buffer)]
    at = offset
    while left:
        done = disk.read(fd, left, at)
        if done <= 0:
            break
        at += done
        left = _after(left, done)
    return at - offset


def _after(buffers: list[memoryview], num_bytes: int) -> list[memoryview]:
    for index, buffer in enumerate(buffers):
        if num_bytes < len(buffer):
            return [buffer[num_bytes:], *buffers[index + 1 :]]
        num_bytes -= len(buffer)
    return []
