"""The section of the validation on measured rows of serving engines: median errors with each type of GPU left out."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from controlplane.validation.rows import MeasuredRow
from controlplane.validation.section import Cell, Section, percent
from controlplane.validation.silicon_fit import Array
from controlplane.validation.silicon_profile import fitted_profile
from controlplane.validation.silicon_study import Study, study

__all__ = ["fitted_profile", "report"]

FILE = "silicon/measured.csv"
TITLE = "TPOT and TTFT of served models"
TPOT_BAR, TTFT_BAR = 0.12, 0.30
PEER = {("tpot", "aggregated"): 0.129, ("tpot", "disaggregated"): 0.103, ("ttft", "aggregated"): 0.448,
        ("ttft", "disaggregated"): 0.805}  # fmt: skip
"""Median errors of NVIDIA's AIConfigurator on these rows, with no type of GPU left out."""
Mask = NDArray[np.bool_]
HEADER = (
    "rows", "number", "TPOT left out", "p90", "first principles alone", "TPOT seen", "TTFT left out", "p90",
    "TTFT seen",
)  # fmt: skip


def report(data_dir: Path) -> Section:
    """Fits and compares; about half a minute on one core. Raises InvalidValue for rows that cannot be read."""
    return section(study(data_dir / FILE))


def section(found: Study) -> Section:
    """The section about a study."""
    modes = dict(_groups(found, _mode))
    medians = {
        (what, mode): float(np.median(_errors(found, what, rows)))
        for what in ("tpot", "ttft")
        for mode, rows in modes.items()
    }
    passed = all(
        error <= (TPOT_BAR if what == "tpot" else TTFT_BAR)
        for (what, mode), error in medians.items()
        if (what, mode) != ("ttft", "disaggregated")
    )
    told = "; ".join(
        f"{what.upper()} {mode} {percent(error)} (AIConfigurator {percent(PEER[what, mode])}, none left out)"
        for (what, mode), error in medians.items()
    )
    uncertain = sum(not one.certain for one in found.columns.deployments)
    return Section(
        title=TITLE,
        verdict=f"Median errors on types of GPU left out of the fit: {told}.",
        table=(HEADER, *_table(found, modes)),
        notes=_notes(uncertain, len(found.columns)),
        passed=passed,
        figures=tuple(_figures(found, modes, medians)),
    )


def _table(found: Study, modes: dict[str, Mask]) -> Iterable[tuple[str, ...]]:
    kinds: tuple[Callable[[MeasuredRow], str], ...] = (
        lambda row: row.gpu,
        lambda row: row.backend,
        lambda row: row.model,
    )
    for mode, chosen in modes.items():
        yield _line(found, f"**{mode}**", chosen)
        for kind in kinds:
            for name, rows in _groups(found, kind):
                if (chosen & rows).any():
                    yield _line(found, f"{mode}, {name}", chosen & rows)


def _groups(found: Study, kind: Callable[[MeasuredRow], str]) -> list[tuple[str, Mask]]:
    """The rows of each kind, by name."""
    names = np.array([kind(row) for row in found.columns.rows])
    return [(str(name), names == name) for name in sorted(set(names))]


def _line(found: Study, title: str, rows: Mask) -> tuple[str, ...]:
    left, first = _errors(found, "tpot", rows), _errors(found, "ttft", rows)
    columns = found.columns
    plain = _relative(found.left_out.plain_tpot_s, columns["tpot_s"], rows)
    seen = _relative(found.seen.tpot_s, columns["tpot_s"], rows)
    seen_first = _relative(found.seen.ttft_s, columns["ttft_s"], rows)
    return (
        title, str(int(rows.sum())), percent(float(np.median(left))), percent(float(np.quantile(left, 0.9)), 0),
        percent(float(np.median(plain))), percent(float(np.median(seen))), percent(float(np.median(first))),
        percent(float(np.quantile(first, 0.9)), 0), percent(float(np.median(seen_first))),
    )  # fmt: skip


def _figures(found: Study, modes: dict[str, Mask], medians: dict[tuple[str, str], float]) -> Iterable[tuple[str, Cell]]:
    for (what, mode), error in medians.items():
        yield f"{what}_{mode}_left_out", error
        yield f"{what}_{mode}_left_out_p90", float(np.quantile(_errors(found, what, modes[mode]), 0.9))
        measured = found.columns[f"{what}_s"]
        seen = found.seen.tpot_s if what == "tpot" else found.seen.ttft_s
        plain = found.left_out.plain_tpot_s if what == "tpot" else found.left_out.plain_ttft_s
        yield f"{what}_{mode}_seen", float(np.median(_relative(seen, measured, modes[mode])))
        yield f"{what}_{mode}_left_out_first_principles", float(np.median(_relative(plain, measured, modes[mode])))


def _errors(found: Study, what: str, rows: Mask) -> Array:
    predicted = found.left_out.tpot_s if what == "tpot" else found.left_out.ttft_s
    return _relative(predicted, found.columns[f"{what}_s"], rows)


def _relative(predicted: Array, measured: Array, rows: Mask) -> Array:
    return np.asarray(np.abs(predicted[rows] / measured[rows] - 1.0))


def _mode(row: MeasuredRow) -> str:
    return "disaggregated" if row.disaggregated else "aggregated"


def _notes(uncertain: int, total: int) -> tuple[str, ...]:
    return (
        "Left out: for each type of GPU, all coefficients are fitted to the rows of the other types; the GPU enters by "
        "public figures (product rates by width, memory, bandwidth, links) and its generation, Hopper or Blackwell.",
        "Model: dense and expert weights (those experts that the batch touches) read or multiplied, whichever takes "
        "longer; attention the same; collectives; constants a layer; and, in aggregated engines, prompts that share "
        "steps with decoding at the closed loop's steady rate (clients x prompt / output tokens a step). Efficiencies "
        "by engine and number format are shrunk towards common ones; a shrunk log-linear correction follows.",
        "TTFT includes queueing, as measured: closed loop of clients between a prefill station and decoding (mean "
        "value analysis), a fitted share of a burst of all clients, since lengths are nearly equal and clients start "
        "together, and the wait for KV where it does not fit for all. The correction is for aggregated rows only.",
        f"Rows do not tell speculative decoding and most disaggregated deployments; both come from the public recipes "
        f"of the sweep (InferenceX). For {uncertain} of {total} rows recipes with and without it fit equally; they "
        f"are taken to be without, and hardly count in fits, but in full in the errors.",
        "The form of the model and how much it is shrunk were chosen on these rows, too; other reasonable choices gave "
        "medians of TPOT between 11 % and 14 %. The file repeats some measurements; every row counts.",
    )
