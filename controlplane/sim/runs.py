"""A run of equal steps of one instance: when each of them ends. Pure arithmetic, no events."""

from __future__ import annotations

import math
from bisect import bisect_right

import numpy as np

from nodes.core.events import StepPlan
from nodes.core.speed import EWMA_WEIGHT, MIN_SPEED, USUAL_WEIGHT, SpeedMeter
from transfer.profile import LatencyProfile

MIN_NOISE = 0.2
NUM_DRAWN = 4096


class Noise:
    """Factors of an instance's step times, by the number of the step: the same however steps are taken together."""

    def __init__(self, deviation: float, seed: tuple[int, ...]) -> None:
        self._deviation = deviation
        self._random = np.random.default_rng(seed)
        self._drawn: list[float] = []
        self._first = 0

    def factors(self, step: int, count: int) -> list[float]:
        """Of steps [step, step + count). Steps before are not asked for again."""
        if step - self._first > NUM_DRAWN:
            del self._drawn[: step - self._first]
            self._first = step
        while self._first + len(self._drawn) < step + count:
            draws = 1.0 + self._deviation * self._random.standard_normal(NUM_DRAWN)
            self._drawn.extend(np.maximum(draws, MIN_NOISE).tolist())
        return self._drawn[step - self._first : step - self._first + count]


class Run:
    """count: steps it is planned to have, of which all but the last are even (BatchCore.even_steps). taken: how many of
    them the core knows of already; measured: whose times are in the instance's own figures.

    Step i of the run takes (first_s + i * slope_s) * factor * noise[i].
    """

    __slots__ = (
        "_ends", "count", "factor", "first_s", "measured", "noise", "num_rows", "plan", "slope_s", "start_s", "taken",
    )  # fmt: skip

    def __init__(self, plan: StepPlan, start_s: float, first_s: float, factor: float, num_rows: int) -> None:
        self.plan, self.start_s, self.first_s, self.factor, self.num_rows = plan, start_s, first_s, factor, num_rows
        self.count, self.slope_s = 1, 0.0
        self.taken = self.measured = 0
        self.noise: list[float] | None = None
        self._ends: list[float] | None = None

    def stretch(self, count: int, slope_s: float, noise: list[float] | None) -> None:
        """Plan it `count` steps long."""
        self.count, self.slope_s, self.noise = count, slope_s, noise
        if noise is not None:
            ends: list[float] = []
            end = self.start_s
            for step, factor in enumerate(noise):
                end += (self.first_s + step * slope_s) * self.factor * factor
                ends.append(end)
            self._ends = ends

    def duration_s(self, step: int) -> float:
        noise = 1.0 if self.noise is None else self.noise[step]
        return (self.first_s + step * self.slope_s) * self.factor * noise

    def end_s(self, count: int) -> float:
        """When the first `count` steps have ended."""
        if self._ends is not None:
            return self._ends[count - 1] if count else self.start_s
        if count == 1:
            return self.start_s + self.first_s * self.factor
        return self.start_s + self.factor * (count * self.first_s + self.slope_s * (count * (count - 1) / 2))

    def num_ended(self, now: float) -> int:
        """Steps that have ended by `now`, the last one left out: its end is an event of its own."""
        most = self.count - 1
        if most <= 0 or now < self.end_s(1):
            return 0
        if self._ends is not None:
            return min(most, bisect_right(self._ends, now))
        passed_s, slope_s, first_s = (now - self.start_s) / self.factor, self.slope_s, self.first_s
        if slope_s <= 1e-9 * first_s:
            guess = int(passed_s / first_s)
        else:
            linear = first_s - slope_s / 2
            guess = int((math.sqrt(linear * linear + 2 * slope_s * passed_s) - linear) / slope_s)
        guess = min(most, guess)
        while guess < most and self.end_s(guess + 1) <= now:
            guess += 1
        while guess > 0 and self.end_s(guess) > now:
            guess -= 1
        return guess

    def longest_s(self, first: int, last: int) -> float:
        """The longest step of [first, last)."""
        if self.noise is None:
            return max(self.duration_s(first), self.duration_s(last - 1))
        return max(self.duration_s(step) for step in range(first, last))


def slope_of(latency: LatencyProfile, rows: int, context: int, first_s: float, count: int) -> float | None:
    """Seconds that each step of `rows` decodes takes longer than the one before, the first of which takes first_s; None
    when that is not the same over the next `count` steps."""
    middle, last = count // 2, count - 1
    last_s = latency.step_s(rows, context + last * rows, rows)
    slope_s = (last_s - first_s) / last
    if middle not in (0, last):
        middle_s = latency.step_s(rows, context + middle * rows, rows)
        if abs(first_s + middle * slope_s - middle_s) > 1e-12 * last_s:
            return None
    return slope_s


class Measured(SpeedMeter):
    """The meter of the real instances, which takes the steps of a run together."""

    def take(self, run: Run, upto: int, waited_s: float = 0.0) -> None:
        """Steps [run.measured, upto) have ended. waited_s: how long a run of one step stood still, waiting for KV."""
        first = step = run.measured
        run.measured = upto
        while step < upto and not (run.noise is None and self._is_settled(run.factor, step > first)):
            predicted_s, duration_s = run.first_s + step * run.slope_s, run.duration_s(step)
            step += 1
            self.measured(duration_s, predicted_s, run.end_s(step) + waited_s)
        if step < upto:
            self._measured_evenly(run, step, upto)

    def _is_settled(self, factor: float, goes_on: bool) -> bool:
        """Whether weights no longer change, and nothing fades or is odd, where steps take `factor` times as long as
        predicted. goes_on: the step measured last had this factor, too, and the next one follows at once."""
        if not self.step_s:
            return False
        if self._speed == self._usual == factor == 1.0:
            return True  # whatever the weights
        return goes_on and not self._num_odd and self._num_steps * USUAL_WEIGHT >= 1.0

    def _measured_evenly(self, run: Run, first: int, last: int) -> None:
        """As `measured` for each of the steps [first, last), once settled."""
        count, kept = last - first, 1.0 - EWMA_WEIGHT
        faded = kept**count
        # sum of kept**(count - 1 - i) * (d + i slope), times the weight
        ramp = (count - 1) * (1 - faded) - kept * (1 - count * kept ** (count - 1) + (count - 1) * faded) / EWMA_WEIGHT
        self.step_s = faded * self.step_s + (1 - faded) * run.duration_s(first) + ramp * run.slope_s * run.factor
        self._num_steps += count
        self._num_odd = 0
        self._measured_at = run.end_s(last)
        ratio = max(MIN_SPEED, run.factor)
        self._speed = ratio + (self._speed - ratio) * faded
        self._usual = ratio + (self._usual - ratio) * (1.0 - USUAL_WEIGHT) ** count
