"""Recordings of a session: a stream of msgpack values [Unix time, kind, value], the first of kind "phaseplane".

Kinds: frame (a LiveFrame of GET /v1/live), requests, audit, kv, autopilot (answers of these paths).
"""

from __future__ import annotations

from pathlib import Path
from typing import IO, Any

import msgpack
import msgspec

from transfer.api import AuditRow, LiveFrame, RequestRecord
from transfer.autopilot import AutopilotView
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
_LAST_S = 1e11
"""No moment is later."""


class Recorder:
    """Appends to a new file. Raises CliError when it is there already or cannot be written. A disk that fails later
    ends the recording, not the screen: `problem` then says why."""

    def __init__(self, path: Path, now_s: float, words: Words) -> None:
        self.problem = ""
        self._path, self._words = path, words
        try:
            self._file: IO[bytes] = path.open("xb", buffering=0)
        except FileExistsError:
            raise CliError(words.say("tui.error.exists", path=path)) from None
        except OSError as error:
            raise CliError(words.say("tui.error.cannot_write", path=path, reason=error.strerror)) from None
        self.put(now_s, MAGIC, VERSION)
        if self.problem:
            raise CliError(self.problem)

    def put(self, at_s: float, kind: str, value: Any) -> None:
        left = b"" if self.problem else msgspec.msgpack.encode((at_s, kind, value))
        try:
            while left:
                left = left[self._file.write(left) :]
        except OSError as error:
            self.problem = self._words.say("tui.error.cannot_write", path=self._path, reason=error.strerror)

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
                    frame = _checked(value, LiveFrame)
                    state = fold(state, frame)
                    _moment(frame.at_s)
                    tape.add(frame, state)
                elif kind in ANSWERS:
                    tape.answer(kind, _moment(at_s), _checked(value, ANSWERS[kind]))
    except OSError as error:
        raise CliError(words.say("tui.error.cannot_read", path=path, reason=error.strerror)) from None
    except (ValueError, TypeError, msgspec.MsgspecError, msgpack.UnpackException) as error:
        raise CliError(words.say("tui.error.damaged", path=path, reason=error)) from None
    if tape.first_s is None:
        raise CliError(words.say("tui.error.empty", path=path))
    return tape


def _checked(value: Any, kind: Any) -> Any:
    """As the API would have told it, which knows neither NaN nor infinity. Raises MsgspecError for anything else."""
    return msgspec.json.decode(msgspec.json.encode(value), type=kind)


def _moment(at_s: Any) -> float:
    """Unix time. Raises ValueError for what is none."""
    if not isinstance(at_s, int | float) or not 0 <= at_s < _LAST_S:
        raise ValueError(f"{at_s!r} is no moment")
    return at_s
