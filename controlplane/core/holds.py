"""What operators set aside: a cordoned instance gets nothing new, a draining one is emptied besides, until resumed.

By instance id, so that it outlasts a restart of the instance, though not one of the control plane. Refuses what would
leave a model without a phase, and what a plan is moving.
"""

from __future__ import annotations

from collections import deque

from controlplane.core.desk import Desk
from controlplane.core.events import Audit, HoldReady, HoldWanted, PlanRefused
from controlplane.core.instance import Instance, InstanceState
from controlplane.core.membership import Membership
from controlplane.core.migration import Migrations
from controlplane.core.plans import Plans
from controlplane.core.view import instance_view
from controlplane.text import shown
from transfer.api import ActionView, AuditRow, HoldAction
from transfer.said import Said, say
from transfer.terms import InstanceId, Role

MAX_HELD = 4096
MAX_KEYS = 256
_STATES = {"cordon": InstanceState.CORDONED, "drain": InstanceState.DRAINING}


class Holds:
    """Single owner: SchedulerCore. Idempotent: what is in force already, or was asked for with the same idempotency
    key of the same instance, is answered with the instance as it is."""

    def __init__(self, desk: Desk, migrations: Migrations, membership: Membership, plans: Plans) -> None:
        self._desk, self._migrations, self._membership, self._plans = desk, migrations, membership, plans
        self._held: dict[InstanceId, HoldAction] = {}
        self._keys: deque[tuple[str, InstanceId, HoldAction]] = deque(maxlen=MAX_KEYS)

    @property
    def draining(self) -> bool:
        return "drain" in self._held.values()

    def wanted(self, event: HoldWanted) -> None:
        """Answered with HoldReady or PlanRefused."""
        instance, apply = self._desk.fleet.instances.get(event.instance_id), event.apply
        if instance is None:
            self._refuse(event, 404, say("refused.no_instance", id=shown(event.instance_id)))
            return
        click = (apply.idempotency_key, event.instance_id, event.action)
        known = bool(apply.idempotency_key) and click in self._keys
        if not known and not self._in_force(instance, event.action):
            if (reason := self._why_not(instance, event)) is not None:
                self._refuse(event, 409, reason)
                return
            if apply.idempotency_key:
                self._keys.append(click)
            self._set(instance, event.action)
            self._audit(event, instance)
        self._answer(event, instance)

    def heard(self, instance: Instance) -> None:
        """It became ready, perhaps in a new life: what it was set aside for still holds."""
        action = self._held.get(instance.id)
        if action is not None and instance.ready:
            self._put(instance, action)

    def tick(self) -> None:
        """Carry on with what is being emptied."""
        for name, action in self._held.items():
            instance = self._desk.fleet.live(name) if action == "drain" else None
            if instance is not None and instance.state is InstanceState.DRAINING:
                self._migrations.empty(instance)

    # --- deciding -------------------------------------------------------------------------------------------

    def _in_force(self, instance: Instance, action: HoldAction) -> bool:
        held = self._held.get(instance.id)
        if action == "resume":
            return held is None
        return held in (action, "drain")

    def _why_not(self, instance: Instance, event: HoldWanted) -> Said | None:
        plan, version = self._plans.applying, self._desk.fleet.version
        if plan is not None and any(step.instance_id == instance.id for step in plan.steps):
            return say("refused.being_moved", id=instance.id, plan=plan.plan_id)
        if event.apply.base_version != version:
            return say("refused.changed", version=version, seen=event.apply.base_version)
        if event.action == "resume":
            return None
        if instance.state not in (InstanceState.READY, InstanceState.CORDONED):
            return say("refused.not_now", id=instance.id, state=say(f"states.{instance.state.value}"))
        if len(self._held) >= MAX_HELD and self._forgotten() is None:
            return say("refused.too_many", num=MAX_HELD)
        return self._last_of(instance)

    def _forgotten(self) -> InstanceId | None:
        """One that was set aside and has long gone: where ids do not come again, nobody resumes it."""
        return next((name for name in self._held if name not in self._desk.fleet.instances), None)

    def _last_of(self, instance: Instance) -> Said | None:
        """Whether its model could not be served without it and those that a plan takes away, in a sentence."""
        model = instance.hello.model
        group = self._desk.fleet.groups.get(model.name) if model is not None else None
        if group is None or instance.role is Role.KV_POOL or not instance.ready:
            return None
        ready = (*group.prefills, *group.decodes, *group.mixed)
        left = [one for one in ready if one is not instance and self._plans.step_of(one) is None]
        for role in (Role.PREFILL, Role.DECODE):
            if instance.role in (role, Role.MIXED) and not any(one.role in (role, Role.MIXED) for one in left):
                return say("refused.last", id=instance.id, role=role.value, model=group.model.name)
        return None

    # --- doing ----------------------------------------------------------------------------------------------

    def _set(self, instance: Instance, action: HoldAction) -> None:
        if action != "resume":
            if len(self._held) >= MAX_HELD and (forgotten := self._forgotten()) is not None:
                del self._held[forgotten]
            self._held[instance.id] = action
            self._put(instance, action)
            return
        del self._held[instance.id]
        instance.held = False
        for event in ("resume", "undrain"):
            if instance.machine.can(event):
                self._move(instance, event)
                break

    def _put(self, instance: Instance, action: HoldAction) -> None:
        instance.held = True
        if instance.state is not _STATES[action]:
            self._move(instance, action)
        if action == "drain":
            self._migrations.empty(instance)

    def _move(self, instance: Instance, event: str) -> None:
        self._desk.fleet.move(instance, event)
        self._membership.share_pools()
        self._desk.stirred = True

    def _answer(self, event: HoldWanted, instance: Instance) -> None:
        left = {leg.request_id: None for leg in self._desk.ledger.legs_at(instance.id)}
        view = ActionView(
            instance=instance_view(self._desk, instance, self._desk.now), version=self._desk.fleet.version,
            num_left=len(left),
        )  # fmt: skip
        self._desk.emit(HoldReady(ask_id=event.ask_id, view=view))

    def _audit(self, event: HoldWanted, instance: Instance) -> None:
        said = say("held", role=instance.role.value, state=say(f"states.{instance.state.value}"))
        row = AuditRow(
            at_s=event.at_s, actor=event.apply.actor, action=event.action, subject=instance.id, detail=str(said),
            said=said,
        )  # fmt: skip
        self._desk.emit(Audit(row=row))

    def _refuse(self, event: HoldWanted, status: int, why: Said) -> None:
        self._desk.emit(PlanRefused(ask_id=event.ask_id, status=status, said=why))
