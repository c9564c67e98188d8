"""The past of some series, made of an answer of GET /v1/series: rows, extremes, means, and when there is no record.

Pure: asks nobody and draws nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from transfer.screens import Column, SeriesView
from ui.series_names import PULSE

MOST_STEPS = 1500
"""The control plane widens a step until so many are enough."""
FINE_S = 1200.0
"""Up to here seconds are read, beyond it tens."""
MIN_GAP_S = 5.0
"""A second without a record is one that was not sampled in time."""
NUM_ROWS = 30
HOUR_S = 3600.0
"""By as much clocks are put back: wider rows stay at their hours of the day, the others all stay as long."""
Zone = Callable[[float], float]
"""How far the local time is ahead of UTC at a Unix time, seconds."""
NICE_S = (1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400)


@dataclass(frozen=True, slots=True)
class Row:
    """every_s from Unix time at_s on. None where there is no value; down_s: how long there was no record at all."""

    at_s: float
    last: float | None
    low: float | None
    high: float | None
    mean: float | None
    down_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Gap:
    """Unix times between which the control plane did not run."""

    from_s: float
    until_s: float


@dataclass(frozen=True, slots=True)
class Past:
    """One series. last_at_s, low_at_s and high_at_s: when it had its last, smallest and largest value. mean: of the
    last value of each step."""

    last: float | None
    low: float | None
    high: float | None
    mean: float | None
    last_at_s: float | None
    low_at_s: float | None
    high_at_s: float | None
    rows: tuple[Row, ...]


@dataclass(frozen=True, slots=True)
class Report:
    """asked_s: how long a time was asked for; since_s and until_s: begin and end of the steps; from_s: the first moment
    there is a record of."""

    asked_s: float
    since_s: float
    from_s: float | None
    until_s: float
    step_s: float
    every_s: float
    down: tuple[Gap, ...]
    series: dict[str, Past]


class Step(NamedTuple):
    """One step of the answer; all None where nothing is known."""

    at_s: float
    last: float | None
    low: float | None
    high: float | None


def step_for(span_s: float, every_s: float) -> float:
    """The finest step that an answer has room for and that divides every_s, where one does."""
    unit = 1 if span_s <= FINE_S else 10
    finest = math.ceil(max(1.0, span_s / MOST_STEPS) / unit) * unit
    fitting = (step for step in range(finest, int(every_s) + 1, unit) if every_s % step == 0)
    return next(fitting, finest)


def nice_every(span_s: float) -> float:
    """A round number of seconds that makes about NUM_ROWS rows."""
    return next((float(one) for one in NICE_S if one * NUM_ROWS >= span_s), float(NICE_S[-1]))


def report(view: SeriesView, names: Sequence[str], asked_s: float, every_s: float, zone: Zone) -> Report:
    """view: of `names` and PULSE. Rows begin at round local times."""
    step_s = view.step_s
    every_s = max(1, math.ceil(every_s / step_s)) * step_s
    pulse = recorded(view, PULSE)
    down = tuple(_joined((one.at_s for one in pulse if one.last is None), step_s))
    begins = _begins([one.at_s for one in pulse], every_s, zone)
    series = {name: _past(recorded(view, name), begins, down, step_s) for name in names}
    since_s, until_s = (float(view.times[0]), view.times[-1] + step_s) if view.times else (0.0, 0.0)
    return Report(asked_s, since_s, pulse[0].at_s if pulse else None, until_s, step_s, every_s, down, series)


def recorded(view: SeriesView, name: str) -> list[Step]:
    """A series of an answer, step by step, from where the record begins; without any value where it has none of that
    name."""
    begun = from_record(view)
    column = begun.series.get(name) or Column(last=(None,) * len(begun.times))
    lows, highs = column.low or column.last, column.high or column.last
    found = zip(begun.times, column.last, lows, highs, strict=True)
    return [Step(float(at_s), *values) for at_s, *values in found]


def from_record(view: SeriesView) -> SeriesView:
    """Without the steps before the first of which there is a record. view: with PULSE."""
    pulse = view.series.get(PULSE)
    known = [] if pulse is None else [index for index, value in enumerate(pulse.last) if value is not None]
    begin = known[0] if known else len(view.times)
    series = {
        name: Column(
            last=column.last[begin:], low=None if column.low is None else column.low[begin:],
            high=None if column.high is None else column.high[begin:],
        )
        for name, column in view.series.items()
    }  # fmt: skip
    return msgspec.structs.replace(view, times=view.times[begin:], series=series)


def _begins(times: Iterable[float], every_s: float, zone: Zone) -> list[float]:
    """For each, when its row begins. Where clocks change, a row that is wider than an hour is longer or shorter."""
    begun: dict[float, float] = {}
    found = []
    for at_s in times:
        offset_s = zone(at_s)
        local_s = (at_s + offset_s) // every_s * every_s
        row = local_s if every_s > HOUR_S else local_s - offset_s
        if row not in begun:
            begun[row] = _at(local_s, at_s, zone)
        found.append(begun[row])
    return found


def _at(local_s: float, near_s: float, zone: Zone) -> float:
    """The Unix time at which clocks read local_s; near_s where they leapt over it."""
    near = zone(near_s)
    for offset_s in (near, zone(local_s - near)):
        if zone(local_s - offset_s) == offset_s:
            return local_s - offset_s
    return near_s


def _past(found: Sequence[Step], begins: Sequence[float], down: Sequence[Gap], step_s: float) -> Past:
    grouped: dict[float, list[Step]] = {}
    for one, begin in zip(found, begins, strict=True):
        grouped.setdefault(begin, []).append(one)
    whole = _row(0.0, found, down, step_s)
    return Past(
        whole.last, whole.low, whole.high, whole.mean,
        next((one.at_s for one in reversed(found) if one.last is not None), None),
        _when(found, whole.low, "low"), _when(found, whole.high, "high"),
        tuple(_row(at_s, group, down, step_s) for at_s, group in grouped.items()),
    )  # fmt: skip


def _row(at_s: float, group: Sequence[Step], down: Sequence[Gap], step_s: float) -> Row:
    lasts = [one.last for one in group if one.last is not None]
    lows, highs = ([value for one in group if (value := getattr(one, side)) is not None] for side in ("low", "high"))
    return Row(
        at_s=at_s, last=lasts[-1] if lasts else None, low=min(lows, default=None), high=max(highs, default=None),
        mean=math.fsum(lasts) / len(lasts) if lasts else None,
        down_s=step_s * sum(any(gap.from_s <= one.at_s < gap.until_s for gap in down) for one in group),
    )  # fmt: skip


def _when(found: Sequence[Step], value: float | None, side: str) -> float | None:
    return None if value is None else next(one.at_s for one in found if getattr(one, side) == value)


def _joined(silent: Iterable[float], step_s: float) -> list[Gap]:
    """Steps next to each other as one gap; the short ones are left out."""
    gaps: list[Gap] = []
    for at_s in silent:
        if gaps and gaps[-1].until_s == at_s:
            gaps[-1] = Gap(gaps[-1].from_s, at_s + step_s)
        else:
            gaps.append(Gap(at_s, at_s + step_s))
    return [gap for gap in gaps if gap.until_s - gap.from_s >= MIN_GAP_S]
