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
            self.fail(plan_id, step, f"{step.instance_id} was lost while the step was {step.machine.state.value}")
            return
        match step.machine.state:
            case StepState.PENDING:
                self._begin(plan_id, step, instance)
            case StepState.DRAINING:
                self._drain(plan_id, step, instance)
            case StepState.SWITCHING | StepState.VERIFYING:
                timeout_s = self._desk.config.switch_timeout_s
                if self._desk.now - step.since_s > timeout_s:
                    self.fail(plan_id, step, f"{instance.id} did not show its new role within {timeout_s:g} s")

    def report(self, plan_id: str, step: StepRun, instance: Instance, report: RoleReport) -> None:
        """The node's own word on its role. A refusal is asked again a few times: work may just have been leaving."""
        desk = self._desk
        if step.machine.state is not StepState.SWITCHING:
            return
        if report.ok and report.role is step.to_role:
            step.fire("reported", desk.now)
            step.detail = f"{instance.id} says it serves {report.role.value}"
        elif step.num_orders < desk.config.max_role_orders and report.role is step.from_role:
            step.detail = f"{instance.id} refused: {report.detail or 'no reason given'}"
        else:
            told = report.detail or f"it says it serves {report.role.value}"
            self.fail(plan_id, step, f"{instance.id} did not become {step.to_role.value}: {told}")

    def beat(self, plan_id: str, step: StepRun, instance: Instance, beat: Heartbeat) -> None:
        """Verification: the heartbeat after the report must show the instance ready, in the new role if it says one."""
        desk, state = self._desk, step.machine.state
        if state is StepState.SWITCHING:
            # Refused: asked again with the next beat. No answer at all: the order is idempotent on the node.
            patience_s = desk.config.heartbeat_s * (1 if step.detail else UNANSWERED_BEATS)
            if desk.now - step.ordered_s >= patience_s and step.num_orders < desk.config.max_role_orders:
                self._order(plan_id, step, instance)
        elif state is StepState.VERIFYING and beat.state == "ready":
            if beat.role not in (None, step.to_role):
                self.fail(plan_id, step, f"{instance.id} still serves {beat.role} after it reported the switch")
                return
            desk.fleet.take_role(instance, step.to_role)
            desk.fleet.move(instance, "switched")
            self._membership.new_role(instance)
            step.fire("verified", desk.now)
            if step.num_orders == 1:
                self.switch_s += LEARNING * (desk.now - step.ordered_s - self.switch_s)
            step.detail = f"verified on {instance.id}"
            desk.stirred = True

    def fail(self, plan_id: str, step: StepRun, sentence: str) -> None:
        """Give the step up and restore the instance, so that it serves in the role it really has."""
        desk, state = self._desk, step.machine.state
        instance = desk.fleet.live(step.instance_id)
        step.fire("fail", desk.now)
        step.detail = sentence
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
            self.fail(plan_id, step, f"{instance.id} is {instance.state.value} as {instance.role.value}, "
                                     f"not ready as {step.from_role.value}")  # fmt: skip
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
            step.detail = ""
            self._order(plan_id, step, instance)
            return
        if desk.now - step.since_s > config.drain_timeout_s:
            self.fail(
                plan_id, step, f"{instance.id} still holds {len(legs)} requests after {config.drain_timeout_s:g} s"
            )
            return
        step.detail = f"{len(legs)} requests left"
        self._migrations.empty(instance)

    def _order(self, plan_id: str, step: StepRun, instance: Instance) -> None:
        step.num_orders += 1
        step.ordered_s = self._desk.now
        self._desk.send(instance.id, RoleOrder(plan_id=plan_id, epoch=instance.epoch, role=step.to_role))
