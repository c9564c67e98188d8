"""The past in memory: named series, every second of the last hour and every ten seconds of the last day.

Bounded: BYTES_A_SERIES for each of at most MAX_SERIES names, taken as time passes. Knows no clock: times are arguments.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from transfer.screens import Column
from transfer.terms import Struct

FINE_SLOTS = 3600
"""Of a second each."""
COARSE_S = 10
COARSE_SLOTS = 24 * 3600 // COARSE_S
BYTES_A_SERIES = 4 * (FINE_SLOTS + 3 * COARSE_SLOTS)
"""118,080: single-precision numbers, the coarse ones with their smallest and largest value."""
MAX_SERIES = 768
"""Together 91 MB at most; a fleet of 64 instances has about 410 series."""
MAX_POINTS = 1500
"""Steps in one answer; a finer step than that gives is widened."""
SET_BACK_S = 60
"""A clock that is set back by more begins a new past; by less, its seconds are skipped until it has caught up."""
NOT_KEPT = "instance."
"""Series whose names begin so live in memory only: rows on disk stay small."""

NAN = math.nan
Triple = tuple[float, float, float]
"""Last, smallest and largest value."""


class SeriesRow(Struct, frozen=True):
    """COARSE_S seconds from Unix time at_s on, as the history keeps them: (last, smallest, largest) by name."""

    at_s: int
    values: dict[str, Triple]


class Window(NamedTuple):
    """Steps of step_s seconds from first_s to before end_s, read from the seconds or (coarse) from the tens."""

    first_s: int
    end_s: int
    step_s: int
    coarse: bool

    @property
    def times(self) -> range:
        return range(self.first_s, self.end_s, self.step_s)


class SeriesBook:
    """One owner, who calls `put` once a second with everything that is known."""

    def __init__(self) -> None:
        self._series: dict[str, _Series] = {}
        self._newest: int | None = None
        self._loaded_until: int | None = None
        """Where what an earlier life has kept ends: of it there are no seconds."""
        self._full: int | None = None
        """The second in which there was no room for another one."""

    def put(self, at_s: float, values: Mapping[str, float | None]) -> SeriesRow | None:
        """The values of this second (Unix time); those of a second that was told already are dropped.

        Returns the ten seconds that this completes, if it does.
        """
        second = int(at_s)
        if self._newest is not None and second <= self._newest:
            if second > self._newest - SET_BACK_S:
                return None
            self._series.clear()
            self._newest = self._loaded_until = None
        row = self._close(second)
        self._newest = second
        for name, value in values.items():
            if value is not None and (series := self._open(name)) is not None:
                series.put(second, value)
        return row

    def load(self, rows: Iterable[SeriesRow]) -> None:
        """What an earlier life has kept, the oldest first; to be called before the first `put`."""
        for row in rows:
            self._loaded_until = row.at_s + COARSE_S
            for name, values in row.values.items():
                if (series := self._open(name)) is not None:
                    series.store(row.at_s // COARSE_S, values)

    def window(self, since_s: float, until_s: float, step_s: float) -> Window:
        """The steps that answer a question. The hour of seconds is read while it, and this life, reach back far enough
        and the step asks for it; a step is widened until MAX_POINTS are enough."""
        newest = self._newest if self._newest is not None else int(until_s)
        end = min(int(until_s), newest) + 1
        since = min(max(int(since_s), end - COARSE_S * COARSE_SLOTS), end)
        of_before = self._loaded_until is not None and since < self._loaded_until
        coarse = step_s >= COARSE_S or since <= newest - FINE_SLOTS or of_before
        width = COARSE_S if coarse else 1
        wanted = max(math.ceil(min(step_s, 1e6)), math.ceil((end - since) / MAX_POINTS), 1)
        step = math.ceil(wanted / width) * width
        return Window(since // step * step, end, step, coarse)

    def column(self, name: str, window: Window) -> Column | None:
        """One series over a window; None when there is no such series."""
        series = self._series.get(name)
        return None if series is None else series.column(window)

    def names(self, patterns: Sequence[str] = ()) -> list[str]:
        """Those there are, in order of name; a pattern is a name, or the beginning of names and a star."""
        if not patterns:
            return sorted(self._series)
        found: dict[str, None] = {}
        for pattern in patterns:
            if pattern.endswith("*"):
                found.update(dict.fromkeys(name for name in sorted(self._series) if name.startswith(pattern[:-1])))
            elif pattern in self._series:
                found[pattern] = None
        return list(found)

    def _open(self, name: str) -> _Series | None:
        """The series, a new one if need be; None when there are too many that are still told."""
        series = self._series.get(name)
        if series is None:
            if len(self._series) >= MAX_SERIES and not self._forget_one():
                return None
            series = self._series[name] = _Series()
        return series

    def _forget_one(self) -> bool:
        """Make room: the series longest silent goes, of an instance that left, for example."""
        if self._full is not None and self._full == self._newest:
            return False
        name = min(self._series, key=lambda one: self._series[one].newest)
        if self._newest is not None and self._series[name].newest >= self._newest - 1:
            self._full = self._newest
            return False
        del self._series[name]
        return True

    def _close(self, second: int) -> SeriesRow | None:
        """End the ten seconds before those of `second`."""
        if self._newest is None or second // COARSE_S == self._newest // COARSE_S:
            return None
        slot = self._newest // COARSE_S
        kept = {}
        for name, series in self._series.items():
            values = series.close(slot)
            if values is not None and not name.startswith(NOT_KEPT):
                kept[name] = values
        return SeriesRow(at_s=slot * COARSE_S, values=kept) if kept else None


class _Line:
    """Values in consecutive slots, of which the newest `capacity` stay. What was not told is NaN."""

    __slots__ = ("_capacity", "_origin", "_values", "end")

    def __init__(self, capacity: int) -> None:
        self._capacity, self._values = capacity, array("f")
        self._origin = self.end = 0

    def put(self, slot: int, value: float) -> None:
        """Slots must grow; others are dropped."""
        if not self._values or slot - self.end >= self._capacity:
            del self._values[:]
            self._origin = self.end = slot
        for _ in range(slot - self.end):
            self._append(NAN)
        if slot == self.end:
            self._append(value)

    def span(self, first: int, end: int) -> array[float]:
        """The slots from first to before end, NaN where there is nothing."""
        held = range(max(first, self.end - len(self._values)), min(end, self.end))
        if not held:
            return array("f", [NAN]) * max(0, end - first)
        start, stop = ((slot - self._origin) % self._capacity for slot in (held[0], held[-1]))
        values = self._values
        found = values[start : stop + 1] if start <= stop else values[start:] + values[: stop + 1]
        return array("f", [NAN]) * (held[0] - first) + found + array("f", [NAN]) * (end - held[-1] - 1)

    def _append(self, value: float) -> None:
        if len(self._values) < self._capacity:
            self._values.append(value)
        else:
            self._values[(self.end - self._origin) % self._capacity] = value
        self.end += 1


class _Series:
    """The seconds, and of every ten of them the last, smallest and largest value."""

    __slots__ = ("_fine", "_highs", "_lasts", "_lows", "_open", "_slot", "newest")

    def __init__(self) -> None:
        self._fine = _Line(FINE_SLOTS)
        self._lasts, self._lows, self._highs = _Line(COARSE_SLOTS), _Line(COARSE_SLOTS), _Line(COARSE_SLOTS)
        self._open: Triple | None = None
        self._slot = 0
        self.newest = 0

    def put(self, second: int, value: float) -> None:
        self._fine.put(second, value)
        self.newest = second
        _, low, high = self._open or (value, value, value)
        self._open, self._slot = (value, min(low, value), max(high, value)), second // COARSE_S

    def close(self, slot: int) -> Triple | None:
        """The ten seconds of `slot` are over; None when nothing was told in them."""
        values, self._open = self._open, None
        if values is not None:
            self.store(slot, values)
        return values

    def store(self, slot: int, values: Triple) -> None:
        for line, value in zip((self._lasts, self._lows, self._highs), values, strict=True):
            line.put(slot, value)
        self.newest = max(self.newest, slot * COARSE_S)

    def column(self, window: Window) -> Column:
        if not window.coarse:
            lasts = lows = highs = self._fine.span(window.first_s, window.end_s)
            size = window.step_s
        else:
            first, end = window.first_s // COARSE_S, -(-window.end_s // COARSE_S)
            lasts, lows, highs = (line.span(first, end) for line in (self._lasts, self._lows, self._highs))
            size = window.step_s // COARSE_S
            if self._open is not None and first <= self._slot < end:
                lasts[self._slot - first], lows[self._slot - first], highs[self._slot - first] = self._open
        last = tuple(_last(lasts[at : at + size]) for at in range(0, len(lasts), size))
        if window.step_s == 1:
            return Column(last=last)
        return Column(
            last=last, low=tuple(_extreme(min, lows, at, size) for at in range(0, len(lows), size)),
            high=tuple(_extreme(max, highs, at, size) for at in range(0, len(highs), size)),
        )  # fmt: skip


def _last(values: array[float]) -> float | None:
    for value in reversed(values):
        if not math.isnan(value):
            return _short(value)
    return None


def _extreme(pick: Callable[[list[float]], float], values: array[float], at: int, size: int) -> float | None:
    known = [value for value in values[at : at + size] if not math.isnan(value)]
    return _short(pick(known)) if known else None


def _short(value: float) -> float:
    """As many digits as single precision has, so that an answer is not full of those it has not."""
    return float(f"{value:.7g}")
