"""The operator's plans: made, applied once, undone, measured and audited. One is applied at a time."""

from __future__ import annotations

from dataclasses import dataclass, field

from controlplane.core.desk import Desk
from controlplane.core.estimate import kv_token_bytes
from controlplane.core.events import ApplyWanted, Audit, PlanReady, PlanRefused, PlanWanted
from controlplane.core.fleet import xpyd
from controlplane.core.forecast import Predictor, pace_of, predict
from controlplane.core.goodput import Probe
from controlplane.core.instance import Instance
from controlplane.core.pins import SPLIT, Pins
from controlplane.core.planrun import StepRunner
from controlplane.core.rebalance import plan_steps, risks
from controlplane.core.score import Applied, Outcome, Scores
from controlplane.core.steps import StepRun, StepState, new_step
from controlplane.text import shown
from transfer.api import AuditRow, Plan, PlanRequest, PlanStatus, PlanStep, Prediction, ScoredMove
from transfer.errors import InvalidValue
from transfer.terms import InstanceId, Role
from transfer.wire.messages import Heartbeat, RoleReport

MOVE_S = 0.02
"""What a migration takes besides moving its bytes."""
AUTOPILOT = "autopilot"
"""The actor of plans that nobody asked for."""


@dataclass
class PlanRun:
    """One plan and how far it is. status moves planned -> applying -> done or failed; done -> undone."""

    plan_id: str
    base_version: int
    before: str
    after: str
    steps: list[StepRun]
    predicted: Prediction
    risks: tuple[str, ...]
    undo_of: str | None = None
    status: PlanStatus = "planned"
    measured: Prediction | None = None
    failed: str | None = None
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
            measured=self.measured, risks=self.risks, failed=self.failed, undo_of=self.undo_of,
        )  # fmt: skip


class Plans:
    """Idempotent by idempotency_key: applying a plan again with the key it was applied with answers its state."""

    def __init__(self, desk: Desk, runner: StepRunner, pins: Pins, scores: Scores) -> None:
        """An operator's plan pins the split; every plan that is done is scored."""
        self._desk, self._runner, self._pins, self.scores = desk, runner, pins, scores
        self._plans: dict[str, PlanRun] = {}
        self._num_plans = 0
        self.applying: PlanRun | None = None
        self._measuring: PlanRun | None = None
        self.ended_s: float | None = None
        """When the last plan was over."""

    def wanted(self, event: PlanWanted) -> None:
        """Plan only."""
        try:
            plan = self._make(event.request)
        except InvalidValue as error:
            self._refuse(event.ask_id, 400, str(error))
            return
        self._desk.emit(PlanReady(ask_id=event.ask_id, plan=plan.view()))

    def apply(self, event: ApplyWanted) -> None:
        """Start a plan, or the inverse of one; refused when the fleet changed since the caller looked."""
        plan, asked, version = self._plans.get(event.plan_id), event.apply, self._desk.fleet.version
        if plan is None:
            self._refuse(event.ask_id, 404, f"there is no plan {shown(event.plan_id)}; plans are kept for a while only")
            return
        if event.undo and (undone := self._undone_by(plan, asked.idempotency_key)):
            plan = undone
        elif event.undo:
            plan = self._inverse(event, plan)
            if plan is None:
                return
        if asked.idempotency_key and asked.idempotency_key in plan.keys:
            self._desk.emit(PlanReady(ask_id=event.ask_id, plan=plan.view()))
            return
        if plan.status != "planned":
            self._refuse(event.ask_id, 409, f"plan {plan.plan_id} is {plan.status} already")
        elif self.applying is not None:
            self._refuse(event.ask_id, 409, f"plan {self.applying.plan_id} is being applied; wait until it has ended")
        elif asked.base_version != version or plan.base_version != version:
            self._refuse_stale(event, plan.base_version)
        else:
            self._start(plan, event)

    def own(self, moves: dict[str, str], gain: float) -> Plan:
        """Make and start a plan of the autopilot's. gain: predicted, as a share of goodput. Raises InvalidValue when
        it cannot be."""
        plan = self._make(PlanRequest(moves=moves))
        plan.gain = gain
        self._begin(plan, AUTOPILOT, 0.0)
        return plan.view()

    def advance(self) -> None:
        """Carry the plan on, step after step; end its measurement when its window is over."""
        desk, plan = self._desk, self.applying
        while plan is not None and plan.status == "applying":
            step = next((one for one in plan.steps if one.machine.state is not StepState.DONE), None)
            if step is None:
                self._done(plan)
                break
            before = step.machine.state
            if before in (StepState.FAILED, StepState.ROLLED_BACK):
                self._failed(plan, step.detail)
                break
            self._runner.advance(plan.plan_id, step)
            if step.machine.state is before:
                break
        self._scored(self.scores.due(desk.now, desk.config.autopilot_window_s, self._outcome))
        probe = self._measuring.probe if self._measuring is not None else None
        if self._measuring is not None and probe is not None and desk.now - probe.since_s >= desk.config.measure_s:
            self._measure(self._measuring)

    def report(self, instance: Instance, report: RoleReport) -> None:
        step = self.step_of(instance)
        if step is not None and self.applying is not None and report.plan_id == self.applying.plan_id:
            self._runner.report(self.applying.plan_id, step, instance, report)
        elif step is None:
            self._desk.fleet.take_role(instance, report.role)  # the truth, also after a switch was given up

    def beat(self, instance: Instance, beat: Heartbeat) -> None:
        step = self.step_of(instance)
        if step is not None and self.applying is not None:
            self._runner.beat(self.applying.plan_id, step, instance, beat)
        elif beat.role is not None and step is None:
            self._desk.fleet.take_role(instance, beat.role)

    def moved(self, instance_id: InstanceId) -> None:
        """A request migrated away from this instance."""
        for step in self.applying.steps if self.applying is not None else []:
            if step.instance_id == instance_id:
                step.num_migrated += 1

    def plan(self, plan_id: str) -> Plan | None:
        run = self._plans.get(plan_id)
        return run.view() if run is not None else None

    def all(self) -> list[Plan]:
        """Newest first."""
        return [run.view() for run in reversed(self._plans.values())]

    # --- making ---------------------------------------------------------------------------------------------

    def _make(self, request: PlanRequest, undo_of: str | None = None) -> PlanRun:
        desk, fleet = self._desk, self._desk.fleet
        target, steps = plan_steps(fleet, request)
        counts = fleet.counts()
        self._num_plans += 1
        run = PlanRun(
            plan_id=f"plan-{desk.control_epoch:x}-{self._num_plans}", base_version=fleet.version,
            before=xpyd(counts[Role.PREFILL], counts[Role.DECODE], counts[Role.MIXED]), after=str(target),
            steps=[new_step(step) for step in steps], predicted=self._predict(steps),
            risks=risks(fleet, target, steps), undo_of=undo_of, model=self._model_of(steps),
        )  # fmt: skip
        self._plans[run.plan_id] = run
        for old in [name for name, one in self._plans.items() if one.status != "applying"][: -desk.config.max_plans]:
            del self._plans[old]
        return run

    def _predict(self, steps: tuple[PlanStep, ...]) -> Prediction:
        desk, fleet = self._desk, self._desk.fleet
        roles = {one.id: one.role for one in fleet.engines()}
        roles |= {step.instance_id: Role(step.to_role) for step in steps}
        moved = [one for step in steps if (one := fleet.live(step.instance_id)) is not None]
        group = fleet.groups.get(self._model_of(steps))
        found = predict(desk.config, group, roles, desk.traffic, desk.now, self.scores.error)
        return _with(found, duration_s=sum(self.duration_s(one) for one in moved))

    def _model_of(self, steps: tuple[PlanStep, ...]) -> str:
        """The model that the first moved instance serves, or any."""
        groups = self._desk.fleet.groups
        first = self._desk.fleet.live(steps[0].instance_id) if steps else None
        model = first.hello.model.name if first is not None and first.hello.model is not None else ""
        return model if model in groups else next(iter(groups), "")

    def duration_s(self, one: Instance) -> float:
        """Predicted drain and switch of one instance."""
        return _drain_s(one) + self._runner.switch_s

    def _undone_by(self, plan: PlanRun, key: str) -> PlanRun | None:
        """The undo of this plan that was asked for with the same key."""
        return next(
            (one for one in self._plans.values() if one.undo_of == plan.plan_id and key and key in one.keys), None
        )

    def _inverse(self, event: ApplyWanted, plan: PlanRun) -> PlanRun | None:
        done = [step for step in plan.steps if step.machine.state is StepState.DONE]
        if plan.status not in ("done", "failed") or not done:
            why = "there is nothing to undo" if plan.status != "applying" else "wait until it has ended"
            self._refuse(event.ask_id, 409, f"plan {plan.plan_id} is {plan.status}: {why}")
            return None
        if self.applying is not None:
            self._refuse(event.ask_id, 409, f"plan {self.applying.plan_id} is being applied; wait until it has ended")
            return None
        if event.apply.base_version != self._desk.fleet.version:
            self._refuse_stale(event, self._desk.fleet.version)
            return None
        moves = {step.instance_id: step.from_role.value for step in done}
        try:
            return self._make(PlanRequest(moves=moves), undo_of=plan.plan_id)
        except InvalidValue as error:
            self._refuse(event.ask_id, 409, f"plan {plan.plan_id} cannot be undone: {error}")
            return None

    # --- applying -------------------------------------------------------------------------------------------

    def _start(self, plan: PlanRun, event: ApplyWanted) -> None:
        if event.apply.idempotency_key:
            plan.keys.append(event.apply.idempotency_key)
        if plan.steps and self._desk.config.pin_s > 0:
            self._pins.put(SPLIT, event.apply.actor, self._desk.config.pin_s, plan.plan_id, self._desk.now)
        self._begin(plan, event.apply.actor, event.at_s)
        self._desk.emit(PlanReady(ask_id=event.ask_id, plan=plan.view()))

    def _begin(self, plan: PlanRun, actor: str, at_s: float) -> None:
        desk = self._desk
        if self._measuring is not None:
            self._measure(self._measuring)
        if plan.steps:
            self._scored(self.scores.interrupt(self._outcome))
        plan.status, plan.actor, plan.at_s, plan.applied_s = "applying", actor, at_s, desk.now
        self.applying = plan
        desk.fleet.version += 1
        self._audit(plan, "undo" if plan.undo_of else "apply", f"{plan.before} to {plan.after}")
        self.advance()

    def _done(self, plan: PlanRun) -> None:
        desk = self._desk
        plan.status, self.applying = "done", None
        plan.measured = Prediction(duration_s=desk.now - plan.applied_s, basis="goodput is being measured")
        if plan.undo_of is not None and (undone := self._plans.get(plan.undo_of)) is not None:
            undone.status = "undone"
        desk.fleet.version += 1
        desk.note("info", f"plan {plan.plan_id} is done: {plan.before} to {plan.after}")
        plan.probe = desk.goodput.probe(desk.now)
        self._measuring, self.ended_s = plan, desk.now
        if plan.steps and plan.predicted.attainment is not None:
            change = f"{plan.before} to {plan.after}"
            self._scored(self.scores.applied(
                Applied(plan.plan_id, plan.actor, change, plan.model, plan.predicted.attainment, plan.gain, desk.now),
                self._outcome,
            ))  # fmt: skip

    def _failed(self, plan: PlanRun, sentence: str) -> None:
        desk = self._desk
        plan.status, plan.failed, self.applying, self.ended_s = "failed", sentence, None, desk.now
        plan.measured = Prediction(duration_s=desk.now - plan.applied_s, basis="the plan failed")
        desk.fleet.version += 1
        desk.note("error", f"plan {plan.plan_id} failed: {sentence}")
        self._audit(plan, "failed", sentence)

    def _measure(self, plan: PlanRun) -> None:
        """Close the window after a plan: what really came of it, beside what was predicted."""
        desk, probe = self._desk, plan.probe
        self._measuring = plan.probe = None
        if probe is None or plan.measured is None:
            return
        counts, span_s = desk.goodput.end_probe(probe), desk.now - probe.since_s
        quiet = counts.finished == 0 or span_s <= 0
        plan.measured = Prediction(
            duration_s=plan.measured.duration_s, goodput_per_s=None if quiet else counts.good / span_s,
            ttft_p50_s=counts.ttft_s.quantile(0.5), tpot_p50_s=counts.tpot_s.quantile(0.5),
            basis=f"{counts.finished} requests finished in the {span_s:.1f} s after it",
        )  # fmt: skip
        self._audit(plan, "done", f"{plan.before} to {plan.after}, {len(plan.steps)} steps")

    def step_of(self, instance: Instance) -> StepRun | None:
        """The step in progress for this instance."""
        if self.applying is None:
            return None
        ended = (StepState.DONE, StepState.FAILED, StepState.ROLLED_BACK)
        return next((one for one in self.applying.steps
                     if one.instance_id == instance.id and one.machine.state not in ended), None)  # fmt: skip

    # --- helpers --------------------------------------------------------------------------------------------

    def _outcome(self, since_s: float, model: str) -> Outcome:
        desk, group = self._desk, self._desk.fleet.groups.get(model)
        if group is None:
            return Outcome(0, 0, None)
        pace = pace_of(group)
        good, counted = desk.traffic.outcome(since_s, desk.now, model, desk.config.classes, pace)
        load = desk.traffic.load(desk.now, model, desk.now - since_s, pace)
        if not load.shapes:
            return Outcome(good, counted, None)
        predictor = Predictor(group.members, load, desk.config.classes, desk.config)
        found = predictor.forecast(predictor.split({one.id: one.role for one in group.members}))
        return Outcome(good, counted, found.attainment if found is not None else None)

    def _scored(self, move: ScoredMove | None) -> None:
        plan = self._plans.get(move.plan_id) if move is not None else None
        if plan is not None and move is not None:
            found = f"predicted {move.predicted:.1%}, {move.expected:.1%} for the load that came"
            measured = f"attainment {move.measured:.1%} of {move.num_requests} requests"
            self._audit(plan, "scored", f"{move.change}: {measured}, {found}")

    def _audit(self, plan: PlanRun, action: str, detail: str) -> None:
        """Without a time of its own the shell puts the present one."""
        at_s = plan.at_s + max(0.0, self._desk.now - plan.applied_s) if plan.at_s else 0.0
        self._desk.emit(Audit(row=AuditRow(
            at_s=at_s, actor=plan.actor, action=action, subject=plan.plan_id, detail=detail,
            predicted=plan.predicted, measured=plan.measured,
        )))  # fmt: skip

    def _refuse_stale(self, event: ApplyWanted, made_for: int) -> None:
        seen = f"the plan was made for {made_for} and you saw {event.apply.base_version}"
        message = f"the fleet changed: it is at version {self._desk.fleet.version}, {seen}; plan again"
        self._refuse(event.ask_id, 409, message)

    def _refuse(self, ask_id: str, status: int, message: str) -> None:
        self._desk.emit(PlanRefused(ask_id=ask_id, status=status, message=message))


def _drain_s(one: Instance) -> float:
    """Predicted drain: the prefill queue, and the bytes of running requests over the link."""
    token_bytes = kv_token_bytes(one, one.hello.layout) if one.hello.layout is not None else 0
    link = one.hello.hardware.link_bytes_per_s * one.profile.link_efficiency
    return one.queue_s() + one.context_tokens * token_bytes / link + one.rows * MOVE_S


def _with(prediction: Prediction, duration_s: float) -> Prediction:
    fields = {name: getattr(prediction, name) for name in prediction.__struct_fields__}
    return Prediction(**{**fields, "duration_s": duration_s})
