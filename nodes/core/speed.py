"""How fast an instance is: what its steps took of late, and how that compares with what its profile says."""

from __future__ import annotations

EWMA_WEIGHT = 0.1
MIN_SPEED = 1e-3
MAX_JUMP = 5.0
"""A step this many times slower or faster than expected says nothing of the next ones (the process stood still, a page
was missing), unless it happens ODD_RUN times in a row."""
ODD_RUN = 5
SPEED_HALF_LIFE_S = 10.0
"""Of a correction nobody renews: an instance that was slow once must not stay without work for it."""
USUAL_WEIGHT = 0.02
"""Of a step in what is usual. Who is usually faster than its profile says stays so: were it taken for slow again after
a rest, nobody would give it the work that shows otherwise."""


class SpeedMeter:
    """step_s: exponentially weighted mean, seconds; 0.0 before the first step."""

    def __init__(self) -> None:
        self.step_s = 0.0
        self._speed = self._usual = 1.0
        self._measured_at = 0.0
        self._num_steps = self._num_odd = 0

    def speed(self, now: float) -> float:
        """Measured / predicted step time, exponentially weighted; while no step is run it fades to what is usual, and
        to 1.0 at most."""
        idle_s = max(0.0, now - self._measured_at)
        rest = min(1.0, self._usual)
        return float(rest + (self._speed - rest) * 0.5 ** (idle_s / SPEED_HALF_LIFE_S))

    def restart(self) -> None:
        """What the other phase's steps took says nothing about this one's."""
        self.step_s, self._speed, self._usual = 0.0, 1.0, 1.0
        self._num_steps = self._num_odd = 0

    def measured(self, measured_s: float, predicted_s: float, now: float) -> None:
        """A step has ended. predicted_s: by the profile; 0.0 says nothing of the speed."""
        weight = EWMA_WEIGHT if self.step_s else 1.0
        self.step_s += weight * (measured_s - self.step_s)
        if predicted_s > 0.0:
            before = self.speed(now - measured_s)
            odd = not before / MAX_JUMP <= measured_s / predicted_s <= before * MAX_JUMP
            self._num_odd = self._num_odd + 1 if odd else 0
            if odd and self._num_odd < ODD_RUN:
                return
            self._measured_at = now
            self._num_steps += 1
            first = 1.0 / (1.0 + self._num_steps)  # the profile counts as one step, until there are enough
            ratio = max(MIN_SPEED, measured_s / predicted_s)
            self._speed = before + max(EWMA_WEIGHT, first) * (ratio - before)
            self._usual += max(USUAL_WEIGHT, first) * (ratio - self._usual)
