"""Turns what a benchmark saw into numbers: percentiles, goodput and attainment as docs/metrics.md defines them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from transfer.api import Quantiles
from transfer.terms import Slo, Struct

MAX_ERROR_SAMPLES = 5


class Ending(StrEnum):
    """How one request ended, seen from the client."""

    COMPLETED = "completed"
    WRONG = "wrong"
    ERROR = "error"
    TIMED_OUT = "timed_out"
    REJECTED = "rejected"
    CANCELLED = "cancelled"


@dataclass(slots=True)
class Sample:
    """One request. Seconds count from the time it was SCHEDULED, so a late client cannot flatter the server."""

    index: int
    traffic_class: str
    ending: Ending
    at_s: float
    lag_s: float
    ended_s: float
    """Since the start of the run."""
    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float = 0.0
    max_itl_s: float | None = None
    prompt_tokens: int = 0
    output_tokens: int = 0
    error: str = ""
    text: str = ""


class ClassReport(Struct, frozen=True):
    name: str
    slo: Slo | None
    good: int
    total: int
    attainment: float | None
    ttft_s: Quantiles
    tpot_s: Quantiles


class BenchReport(Struct, frozen=True):
    """What `phaseplane bench --json` prints. offered = completed + errors + rejected + cancelled.

    errors counts wrong and timed out ones too. goodput and attainment are null without objectives.
    """

    offered: int
    completed: int
    errors: int
    rejected: int
    cancelled: int
    goodput_per_s: float | None
    attainment: float | None
    ttft_s: Quantiles
    tpot_s: Quantiles
    wall_s: float
    wrong: int
    timed_out: int
    good: int
    e2e_s: Quantiles
    max_itl_s: Quantiles
    throughput_per_s: float
    prompt_tokens: int
    output_tokens: int
    output_tokens_per_s: float
    offered_per_s: float
    max_lag_s: float
    clamped: int
    seed: int
    classes: tuple[ClassReport, ...]
    error_samples: tuple[str, ...]


def is_good(sample: Sample, slo: Slo) -> bool:
    """Finished normally, with the right text where it is known, within every objective."""
    if sample.ending is not Ending.COMPLETED or sample.ttft_s is None or sample.ttft_s > slo.ttft_s:
        return False
    if sample.tpot_s is not None and sample.tpot_s > slo.tpot_s:
        return False
    return slo.e2e_s is None or sample.e2e_s <= slo.e2e_s


def counts_for_attainment(sample: Sample, slo: Slo) -> bool:
    """A client's cancel counts only if TTFT was already missed."""
    if sample.ending is not Ending.CANCELLED:
        return True
    waited = sample.e2e_s if sample.ttft_s is None else sample.ttft_s
    return waited > slo.ttft_s


def quantiles(values: Iterable[float | None]) -> Quantiles:
    """Exact percentiles of the values that are there, linear between neighbours."""
    known = sorted(value for value in values if value is not None)
    if not known:
        return Quantiles()
    return Quantiles(p50=_at(known, 0.50), p90=_at(known, 0.90), p99=_at(known, 0.99))


def summarize(samples: Sequence[Sample], slos: dict[str, Slo | None], seed: int, clamped: int = 0) -> BenchReport:
    """The report. `slos` maps a traffic class to its objectives; a class that is missing has none."""
    count = {ending: sum(sample.ending is ending for sample in samples) for ending in Ending}
    completed = [sample for sample in samples if sample.ending is Ending.COMPLETED]
    wall_s = max((sample.ended_s for sample in samples), default=0.0)
    per_wall = 1.0 / wall_s if wall_s > 0 else 0.0
    names = sorted({sample.traffic_class for sample in samples})
    classes = tuple(_class_report(name, slos.get(name), samples) for name in names)
    judged = [view for view in classes if view.slo is not None]
    good, total = sum(view.good for view in judged), sum(view.total for view in judged)
    last_at_s = max((sample.at_s for sample in samples), default=0.0)
    errors = [f"request {sample.index}: {sample.error}" for sample in samples if sample.error]
    return BenchReport(
        offered=len(samples),
        completed=len(completed),
        errors=count[Ending.ERROR] + count[Ending.WRONG] + count[Ending.TIMED_OUT],
        rejected=count[Ending.REJECTED],
        cancelled=count[Ending.CANCELLED],
        goodput_per_s=good * per_wall if judged else None,
        attainment=good / total if total else None,
        ttft_s=quantiles(sample.ttft_s for sample in completed),
        tpot_s=quantiles(sample.tpot_s for sample in completed),
        wall_s=wall_s,
        wrong=count[Ending.WRONG],
        timed_out=count[Ending.TIMED_OUT],
        good=good,
        e2e_s=quantiles(sample.e2e_s for sample in completed),
        max_itl_s=quantiles(sample.max_itl_s for sample in completed),
        throughput_per_s=len(completed) * per_wall,
        prompt_tokens=sum(sample.prompt_tokens for sample in samples),
        output_tokens=sum(sample.output_tokens for sample in samples),
        output_tokens_per_s=sum(sample.output_tokens for sample in samples) * per_wall,
        offered_per_s=len(samples) / last_at_s if last_at_s > 0 else 0.0,
        max_lag_s=max((sample.lag_s for sample in samples), default=0.0),
        clamped=clamped,
        seed=seed,
        classes=classes,
        error_samples=tuple(errors[:MAX_ERROR_SAMPLES]),
    )


def _class_report(name: str, slo: Slo | None, samples: Sequence[Sample]) -> ClassReport:
    own = [sample for sample in samples if sample.traffic_class == name]
    completed = [sample for sample in own if sample.ending is Ending.COMPLETED]
    good = 0 if slo is None else sum(is_good(sample, slo) for sample in own)
    total = len(own) if slo is None else sum(counts_for_attainment(sample, slo) for sample in own)
    return ClassReport(
        name=name,
        slo=slo,
        good=good,
        total=total,
        attainment=good / total if slo is not None and total else None,
        ttft_s=quantiles(sample.ttft_s for sample in completed),
        tpot_s=quantiles(sample.tpot_s for sample in completed),
    )


def _at(known: Sequence[float], share: float) -> float:
    place = share * (len(known) - 1)
    low = math.floor(place)
    high = min(low + 1, len(known) - 1)
    return known[low] + (known[high] - known[low]) * (place - low)
