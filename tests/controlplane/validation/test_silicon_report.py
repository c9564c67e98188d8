"""The section on the public measured rows, as far as they are here."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest

from controlplane.validation.rows import read_rows
from controlplane.validation.silicon import FILE, section
from controlplane.validation.silicon_profile import coefficients, of_study
from controlplane.validation.silicon_study import Study, read_table, study

DATA = Path(__file__).parents[4] / "shared" / "data"
pytestmark = pytest.mark.skipif(not (DATA / FILE).is_file(), reason=f"needs {FILE} in the shared data")


@pytest.fixture(scope="module")
def found() -> Study:
    return study(DATA / FILE)


def test_reads_every_row() -> None:
    columns = read_table(read_rows(DATA / FILE))
    assert len(columns) == 3736
    assert sum(row.disaggregated for row in columns.rows) == 1121
    assert all(np.isfinite(values).all() for values in columns.columns.values())
    assert sum(not one.certain for one in columns.deployments) < 400


@pytest.mark.slow
def test_medians_of_types_of_gpu_left_out(found: Study) -> None:
    told = section(found)
    figures = dict(told.figures)
    assert told.passed
    assert float(figures["tpot_aggregated_left_out"] or 1) < 0.12
    assert float(figures["tpot_disaggregated_left_out"] or 1) < 0.12
    assert float(figures["ttft_aggregated_left_out"] or 1) < 0.30
    assert float(figures["ttft_disaggregated_left_out"] or 1) < 0.50


@pytest.mark.slow
def test_the_stored_coefficients_are_those_of_the_fit(found: Study) -> None:
    fresh, stored = (msgspec.to_builtins(one) for one in (of_study(found), coefficients()))
    assert fresh["errors"] == pytest.approx(stored["errors"], abs=0.01)
    for name, parts in fresh["deviations"].items():
        assert parts == pytest.approx(stored["deviations"][name], abs=0.05)
