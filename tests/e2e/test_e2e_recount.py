"""What the API says of a bench run is what its raw history says: counted again here, from every finished request.

Percentiles are within the 1.1 % of their buckets, stages add up to TTFT, and the past outlives the control plane.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import pytest
from e2e_fleet import Fleet, running

from transfer.api import ClassView, FleetState, Quantiles, RequestRecord
from transfer.screens import SeriesView

CLASSES = """
[classes.default]
ttft_s = 0.5
tpot_s = 0.1
[classes.batch]
"""
BUCKET = 1.011
"""A percentile's error by its buckets (docs/metrics.md)."""
WINDOW_S = 60.0


@pytest.mark.slow
def test_goodput_attainment_and_percentiles_are_those_of_the_raw_history(tmp_path: Path) -> None:
    config = tmp_path / "classes.toml"
    config.write_text(CLASSES)
    shape = ("--engine", "emulated", "--prefill", "2", "--decode", "2", "--hardware", "H20,H20")
    with running(tmp_path, *shape, "--config", str(config)) as fleet:
        fleet.at_rest()
        load = ("--rate", "8", "--duration", "15", "--prompt-tokens", "64-6000", "--output-tokens", "1-60")
        bench = fleet.cli("bench", *load, "--classes", "default:0.7,batch:0.3", "--json")
        assert bench.returncode == 0, bench.stderr
        state = msgspec.convert(fleet.get("/v1/fleet"), FleetState)
        asked_s = time.time()
        records = history(fleet)
        ends = sorted(one.arrived_at + one.e2e_s for one in records)
        assert asked_s - ends[0] < WINDOW_S - 2, "this machine is too slow: the window has lost requests"
        time.sleep(2.0)  # a sample is taken every second
        check_state(state, records)
        check_series(fleet, state, records, asked_s)
        check_stages(records)
        before = series(fleet, "attainment", since_s=ends[0], step_s=10)
        history(fleet)  # its answer waits until what was told before is on disk
        fleet.kill_control()
        time.sleep(1.0)
        fleet.wait_until_ready([one.id for one in state.instances])
        after = series(fleet, "attainment", since_s=ends[0], step_s=10)
        assert set(known(after)) >= set(known(before)[:-1])
        assert len(known(before)) >= 2


def history(fleet: Fleet) -> list[RequestRecord]:
    return [msgspec.convert(one, RequestRecord) for one in fleet.get("/v1/requests?limit=1000")["requests"]]


def check_state(state: FleetState, records: Sequence[RequestRecord]) -> None:
    """GET /v1/fleet: rates, attainment, and every class."""
    span_s = min(WINDOW_S, state.uptime_s)
    good, counted = good_of(records), counted_of(records)
    assert 0 < good < counted, "a run in which some miss and some do not"
    assert state.goodput.per_s == pytest.approx(good / span_s, rel=0.011)
    assert state.goodput.throughput_per_s == pytest.approx(len(records) / span_s, rel=0.011)
    assert state.attainment == state.recent_attainment == good / counted
    assert {row.name for row in state.classes} == {"default", "batch"}
    for row in state.classes:
        check_class(row, [one for one in records if one.traffic_class == row.name])
    for view in state.instances:
        paces = [one.tpot_s for one in records if one.decode == view.id and one.tpot_s is not None]
        assert (view.tpot_p50_s is None) == (not paces)
        if view.tpot_p50_s is not None:
            assert 1 / BUCKET <= view.tpot_p50_s / quantile(paces, 0.5) <= BUCKET, view.id
    missed = [one for one in records if one.good is False]
    for stage, seconds in state.stages_s.items():
        assert seconds == pytest.approx(sum(one.stages_s.get(stage, 0.0) for one in missed), rel=0.011, abs=0.001)


def check_class(row: ClassView, records: Sequence[RequestRecord]) -> None:
    assert (row.good, row.total) == (good_of(records), counted_of(records))
    assert (row.recent_good, row.recent_total) == (row.good, row.total)
    check_quantiles(row.ttft_s, [one.ttft_s for one in records if one.ttft_s is not None])
    check_quantiles(row.tpot_s, [one.tpot_s for one in records if one.tpot_s is not None])


def check_quantiles(told: Quantiles, values: list[float]) -> None:
    for q, value in ((0.5, told.p50), (0.9, told.p90), (0.99, told.p99)):
        assert value is not None
        assert 1 / BUCKET <= value / quantile(values, q) <= BUCKET, q


def check_series(fleet: Fleet, state: FleetState, records: Sequence[RequestRecord], asked_s: float) -> None:
    """GET /v1/series: the latest values, and goodput over 10 s at every second of the run."""
    default = [one for one in records if one.traffic_class == "default"]
    latest = {name: known(series(fleet, name))[-1] for name in ("attainment", "ttft_p50_s", "class.default.tpot_p90_s")}
    assert latest["attainment"][1] == pytest.approx(good_of(records) / counted_of(records), rel=1e-5)
    for name, values, q in (
        ("ttft_p50_s", [one.ttft_s for one in records], 0.5),
        ("class.default.tpot_p90_s", [one.tpot_s for one in default], 0.9),
    ):
        told = quantile([value for value in values if value is not None], q)
        assert 1 / BUCKET <= latest[name][1] / told <= BUCKET, name
    started_s = asked_s - state.uptime_s
    for name, count in (("goodput_per_s", good_of(records)), ("throughput_per_s", len(records))):
        at_s, told = known(series(fleet, name))[-1]
        assert count / (at_s + 1.5 - started_s) / 1.011 <= told <= count / (at_s - 0.5 - started_s) * 1.011, name
    good_ends = [one.arrived_at + one.e2e_s for one in records if one.good]
    within = number_within(good_ends)
    compared = 0
    for at_s, told in known(series(fleet, "goodput_10s_per_s")):
        if at_s - started_s > 11:  # read at some moment of this second, of the last nine to ten
            assert within(at_s - 8, at_s) / 10 - 1e-6 <= told <= within(at_s - 10, at_s + 1.1) / 10 + 1e-6, at_s
            compared += 1
    assert compared >= 8


def check_stages(records: Sequence[RequestRecord]) -> None:
    for one in records:
        assert one.ttft_s is not None
        assert sum(one.stages_s.values()) == pytest.approx(one.ttft_s, rel=0.02)


def series(fleet: Fleet, name: str, since_s: float = -120.0, step_s: int = 1) -> SeriesView:
    return msgspec.convert(fleet.get(f"/v1/series?names={name}&since_s={since_s}&step_s={step_s}"), SeriesView)


def known(view: SeriesView) -> list[tuple[int, float]]:
    """(time, last value) of the only series, where there is one."""
    (column,) = view.series.values()
    return [(at_s, value) for at_s, value in zip(view.times, column.last, strict=True) if value is not None]


def good_of(records: Sequence[RequestRecord]) -> int:
    return sum(one.good is True for one in records)


def counted_of(records: Sequence[RequestRecord]) -> int:
    """Nothing of this run was cancelled, so all with objectives count."""
    return sum(one.good is not None for one in records)


def quantile(values: list[float], q: float) -> float:
    """Nearest rank, as the buckets count."""
    return sorted(values)[max(1, math.ceil(q * len(values))) - 1]


def number_within(ends: list[float]) -> Callable[[float, float], int]:
    return lambda first, last: sum(first <= end <= last for end in ends)
