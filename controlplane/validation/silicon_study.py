"""Predicts measured TPOT and TTFT: with all rows seen, and for each type of GPU with none of its rows seen."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from controlplane.validation import silicon_tpot as tpot
from controlplane.validation import silicon_ttft as ttft
from controlplane.validation.recipes import Recipes
from controlplane.validation.rows import MeasuredRow, read_rows
from controlplane.validation.silicon_correction import correction
from controlplane.validation.silicon_fit import Array, Coefficient, Fitted, Model, solve
from controlplane.validation.silicon_table import GPUS, SIZES, Table, table

UNCERTAIN = 0.1
"""Weight in fits of a row whose speculative decoding cannot be known."""
TPOT_NOISE, TPOT_LEFT = 0.12, 0.15
TTFT_NOISE, TTFT_LEFT, TTFT_SCALE = 0.12, 0.25, 2.0


@dataclass(frozen=True, slots=True)
class Predicted:
    """Seconds of every row; plain_*: by the first-principles model alone."""

    tpot_s: Array
    ttft_s: Array
    plain_tpot_s: Array
    plain_ttft_s: Array


@dataclass(frozen=True, slots=True)
class Study:
    """seen: fitted to all rows. left_out: each row by fits that saw no row of its type of GPU."""

    columns: Table
    seen: Predicted
    left_out: Predicted
    coefficients: Fitted


def study(file: Path) -> Study:
    """Of the measured rows in `file`. Raises InvalidValue for a row that cannot be read."""
    columns = read_table(read_rows(file))
    coefficients, seen = predict(columns, np.ones(len(columns)))
    parts = {name: np.zeros(len(columns)) for name in Predicted.__slots__}
    for gpu in GPUS:
        out = columns.gpu(gpu)
        if not out.any():
            continue
        _, predicted = predict(columns, np.where(out, 0.0, 1.0))
        for name, values in parts.items():
            values[out] = getattr(predicted, name)[out]
    return Study(columns, seen, Predicted(**parts), coefficients)


def read_table(rows: list[MeasuredRow]) -> Table:
    recipes = Recipes.read()
    return table(rows, [recipes.deployment(row) for row in rows])


def predict(columns: Table, use: Array) -> tuple[Fitted, Predicted]:
    """All rows by a fit to the rows with `use` 1; those with 0 count for nothing. Also the coefficients of TPOT."""
    known = np.array([row.concurrency is not None for row in columns.rows])
    weights = np.where(known, np.where(columns["certain"] > 0, 1.0, UNCERTAIN), 0.0) * use
    spent = np.log(columns["tpot_s"])
    fitted, plain = _fit(columns, tpot.COEFFICIENTS, lambda log: np.log(tpot.serve(columns, log).tpot_s), spent,
                         weights, TPOT_NOISE)  # fmt: skip
    log = fitted.rows(columns.levels)
    served = tpot.serve(columns, log)
    corrected = plain + correction(columns, spent - plain, weights, TPOT_LEFT)
    first = np.log(columns["ttft_s"])
    _, plain_first = _fit(columns, ttft.COEFFICIENTS, lambda at: np.log(ttft.ttft_s(columns, served, log, at)), first,
                          weights, TTFT_NOISE)  # fmt: skip
    together = columns["apart"] == 0
    right = correction(columns, first - plain_first, weights * together, TTFT_LEFT, TTFT_SCALE)
    corrected_first = plain_first + np.where(together, right, 0.0)
    return fitted, Predicted(*(np.exp(part) for part in (corrected, corrected_first, plain, plain_first)))


def _fit(
    columns: Table, coefficients: tuple[Coefficient, ...], model: Model, observed: Array, weights: Array,
    noise: float,
) -> tuple[Fitted, Array]:  # fmt: skip
    fitted = solve(model, coefficients, columns.levels, SIZES, observed, weights, noise)
    return fitted, model(fitted.rows(columns.levels))
