"""What a simulated run says: the numbers of docs/metrics.md out of its records. It draws nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from controlplane.sim.compiled import is_compiled
from controlplane.sim.spec import NodeSpec, SimConfig, SimResult
from transfer.api import Quantiles, RequestRecord
from transfer.terms import Role, Slo, Struct
from transfer.traces.request import TraceRequest

REASONS = {
    "ttft": "TTFT", "tpot": "TPOT", "e2e": "whole answer", "rejected": "rejection", "timed_out": "timeout",
    "error": "error", "cancelled": "cancel",
}  # fmt: skip


class About(Struct, frozen=True):
    """What was simulated, as it was written on the command line."""

    trace: str
    format: str
    fleet: str
    model: str
    policy: str
    seed: int


class ClassReport(Struct, frozen=True):
    """total counts as attainment does; a class without objectives has none."""

    name: str
    slo: Slo | None
    good: int
    total: int
    attainment: float | None
    ttft_s: Quantiles
    tpot_s: Quantiles


class InstanceReport(Struct, frozen=True):
    """What requests left at an instance, by the role it began in. use: the share of the span its steps took; of a pool:
    None. prefill_tokens: computed, not found; fetched_tokens: read from it by others."""

    id: str
    role: str
    hardware: str
    num_gpus: int
    num_requests: int
    prefill_tokens: int
    output_tokens: int
    fetched_tokens: int
    use: float | None = None


class SimReport(Struct, frozen=True):
    """What `phaseplane simulate --json` prints. Rates count over span_s, from the first arrival to the last end.

    compiled: whether by a compiled copy (compiled.py). goodput_per_gpu: good requests a second and GPU. bound: the most
    goodput_per_s that any policy could reach; of_bound: the share of it that was reached. missed: why requests that
    count were not good. missed_stages_s: where those lost time before their first token, on the critical path.
    """

    requests: int
    wall_s: float
    requests_per_wall_s: float
    compiled: bool
    goodput_per_s: float
    goodput_per_gpu: float
    cost_per_good: float | None
    attainment: float
    rejected: int
    bound: float | None
    of_bound: float | None
    verdict: str
    about: About
    good: int
    counted: int
    completed: int
    timed_out: int
    errors: int
    cancelled: int
    span_s: float
    offered_per_s: float
    throughput_per_s: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    output_tokens_per_s: float
    dollars: float
    ttft_s: Quantiles
    tpot_s: Quantiles
    e2e_s: Quantiles
    max_itl_s: Quantiles
    classes: tuple[ClassReport, ...]
    missed: dict[str, int]
    missed_stages_s: dict[str, float]
    bottleneck: str | None
    instances: tuple[InstanceReport, ...]
    preemptions: int
    moves: int
    resumes: int
    migrations: int
    predicted_from: tuple[str, ...]
    notes: tuple[str, ...]


def summarize(
    about: About, nodes: Sequence[NodeSpec], trace: Sequence[TraceRequest], config: SimConfig, result: SimResult,
    bound: float | None, notes: Sequence[str] = (),
) -> SimReport:  # fmt: skip
    """The report of one run."""
    records = result.records
    outcomes = Counter(record.outcome for record in records)
    completed = [record for record in records if record.outcome == "ok"]
    per_span = 1 / result.span_s if result.span_s > 0 else 0.0
    of_bound = result.goodput_per_s / bound if bound else None
    missed = [record for record in records if record.good is False]
    stages, reasons = _stages(missed), _missed(missed, config)
    last_s = trace[-1].at_s if trace else 0.0
    num_output = sum(record.output_tokens for record in records)
    return SimReport(
        requests=len(trace),
        wall_s=result.wall_s,
        requests_per_wall_s=len(trace) / result.wall_s if result.wall_s > 0 else 0.0,
        compiled=is_compiled(),
        goodput_per_s=result.goodput_per_s,
        goodput_per_gpu=result.goodput_per_gpu,
        cost_per_good=result.cost_per_good,
        attainment=result.attainment,
        rejected=result.rejected,
        bound=bound,
        of_bound=of_bound,
        verdict=_verdict(result, of_bound, reasons, next(iter(stages), None)),
        about=about,
        good=result.good,
        counted=result.counted,
        completed=len(completed),
        timed_out=outcomes["timed_out"],
        errors=outcomes["error"],
        cancelled=outcomes["cancelled"],
        span_s=result.span_s,
        offered_per_s=len(trace) / last_s if last_s > 0 else 0.0,
        throughput_per_s=len(completed) * per_span,
        prompt_tokens=sum(record.prompt_tokens for record in records),
        cached_tokens=sum(record.cached_tokens for record in records),
        output_tokens=num_output,
        output_tokens_per_s=num_output * per_span,
        dollars=result.dollars,
        ttft_s=quantiles(record.ttft_s for record in completed),
        tpot_s=quantiles(record.tpot_s for record in completed),
        e2e_s=quantiles(record.e2e_s for record in completed),
        max_itl_s=quantiles(record.max_itl_s for record in completed),
        classes=_classes(records, config),
        missed=reasons,
        missed_stages_s=stages,
        bottleneck=next(iter(stages), None),
        instances=_instances(nodes, result),
        preemptions=result.num_preemptions,
        moves=result.num_moves,
        resumes=sum(record.num_resumes for record in records),
        migrations=sum(record.num_migrations for record in records),
        predicted_from=_sources(nodes, result.records),
        notes=(*notes, *result.notes),
    )


def reason_text(reason: str) -> str:
    """A key of SimReport.missed in words."""
    return " and ".join(REASONS.get(part, part) for part in reason.split(" and "))


def quantiles(values: Iterable[float | None]) -> Quantiles:
    """Exact, linear between neighbours."""
    known = [value for value in values if value is not None]
    if not known:
        return Quantiles()
    p50, p90, p99 = np.quantile(known, (0.5, 0.9, 0.99))
    return Quantiles(p50=float(p50), p90=float(p90), p99=float(p99))


def _verdict(result: SimResult, of_bound: float | None, reasons: dict[str, int], bottleneck: str | None) -> str:
    """One sentence: how much was good, what that is a GPU, in money and of the possible, and what stood in the way."""
    cost = result.cost_per_good
    parts = [
        f"{result.attainment:.1%} of {result.counted} requests met their objectives",
        f"goodput {result.goodput_per_s:.3g}/s, {result.goodput_per_gpu:.3g}/s per GPU",
    ]
    if cost is not None:
        parts.append(f"${cost:.3g} each")
    if of_bound is not None:
        parts.append(f"{of_bound:.0%} of possible")
    reason = next(iter(reasons), None)
    if reason is not None:
        stage = f", waiting longest in {bottleneck.replace('_', ' ')}" if bottleneck and "ttft" in reason else ""
        parts.append(f"most misses by {reason_text(reason)}{stage}")
    return "; ".join(parts)


def _stages(missed: Iterable[RequestRecord]) -> dict[str, float]:
    """Seconds by stage, longest first."""
    spent: Counter[str] = Counter()
    for record in missed:
        spent.update(record.stages_s)
    return dict(spent.most_common())


def _missed(missed: Iterable[RequestRecord], config: SimConfig) -> dict[str, int]:
    """How many by reason: an outcome that is no answer, or the objectives that an answer did not meet."""
    counts: Counter[str] = Counter()
    for record in missed:
        if record.outcome != "ok":
            counts[record.outcome] += 1
            continue
        slo = _slo(record.traffic_class, config)
        if slo is None:
            continue
        over = [
            name
            for name, value, most in (
                ("ttft", record.ttft_s, slo.ttft_s), ("tpot", record.tpot_s, slo.tpot_s),
                ("e2e", record.e2e_s, slo.e2e_s),
            )
            if value is not None and most is not None and value > most
        ]  # fmt: skip
        counts[" and ".join(over)] += 1
    return dict(counts.most_common())


def _slo(name: str, config: SimConfig) -> Slo | None:
    classes = config.core.classes
    return classes[name if name in classes else config.core.default_class]


def _classes(records: Sequence[RequestRecord], config: SimConfig) -> tuple[ClassReport, ...]:
    found = []
    for name in sorted({record.traffic_class for record in records}):
        own = [record for record in records if record.traffic_class == name]
        slo = _slo(name, config)
        good = sum(record.good is True for record in own)
        total = sum(record.good is not None for record in own)
        completed = [record for record in own if record.outcome == "ok"]
        found.append(
            ClassReport(
                name=name, slo=slo, good=good, total=total, attainment=good / total if total and slo else None,
                ttft_s=quantiles(record.ttft_s for record in completed),
                tpot_s=quantiles(record.tpot_s for record in completed),
            )
        )  # fmt: skip
    return tuple(found)


def _instances(nodes: Sequence[NodeSpec], result: SimResult) -> tuple[InstanceReport, ...]:
    requests, prefilled, made, fetched = Counter[str](), Counter[str](), Counter[str](), Counter[str]()
    for record in result.records:
        prefill, decode = record.prefill or record.decode, record.decode
        if prefill is not None:
            prefilled[prefill] += record.prompt_tokens - record.cached_tokens
        if decode is not None:
            made[decode] += record.output_tokens
        if record.kv_source is not None:
            fetched[record.kv_source] += record.fetched_tokens
        requests.update({name for name in (prefill, decode) if name is not None})
    return tuple(
        InstanceReport(
            id=node.id, role=node.role, hardware=node.hardware, num_gpus=node.num_gpus,
            num_requests=requests[node.id], prefill_tokens=prefilled[node.id], output_tokens=made[node.id],
            fetched_tokens=fetched[node.id],
            use=None if node.role is Role.KV_POOL else _use(node.id, result),
        )
        for node in nodes
    )  # fmt: skip


def _use(instance: str, result: SimResult) -> float | None:
    busy_s = result.busy_s.get(instance)
    return None if busy_s is None or result.span_s <= 0 else min(1.0, busy_s / result.span_s)


def _sources(nodes: Sequence[NodeSpec], records: Sequence[RequestRecord]) -> tuple[str, ...]:
    """Where step times come from, one sentence for each class of hardware; the longest prompt tells how far they go."""
    found: dict[str, None] = {}
    prompts = [(one.prompt_tokens, max(1, one.prompt_tokens - one.cached_tokens)) for one in records]
    longest, computed = max(prompts, default=(0, 0))
    for node in nodes:
        profile = node.latency
        if profile is not None:
            error = f"median error {profile.error:.1%}" if profile.error is not None else "error not measured"
            gpus = f"{node.num_gpus} GPUs" if node.num_gpus > 1 else "1 GPU"
            far = profile.prefill_provenance(computed, longest - computed, node.token_budget)
            beyond = f", {far} for prompts of {longest} tokens" if far != profile.provenance else ""
            found[f"{node.hardware} ({gpus}): {profile.provenance} profile, {error}{beyond}"] = None
    return tuple(found)
