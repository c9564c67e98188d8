"""Draws what a fleet said for a person: tables on a terminal, the same text when piped. It asks nobody."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import TextIO

import msgspec
from rich.console import Console
from rich.table import Table

from transfer.api import (
    CandidateView,
    ClassView,
    FleetState,
    InstanceView,
    KvView,
    ModelView,
    Plan,
    Prediction,
    Quantiles,
    RequestRecord,
)
from transfer.autopilot import AutopilotView, LookRow
from transfer.classes import ClassesView
from transfer.objectives import describe
from ui.figures import excess, seconds, share, span
from ui.measure import BenchReport

_PIPED_WIDTH = 160
MAX_LOOKS = 10
QUALITY = ("good", "total", "attainment", "TTFT p50", "TTFT p99", "TPOT p50", "TPOT p99")
MIN_SHOWN = 0.005
"""From which an instance is said to be slower or faster than predicted."""


def make_console(file: TextIO | None = None) -> Console:
    """A console for standard output (or `file`); wide when it is not a terminal, so that ids stay whole."""
    target = file or sys.stdout
    return Console(file=target, width=None if target.isatty() else _PIPED_WIDTH, highlight=False, markup=False)


def print_json(value: object, file: TextIO | None = None) -> None:
    """One JSON document, indented, on standard output."""
    text = msgspec.json.format(msgspec.json.encode(value), indent=2).decode()
    print(text, file=file or sys.stdout, flush=True)


def show_fleet(console: Console, fleet: FleetState) -> None:
    """`phaseplane status`."""
    models = ", ".join(fleet.models) or "no model"
    late = f" ({fleet.queue_late} past their objective)" if fleet.queue_late else ""
    waiting = f", {fleet.queue_depth} of them waiting for a place{late}" if fleet.queue_depth else ""
    console.print(
        f"{fleet.xpyd} serving {models}; {fleet.in_flight} requests in flight{waiting}, up {span(fleet.uptime_s)}"
    )
    goodput = fleet.goodput
    console.print(
        f"last {goodput.window_s:.0f} s: goodput {goodput.per_s:.2f}/s ({goodput.per_gpu:.3f}/s per GPU), attainment "
        f"{share(fleet.recent_attainment)}; since start: attainment {share(fleet.attainment)}; now: orphaned KV blocks "
        f"{fleet.orphaned_kv_blocks}"
    )
    if fleet.verdict:
        console.print(fleet.verdict)
    if fleet.notice:
        console.print(fleet.notice)
    if fleet.autopilot != "off":
        console.print(f"autopilot ({fleet.autopilot}): {fleet.advice}")
    table = _table("instance", "role", "state", "hardware", "engine", "model")
    tiered = any(view.ssd_capacity_blocks for view in fleet.instances)
    for name in ("running", "waiting", "KV use", "cached", "step", "predicted by", *(["on SSD"] if tiered else [])):
        table.add_column(name, justify="right")
    for view in fleet.instances:
        table.add_row(
            view.id, view.role, view.state, view.hardware, view.engine, view.model, str(view.num_running),
            str(view.num_waiting), f"{view.kv_use:.0%}", str(view.cached_blocks), seconds(view.step_s or None),
            _latency(view),
            *([str(view.ssd_blocks) if view.ssd_capacity_blocks else "-"] if tiered else []),
        )  # fmt: skip
    console.print(table)
    if fleet.kv.looked_up_tokens:
        console.print(_prefix_hits(fleet.kv))
    _show_quality(console, fleet)
    if fleet.missed_by:
        over = ", ".join(f"{name.upper()} {num}" for name, num in fleet.missed_by.items())
        console.print(f"objectives missed in the last {goodput.window_s:.0f} s, requests: {over}")
    num_missed = sum(one.recent_total - one.recent_good for one in fleet.classes)
    if fleet.bottleneck and [*fleet.missed_by] == ["tpot"] and num_missed <= fleet.missed_by["tpot"]:
        console.print("their first token came in time, so it is decode that is too slow")
    elif fleet.bottleneck:
        what = f", {STAGE_TEXTS[fleet.bottleneck]}" if fleet.bottleneck in STAGE_TEXTS else ""
        console.print(f"bottleneck of those that missed, until the first token: {fleet.bottleneck}{what}")


def _show_quality(console: Console, fleet: FleetState) -> None:
    """By class, and by model where there are several."""
    window = f"last {fleet.goodput.window_s:.0f} s"
    if fleet.classes:
        console.print(
            f"good, total and attainment count since the control plane started; p50 and p99 are of requests that "
            f"ended in the {window}"
        )
        table = _table("class", "objectives")
        for name in QUALITY:
            table.add_column(name, justify="right")
        for row in fleet.classes:
            table.add_row(row.name, describe(row.slo), *_quality(row))
        console.print(table)
        for row in fleet.classes:
            if row.judged_for_s is not None:
                console.print(f"objectives of {row.name} changed {span(row.judged_for_s)} ago: its good, total, "
                              "attainment and goodput count from then on")  # fmt: skip
    if fleet.by_model:
        table = _table("model")
        for name in (*QUALITY, f"goodput, {window}"):
            table.add_column(name, justify="right")
        for one in fleet.by_model:
            table.add_row(one.name, *_quality(one), f"{one.recent_per_s:.2f}/s")
        console.print(table)


def _quality(one: ClassView | ModelView) -> tuple[str, ...]:
    return (
        str(one.good), str(one.total), share(one.attainment), seconds(one.ttft_s.p50), seconds(one.ttft_s.p99),
        seconds(one.tpot_s.p50), seconds(one.tpot_s.p99),
    )  # fmt: skip


def show_classes(console: Console, view: ClassesView) -> None:
    """`phaseplane objectives`."""
    table = _table("class", "objectives", "in the settings")
    for one in view.classes:
        table.add_row(one.name, describe(one.slo), "the same" if one.slo == one.configured
                      else describe(one.configured))  # fmt: skip
    console.print(table)
    table = _table("hardware", "GPUs", "instances", "each, per hour")
    for price in view.prices:
        cost = f"${price.price_per_hour:.2f}" if price.price_per_hour else "-"
        table.add_row(price.hardware, str(price.num_gpus), str(price.num_instances), cost)
    console.print(table)


def _prefix_hits(kv: KvView) -> str:
    fetched = kv.pool_dram_tokens + kv.pool_ssd_tokens
    shares = [
        f"{name} {tokens / kv.looked_up_tokens:.0%}"
        for name, tokens in (
            ("device", kv.device_tokens), ("pool memory", kv.pool_dram_tokens), ("pool SSD", kv.pool_ssd_tokens),
        )
    ]  # fmt: skip
    useful = f"; fetching beat computing for {kv.useful_tokens / fetched:.0%} of what was fetched" if fetched else ""
    return f"prompt tokens found in KV since start: {', '.join(shares)}{useful}"


def show_plan(console: Console, plan: Plan, before: Prediction) -> None:
    """A plan's steps, its risks, and how it was before, as predicted and as measured."""
    console.print(f"plan {plan.plan_id}: {plan.before} -> {plan.after}, {plan.status}")
    if plan.steps:
        table = _table("instance", "from", "to", "status", "migrated", "detail")
        for step in plan.steps:
            table.add_row(
                step.instance_id, step.from_role, step.to_role, step.status, str(step.num_migrated), step.detail
            )
        console.print(table)
    else:
        console.print("nothing to change")
    for risk in plan.risks:
        console.print(f"risk: {risk}")
    sides = (before, plan.predicted, plan.measured)
    table = _table("", "before", "predicted", "measured")
    table.add_row("goodput", *(_goodput(side) for side in sides))
    table.add_row("attainment", *(share(_of(side, "attainment")) for side in sides))
    for name, key in (("TTFT p50", "ttft_p50_s"), ("TPOT p50", "tpot_p50_s"), ("duration", "duration_s")):
        table.add_row(name, *(seconds(_of(side, key)) for side in sides))
    console.print(table)
    if plan.predicted.basis:
        console.print(f"predicted from: {plan.predicted.basis}")
    if plan.measured is not None and plan.measured.basis:
        console.print(f"measured: {plan.measured.basis}; what had waited before is in it")
    if plan.failed:
        console.print(f"failed: {plan.failed}")


def show_bench(console: Console, report: BenchReport) -> None:
    """`phaseplane bench`."""
    console.print(
        f"offered {report.offered} ({report.offered_per_s:.2f}/s): completed {report.completed}, errors "
        f"{report.errors} ({report.wrong} wrong, {report.timed_out} timed out), rejected {report.rejected}, "
        f"cancelled {report.cancelled}, in {report.wall_s:.1f} s"
    )
    goodput = "none: no objectives" if report.goodput_per_s is None else f"{report.goodput_per_s:.2f}/s"
    console.print(
        f"goodput {goodput}, attainment {share(report.attainment)}, throughput {report.throughput_per_s:.2f}/s, "
        f"{report.output_tokens_per_s:.1f} output tokens/s"
    )
    table = _table("")
    for name in ("p50", "p90", "p99"):
        table.add_column(name, justify="right")
    rows = (("TTFT", report.ttft_s), ("TPOT", report.tpot_s), ("whole answer", report.e2e_s))
    for label, values in (*rows, ("largest gap between tokens", report.max_itl_s)):
        table.add_row(label, *_triple(values))
    console.print(table)
    for row in report.classes if len(report.classes) > 1 else ():
        console.print(f"class {row.name}: {row.good} good of {row.total}, attainment {share(row.attainment)}")
    for text in report.error_samples:
        console.print(text)


def show_request(console: Console, record: RequestRecord) -> None:
    """`phaseplane why`: where the time went and what placement considered."""
    good = {True: "good", False: "missed its objectives", None: "its class has no objectives"}[record.good]
    if record.outcome == "cancelled":
        good = "by its client"
    console.print(
        f"request {record.request_id} ({record.model}, class {record.traffic_class}): {record.outcome}, {good}"
    )
    for name, over_s in record.missed_by_s.items():
        console.print(f"missed {name.upper()} by {excess(over_s)}")
    if record.error:
        console.print(f"error: {record.error}")
    console.print(
        f"{record.prompt_tokens} prompt tokens ({record.cached_tokens} from KV), {record.output_tokens} output tokens; "
        f"TTFT {seconds(record.ttft_s)}, TPOT {seconds(record.tpot_s)}, whole answer {seconds(record.e2e_s)}, "
        f"largest gap {seconds(record.max_itl_s)}"
    )
    places = [f"{label} {name}" for label, name in (("prefill", record.prefill), ("decode", record.decode)) if name]
    if record.kv_source:
        places.append(f"KV from {record.kv_source}")
    moved = f"; resumed {record.num_resumes} times, migrated {record.num_migrations} times"
    console.print((", ".join(places) or "placed nowhere") + moved)
    if record.stages_s and record.ttft_s is not None:
        show_stages(console, record.stages_s, record.ttft_s)
    if record.why:
        show_candidates(console, record.why)


def show_pins(console: Console, view: AutopilotView) -> None:
    """`phaseplane pin` and `unpin`: what is pinned now. The last look was before that, so it says nothing here."""
    _show_pins(console, view)
    console.print(f"autopilot {view.mode}{'' if view.pins else ': nothing is pinned'}")


def _show_pins(console: Console, view: AutopilotView) -> None:
    for pin in view.pins:
        left = "until released" if pin.left_s is None else f"for another {span(pin.left_s)}"
        console.print(f"pinned: {pin.subject}, by {pin.who}, {left}{f' ({pin.why})' if pin.why else ''}")


def show_autopilot(console: Console, view: AutopilotView) -> None:
    """`phaseplane autopilot`: mode, what it last saw, what it must leave alone, and how its moves came out."""
    limits = view.settings
    most = "a third of the engines" if limits.max_moves is None else str(limits.max_moves)
    console.print(f"autopilot {view.mode}: {view.line}")
    console.print(f"the rule: {view.rule}")
    left = "1 instance" if limits.floor == 1 else f"{limits.floor} instances"
    console.print(f"it leaves at least {left} in a role and makes at most {most} switches in a move")
    _show_pins(console, view)
    if view.evaluations:
        table = _table("ago", "model", "what", "line")
        for look in view.evaluations[:MAX_LOOKS]:
            table.add_row(span(look.ago_s), look.model, look.code, look.line)
        console.print(table)
    score = view.score
    if score.num and score.bias is not None and score.error is not None:
        console.print(
            f"of {score.num} scored moves: attainment {score.bias:+.1%} beside the model's for the load that came, "
            f"error {score.error:.0%}, which the next intervals allow for"
        )
        table = _table("plan", "by", "change", "predicted", "for the load that came", "measured", "requests")
        for move in score.moves:
            table.add_row(
                move.plan_id, move.actor, move.change, share(move.predicted), share(move.expected),
                share(move.measured), str(move.num_requests),
            )  # fmt: skip
        console.print(table)


def show_looks(console: Console, looks: Sequence[LookRow]) -> None:
    """`phaseplane autopilot --since`: what it said, the oldest first."""
    if not looks:
        console.print("the autopilot did not look in this time")
        return
    table = _table("from", "to", "looks", "model", "what", "line")
    for row in reversed(looks):
        times = (datetime.fromtimestamp(at_s).strftime("%m-%d %H:%M:%S") for at_s in (row.began_at, row.ended_at))
        table.add_row(*times, str(row.num), row.model, row.code, row.line)
    console.print(table)


STAGE_TEXTS = {
    "queue": "waiting for compute, before and after it was placed",
    "decode_admission": "waiting for KV room on a decode instance",
    "prefill": "computing the prompt",
    "transfer": "KV on its way after that",
    "decode": "from KV received to the first token delivered",
}
"""The stages of docs/metrics.md, in their order."""


def show_stages(console: Console, stages_s: Mapping[str, float], ttft_s: float) -> None:
    """Where the time to first token went: every stage, and their sum, which is TTFT."""
    console.print("measured, where the time to first token went:")
    table = _table("stage", "seconds", "share", "what it is")
    for name in (*STAGE_TEXTS, *(name for name in stages_s if name not in STAGE_TEXTS)):
        spent = stages_s.get(name, 0.0)
        part = f"{spent / ttft_s:.0%}" if ttft_s > 0 else "-"
        table.add_row(name, seconds(spent), part, STAGE_TEXTS.get(name, ""))
    table.add_row("TTFT", seconds(ttft_s), "100%", "the sum of these stages")
    console.print(table)


def show_candidates(console: Console, candidates: Sequence[CandidateView]) -> None:
    """The placements that were weighed, with their predictions; queue, prompt and the rest add up to TTFT."""
    console.print(
        "predicted, from the moment it was last placed; the wait before that is not in these columns (it is in the "
        "measured queue above), but a reason that names an objective counts it:"
    )
    table = _table("", "prefill", "decode", "TTFT =", "queue +", "prompt +", "rest", "TPOT", "from KV", "how", "reason")
    for row in candidates:
        rest_s = max(0.0, row.ttft_s - row.queue_s - row.prefill_s)
        table.add_row(
            "chosen" if row.chosen else "", row.prefill or "(by decode)", row.decode, seconds(row.ttft_s),
            seconds(row.queue_s), seconds(row.prefill_s), seconds(rest_s), seconds(row.tpot_s),
            str(row.cached_tokens), _how(row), row.reason,
        )  # fmt: skip
    console.print(table)
    console.print("rest: KV that is still on its way after the prompt's is made, and the first decode step")
    bases: dict[str, list[str]] = {}
    for row in candidates:
        place = f"{row.prefill} -> {row.decode}" if row.prefill else row.decode
        bases.setdefault(_basis(row.provenance, row.error), []).append(place)
    for basis, places in bases.items():
        console.print(f"step times are {basis}" + (f" ({', '.join(places)})" if len(bases) > 1 else ""))
    if any(row.prefill is None for row in candidates):
        console.print("(by decode): the decode instance computes the prompt itself, so no KV moves")


def _basis(provenance: str, error: float | None) -> str:
    """A latency profile's worth, like `fitted, median error 3%`."""
    beyond = " beyond the steps that were measured" if provenance == "extrapolated" else ""
    known = "error not measured" if error is None else f"median error {error:.1%}"
    return f"{provenance or 'of unknown origin'}{beyond}, {known}"


def _latency(view: InstanceView) -> str:
    """Where predictions of its steps come from, their error, and how far its steps of late are from them."""
    if not view.provenance:
        return "-"
    error = "" if view.latency_error is None else f" \u00b1{view.latency_error:.1%}"
    late = f" x{view.speed:.2f}" if abs(view.speed - 1.0) >= MIN_SHOWN else ""
    return f"{view.provenance}{error}{late}"


def _how(row: CandidateView) -> str:
    """Where the prompt's KV comes from."""
    if row.kv_way == "compute" or row.kv_source is None:
        return "compute beyond its cache" if row.cached_tokens else "compute"
    how = f"fetch {row.fetched_blocks} blocks from {row.kv_source} in {seconds(row.fetch_s)}"
    return how if row.kv_way == "fetch" else f"{how} while computing the rest"


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in columns:
        table.add_column(name, overflow="fold")
    return table


def _triple(values: Quantiles) -> tuple[str, str, str]:
    return seconds(values.p50), seconds(values.p90), seconds(values.p99)


def _of(side: Prediction | None, key: str) -> float | None:
    value = None if side is None else getattr(side, key)
    return value if isinstance(value, float) else None


def _goodput(side: Prediction | None) -> str:
    if side is None or side.goodput_per_s is None:
        return "-"
    if side.goodput_low is None or side.goodput_high is None:
        return f"{side.goodput_per_s:.2f}/s"
    return f"{side.goodput_per_s:.2f}/s ({side.goodput_low:.2f} to {side.goodput_high:.2f})"
