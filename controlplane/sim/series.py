"""A simulated run over time, for plots: rates and latencies in equal slices of its span."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from controlplane.sim.spec import NodeSpec, SimResult
from transfer.api import RequestRecord
from transfer.terms import Role
from transfer.traces.request import TraceRequest

Floats = NDArray[np.float64]
MIN_SLICES, MAX_SLICES = 20, 120
REQUESTS_PER_SLICE = 8
"""As many that a rate is more than noise, where there are enough."""


class Series(NamedTuple):
    """Arrays of one value a slice; nan where nothing happened. at_s: middles of the slices. Latencies are by time of
    arrival, goodput and throughput by time of completion. prefilling, decoding: requests in that phase at once, of
    each instance that serves it."""

    at_s: Floats
    offered_per_s: Floats
    throughput_per_s: Floats
    goodput_per_s: Floats
    ttft_p50_s: Floats
    ttft_p90_s: Floats
    tpot_p50_s: Floats
    tpot_p90_s: Floats
    prefilling: Floats
    decoding: Floats


def make_series(
    nodes: Sequence[NodeSpec], trace: Sequence[TraceRequest], result: SimResult, num_slices: int | None = None
) -> Series:
    """Over result.span_s, from the first arrival."""
    records = result.records
    if num_slices is None:
        num_slices = min(MAX_SLICES, max(MIN_SLICES, len(trace) // REQUESTS_PER_SLICE))
    span_s = max(result.span_s, 1e-9)
    edges = np.linspace(0.0, span_s, num_slices + 1)
    width_s = span_s / num_slices
    begin = min((record.arrived_at for record in records), default=0.0)
    ok = [record for record in records if record.outcome == "ok"]
    good = [record for record in ok if record.good]
    came = np.array([record.arrived_at - begin for record in ok])
    ttft_p50, ttft_p90 = _quantiles(came, [record.ttft_s for record in ok], edges)
    tpot_p50, tpot_p90 = _quantiles(came, [record.tpot_s for record in ok], edges)
    prefill = [_prefill_interval(record, begin) for record in records if "prefill" in record.stages_s]
    decode = [
        (record.arrived_at - begin + record.ttft_s, record.arrived_at - begin + record.e2e_s)
        for record in records if record.ttft_s is not None
    ]  # fmt: skip
    num_prefill = sum(node.role in (Role.PREFILL, Role.MIXED) for node in nodes)
    num_decode = sum(node.role in (Role.DECODE, Role.MIXED) for node in nodes)
    return Series(
        at_s=(edges[:-1] + edges[1:]) / 2,
        offered_per_s=_counts([request.at_s for request in trace], edges) / width_s,
        throughput_per_s=_counts([record.arrived_at - begin + record.e2e_s for record in ok], edges) / width_s,
        goodput_per_s=_counts([record.arrived_at - begin + record.e2e_s for record in good], edges) / width_s,
        ttft_p50_s=ttft_p50, ttft_p90_s=ttft_p90, tpot_p50_s=tpot_p50, tpot_p90_s=tpot_p90,
        prefilling=_at_once(prefill, edges) / max(1, num_prefill or num_decode),
        decoding=_at_once(decode, edges) / max(1, num_decode or num_prefill),
    )  # fmt: skip


def _prefill_interval(record: RequestRecord, begin: float) -> tuple[float, float]:
    """Its stages end with transfer and decode, so the prompt was done before those."""
    stages = record.stages_s
    end = record.arrived_at - begin + (record.ttft_s or record.e2e_s)
    end -= stages.get("transfer", 0.0) + stages.get("decode", 0.0)
    return end - stages["prefill"], end


def _counts(times: Sequence[float], edges: Floats) -> Floats:
    return np.histogram(np.clip(times, 0.0, edges[-1]), edges)[0].astype(np.float64)


def _quantiles(at_s: Floats, values: Sequence[float | None], edges: Floats) -> tuple[Floats, Floats]:
    """p50 and p90 of what arrived in each slice."""
    known = np.array([np.nan if value is None else value for value in values], dtype=np.float64)
    place = np.clip(np.searchsorted(edges, at_s, side="right") - 1, 0, len(edges) - 2)
    order = np.argsort(place, kind="stable")
    bounds = np.searchsorted(place[order], np.arange(len(edges)))
    found = np.full((2, len(edges) - 1), np.nan)
    for number in range(len(edges) - 1):
        own = known[order[bounds[number] : bounds[number + 1]]]
        own = own[~np.isnan(own)]
        if len(own):
            found[:, number] = np.quantile(own, (0.5, 0.9))
    return found[0], found[1]


def _at_once(intervals: Sequence[tuple[float, float]], edges: Floats) -> Floats:
    """Mean number of intervals that cover a moment of each slice."""
    if not intervals:
        return np.zeros(len(edges) - 1)
    starts, ends = np.sort(np.array(intervals).T, axis=1)
    covered: Floats = _seconds_before(starts, edges) - _seconds_before(ends, edges)
    return np.maximum(0.0, np.diff(covered) / np.diff(edges))


def _seconds_before(times: Floats, edges: Floats) -> Floats:
    """Seconds from each of the sorted times to each edge, summed; later ones count nothing."""
    sums = np.concatenate([[0.0], np.cumsum(times)])
    count = np.searchsorted(times, edges)
    seconds: Floats = count * edges - sums[count]
    return seconds
