"""The last minutes as the strip and Overview draw them: begun from GET /v1/series, then a point for each frame."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from transfer.api import FleetState
from transfer.screens import SeriesView
from ui.client import FleetClient
from ui.feed import SET_BACK_S

SPAN_S = 600
NAMES = ("goodput_per_s", "throughput_per_s", "attainment", "goodput_10s_per_s")


class Point(NamedTuple):
    """at_s: Unix time. goodput, throughput and attainment are over 60 s, goodput_10s over 10 s."""

    at_s: float
    goodput: float | None
    throughput: float | None
    attainment: float | None
    goodput_10s: float | None


class Trail:
    """Points in order of time, the last SPAN_S seconds of them."""

    def __init__(self) -> None:
        self.points: deque[Point] = deque(maxlen=SPAN_S)

    @property
    def end_s(self) -> float:
        return self.points[-1].at_s if self.points else 0.0

    def add(self, at_s: float, state: FleetState) -> None:
        """The state of that moment; one that is not newer than the last is left out, unless the clock was set back."""
        if self.end_s - SET_BACK_S < at_s <= self.end_s:
            return
        if at_s <= self.end_s:
            self.points.clear()
        goodput = state.goodput
        self.points.append(
            Point(at_s, goodput.per_s, goodput.throughput_per_s, state.recent_attainment, state.goodput_10s.per_s)
        )
        while self.points[0].at_s < at_s - SPAN_S:
            self.points.popleft()

    async def fill(self, client: FleetClient) -> None:
        """Begin again with what the control plane remembers. Raises CliError."""
        self.take(await client.series(NAMES, since_s=-SPAN_S))

    def take(self, past: SeriesView) -> None:
        """Begin again with these steps; those in which nothing is known are left out."""
        unknown = (None,) * len(past.times)
        columns = [past.series[name].last if name in past.series else unknown for name in NAMES]
        self.points.clear()
        for at_s, *values in zip(past.times, *columns, strict=True):
            if any(value is not None for value in values):
                self.points.append(Point(float(at_s), *values))
