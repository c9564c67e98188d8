"""How likely a prediction keeps a limit: normal around its figure, as wide as its profile's error."""

from __future__ import annotations

from math import erf

from controlplane.core.instance import Instance

DEFAULT_ERROR = 0.10
"""Relative error of a profile whose error nobody measured."""
BAR = 1.645
"""Standard deviations of an error bar: with 95 % the truth is not better than its better end."""
FLOOR_S = 0.002
"""Scheduling jitter: no prediction is better than this."""
SQRT2 = 2.0**0.5


def within(limit: float, predicted: float, error: float) -> float:
    """Probability that what is predicted, with this standard deviation, turns out within limit."""
    if error <= 0.0:
        return 1.0 if predicted <= limit else 0.0
    z = (limit - predicted) / error
    if z > 4.0:
        return 1.0
    return 0.5 + 0.5 * erf(z / SQRT2) if z > -4.0 else 0.0


def relative_error(one: Instance) -> float:
    """Of predictions about this instance."""
    latency = one.latency
    return DEFAULT_ERROR if latency is None or latency.error is None else max(0.01, latency.error)
