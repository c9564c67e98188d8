"""Fits named coefficients with shared values and shrunk deviations per level, and a shrunk correction of what is left.

Gauss-Newton on logarithms with heavy-tailed weights; coefficients of one call never see rows with weight zero.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Levels = Mapping[str, NDArray[np.int64]]
Model = Callable[[Mapping[str, Array]], Array]
"""Logarithm of the prediction of each row, for the logarithm of each coefficient in each row."""
STEP = 1e-4
STUCK = 1e4
TAIL = 4.0 / 3.0
"""Residual, in multiples of the noise, from which a row loses weight, as under a Cauchy distribution."""


@dataclass(frozen=True, slots=True)
class Coefficient:
    """exp(value) is the coefficient; value = log(guess) + shared + one deviation for each of `levels`.

    shared and deviation are the standard deviations they are shrunk with.
    """

    name: str
    guess: float
    shared: float
    deviation: float = 0.0
    levels: tuple[str, ...] = ("backend",)


@dataclass(frozen=True, slots=True)
class Fitted:
    """Values of the coefficients' parts: by name the shared one, and by (name, level) one for each of the level."""

    shared: Mapping[str, float]
    deviations: Mapping[tuple[str, str], tuple[float, ...]]

    def rows(self, levels: Levels) -> dict[str, Array]:
        """The logarithm of every coefficient in every row."""
        size = len(next(iter(levels.values())))
        values = {name: np.full(size, value) for name, value in self.shared.items()}
        for (name, level), parts in self.deviations.items():
            values[name] = values[name] + np.array(parts)[levels[level]]
        return values

    def at(self, name: str, **levels: int) -> float:
        """The coefficient itself at these levels; levels left out count as average."""
        value = self.shared[name]
        for (owner, level), parts in self.deviations.items():
            if owner == name and level in levels:
                value += parts[levels[level]]
        return float(np.exp(value))


def solve(
    model: Model, coefficients: Sequence[Coefficient], levels: Levels, sizes: Mapping[str, int], observed: Array,
    weights: Array, noise: float, rounds: int = 20,
) -> Fitted:  # fmt: skip
    """The coefficients under which `model` comes closest to `observed` (logarithms), rows weighted by `weights`.

    noise: the error expected of a row that the model describes.
    """
    used = weights > 0
    design, scale, columns = _design(coefficients, levels, sizes)
    at: Array = np.zeros(len(scale))
    residual: Array = observed - model(_values(coefficients, design, columns, at))
    damping = 1e-2
    for _ in range(rounds):
        trust = _trust(residual, weights, noise)
        slopes = _slopes(model, coefficients, design, columns, at, observed - residual)
        left = slopes[used] * trust[used, None]
        normal = left.T @ slopes[used] / noise**2 + np.diag(1.0 / scale**2)
        pull = left.T @ residual[used] / noise**2 - at / scale**2
        cost = _cost(residual, weights, at, scale, noise)
        while True:
            step = np.linalg.solve(normal + damping * np.diag(np.diag(normal)), pull)
            moved: Array = np.asarray(at + np.clip(step, -1.0, 1.0))
            tried = observed - model(_values(coefficients, design, columns, moved))
            if damping > STUCK or _cost(tried, weights, moved, scale, noise) <= cost:
                break
            damping *= 5.0
        small = float(np.max(np.abs(moved - at))) < 1e-3
        at, residual = moved, np.asarray(tried)
        damping = max(damping / 5.0, 1e-6)
        if small:
            break
    return _fitted(coefficients, columns, sizes, at)


def shrunk(features: Array, scale: Array, left: Array, weights: Array, spread: float, rounds: int = 6) -> Array:
    """Ridge regression of `left` on `features`, robust: one value a feature, shrunk with standard deviation `scale`."""
    trust = weights.copy()
    found: Array = np.zeros(features.shape[1])
    for _ in range(rounds):
        pulled = features * trust[:, None]
        normal = pulled.T @ features / spread**2 + np.diag(1.0 / scale**2)
        found = np.asarray(np.linalg.solve(normal, pulled.T @ left / spread**2), dtype=np.float64)
        trust = weights / np.maximum(1.0, np.abs(left - features @ found) / spread)
    return np.asarray(found)


def _design(
    coefficients: Sequence[Coefficient], levels: Levels, sizes: Mapping[str, int]
) -> tuple[Array, Array, dict[str, slice]]:
    """Indicator columns (rows x parts), the standard deviation of each part, and where each coefficient's are."""
    blocks: list[Array] = []
    scale: list[float] = []
    columns: dict[str, slice] = {}
    for one in coefficients:
        start = len(scale)
        size = len(next(iter(levels.values())))
        blocks.append(np.ones((size, 1)))
        scale.append(one.shared)
        for level in one.levels if one.deviation else ():
            blocks.append(np.eye(sizes[level])[levels[level]])
            scale += [one.deviation] * sizes[level]
        columns[one.name] = slice(start, len(scale))
    return np.hstack(blocks), np.array(scale), columns


def _values(
    coefficients: Sequence[Coefficient], design: Array, columns: Mapping[str, slice], at: Array
) -> dict[str, Array]:
    return {one.name: np.log(one.guess) + design[:, columns[one.name]] @ at[columns[one.name]] for one in coefficients}


def _slopes(
    model: Model, coefficients: Sequence[Coefficient], design: Array, columns: Mapping[str, slice], at: Array,
    predicted: Array,
) -> Array:  # fmt: skip
    """Derivatives of the prediction by every part: that by the coefficient, in the rows the part is for."""
    values = _values(coefficients, design, columns, at)
    slopes = np.empty_like(design)
    for one in coefficients:
        moved = values | {one.name: values[one.name] + STEP}
        slope = (model(moved) - predicted) / STEP
        slopes[:, columns[one.name]] = design[:, columns[one.name]] * slope[:, None]
    return slopes


def _trust(residual: Array, weights: Array, noise: float) -> Array:
    return weights / (1.0 + (residual / (TAIL * noise)) ** 2)


def _cost(residual: Array, weights: Array, at: Array, scale: Array, noise: float) -> float:
    data = weights * TAIL**2 * np.log1p((residual / (TAIL * noise)) ** 2)
    return float(np.sum(data) + np.sum((at / scale) ** 2))


def _fitted(
    coefficients: Sequence[Coefficient], columns: Mapping[str, slice], sizes: Mapping[str, int], at: Array
) -> Fitted:
    shared: dict[str, float] = {}
    deviations: dict[tuple[str, str], tuple[float, ...]] = {}
    for one in coefficients:
        parts = at[columns[one.name]]
        shared[one.name] = float(np.log(one.guess) + parts[0])
        start = 1
        for level in one.levels if one.deviation else ():
            deviations[one.name, level] = tuple(float(part) for part in parts[start : start + sizes[level]])
            start += sizes[level]
    return Fitted(shared, deviations)
