"""Simulated time: a heap of calls by (time, order of scheduling). Decides nothing."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any


class Heap:
    """now never goes back; what is due in the past is due now. Calls are not cancelled: whoever schedules one that may
    become stale gives it a way to notice. entries: what is scheduled, the next call first, to look at only."""

    __slots__ = ("_num", "entries", "now")

    def __init__(self) -> None:
        self.now = 0.0
        self.entries: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._num = 0

    def __len__(self) -> int:
        return len(self.entries)

    def at(self, when: float, call: Callable[..., None], *args: Any) -> None:
        self._num += 1
        heappush(self.entries, (when if when > self.now else self.now, self._num, call, args))

    @property
    def next_s(self) -> float:
        """When the next call is due; infinity when there is none."""
        return self.entries[0][0] if self.entries else float("inf")

    def run_next(self) -> None:
        self.now, _, call, args = heappop(self.entries)
        call(*args)
