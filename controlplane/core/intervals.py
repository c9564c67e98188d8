"""How far a forecast may be off: by chance in what was recorded, and by the model's own error.

Knows nothing of fleets; forecast.py says what is uncertain, moves.py what follows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

Z80 = 1.2816
"""Half-width of an 80 % interval of the normal distribution, in standard deviations."""
Scenario = Callable[[float, float], float]
Trust = Callable[[float], float]
"""Relative error of the model, given the one that its profiles declare: what came of earlier moves corrects it."""


class Noise(NamedTuple):
    """Relative standard deviations: of the recorded work of each phase, by chance, and of the model."""

    prefill: float
    decode: float
    model: float


def trusted(noise: Noise, trust: Trust | None) -> Noise:
    """The same chance, and the error that the model turned out to have."""
    return noise if trust is None else noise._replace(model=trust(noise.model))


def off(chance: float, noise: Noise, z: float) -> float:
    """How much more work a phase may have than was seen, as a share: by chance (z) and by the model (always Z80)."""
    return math.hypot(z * chance, Z80 * noise.model)


def spread(value: Scenario, noise: Noise, z: float) -> tuple[float, float]:
    """How far below and above its middle `value(prefill factor, decode factor)` may lie. Each phase's work is taken as
    much too small and too large as `off` allows; what comes of it adds up in square."""
    middle = value(1.0, 1.0)
    below = above = 0.0
    for place, chance in enumerate((noise.prefill, noise.decode)):
        most = 1.0 + off(chance, noise, z)
        for factor in (1.0 / most, most):
            moved = value(factor, 1.0) if place == 0 else value(1.0, factor)
            below = math.hypot(below, max(0.0, middle - moved))
            above = math.hypot(above, max(0.0, moved - middle))
    return below, above
