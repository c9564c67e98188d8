"""One plan and how far it is, and what of plans outlives the control plane: so that the next life can undo them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from controlplane.core.events import PlansState
from controlplane.core.goodput import Counts, Probe
from controlplane.core.machine import Machine
from controlplane.core.steps import STEP_MOVES, StepRun, StepState
from transfer.api import Plan, PlanStatus, PlanStep, Prediction
from transfer.said import Said, say
from transfer.terms import Role

MAX_KEPT = 16
KEPT = ("done", "failed", "undone")


@dataclass
class PlanRun:
    """One plan and how far it is. status moves planned -> applying -> done or failed; done -> undone."""

    plan_id: str
    base_version: int
    before: str
    after: str
    steps: list[StepRun]
    predicted: Prediction
    risks: tuple[Said, ...]
    undo_of: str | None = None
    status: PlanStatus = "planned"
    measured: Prediction | None = None
    failed: Said | None = None
    keys: list[str] = field(default_factory=list)
    actor: str = ""
    applied_s: float = 0.0
    at_s: float = 0.0
    probe: Probe | None = None
    model: str = ""
    gain: float | None = None

    def view(self) -> Plan:
        return Plan(
            plan_id=self.plan_id, status=self.status, base_version=self.base_version, before=self.before,
            after=self.after, steps=tuple(step.view() for step in self.steps), predicted=self.predicted,
            measured=self.measured, risks=tuple(str(one) for one in self.risks), risks_said=self.risks,
            failed=None if self.failed is None else str(self.failed), failed_said=self.failed, undo_of=self.undo_of,
        )  # fmt: skip

    @property
    def change(self) -> Said:
        return say("plan.change", before=self.before, after=self.after)


def kept(plans: Iterable[PlanRun]) -> PlansState:
    """The last plans that ended, the oldest first."""
    ended = [plan.view() for plan in plans if plan.status in KEPT]
    return PlansState(plans=tuple(ended[-MAX_KEPT:]))


def restored(plan: Plan) -> PlanRun:
    """As it was kept, to be looked at and undone."""
    return PlanRun(
        plan_id=plan.plan_id, base_version=plan.base_version, before=plan.before, after=plan.after,
        steps=[_step(step) for step in plan.steps], predicted=plan.predicted, risks=plan.risks_said,
        undo_of=plan.undo_of, status=plan.status, measured=plan.measured, failed=plan.failed_said,
    )  # fmt: skip


def new_step(step: PlanStep) -> StepRun:
    return _run(step, StepState.PENDING)


def outcome(counts: Counts, span_s: float, duration_s: float | None, code: str) -> Prediction:
    """What finished in the span, as it stands beside a prediction."""
    said = say(code, num=counts.finished, seconds=f"{span_s:.1f}")
    quiet = counts.finished == 0 or span_s <= 0
    return Prediction(
        duration_s=duration_s, goodput_per_s=None if quiet else counts.good / span_s,
        ttft_p50_s=counts.ttft_s.quantile(0.5), tpot_p50_s=counts.tpot_s.quantile(0.5), basis=str(said), said=said,
    )  # fmt: skip


def _step(step: PlanStep) -> StepRun:
    run = _run(step, StepState(step.status))
    run.said, run.num_migrated = step.said, step.num_migrated
    return run


def _run(step: PlanStep, state: StepState) -> StepRun:
    name = f"step {step.instance_id} {step.from_role} to {step.to_role}"
    return StepRun(
        instance_id=step.instance_id, from_role=Role(step.from_role), to_role=Role(step.to_role),
        machine=Machine(name, STEP_MOVES, state),
    )  # fmt: skip
