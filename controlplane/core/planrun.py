"""Carries the steps of one plan out: drain by migration, switch, verify on the node; roll back what fails.

One step at a time, so that the fleet is never short of more than one instance. A failed step leaves its instance
routable in its old role. Every state of a step has a deadline.
"""

from __future__ import annotations

from controlplane.core.desk import Desk
from controlplane.core.instance import Instance, InstanceState
from controlplane.core.membership import Membership
from controlplane.core.migration import Migrations
from controlplane.core.steps import StepRun, StepState
from transfer.said import Said, counted, say
from transfer.wire.messages import Heartbeat, RoleOrder, RoleReport

UNANSWERED_BEATS = 5
"""Heartbeats after which a role order without any report is repeated."""
FIRST_SWITCH_S = 0.1
"""What an idle switch and its verification take, until some were seen."""
LEARNING = 0.5
"""Weight of the latest switch in what the next is predicted to take."""


class StepRunner:
    def __init__(self, desk: Desk, migrations: Migrations, membership: Membership) -> None:
        self._desk, self._migrations, self._membership = desk, migrations, membership
        self.switch_s = FIRST_SWITCH_S

    def advance(self, plan_id: str, step: StepRun) -> None:
        """Do what can be done now. The step ends in done, failed or rolled_back."""
        instance = self._desk.fleet.live(step.instance_id)
        if instance is None:
            self.fail(plan_id, step, say("step.lost", id=step.instance_id, state=step.machine.state.value))
            return
        match step.machine.state:
            case StepState.PENDING:
                self._begin(plan_id, step, instance)
            case StepState.DRAINING:
                self._drain(plan_id, step, instance)
            case StepState.SWITCHING | StepState.VERIFYING:
                timeout_s = self._desk.config.switch_timeout_s
                if self._desk.now - step.since_s > timeout_s:
                    self.fail(plan_id, step, say("step.not_shown", id=instance.id, seconds=f"{timeout_s:g}"))

    def report(self, plan_id: str, step: StepRun, instance: Instance, report: RoleReport) -> None:
        """The node's own word on its role. A refusal is asked again a few times: work may just have been leaving."""
        desk = self._desk
        if step.machine.state is not StepState.SWITCHING:
            return
        if report.ok and report.role is step.to_role:
            step.fire("reported", desk.now)
            step.said = say("step.serves", id=instance.id, role=report.role.value)
        elif step.num_orders < desk.config.max_role_orders and report.role is step.from_role:
            silent = say("step.refused_silent", id=instance.id)
            step.said = say("step.refused", id=instance.id, reason=report.detail) if report.detail else silent
        else:
            what = {"id": instance.id, "role": step.to_role.value}
            serves = say("step.not_became_serves", **what, other=report.role.value)
            told = say("step.not_became", **what, reason=report.detail) if report.detail else serves
            self.fail(plan_id, step, told)

    def beat(self, plan_id: str, step: StepRun, instance: Instance, beat: Heartbeat) -> None:
        """Verification: the heartbeat after the report must show the instance ready, in the new role if it says one."""
        desk, state = self._desk, step.machine.state
        if state is StepState.SWITCHING:
            # Refused: asked again with the next beat. No answer at all: the order is idempotent on the node.
            patience_s = desk.config.heartbeat_s * (1 if step.said is not None else UNANSWERED_BEATS)
            if desk.now - step.ordered_s >= patience_s and step.num_orders < desk.config.max_role_orders:
                self._order(plan_id, step, instance)
        elif state is StepState.VERIFYING and beat.state == "ready":
            if beat.role not in (None, step.to_role):
                self.fail(plan_id, step, say("step.still_serves", id=instance.id, role=beat.role))
                return
            desk.fleet.take_role(instance, step.to_role)
            desk.fleet.move(instance, "switched")
            self._membership.new_role(instance)
            step.fire("verified", desk.now)
            if step.num_orders == 1:
                self.switch_s += LEARNING * (desk.now - step.ordered_s - self.switch_s)
            step.said = say("step.verified", id=instance.id)
            desk.stirred = True

    def fail(self, plan_id: str, step: StepRun, why: Said) -> None:
        """Give the step up and restore the instance, so that it serves in the role it really has."""
        desk, state = self._desk, step.machine.state
        instance = desk.fleet.live(step.instance_id)
        step.fire("fail", desk.now)
        step.said = why
        if instance is None:
            return
        if instance.state is InstanceState.DRAINING:
            desk.fleet.move(instance, "undrain")
        elif instance.state is InstanceState.SWITCHING:
            desk.fleet.move(instance, "restore")
            order = RoleOrder(plan_id=f"{plan_id}/rollback", epoch=instance.epoch, role=step.from_role)
            desk.send(instance.id, order)
        if state is not StepState.PENDING:
            step.fire("roll_back", desk.now)
        desk.stirred = True

    def _begin(self, plan_id: str, step: StepRun, instance: Instance) -> None:
        if instance.state is not InstanceState.READY or instance.role is not step.from_role:
            self.fail(plan_id, step, say(
                "step.not_ready", id=instance.id, state=say(f"states.{instance.state.value}"),
                role=instance.role.value, wanted=step.from_role.value,
            ))  # fmt: skip
            return
        self._desk.fleet.move(instance, "drain")
        step.fire("drain", self._desk.now)
        self._drain(plan_id, step, instance)

    def _drain(self, plan_id: str, step: StepRun, instance: Instance) -> None:
        """Migrate a few at a time; what cannot move finishes here."""
        desk, config = self._desk, self._desk.config
        legs = desk.ledger.legs_at(instance.id)
        if not legs:
            desk.fleet.move(instance, "switch")
            step.fire("switch", desk.now)
            step.said = None
            self._order(plan_id, step, instance)
            return
        if desk.now - step.since_s > config.drain_timeout_s:
            held_s = f"{config.drain_timeout_s:g}"
            self.fail(plan_id, step, say("step.still_holds", id=instance.id, num=len(legs), seconds=held_s))
            return
        step.said = counted("step.left", len(legs))
        self._migrations.empty(instance)

    def _order(self, plan_id: str, step: StepRun, instance: Instance) -> None:
        step.num_orders += 1
        step.ordered_s = self._desk.now
        self._desk.send(instance.id, RoleOrder(plan_id=plan_id, epoch=instance.epoch, role=step.to_role))
