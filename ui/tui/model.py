"""What each panel shows, worked out from what the fleet said: the verdict, shares, sorted and filtered rows.

Pure: no terminal, no clock, no words; drawing is in ui/tui/draw*.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from transfer.api import AuditRow, AutopilotView, FleetState, InstanceView, Plan, RequestRecord
from transfer.screens import KvDetail, LinkView
from transfer.terms import Role
from ui import looks
from ui.feed import STALE_S
from ui.tui.tape import Happening, Points

Mode = Literal["live", "paused", "past", "replay"]
VerdictKind = Literal["met", "missed", "idle", "degraded", "stale"]
ENGINES = (Role.PREFILL.value, Role.DECODE.value, Role.MIXED.value)
SILENT_S = 3.0
GONE = "lost"


@dataclass(frozen=True, slots=True)
class Picture:
    """One moment of the fleet as this session knows it. age_s: of the newest frame, infinite before the first."""

    fleet: FleetState | None = None
    at_s: float = 0.0
    """Unix time of the state by the control plane's clock; newest_s: of the newest one known."""
    newest_s: float = 0.0
    age_s: float = float("inf")
    mode: Mode = "live"
    url: str = ""
    error: str = ""
    read_only: bool = False
    target: float = 0.9
    points: Points = field(default_factory=Points)
    happenings: Sequence[Happening] = ()
    records: Sequence[RequestRecord] = ()
    audit: Sequence[AuditRow] = ()
    kv: KvDetail | None = None
    autopilot: AutopilotView | None = None
    plan: Plan | None = None
    """The one this session follows or has carried out last."""

    @property
    def stale(self) -> bool:
        return self.mode != "replay" and self.age_s > STALE_S

    @property
    def may_act(self) -> bool:
        """Whether what is shown is what there is now, and this session may change it."""
        return self.mode == "live" and not self.stale and not self.read_only and self.fleet is not None


class Trouble(NamedTuple):
    """key: lost, silent, unserved, orphaned; ids or a number beside it."""

    key: str
    ids: tuple[str, ...] = ()
    number: int = 0


class Verdict(NamedTuple):
    kind: VerdictKind
    attainment: float | None
    troubles: tuple[Trouble, ...] = ()


def verdict(picture: Picture) -> Verdict:
    """Are objectives met? Old figures say nothing; trouble comes before quality."""
    fleet = picture.fleet
    attainment = None if fleet is None else fleet.recent_attainment
    if fleet is None or picture.stale:
        return Verdict("stale", attainment)
    if found := troubles(fleet):
        return Verdict("degraded", attainment, tuple(found))
    if attainment is None:
        return Verdict("idle", None)
    return Verdict("met" if attainment >= picture.target else "missed", attainment)


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


def stage_shares(stages_s: Mapping[str, float]) -> list[tuple[str, float, float]]:
    """(stage, seconds, share), in the order a request passes them."""
    total = sum(stages_s.values())
    names = [*looks.STAGES, *(name for name in stages_s if name not in looks.STAGES)]
    return [(name, stages_s.get(name, 0.0), stages_s.get(name, 0.0) / total) for name in names if total > 0]


def cost_per_hour(fleet: FleetState) -> float:
    return sum(view.price_per_hour for view in fleet.instances if view.state != GONE)


def advised(view: AutopilotView | None) -> Mapping[str, str]:
    """The move the autopilot's newest look proposes, instance to role; empty when it proposes none."""
    if view is None or not view.evaluations or view.evaluations[0].code != "advise":
        return {}
    return view.evaluations[0].moves


def other_roles(view: InstanceView) -> tuple[str, ...]:
    """What it could be instead; nothing for a kv_pool."""
    return tuple(role for role in ENGINES if role != view.role) if view.role in ENGINES else ()


def links(detail: KvDetail) -> tuple[list[str], list[str], dict[tuple[str, str], LinkView]]:
    """The prefill by decode matrix: its rows, its columns, and a link by both."""
    by_pair = {(link.prefill, link.decode): link for link in detail.links}
    rows, columns = ({pair[side]: None for pair in by_pair} for side in (0, 1))
    return [*rows], [*columns], by_pair


class Moment(NamedTuple):
    """A row of the events panel. own: seen in the feed rather than in the audit log."""

    at_s: float
    actor: str
    action: str
    subject: str
    detail: str
    row: AuditRow | None = None
    seen: Happening | None = None

    @property
    def id(self) -> str:
        return f"{self.at_s} {self.action} {self.subject}"


def moments(picture: Picture) -> list[Moment]:
    """Audit log and happenings up to the moment shown, the newest first."""
    found = [Moment(one.at_s, one.actor, one.action, one.subject, one.detail, row=one) for one in picture.audit]
    found += [Moment(one.at_s, "", one.kind, one.subject, "", seen=one) for one in picture.happenings]
    return sorted((one for one in found if one.at_s <= picture.at_s + 1.0), key=lambda one: -one.at_s)


def last_done(plans: Iterable[Plan]) -> Plan | None:
    """The plan that `u` takes back: the newest one that ended well, was not taken back, and is no undo itself."""
    undone = {plan.undo_of for plan in plans if plan.undo_of and plan.status == "done"}
    found = (plan for plan in plans if plan.status == "done" and plan.steps and plan.undo_of is None)
    return next((plan for plan in found if plan.plan_id not in undone), None)
