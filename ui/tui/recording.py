"""Recordings of a session: a stream of msgpack values [Unix time, kind, value], the first of kind "phaseplane".

Kinds: frame (a LiveFrame of GET /v1/live), requests, audit, kv, autopilot (answers of these paths).
"""

from __future__ import annotations

from pathlib import Path
from typing import IO, Any

import msgpack
import msgspec

from transfer.api import AuditRow, AutopilotView, LiveFrame, RequestRecord
from transfer.screens import KvDetail
from ui.errors import CliError
from ui.feed import fold
from ui.tui.tape import Tape
from ui.words import Words

MAGIC = "phaseplane"
VERSION = 1
FRAME = "frame"
ANSWERS: dict[str, Any] = {
    "requests": list[RequestRecord], "audit": list[AuditRow], "kv": KvDetail, "autopilot": AutopilotView,
}  # fmt: skip
_MAX_VALUE_BYTES = 64 << 20


class Recorder:
    """Appends to a new file. Raises CliError when it is there already or cannot be written."""

    def __init__(self, path: Path, now_s: float, words: Words) -> None:
        try:
            self._file: IO[bytes] = path.open("xb", buffering=0)
        except FileExistsError:
            raise CliError(words.say("tui.error.exists", path=path)) from None
        except OSError as error:
            raise CliError(words.say("tui.error.cannot_write", path=path, reason=error.strerror)) from None
        self.put(now_s, MAGIC, VERSION)

    def put(self, at_s: float, kind: str, value: Any) -> None:
        self._file.write(msgspec.msgpack.encode((at_s, kind, value)))

    def close(self) -> None:
        self._file.close()


def load(path: Path, words: Words) -> Tape:
    """A whole recording; the end of one that was cut off is left out. Raises CliError when it is none."""
    tape = Tape(max_frames=0)
    state = None
    try:
        with path.open("rb") as file:
            values = msgpack.Unpacker(file, max_buffer_size=_MAX_VALUE_BYTES)
            first = next(values, None)
            if not isinstance(first, list) or first[1:] != [MAGIC, VERSION]:
                raise CliError(words.say("tui.error.no_recording", path=path))
            for at_s, kind, value in values:
                if kind == FRAME:
                    frame = msgspec.convert(value, LiveFrame)
                    state = fold(state, frame)
                    tape.add(frame, state)
                elif kind in ANSWERS:
                    tape.answer(kind, at_s, msgspec.convert(value, ANSWERS[kind]))
    except OSError as error:
        raise CliError(words.say("tui.error.cannot_read", path=path, reason=error.strerror)) from None
    except (ValueError, TypeError, msgspec.MsgspecError, msgpack.UnpackException) as error:
        raise CliError(words.say("tui.error.damaged", path=path, reason=error)) from None
    if tape.first_s is None:
        raise CliError(words.say("tui.error.empty", path=path))
    return tape
