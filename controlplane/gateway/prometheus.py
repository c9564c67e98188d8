"""The Prometheus text format: counters, gauges and histograms written by hand. Collects nothing by itself."""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence

Labels = Mapping[str, str]
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Histogram:
    """Counts by upper bounds, ascending; +Inf is implied. One for each set of labels."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(sorted(set(bounds)))
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        self._counts[bisect.bisect_left(self._bounds, value)] += count
        self._sum += value * count

    def lines(self, name: str, labels: Labels) -> Iterable[str]:
        total = 0
        for bound, count in zip((*self._bounds, math.inf), self._counts, strict=True):
            total += count
            yield sample(f"{name}_bucket", {**labels, "le": number(bound)}, total)
        yield sample(f"{name}_sum", labels, self._sum)
        yield sample(f"{name}_count", labels, total)


class Text:
    """One scrape: families in the order they are added. help_of: what a name means, in one line."""

    def __init__(self, help_of: Callable[[str], str]) -> None:
        self._lines: list[str] = []
        self._help_of = help_of

    def family(self, name: str, kind: str, samples: Iterable[tuple[Labels, float]]) -> None:
        """A counter or gauge; a family without samples is left out."""
        lines = [sample(name, labels, value) for labels, value in samples]
        if lines:
            self._head(name, kind)
            self._lines += lines

    def histograms(self, name: str, histograms: Iterable[tuple[Labels, Histogram]]) -> None:
        self._head(name, "histogram")
        for labels, histogram in histograms:
            self._lines += histogram.lines(name, labels)

    def encode(self) -> bytes:
        return ("\n".join(self._lines) + "\n").encode()

    def _head(self, name: str, kind: str) -> None:
        self._lines += [f"# HELP {name} {self._help_of(name)}", f"# TYPE {name} {kind}"]


def sample(name: str, labels: Labels, value: float) -> str:
    """One line."""
    inner = ",".join(f'{key}="{_escape(text)}"' for key, text in labels.items())
    return f"{name}{{{inner}}} {number(value)}" if inner else f"{name} {number(value)}"


def number(value: float) -> str:
    """As Prometheus reads it: integers without a point, +Inf, NaN."""
    if isinstance(value, float):
        if math.isinf(value):
            return "+Inf" if value > 0 else "-Inf"
        if math.isnan(value):
            return "NaN"
        if value.is_integer() and abs(value) < 1e15:
            return str(int(value))
    return repr(value)


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')
