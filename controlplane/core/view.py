"""What the outside may see: the fleet's state, the verdict, and the numbers behind /metrics. Changes nothing."""

from __future__ import annotations

from controlplane.core.autopilot import Autopilot
from controlplane.core.decide import unserved
from controlplane.core.desk import Desk
from controlplane.core.fleet import xpyd
from controlplane.core.goodput import SHORT_WINDOW_S, WINDOW_S, Counts, quantiles
from controlplane.core.hits import kv_view
from controlplane.core.instance import Instance, InstanceState
from controlplane.core.membership import served_models
from controlplane.core.suspects import is_suspect
from transfer.api import ClassView, FleetState, InstanceView, ModelView
from transfer.said import Said, say
from transfer.screens import CacheView, KvDetail
from transfer.terms import Role

SILENT_BEATS = 3
"""Heartbeats missed before the verdict calls an instance silent."""
KEPT_S = 10.0
"""How long operators are told that prefill time was kept from those that are late: it is so at times, not always."""


MODES = ("off", "advise", "auto")
COUNTED = {
    "arrived": "arrivals", "placed_remote": "placements_remote", "placed_local": "placements_local",
    "reserve_refused": "reservations_refused", "migrations_failed": "migrations_failed",
    "instances_lost": "instances_lost", "engine_failures": "engine_failures",
    "poisonous_requests": "poisonous_requests", "computed_tokens": "prefill_tokens_computed",
    "fetched_tokens": "prefill_tokens_fetched", "transfer_bytes": "handoff_bytes",
    "replications": "prefix_copies_ordered", "replications_failed": "prefix_copies_failed",
}  # fmt: skip
"""Counters of the desk that are told outside, and their names there, without _total."""


def core_metrics(desk: Desk, autopilot: Autopilot) -> dict[str, float]:
    """What the core alone knows, by name on /metrics without prefix; counters since start end in _total."""
    found = {f"{name}_total": float(desk.counters.get(key, 0)) for key, name in COUNTED.items()}
    return found | {
        "requests_waiting_for_a_place": float(len(desk.line)),
        "requests_waiting_past_objective": float(_num_late(desk, desk.now)),
        "handoff_legs": float(desk.ledger.num_legs),
        "directory_blocks": float(len(desk.directory)),
        "requests_suspected": float(sum(is_suspect(desk, request) for request in desk.requests.values())),
        "requests_doomed": float(sum(request.doomed(desk.now) for request in desk.requests.values())),
        "autopilot_mode": float(MODES.index(autopilot.mode)),
        "autopilot_looks_total": float(autopilot.counts["looks"]),
        "autopilot_proposals_total": float(autopilot.counts["proposals"]),
        "autopilot_moves_total": float(autopilot.counts["moves"]),
    }


def fleet_state(desk: Desk, now: float, autopilot: Autopilot) -> FleetState:
    """Everything `phaseplane status` and the live feed show."""
    stages = desk.goodput.missed_stages(now)
    counts = desk.fleet.counts()
    attainment = desk.goodput.attainment()
    num_late = _num_late(desk, now)
    notice = _notice(desk, now) if num_late else None
    return FleetState(
        xpyd=xpyd(counts[Role.PREFILL], counts[Role.DECODE], counts[Role.MIXED]),
        models=served_models(desk.fleet.groups),
        instances=tuple(instance_view(desk, one, now) for one in desk.fleet.ordered()),
        goodput=desk.goodput.goodput(WINDOW_S, now), attainment=attainment,
        orphaned_kv_blocks=desk.ledger.orphaned_blocks(now), in_flight=len(desk.requests),
        version=desk.fleet.version, classes=_classes(desk, now), by_model=_models(desk, now), stages_s=stages,
        missed_by=desk.goodput.missed_by(now),
        bottleneck=next(iter(stages), None), verdict=verdict(desk, now),
        uptime_s=now - desk.started_s if desk.started_s is not None else 0.0, kv=kv_view(desk),
        autopilot=autopilot.mode, advice=str(autopilot.said), advice_said=autopilot.said,
        recent_attainment=desk.goodput.windows[WINDOW_S].attainment(),
        goodput_10s=desk.goodput.goodput(SHORT_WINDOW_S, now), queue_depth=len(desk.line),
        queue_late=num_late, notice="" if notice is None else str(notice), notice_said=notice,
    )  # fmt: skip


def verdict(desk: Desk, now: float) -> str:
    """One sentence for an operator: what is degraded, else whether objectives are met."""
    troubles = _troubles(desk, now)
    attainment = desk.goodput.attainment()
    if attainment is None:
        quality = "no request with objectives has finished yet"
    else:
        stage = next(iter(desk.goodput.missed_stages(now)), None)
        quality = f"{attainment:.1%} of requests met their objectives since the start"
        recent = desk.goodput.windows[WINDOW_S].everything()
        if 2 * desk.goodput.missed_by(now).get("tpot", 0) > recent.total - recent.good:
            quality += "; most of those that miss are over TPOT, so decode is too slow"
        elif stage is not None:
            quality += f"; those that miss lose most time in {stage.replace('_', ' ')}"
    text = "; ".join([*troubles, quality])
    return text[:1].upper() + text[1:] + "."


def _troubles(desk: Desk, now: float) -> list[str]:
    fleet, config = desk.fleet, desk.config
    found = []
    if not fleet.groups:
        found.append("no engine has joined")
    for model, group in sorted(fleet.groups.items()):
        blocked = unserved(config, model, group)
        if blocked is not None:
            found.append(f"{blocked.said}, requests wait and are then refused")
        elif not group.prefills and not group.mixed:
            found.append(f"no prefill instance of {model} is ready, so decode computes prompts (serve_on_decode)")
    late_s = SILENT_BEATS * config.heartbeat_s
    silent = [one.id for one in fleet.alive() if now - one.last_seen_s > late_s]
    if silent:
        found.append(f"no word for {late_s:g} s from {_names(silent)}: placed on by what was charged")
    lost = [one.id for one in fleet.ordered() if one.state is InstanceState.LOST]
    if lost:
        found.append(f"lost in the last {config.forget_s:g} s: {_names(lost)}")
    held = [one.id for one in fleet.alive() if one.held]
    if held:
        found.append(f"set aside by an operator: {_names(held)}")
    if (orphaned := desk.ledger.orphaned_blocks(now)) > 0:
        found.append(f"{orphaned} KV blocks are held for nobody and are being freed")
    for model in desk.line.models():
        line = desk.line.of(model)
        if line and line[0].waits_for:
            found.append(f"waiting requests: {len(line)}, because {line[0].waits_for}")
    return found


def _num_late(desk: Desk, now: float) -> int:
    """Of those that wait for a place: past an objective already."""
    return sum(request.doomed(now) for model in desk.line.models() for request in desk.line.of(model))


def _notice(desk: Desk, now: float) -> Said | None:
    """Why requests wait beside idle prefill instances, where it is not decodes that they wait for."""
    kept = any(now - desk.memory(model).kept_s < KEPT_S for model in desk.line.models())
    return say("notice.late") if kept and desk.config.early_reject != "objective" else None


FAILURES = {
    "reserve_refused": "reservations_refused", "prefills_failed": "prefills_failed",
    "decodes_failed": "decodes_failed", "migrations_failed": "migrations_failed", "fetches_missed": "fetches_missed",
    "replications_failed": "copies_failed",
}  # fmt: skip
"""Counters of the desk that KvDetail tells, and their names there."""


def kv_detail(desk: Desk, now: float) -> KvDetail:
    """Where KV is and where it went."""
    return KvDetail(
        hits=kv_view(desk), links=desk.watch.links(now), prefixes=desk.watch.prefixes(desk.directory, now),
        caches=tuple(_cache(desk, one) for one in desk.fleet.alive()),
        failures={name: desk.counters.get(key, 0) for key, name in FAILURES.items()},
        orphaned_kv_blocks=desk.ledger.orphaned_blocks(now), handoff_bytes=desk.counters.get("transfer_bytes", 0),
    )  # fmt: skip


def _cache(desk: Desk, one: Instance) -> CacheView:
    load = one.load
    return CacheView(
        id=one.id, role=one.role.value, num_blocks=load.num_blocks, used_blocks=load.num_blocks - load.free_blocks,
        cached_blocks=load.cached_blocks, free_blocks=load.free_blocks, ssd_blocks=load.ssd_blocks,
        ssd_capacity_blocks=load.ssd_capacity_blocks, num_evicted=desk.watch.num_evicted(one.id),
        num_preemptions=load.num_preemptions, fetch_scale=round(one.fetch_scale, 3),
    )  # fmt: skip


def _names(ids: list[str]) -> str:
    return ", ".join(ids[:3]) + (f" and {len(ids) - 3} more" if len(ids) > 3 else "")


def _classes(desk: Desk, now: float) -> tuple[ClassView, ...]:
    goodput = desk.goodput
    goodput.advance(now)
    doomed: dict[str, int] = {}
    for request in desk.requests.values():
        if request.doomed(now):
            doomed[request.traffic_class] = doomed.get(request.traffic_class, 0) + 1
    views = []
    for name, slo in desk.config.classes.items():
        counts, recent = goodput.by_class[name], goodput.windows[WINDOW_S].by_class.get(name) or Counts()
        judged_for_s = goodput.judged_for_s(name, now)
        views.append(
            ClassView(
                name=name, slo=slo, good=counts.good, total=counts.total,
                attainment=goodput.attainment(name) if slo is not None else None,
                ttft_s=quantiles(recent.ttft_s), tpot_s=quantiles(recent.tpot_s), doomed=doomed.get(name, 0),
                recent_good=recent.good, recent_total=recent.total,
                recent_per_s=recent.good / goodput.span_s(WINDOW_S, now, name),
                judged_for_s=None if judged_for_s is None else round(judged_for_s),
            )
        )  # fmt: skip
    return tuple(views)


def _models(desk: Desk, now: float) -> tuple[ModelView, ...]:
    return tuple(_model(desk, name, now) for name in desk.goodput.models(desk.fleet.groups))


def _model(desk: Desk, name: str, now: float) -> ModelView:
    counts, recent, per_s = desk.goodput.of_model(name, now)
    return ModelView(
        name=name, good=counts.good, total=counts.total,
        attainment=counts.good / counts.total if counts.total else None,
        ttft_s=quantiles(recent.ttft_s), tpot_s=quantiles(recent.tpot_s), recent_good=recent.good,
        recent_total=recent.total, recent_per_s=per_s,
    )  # fmt: skip


def instance_view(desk: Desk, one: Instance, now: float) -> InstanceView:
    """One instance as operators see it."""
    load, hello = one.load, one.hello
    return InstanceView(
        id=one.id, role=one.role.value, state=one.state.value, hardware=hello.hardware.name,
        model=hello.model.name if hello.model is not None else "", epoch=one.epoch, host=hello.host_id,
        engine=hello.engine, num_gpus=one.num_gpus, price_per_hour=hello.hardware.price_per_hour,
        num_running=load.num_running, num_waiting=load.num_waiting,
        queued_prefill_tokens=load.queued_prefill_tokens, num_blocks=hello.num_blocks, free_blocks=load.free_blocks,
        cached_blocks=load.cached_blocks, kv_use=round(one.kv_use, 4),
        step_s=round(load.step_s, 7), num_preemptions=load.num_preemptions, ssd_blocks=load.ssd_blocks,
        ssd_capacity_blocks=load.ssd_capacity_blocks, unsettled=load.unsettled,
        last_seen_s=round(max(0.0, now - one.last_seen_s), 1), speed=round(one.speed, 4),
        provenance=one.latency.provenance if one.latency is not None else "",
        latency_error=one.latency.error if one.latency is not None else None,
        tpot_p50_s=desk.goodput.paces.median(one.id),
    )  # fmt: skip
