"""Measuring several ways of moving the same bytes in turn, so that a noisy machine disturbs all of them alike."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import statistics
import subprocess
import sys
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from transfer.errors import PhaseplaneError

GB = 1e9
PEER_S = 120.0
SETTLE_S = 0.02
"""What a peer that was stopped gets to wake up before it is timed."""

Seconds = Mapping[str, float]
Contender = Callable[[], Awaitable[Seconds]]
"""Moves the bytes once each way it knows; seconds by the way's name."""


class PeerFailed(PhaseplaneError):
    """Another project's program did not do what it was asked."""


@dataclass(frozen=True)
class Line:
    """One result. peer: what ours is beside, None when nothing is. ratio: ours / peer, higher is better."""

    name: str
    ours_gb_per_s: float
    peer: str | None
    peer_gb_per_s: float | None
    ratio: float | None

    def text(self) -> str:
        beside = "" if self.peer is None else f"   {self.peer:42} {self.peer_gb_per_s:6.2f} GB/s   {self.ratio:.2f}x"
        return f"{self.name:24} {self.ours_gb_per_s:6.2f} GB/s{beside}"

    def json(self) -> str:
        return json.dumps(asdict(self))


def line(name: str, ours: float, peer: str | None = None, theirs: float | None = None) -> Line:
    """From GB/s; `peer` without a figure is left out."""
    if peer is None or theirs is None:
        return Line(name, round(ours, 3), None, None, None)
    return Line(name, round(ours, 3), peer, round(theirs, 3), round(ours / theirs, 3))


async def alternate(rounds: int, contenders: Mapping[str, Contender]) -> dict[str, dict[str, float]]:
    """Run each in turn, `rounds` times and once before that to warm up; median seconds by contender and way."""
    taken: dict[str, dict[str, list[float]]] = {name: {} for name in contenders}
    for number in range(rounds + 1):
        for name, run in contenders.items():
            seconds = await run()
            if number:
                for way, value in seconds.items():
                    taken[name].setdefault(way, []).append(value)
    return {name: {way: statistics.median(v) for way, v in ways.items()} for name, ways in taken.items()}


class Peer:
    """A driver of peers.py in a Python of its own, stopped (SIGSTOP) while it is not its turn. Async context manager.

    Raises PeerFailed when it does not start, breaks, or is not done within PEER_S.
    """

    def __init__(self, python: Path, kind: str, num_bytes: int) -> None:
        driver = str(Path(__file__).with_name("peers.py"))
        self._command = [str(python), driver, kind, "--bytes", str(num_bytes)]
        self._kind = kind
        self._process: asyncio.subprocess.Process | None = None

    async def __aenter__(self) -> Peer:
        self._process = await asyncio.create_subprocess_exec(
            *self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            start_new_session=True,
        )  # fmt: skip
        try:
            await self._answer("ready")
        except BaseException:
            await self.__aexit__()
            raise
        self._signal(signal.SIGSTOP)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._process is not None:
            self._signal(signal.SIGKILL)
            await self._process.communicate()

    async def run(self) -> Seconds:
        """One write and one read; a Contender."""
        self._signal(signal.SIGCONT)
        await asyncio.sleep(SETTLE_S)
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(b"go\n")
        try:
            seconds = await self._answer("write_s")
        finally:
            self._signal(signal.SIGSTOP)
        return {"write": float(seconds["write_s"]), "read": float(seconds["read_s"])}

    async def _answer(self, key: str) -> dict[str, float]:
        """The next line that is ours to read: peers log to standard output too."""
        assert self._process is not None
        assert self._process.stdout is not None
        try:
            async with asyncio.timeout(PEER_S):
                while text := await self._process.stdout.readline():
                    if text.startswith(b"{") and key.encode() in text:
                        answer: dict[str, float] = json.loads(text)
                        return answer
        except TimeoutError:
            raise PeerFailed(
                f"{self._kind} did not answer within {PEER_S:g} s; try it alone: {self._alone()}"
            ) from None
        raise PeerFailed(f"{self._kind} ended early; try it alone: {self._alone()}")

    def _signal(self, number: int) -> None:
        """To the driver and all it has started."""
        assert self._process is not None
        try:
            os.killpg(self._process.pid, number)
        except ProcessLookupError:
            return

    def _alone(self) -> str:
        return " ".join(self._command)


def say(text: str) -> None:
    """Progress, beside the results."""
    print(text, file=sys.stderr, flush=True)
