"""Where the time of a fleet goes: terms of the latency model at the work it would do, and how busy each role is."""

from __future__ import annotations

from collections.abc import Sequence

from controlplane.planner.bound import Resource
from controlplane.planner.capacity import Workload
from controlplane.planner.fleets import Fleet, build
from controlplane.planner.judge import Judged
from controlplane.sim.spec import NodeSpec
from transfer.profile import LatencyProfile, StepTerms
from transfer.said import Said, joined, say
from transfer.terms import Role, Struct

MAX_ROWS = 256


class Phase(Struct, frozen=True):
    """One phase on one kind of instance. step: what is timed; shares: of the step by term, largest first; use: share of
    the time that such instances work at the max rate."""

    phase: str
    where: str
    step: str
    step_s: float
    shares: dict[str, float]
    use: float | None


def phases(judged: Judged, workload: Workload) -> tuple[Phase, ...]:
    """Of each kind of instance of the fleet, the steps it would spend its time with."""
    fleet, sizes = judged.fleet, workload.sizes
    found = []
    for part in fleet.parts:
        node = build(Fleet((part,)), workload.model, workload.block_size)[0]
        latency = node.latency
        assert latency is not None
        use = judged.use(part.role)
        if part.role is not Role.DECODE:
            mean = max(1, round(float(sizes.unseen.mean())))
            tokens, cached = min(mean, node.token_budget), round(float((sizes.prompt - sizes.unseen).mean()))
            found.append(_phase(
                "prefill", str(part.shape), f"{tokens:,} tokens after {cached:,}", _prompt(latency, tokens, cached), use
            ))  # fmt: skip
        if part.role is not Role.PREFILL:
            context = round(float((sizes.prompt + sizes.output / 2).mean()))
            rows = _rows(node, latency, float(sizes.tpot_s.min()), context, workload.block_size)
            terms = latency.step_terms(rows, rows * context, rows)
            found.append(_phase(
                "decode", str(part.shape), f"{rows} answers of {context:,} tokens", terms, use
            ))  # fmt: skip
    return tuple(found)


def bottleneck(judged: Judged, limits: Sequence[tuple[Resource, float]], rows: Sequence[Phase]) -> Said:
    """One sentence."""
    busy = [row for row in rows if row.use is not None]
    parts: list[Said] = []
    if busy:
        most = max(busy, key=lambda row: row.use or 0.0)
        term = say(f"terms.{next(iter(most.shares), 'nothing')}")
        parts.append(say("planner.busiest", phase=most.phase, where=most.where, use=f"{most.use:.0%}", term=term))
    if limits:
        kind, where = limits[0][0]
        parts.append(say(f"planner.lift_{kind}", where=where))
    return joined(parts) if parts else say("planner.free")


def _phase(phase: str, where: str, step: str, terms: StepTerms, use: float | None) -> Phase:
    return Phase(phase, where, step, terms.step_s, terms.shares(), use)


def _prompt(latency: LatencyProfile, tokens: int, cached: int) -> StepTerms:
    total = tokens + cached
    pairs = (total * (total + 1) - cached * (cached + 1)) // 2
    return latency.step_terms(tokens, total, 1, pairs)


def _rows(node: NodeSpec, latency: LatencyProfile, tpot_s: float, context: int, block_size: int) -> int:
    """As many answers at once as TPOT and KV allow."""
    room = max(1, node.num_blocks * block_size // max(1, context))
    most = 1
    for rows in range(1, min(MAX_ROWS, room) + 1):
        if latency.decode_step_s(rows, rows * context) > tpot_s:
            break
        most = rows
    return most
