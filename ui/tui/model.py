"""What a session shows: one moment of the fleet, its price, and the rows of its events.

Pure: no terminal, no clock, no words; drawing is in ui/tui/draw*.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from transfer.api import AuditRow, FleetState, Plan, RequestRecord
from transfer.autopilot import AutopilotView
from transfer.screens import KvDetail, SeriesView
from ui.feed import STALE_S
from ui.insight import GONE, Verdict, verdict
from ui.tui.tape import Happening, Points

Mode = Literal["live", "paused", "past", "replay"]


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
    past: SeriesView | None = None
    """Of the instance that was chosen last."""
    plan: Plan | None = None
    """The one this session follows or has carried out last."""

    @property
    def stale(self) -> bool:
        return self.mode != "replay" and self.age_s > STALE_S

    @property
    def verdict(self) -> Verdict:
        return verdict(self.fleet, self.target, stale=self.stale)

    @property
    def may_act(self) -> bool:
        """Whether what is shown is what there is now, and this session may change it."""
        return self.mode == "live" and not self.stale and not self.read_only and self.fleet is not None


def cost_per_hour(fleet: FleetState) -> float:
    return sum(view.price_per_hour for view in fleet.instances if view.state != GONE)


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
