"""The flight recorder's codec: every event that entered the core, framed as bytes, and the replay of such a stream.

Pure: files are the shell's (controlplane/history/recorder.py). A frame is a 4-byte little-endian length and that many
bytes of MessagePack; the first one is the header. A torn last frame, as after a kill, ends the stream quietly.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import msgspec

from controlplane.core.config import CoreConfig
from controlplane.core.events import (
    ApplyWanted,
    Arrived,
    AutopilotRestored,
    AutopilotWanted,
    ClassesRestored,
    ClassesWanted,
    Effect,
    Ended,
    Event,
    FirstToken,
    FromNode,
    HoldWanted,
    NodeLost,
    PlansRestored,
    PlanWanted,
    Resume,
    Tick,
)
from controlplane.core.scheduler import SchedulerCore
from transfer.errors import InvalidValue
from transfer.terms import Struct

FORMAT = 1
MAX_FRAME_BYTES = 64 << 20
_LENGTH = struct.Struct("<I")

AnyEvent = (
    FromNode | NodeLost | Arrived | Resume | FirstToken | Ended | PlanWanted | ApplyWanted | Tick | AutopilotWanted
    | HoldWanted | AutopilotRestored | ClassesWanted | ClassesRestored | PlansRestored
)  # fmt: skip


class Header(Struct, frozen=True):
    """Begins every file: what the core was built with. part: 0 for the file that begins with the first event."""

    format: int
    control_epoch: int
    seed: int
    config: CoreConfig
    part: int = 0


class Entry(Struct, frozen=True, array_like=True):
    """One event, handled at loop time `now`."""

    now: float
    event: AnyEvent


class Replayed(NamedTuple):
    now: float
    event: Event
    effects: list[Effect]
    digest: bytes


class FlightRecorder:
    """Encodes; owns no file. A file starts with header(part), then one entry() an event, before it is handled."""

    def __init__(self, config: CoreConfig, control_epoch: int, seed: int) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._config, self._control_epoch, self._seed = config, control_epoch, seed

    def header(self, part: int = 0) -> bytes:
        header = Header(
            format=FORMAT, control_epoch=self._control_epoch, seed=self._seed, config=self._config, part=part
        )
        return _frame(self._encoder.encode(header))

    def entry(self, now: float, event: Event) -> bytes:
        return _frame(self._encoder.encode((now, event)))


def read(chunks: Iterable[bytes]) -> tuple[Header, Iterator[Entry]]:
    """A recording out of chunks of any size. Raises InvalidValue, also while iterating, for what is not one."""
    frames = _frames(chunks)
    try:
        header = msgspec.msgpack.decode(next(frames, b""), type=Header)
    except msgspec.MsgspecError as error:
        raise InvalidValue(f"this is not a flight recording of this release: {error}") from None
    if header.format != FORMAT:
        raise InvalidValue(f"this recording has format {header.format}, this release reads {FORMAT}")
    return header, _entries(frames)


def replay(chunks: Iterable[bytes], core: SchedulerCore | None = None) -> Iterator[Replayed]:
    """Feed a recording to a core: a fresh one as the header says, by default. Part 0 alone gives the same decisions.

    Raises InvalidValue for a recording that does not begin with the first event, unless `core` is given.
    """
    header, entries = read(chunks)
    if core is None:
        if header.part != 0:
            raise InvalidValue(f"this file is part {header.part} of a recording; a replay begins with part 0")
        core = SchedulerCore(header.config, header.control_epoch, header.seed)
    for entry in entries:
        effects = core.handle(entry.event, entry.now)
        yield Replayed(entry.now, entry.event, effects, effects_digest(effects))


def effects_digest(effects: Sequence[Effect]) -> bytes:
    """16 bytes that are equal for equal effects in equal order, in every process."""
    return hashlib.blake2b(msgspec.msgpack.encode(list(effects)), digest_size=16).digest()


def _entries(frames: Iterator[bytes]) -> Iterator[Entry]:
    decoder = msgspec.msgpack.Decoder(Entry)
    for frame in frames:
        try:
            yield decoder.decode(frame)
        except msgspec.MsgspecError as error:
            raise InvalidValue(f"the recording holds an event that this release does not know: {error}") from None


def _frame(body: bytes) -> bytes:
    return _LENGTH.pack(len(body)) + body


def _frames(chunks: Iterable[bytes]) -> Iterator[bytes]:
    buffer = bytearray()
    for chunk in chunks:
        buffer += chunk
        start = 0
        while len(buffer) - start >= _LENGTH.size:
            size = _LENGTH.unpack_from(buffer, start)[0]
            if size > MAX_FRAME_BYTES:
                raise InvalidValue(f"this is not a flight recording: it has a frame of {size} bytes")
            end = start + _LENGTH.size + size
            if end > len(buffer):
                break
            yield bytes(buffer[start + _LENGTH.size : end])
            start = end
        del buffer[:start]
