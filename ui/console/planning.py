"""Runs the offline planner in the background for one session at a time: starts it, says how far it is, ends it."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from transfer.said import Said
from transfer.terms import Struct
from ui.processes import child_environment, last_word

PROGRAM = "controlplane.planner"
MOST_S = 1800.0
"""A planner that runs longer is ended."""
NICE = 10
"""Serving goes first where the console shares a machine with a fleet."""
MAX_TAIL_BYTES = 4096


_PROGRESS = re.compile(r"\S+ (\d+) \S+ \S+ (.+)")
"""What the program says meanwhile: a word, how many runs were simulated, two words, and what is next."""


class _Refusal(Struct, frozen=True):
    error: str
    said: Said | None = None


@dataclass(frozen=True, slots=True)
class Fleet:
    """One row of the comparison, as the planner reports it."""

    label: str
    label_said: tuple[Said, ...]
    fleet: str
    xpyd: str
    price_per_hour: float
    max_rate: float
    low: float
    high: float
    per_gpu: float
    cost_per_good: float | None
    attainment: float
    note: str
    note_said: Said | None


@dataclass(frozen=True, slots=True)
class Outcome:
    """verdict, and beside it what is possible at all. rows: the chosen fleet first."""

    verdict: str
    verdict_said: Said
    rows: tuple[Fleet, ...]
    possible_rate: float | None
    of_possible: float | None
    bottleneck: str
    bottleneck_said: Said
    warnings: tuple[tuple[str, Said], ...]
    commands: tuple[str, ...]
    frontier: tuple[tuple[float, float, str], ...]
    """(dollars an hour, requests a second, fleet)."""


@dataclass(slots=True)
class Planning:
    """One run of the program. Poll `running`; then there is an outcome or a fault."""

    flags: list[str]
    started: float = field(default_factory=time.monotonic)
    took_s: float = 0.0
    stopped: bool = False
    _process: subprocess.Popen[bytes] | None = None
    _files: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    _out: Any = None
    _err: Any = None
    _report: bytes = b""
    _tail: list[str] = field(default_factory=list)

    def start(self) -> None:
        """Raises OSError when the program cannot be started."""
        self._out = self._files.enter_context(tempfile.TemporaryFile())  # noqa: SIM115
        self._err = self._files.enter_context(tempfile.TemporaryFile())  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, "-m", PROGRAM, *self.flags, "--json", "--progress"], stdin=subprocess.DEVNULL,
            stdout=self._out, stderr=self._err, env=child_environment(), start_new_session=True,
        )  # fmt: skip
        _running.append(self)
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, self._process.pid, NICE)

    @property
    def running(self) -> bool:
        if self._process is None or self._process.poll() is None:
            if self.age_s > MOST_S:
                self.stop()
            return self._process is not None
        if self in _running:
            _running.remove(self)
            self.took_s, self._tail = self.age_s, self._said()
            self._out.seek(0)
            self._report = self._out.read()
            self._files.close()
        return False

    @property
    def age_s(self) -> float:
        return time.monotonic() - self.started

    def stop(self) -> None:
        """End it, and whatever it started."""
        self.stopped = True
        if self._process is not None and self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGTERM)

    def progress(self) -> tuple[int, str] | None:
        """How many runs were simulated, and of which fleet the last one is; None before the first."""
        lines = self._said() if self in _running else self._tail
        found = _PROGRESS.fullmatch(lines[-1]) if lines else None
        return (int(found[1]), found[2]) if found is not None else None

    def fault(self) -> tuple[str, Said | None] | None:
        """Why there is no outcome, in English and as a code where the planner gave one; None when there is one."""
        if self._process is None or self._process.returncode == 0:
            return None
        with contextlib.suppress(msgspec.MsgspecError):
            answer = msgspec.json.decode(self._report, type=_Refusal)
            return answer.error, answer.said
        return last_word(self._tail), None

    def outcome(self) -> Outcome:
        """What it found. Raises msgspec.MsgspecError for an answer of another version."""
        return read_report(self._report)

    def _said(self) -> list[str]:
        """The end of its standard error, by lines; read by offset, since the program writes through the same handle."""
        size = os.fstat(self._err.fileno()).st_size
        data = os.pread(self._err.fileno(), MAX_TAIL_BYTES, max(0, size - MAX_TAIL_BYTES))
        return [line.strip() for line in data.decode("utf-8", "replace").splitlines() if line.strip()]


_running: list[Planning] = []


def stop_all() -> None:
    """The console ends: so do the planners it runs."""
    for planning in list(_running):
        planning.stop()


def busy() -> bool:
    """Whether some session plans: one planner at a time, since each takes a core."""
    return any(planning.running for planning in list(_running))


def read_report(text: bytes) -> Outcome:
    """Out of the planner's JSON. Raises msgspec.MsgspecError."""
    found = msgspec.json.decode(text, type=dict[str, Any])
    listed = [found["chosen"], *found["alternatives"]]
    rows = {row["fleet"]: msgspec.convert(row, Fleet) for row in reversed(listed)}
    verdict, why = (msgspec.convert(found[name], Said) for name in ("verdict_said", "bottleneck_said"))
    said = msgspec.convert(found["warnings_said"], tuple[Said, ...])
    return Outcome(
        verdict=found["verdict"], verdict_said=verdict, rows=tuple(reversed(rows.values())),
        possible_rate=found["possible_rate"], of_possible=found["of_possible"], bottleneck=found["bottleneck"],
        bottleneck_said=why, warnings=tuple(zip(found["warnings"], said, strict=True)),
        commands=tuple(found["commands"]),
        frontier=tuple((point["price_per_hour"], point["max_rate"], point["fleet"]) for point in found["frontier"]),
    )  # fmt: skip


def flags_of(wanted: Mapping[str, object]) -> list[str]:
    """Options by name; "", 0 and None leave one out, True is a flag alone."""
    return [f"--{name}" if value is True else f"--{name}={value}" for name, value in wanted.items() if value]
