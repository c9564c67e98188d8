"""The flight recorder's files: a thread writes what core/recorder.py encodes, in bounded, rotating files.

They hold prompts as token ids: readable by their owner alone, and history.flight_recorder turns them off.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec

from controlplane.core.config import CoreConfig
from controlplane.core.events import Event, Tick
from controlplane.core.recorder import FlightRecorder
from transfer.errors import ConfigError

MAX_QUEUED_BYTES = 64 << 20
BUFFER_BYTES = 256 << 10
"""What may wait for the next tick before it goes to the thread: waking it for every event costs more than the event."""
_CHUNK_BYTES = 1 << 20
_log = logging.getLogger(__name__)


class FlightFiles:
    """record() never blocks and never raises. When the disk cannot follow or an event cannot be encoded, recording
    ends: a journal with holes would not replay."""

    def __init__(
        self, directory: Path, config: CoreConfig, control_epoch: int, seed: int, *, file_bytes: int, num_files: int
    ) -> None:
        """num_files: how many the directory keeps, those of earlier lives included. Raises ConfigError."""
        self._directory, self._file_bytes, self._num_files = directory, file_bytes, num_files
        self._codec, self._control_epoch = FlightRecorder(config, control_epoch, seed), control_epoch
        self._queue: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._buffer = bytearray()
        self._handed = self._taken = 0
        self._part = self._written = 0
        self._ended = False
        try:
            directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._file = self._open()
        except OSError as error:
            raise ConfigError(
                f"cannot write the flight recorder in {directory}: {error.strerror}; choose another history.directory"
            ) from None
        self._thread = threading.Thread(target=self._run, name="flight-recorder", daemon=True)
        self._thread.start()

    @property
    def path(self) -> Path:
        """The file being written."""
        return self._directory / f"flight-{self._control_epoch:016x}-{self._part:06d}.msgpack"

    def record(self, now: float, event: Event) -> None:
        """To be called before the core handles the event, at loop time `now`."""
        if self._ended:
            return
        try:
            self._buffer += self._codec.entry(now, event)
        except (ArithmeticError, ValueError, msgspec.MsgspecError) as error:  # an int beyond 64 bits, a lone surrogate
            self._hand_over()
            self._ended = True
            _log.error("the flight recorder stops: it cannot write a %s (%s)", type(event).__name__, error)
            return
        if len(self._buffer) >= BUFFER_BYTES or type(event) is Tick:
            self._hand_over()

    def close(self, timeout_s: float = 5.0) -> None:
        """Write what is queued. Idempotent; blocks up to timeout_s."""
        if not self._ended:
            self._hand_over()
        self._ended = True
        self._queue.put(None)
        self._thread.join(timeout_s)

    def _hand_over(self) -> None:
        if self._handed - self._taken > MAX_QUEUED_BYTES:
            self._ended = True
            _log.error("the flight recorder stops: its disk cannot follow; %s ends here", self.path.name)
            return
        self._handed += len(self._buffer)
        self._queue.put(bytes(self._buffer))
        self._buffer.clear()

    def _open(self) -> BinaryIO:
        descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        file = os.fdopen(descriptor, "wb")
        file.write(self._codec.header(self._part))
        file.flush()
        self._written = 0
        files = sorted(self._directory.glob("flight-*.msgpack"), key=lambda path: path.stat().st_mtime_ns)
        for old in files[: -self._num_files]:
            if old != self.path:
                old.unlink(missing_ok=True)
        return file

    def _run(self) -> None:
        try:
            while (frames := self._queue.get()) is not None:
                self._file.write(frames)
                self._file.flush()
                self._taken += len(frames)
                self._written += len(frames)
                if self._written >= self._file_bytes:
                    self._file.close()
                    self._part += 1
                    self._file = self._open()
            self._file.close()
        except OSError as error:
            self._ended = True
            _log.error("the flight recorder stops: it cannot write %s (%s)", self.path, error.strerror)
            with contextlib.suppress(OSError):
                self._file.close()


def chunks(path: Path) -> Iterator[bytes]:
    """A file as core/recorder.py's read and replay take it."""
    with path.open("rb") as file:
        while data := file.read(_CHUNK_BYTES):
            yield data
