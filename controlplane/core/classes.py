"""Objectives of the traffic classes while the fleet runs: changed by operators, kept for the control plane's next life.

What was judged by the old objectives of a class is not mixed with what the new ones say. Classes neither come nor go.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

import msgspec

from controlplane.core.desk import Desk
from controlplane.core.events import (
    Audit,
    ClassesKept,
    ClassesReady,
    ClassesRestored,
    ClassesState,
    ClassesWanted,
    PlanRefused,
)
from controlplane.text import shown
from transfer.api import AuditRow
from transfer.classes import MAX_OBJECTIVE_S, ClassesView, ClassSetting, PriceView
from transfer.objectives import describe
from transfer.said import Said, say
from transfer.terms import Slo


class Classes:
    """Single owner: SchedulerCore. Idempotent: objectives that are in force already change nothing."""

    def __init__(self, desk: Desk, on_change: Callable[[], None]) -> None:
        """on_change: after every change, for those who remember how well something did."""
        self._desk, self._on_change = desk, on_change
        self._configured = desk.config.classes

    def wanted(self, event: ClassesWanted) -> None:
        """Answered with ClassesReady or PlanRefused."""
        desk, change = self._desk, event.change
        present, version = desk.config.classes, desk.fleet.version
        if (unknown := next((name for name in change.classes if name not in present), None)) is not None:
            self._refuse(event, 404, say("refused.no_class", name=shown(unknown), known=", ".join(present)))
            return
        for name, slo in change.classes.items():
            if (fault := _fault(slo)) is not None:
                self._refuse(event, 400, say("refused.objective", name=name, fault=fault))
                return
        changed = {name: slo for name, slo in change.classes.items() if slo != present[name]}
        if changed and change.base_version != version:
            self._refuse(event, 409, say("refused.changed", version=version, seen=change.base_version))
            return
        for name, slo in changed.items():
            detail = f"{describe(present[name])} -> {describe(slo)}"
            row = AuditRow(at_s=event.at_s, actor=change.actor, action="objectives", subject=name, detail=detail)
            desk.emit(Audit(row=row))
        if changed:
            self._put(changed, desk.now)
            desk.emit(ClassesKept(state=ClassesState(classes=desk.config.classes, configured=self._configured)))
        desk.emit(ClassesReady(ask_id=event.ask_id, view=self.view()))

    def restored(self, event: ClassesRestored) -> None:
        """Go on with what an earlier life was told. A class whose settings were changed since then has those."""
        state = event.state
        self._put({
            name: state.classes[name]
            for name, slo in self._configured.items()
            if name in state.classes and name in state.configured and state.configured[name] == slo
        })  # fmt: skip

    def view(self) -> ClassesView:
        desk = self._desk
        kinds = Counter(
            (one.hello.hardware.name, one.num_gpus, one.hello.hardware.price_per_hour) for one in desk.fleet.alive()
        )
        return ClassesView(
            version=desk.fleet.version,
            classes=tuple(
                ClassSetting(name=name, slo=slo, configured=self._configured[name])
                for name, slo in desk.config.classes.items()
            ),
            prices=tuple(
                PriceView(hardware=hardware, num_gpus=num_gpus, price_per_hour=price, num_instances=num)
                for (hardware, num_gpus, price), num in sorted(kinds.items())
            ),
        )  # fmt: skip

    def _put(self, wanted: Mapping[str, Slo | None], since_s: float | None = None) -> None:
        """Requests that have not ended are held to the new objectives; counts of the old ones are forgotten. since_s:
        as in GoodputCore.judge."""
        desk = self._desk
        changed = {name: slo for name, slo in wanted.items() if slo != desk.config.classes[name]}
        if not changed:
            return
        desk.config = msgspec.structs.replace(desk.config, classes=desk.config.classes | changed)
        for name, slo in changed.items():
            desk.goodput.judge(name, slo, since_s)
            desk.traffic.unjudge(name)
        for request in desk.requests.values():
            request.slo = desk.config.classes[request.traffic_class]
        desk.fleet.version += 1
        desk.stirred = True
        self._on_change()

    def _refuse(self, event: ClassesWanted, status: int, why: Said) -> None:
        self._desk.emit(PlanRefused(ask_id=event.ask_id, status=status, said=why))


def _fault(slo: Slo | None) -> Said | None:
    """What is wrong with them, in a sentence's end."""
    values = {} if slo is None else {"ttft_s": slo.ttft_s, "tpot_s": slo.tpot_s, "e2e_s": slo.e2e_s}
    for name, value in values.items():
        if value is not None and not 0.0 < value <= MAX_OBJECTIVE_S:
            return say("refused.seconds", name=name, most=f"{MAX_OBJECTIVE_S:g}", got=f"{value:g}")
    return None
