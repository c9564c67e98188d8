"""What the first-principles model leaves, as a log-linear correction in few physical quantities, heavily shrunk.

Intercepts for an engine's support of a model and of a GPU generation's kernels; slopes in clients, GPUs, prompt over
output and context. No term belongs to one type of GPU, so that each can be left out.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from controlplane.validation.silicon_fit import Array, shrunk
from controlplane.validation.silicon_table import SIZES, Table

INTERCEPT, KERNELS, SLOPE, SLOPE_OF_SERVICE, SLOPE_OF_MODEL = 0.1, 0.08, 0.05, 0.04, 0.03
"""Standard deviations of the correction's parts for `scale` 1."""


def correction(columns: Table, left: Array, weights: Array, noise: float, scale: float = 1.0) -> Array:
    """The correction of every row's logarithm, learned from `left` (observed less predicted) by `weights`."""
    features, deviations = _features(columns)
    return np.asarray(features @ shrunk(features, scale * deviations, left, weights, noise))


def _features(columns: Table) -> tuple[Array, Array]:
    parts: list[tuple[Array, float]] = []
    levels = columns.levels
    service, sizes = levels["service"], SIZES["service"]
    drafting, split = columns["draft"] > 0, columns["dp"] > 0
    kernels = (service * SIZES["precision"] + levels["precision"]) * SIZES["generation"] + levels["generation"]
    parts.append((_indicators(levels["served"], SIZES["served"]), INTERCEPT))
    parts.append((_indicators(2 * service + drafting, 2 * sizes), KERNELS))
    parts.append((_indicators(2 * service + split, 2 * sizes), KERNELS))
    parts.append((_indicators(kernels, sizes * SIZES["precision"] * SIZES["generation"]), KERNELS))
    clients, gpus, balance, context = _quantities(columns)
    for quantity in (clients, gpus, balance, context):
        of_model = _indicators(levels["model"], SIZES["model"]) * quantity[:, None]
        parts.append((of_model, SLOPE_OF_MODEL))
    crossed = (clients * gpus, clients * balance, clients * clients, clients * context, gpus * balance)
    for quantity in (clients, gpus, balance, context, *crossed):
        parts.append((quantity[:, None], SLOPE))
        parts.append((_indicators(service, sizes) * quantity[:, None], SLOPE_OF_SERVICE))
    deviations = np.concatenate([np.full(part.shape[1], deviation) for part, deviation in parts])
    return np.hstack([part for part, _ in parts]), deviations


def _quantities(columns: Table) -> tuple[Array, Array, Array, Array]:
    """Logarithms of clients of an engine, its GPUs, prompt over output, and context, about zero and one wide."""
    clients = (np.log(columns["clients"] / columns["engines"]) - 3.5) / 1.5
    balance = np.log(columns["isl"] / columns["osl"]) / 1.5
    context = np.log(columns["isl"] + 0.5 * columns["osl"]) - 8.0
    return clients, np.log(columns["gpus"]) - 1.2, balance, context


def _indicators(index: NDArray[np.int64], size: int) -> Array:
    """One column for each value that occurs."""
    all_ = np.eye(size)[index]
    return np.asarray(all_[:, all_.any(axis=0)])
