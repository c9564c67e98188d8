"""What a fleet's state and answers mean, for console and TUI: the verdict, troubles, shares, what may be done.

Pure: no terminal, no page, no clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple

from transfer.api import CandidateView, FleetState, InstanceView, Plan, Prediction, RequestRecord
from transfer.autopilot import AutopilotView
from transfer.screens import KvDetail, LinkView
from transfer.terms import Role
from ui import figures, looks
from ui.errors import ApiError, CliError
from ui.words import DEFAULT, Words

VerdictKind = Literal["met", "missed", "idle", "degraded", "stale"]
ENGINES = (Role.PREFILL.value, Role.DECODE.value, Role.MIXED.value)
SILENT_S = 3.0
GONE = "lost"


class Trouble(NamedTuple):
    """key: lost, silent, unserved, orphaned; ids or a number beside it."""

    key: str
    ids: tuple[str, ...] = ()
    number: int = 0


class Verdict(NamedTuple):
    kind: VerdictKind
    attainment: float | None
    troubles: tuple[Trouble, ...] = ()


def verdict(fleet: FleetState | None, target: float, *, stale: bool = False) -> Verdict:
    """Are objectives met, by `target` of the requests? Old figures say nothing; trouble comes before quality."""
    attainment = None if fleet is None else fleet.recent_attainment
    if fleet is None or stale:
        return Verdict("stale", attainment)
    if found := troubles(fleet):
        return Verdict("degraded", attainment, tuple(found))
    if attainment is None:
        return Verdict("idle", None)
    return Verdict("met" if attainment >= target else "missed", attainment)


def troubles(fleet: FleetState) -> list[Trouble]:
    """What is broken, the worst first."""
    found = []
    ready = {view.role for view in fleet.instances if view.state == "ready"}
    if Role.MIXED.value not in ready and not {Role.PREFILL.value, Role.DECODE.value} <= ready:
        missing = [role for role in ENGINES[:2] if role not in ready]
        found.append(Trouble("unserved", tuple(missing)))
    if lost := tuple(view.id for view in fleet.instances if view.state == GONE):
        found.append(Trouble("lost", lost))
    if silent := tuple(view.id for view in fleet.instances if view.state != GONE and view.last_seen_s > SILENT_S):
        found.append(Trouble("silent", silent))
    if fleet.orphaned_kv_blocks:
        found.append(Trouble("orphaned", number=fleet.orphaned_kv_blocks))
    return found


def with_changes(sentence: str, fleet: FleetState, say: Words) -> str:
    """A verdict, and for as long as it stands on less than its window which objectives were changed and when."""
    window_s = fleet.goodput.window_s
    changed = {one.name: one.judged_for_s for one in fleet.classes
               if one.judged_for_s is not None and one.judged_for_s < window_s}  # fmt: skip
    if not changed:
        return sentence
    names, ago = say.say("core.join").join(changed), figures.span(min(changed.values()))
    return say.say("verdict.changed", verdict=sentence, ago=ago, names=names)


def over_text(fleet: FleetState, say: Words) -> str:
    """How many requests of the window missed which objective; empty when none."""
    over = [f"{name.upper()} {num}" for name, num in fleet.missed_by.items()]
    return say.say("verdict.over", objectives=say.say("core.join").join(over)) if over else ""


def present(fleet: FleetState) -> Prediction:
    """The fleet as it is, in the terms of a prediction; percentiles of the class with most requests, since they are
    never averaged."""
    busiest = max(fleet.classes, key=lambda one: one.recent_total, default=None)
    return Prediction(
        goodput_per_s=fleet.goodput.per_s, goodput_per_gpu=fleet.goodput.per_gpu, attainment=fleet.recent_attainment,
        ttft_p50_s=None if busiest is None else busiest.ttft_s.p50,
        tpot_p50_s=None if busiest is None else busiest.tpot_s.p50,
    )  # fmt: skip


def stage_shares(stages_s: Mapping[str, float]) -> list[tuple[str, float, float]]:
    """(stage, seconds, share), in the order a request passes them."""
    total = sum(stages_s.values())
    names = [*looks.STAGES, *(name for name in stages_s if name not in looks.STAGES)]
    return [(name, stages_s.get(name, 0.0), stages_s.get(name, 0.0) / total) for name in names if total > 0]


def advised(view: AutopilotView | None) -> Mapping[str, str]:
    """The move that the autopilot proposes, instance to role; empty when it proposes none."""
    if view is None or view.shown is None or view.shown.code != "advise":
        return {}
    return view.shown.moves


def other_roles(view: InstanceView) -> tuple[str, ...]:
    """What it could be instead; nothing for a kv_pool."""
    return tuple(role for role in ENGINES if role != view.role) if view.role in ENGINES else ()


def links(detail: KvDetail) -> tuple[list[str], list[str], dict[tuple[str, str], LinkView]]:
    """The prefill by decode matrix: its rows, its columns, and a link by both."""
    by_pair = {(link.prefill, link.decode): link for link in detail.links}
    rows, columns = ({pair[side]: None for pair in by_pair} for side in (0, 1))
    return [*rows], [*columns], by_pair


def risk_texts(plan: Plan, say: Words) -> list[str]:
    """Its risks, as sentences."""
    said = plan.risks_said or (None,) * len(plan.risks)
    return [say.sentence(one, risk) for one, risk in zip(said, plan.risks, strict=True)]


def reason_text(one: CandidateView, say: Words) -> str:
    """Why this placement won or lost."""
    return say.say("core.join").join(say.sentence(part, str(part)) for part in one.said) or one.reason


def refusal_text(error: CliError, say: Words) -> str:
    """Why something was not done. What has no code, such as a fault of the network, is quoted as it is."""
    if say.lang == DEFAULT:
        return str(error)
    said = error.said if isinstance(error, ApiError) else None
    return say.say("action.refused", reason=say.sentence(said, str(error)))


def miss_text(record: RequestRecord, say: Words) -> str:
    """Which objectives it missed and by how much; empty when none, or when it came to no answer."""
    over = [f"{name.upper()} +{figures.excess(over_s)}" for name, over_s in record.missed_by_s.items()]
    return say.say("request.missed_by", objectives=say.say("core.join").join(over)) if over else ""


def last_done(plans: Iterable[Plan]) -> Plan | None:
    """The plan that an undo takes back: the newest one that ended well, was not taken back, and is no undo itself."""
    undone = {plan.undo_of for plan in plans if plan.undo_of and plan.status == "done"}
    found = (plan for plan in plans if plan.status == "done" and plan.steps and plan.undo_of is None)
    return next((plan for plan in found if plan.plan_id not in undone), None)
