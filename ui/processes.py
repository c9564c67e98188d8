"""Starts child processes, keeps their logs, restarts those that die and stops them all. It knows nothing of fleets."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

MAX_LOG_BYTES = 16 << 20
MAX_LAST_LINES = 20
STOP_GRACE_S = 6.0
KILL_GRACE_S = 2.0
FIRST_BACKOFF_S = 0.2
MAX_BACKOFF_S = 5.0
MAX_RESTARTS = 8
FORGET_AFTER_S = 120.0
"""A process that ran so long starts again with a clean slate."""

SENTENCE_MARKS = ("phaseplane: ", "phaseplane node: ", "error: ")
"""How our programs begin the one sentence that says why they end."""
OWN_VARIABLES = ("PHASEPLANE_READY_FILE", "PHASEPLANE_HARDWARE", "PHASEPLANE_INSTANCES", "PHASEPLANE_CONTROL")
"""Meant for us: a child that also read them would do something else with them."""

_READ_BYTES = 65536
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None

Say = Callable[[str], None]


@dataclass(slots=True)
class Child:
    """One program that should run. `argv` may be changed before a restart (see Supervisor.before_restart).

    essential: when it cannot be kept running, nothing else makes sense. env: variables it is given besides ours.
    """

    name: str
    argv: list[str]
    log: Path
    process: asyncio.subprocess.Process | None = None
    last_lines: deque[str] = field(default_factory=lambda: deque(maxlen=MAX_LAST_LINES))
    num_restarts: int = 0
    essential: bool = False
    env: dict[str, str] = field(default_factory=dict)

    @property
    def pid(self) -> int | None:
        return None if self.process is None else self.process.pid

    @property
    def last_word(self) -> str:
        """Its last sentence to a person, else the last line it wrote."""
        return last_word(self.last_lines)


class RotatingLog:
    """A file that is renamed to FILE.1 when it is full, so that two files bound what a process may write."""

    def __init__(self, path: Path, max_bytes: int = MAX_LOG_BYTES) -> None:
        self._path, self._max_bytes = path, max_bytes
        self._file = path.open("ab")
        self._size = path.stat().st_size

    def write(self, data: bytes) -> None:
        """Append and flush. Raises OSError when the disk is full."""
        if self._size + len(data) > self._max_bytes and self._size > 0:
            self._file.close()
            self._path.replace(self._path.with_name(f"{self._path.name}.1"))
            self._file = self._path.open("ab")
            self._size = 0
        self._file.write(data)
        self._file.flush()
        self._size += len(data)

    def close(self) -> None:
        self._file.close()


class Supervisor:
    """Owns every child. One task a child: it reads the output, waits for the exit and starts it again.

    A child that dies more than MAX_RESTARTS times without FORGET_AFTER_S of health in between is given up; the
    others go on, unless it is essential.
    """

    def __init__(self, say: Say, before_restart: Callable[[Child], Awaitable[None]] | None = None) -> None:
        self._say = say
        self._before_restart = before_restart
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._children: dict[str, Child] = {}
        self._stopping = False
        self.may_restart = False
        """False while starting: a child that dies then ends the start (see `first_death`)."""
        self.first_death: asyncio.Future[tuple[Child, int]] = asyncio.get_running_loop().create_future()
        self.gave_up: asyncio.Future[tuple[Child, int]] = asyncio.get_running_loop().create_future()
        """Set when an essential child cannot be kept running: it and its exit status."""

    async def start(self, child: Child) -> None:
        """Start it and watch it from now on. Raises OSError when the program cannot run."""
        child.log.parent.mkdir(parents=True, exist_ok=True)
        await self._spawn(child)
        self._children[child.name] = child
        self._tasks[child.name] = asyncio.create_task(self._watch(child), name=f"watch {child.name}")

    async def stop(self, grace_s: float = STOP_GRACE_S) -> None:
        """SIGTERM to all, SIGKILL to those that remain after `grace_s`. Idempotent; leaves no child behind."""
        self._stopping = True
        self._signal_all(signal.SIGTERM)
        tasks = list(self._tasks.values())
        if tasks:
            await asyncio.wait(tasks, timeout=grace_s)
        self.kill()
        if tasks:
            await asyncio.wait(tasks, timeout=KILL_GRACE_S)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def kill(self) -> None:
        """SIGKILL to all, now."""
        self._stopping = True
        self._signal_all(signal.SIGKILL)

    def _signal_all(self, number: signal.Signals) -> None:
        """SIGKILL goes to the child's whole session, so that nothing it started stays."""
        for child in self._children.values():
            process = child.process
            if process is not None and process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    if number is signal.SIGKILL:
                        os.killpg(process.pid, number)
                    else:
                        process.send_signal(number)

    async def _spawn(self, child: Child) -> None:
        child.process = await asyncio.create_subprocess_exec(
            *child.argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**child_environment(), **child.env},
            start_new_session=True,  # Ctrl-C in the terminal reaches us alone: we stop them in order
            preexec_fn=_die_with_parent,
        )

    async def _watch(self, child: Child) -> None:
        loop = asyncio.get_running_loop()
        while True:
            started = loop.time()
            code = await self._run_to_exit(child)
            if self._stopping:
                return
            if not self.may_restart:
                if not self.first_death.done():
                    self.first_death.set_result((child, code))
                return
            if loop.time() - started > FORGET_AFTER_S:
                child.num_restarts = 0
            if child.num_restarts >= MAX_RESTARTS:
                self._give_up(child, code, f"{child.name} died {MAX_RESTARTS + 1} times ({child.last_word})")
                return
            backoff_s = min(MAX_BACKOFF_S, FIRST_BACKOFF_S * 2**child.num_restarts)
            child.num_restarts += 1
            self._say(f"{child.name} died ({exit_text(code)}); starting it again in {backoff_s:.1f} s")
            await asyncio.sleep(backoff_s)
            if self._before_restart is not None:
                await self._before_restart(child)
            if self._stopping:
                return
            try:
                await self._spawn(child)
            except OSError as error:
                self._give_up(child, code, f"{child.name} cannot be started ({error.strerror})")
                return

    def _give_up(self, child: Child, code: int, why: str) -> None:
        self._say(f"{why} and stays down; its log is {child.log}")
        if child.essential and not self.gave_up.done():
            self.gave_up.set_result((child, code))

    async def _run_to_exit(self, child: Child) -> int:
        """Copy its output to the log until it ends; returns the exit status."""
        process = child.process
        if process is None or process.stdout is None:
            raise RuntimeError(f"{child.name} was not started")
        log = RotatingLog(child.log)
        partial = b""
        try:
            while data := await process.stdout.read(_READ_BYTES):
                with contextlib.suppress(OSError):  # a full disk must not stop a fleet that serves
                    log.write(data)
                *lines, partial = (partial + data).split(b"\n")
                partial = partial[-_READ_BYTES:]
                child.last_lines.extend(text for line in lines if (text := line.decode(errors="replace").strip()))
        finally:
            log.close()
        return await process.wait()


def _die_with_parent() -> None:
    """In the child: be told to stop when we are killed and can stop nobody (Linux)."""
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM))


def child_environment() -> dict[str, str]:
    """The variables that programs we start are given."""
    return {name: text for name, text in os.environ.items() if name not in OWN_VARIABLES}


def last_word(lines: Sequence[str]) -> str:
    """The last sentence to a person among a program's lines, else the last line."""
    for line in reversed(lines):
        for mark in SENTENCE_MARKS:
            if line.startswith(mark):
                return line.removeprefix(mark)
    return lines[-1] if lines else "it said nothing"


def exit_text(code: int) -> str:
    """`killed by SIGKILL` or `exit status 1`."""
    if code >= 0:
        return f"exit status {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"
