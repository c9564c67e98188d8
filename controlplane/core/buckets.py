"""Base-2 exponential buckets of scale 5: mergeable, subtractable percentiles with about 1 % error.

The bucketing of OpenTelemetry's exponential histogram (data model, "ExponentialHistogram"): bucket i holds values in
(base**i, base**(i+1)], base = 2**(2**-5). Values outside 1e-6 .. 1e6 fall into the outermost buckets.
"""

from __future__ import annotations

import math

SCALE = 5
PER_OCTAVE = 1 << SCALE
MIN_INDEX = -20 * PER_OCTAVE
MAX_INDEX = 20 * PER_OCTAVE - 1


class Buckets:
    """A histogram of non-negative values. Bounded: at most MAX_INDEX - MIN_INDEX + 1 buckets and one for zero."""

    __slots__ = ("count", "counts", "total", "zeros")

    def __init__(self) -> None:
        self.count = self.zeros = 0
        self.total = 0.0
        self.counts: dict[int, int] = {}

    def add(self, value: float) -> None:
        """Count one value. Negative ones and NaN are a caller's bug and raise ValueError."""
        if not value >= 0:
            raise ValueError(f"a histogram takes values of at least 0, got {value}")
        self.add_to(bucket_index(value) if value > 0 else None, value)

    def add_to(self, index: int | None, value: float) -> None:
        """The same for a value whose bucket_index is known; None: that of zero."""
        self.count += 1
        self.total += value
        if index is None:
            self.zeros += 1
        else:
            self.counts[index] = self.counts.get(index, 0) + 1

    def merge(self, other: Buckets) -> None:
        """Add what `other` counted."""
        self._combine(other, 1)

    def subtract(self, other: Buckets) -> None:
        """Take away what was added before. Raises ValueError when `other` is not contained in this one."""
        short = any(self.counts.get(index, 0) < count for index, count in other.counts.items())
        if short or other.zeros > self.zeros:
            raise ValueError("cannot subtract a histogram that was never added")
        self._combine(other, -1)

    def copy(self) -> Buckets:
        made = Buckets()
        made.merge(self)
        return made

    def quantile(self, q: float) -> float | None:
        """The value at quantile `q` (0..1), the geometric middle of its bucket; None without values."""
        if self.count == 0:
            return None
        rank = max(1, math.ceil(q * self.count))
        if rank <= self.zeros:
            return 0.0
        seen = self.zeros
        for index in sorted(self.counts):
            seen += self.counts[index]
            if seen >= rank:
                return float(2.0 ** ((index + 0.5) / PER_OCTAVE))
        raise ValueError("the counts of a histogram do not add up")

    def count_le(self, bound: float) -> int:
        """Values at or below `bound`: exact at a bucket boundary, else those of all buckets that end below it."""
        if bound < 0:
            return 0
        last = math.floor(math.log2(bound) * PER_OCTAVE + 1e-9) - 1 if bound > 0 else MIN_INDEX - 1
        return self.zeros + sum(count for index, count in self.counts.items() if index <= last)

    def _combine(self, other: Buckets, sign: int) -> None:
        self.count += sign * other.count
        self.zeros += sign * other.zeros
        self.total += sign * other.total
        for index, count in other.counts.items():
            left = self.counts.get(index, 0) + sign * count
            if left:
                self.counts[index] = left
            else:
                self.counts.pop(index, None)


def bucket_index(value: float) -> int:
    """Index of the bucket that holds a positive value."""
    index = math.ceil(math.log2(value) * PER_OCTAVE) - 1
    return min(MAX_INDEX, max(MIN_INDEX, index))
