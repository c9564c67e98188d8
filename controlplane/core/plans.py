"""The operator's plans: made, applied once, undone, measured and audited. One is applied at a time."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from controlplane.core.desk import Desk
from controlplane.core.estimate import kv_token_bytes
from controlplane.core.events import (
    ApplyWanted,
    Audit,
    PlanReady,
    PlanRefused,
    PlansKept,
    PlansRestored,
    PlanWanted,
)
from controlplane.core.fleet import xpyd
from controlplane.core.forecast import Predictor, pace_of, predict
from controlplane.core.goodput import Probe
from controlplane.core.instance import Instance
from controlplane.core.pins import SPLIT, Pins
from controlplane.core.planbook import PlanRun, kept, new_step, outcome, restored
from controlplane.core.planrun import StepRunner
from controlplane.core.rebalance import plan_steps, risks
from controlplane.core.score import Applied, Outcome, Scores
from controlplane.core.steps import StepRun, StepState
from controlplane.text import shown
from transfer.api import AuditRow, Plan, PlanRequest, PlanStep, Prediction
from transfer.autopilot import ScoredMove
from transfer.errors import InvalidValue
from transfer.said import Said, counted, said_of, say
from transfer.terms import InstanceId, Role
from transfer.wire.messages import Heartbeat, RoleReport

MOVE_S = 0.02
"""What a migration takes besides moving its bytes."""
AUTOPILOT = "autopilot"
"""The actor of plans that nobody asked for."""


class Plans:
    """Idempotent by idempotency_key: applying a plan again with the key it was applied with answers its state."""

    def __init__(self, desk: Desk, runner: StepRunner, pins: Pins, scores: Scores) -> None:
        """An operator's plan pins the split; every plan that is done is scored."""
        self._desk, self._runner, self._pins, self.scores = desk, runner, pins, scores
        self._plans: dict[str, PlanRun] = {}
        self._num_plans = 0
        self.applying: PlanRun | None = None
        self._measuring: PlanRun | None = None
        self._since: Probe | None = None
        """What finished since the last plan was done, until that is scored."""
        self.ended_s: float | None = None
        """When the last plan was over."""

    def wanted(self, event: PlanWanted) -> None:
        """Plan only."""
        try:
            plan = self._make(event.request)
        except InvalidValue as error:
            self._refuse(event.ask_id, 400, said_of(error))
            return
        self._desk.emit(PlanReady(ask_id=event.ask_id, plan=plan.view()))

    def apply(self, event: ApplyWanted) -> None:
        """Start a plan, or the inverse of one; refused when the fleet changed since the caller looked."""
        plan, asked, version = self._plans.get(event.plan_id), event.apply, self._desk.fleet.version
        if plan is None:
            self._refuse(event.ask_id, 404, say("refused.no_plan", plan=shown(event.plan_id)))
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
            self._refuse(event.ask_id, 409, say("refused.status", plan=plan.plan_id, status=plan.status))
        elif self.applying is not None:
            self._refuse(event.ask_id, 409, say("refused.busy", plan=self.applying.plan_id))
        elif asked.base_version != version or plan.base_version != version:
            self._refuse_stale(event, plan.base_version)
        else:
            self._start(plan, event)

    def restored(self, event: PlansRestored) -> None:
        """Know the plans of an earlier life, so that they can be looked at and undone."""
        self._plans = {plan.plan_id: restored(plan) for plan in event.state.plans} | self._plans

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
                self._failed(plan, step.said or say("basis.failed"))
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
            busy, status = say("refused.busy", plan=plan.plan_id), plan.status
            nothing = say("refused.nothing_done", plan=plan.plan_id, status=status)
            self._refuse(event.ask_id, 409, busy if status == "applying" else nothing)
            return None
        if self.applying is not None:
            self._refuse(event.ask_id, 409, say("refused.busy", plan=self.applying.plan_id))
            return None
        if event.apply.base_version != self._desk.fleet.version:
            self._refuse_stale(event, self._desk.fleet.version)
            return None
        moves = {step.instance_id: step.from_role.value for step in done}
        try:
            self._check_unchanged(done)
            return self._make(PlanRequest(moves=moves), undo_of=plan.plan_id)
        except InvalidValue as error:
            self._refuse(event.ask_id, 409, say("refused.not_undone", plan=plan.plan_id, why=said_of(error)))
            return None

    def _check_unchanged(self, done: Sequence[StepRun]) -> None:
        """Raises InvalidValue where an instance has another role than the plan left it with."""
        for step in done:
            one = self._desk.fleet.live(step.instance_id)
            if one is not None and one.role is not step.to_role:
                raise InvalidValue(say("refused.moved_since", id=one.id, role=step.to_role.value))

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
        self._audit(plan, "undo" if plan.undo_of else "apply", plan.change)
        self.advance()

    def _done(self, plan: PlanRun) -> None:
        desk = self._desk
        plan.status, self.applying = "done", None
        plan.measured = _waiting(desk.now - plan.applied_s, say("basis.measuring"))
        if plan.undo_of is not None and (undone := self._plans.get(plan.undo_of)) is not None:
            undone.status = "undone"
        desk.fleet.version += 1
        desk.note("info", f"plan {plan.plan_id} is done: {plan.before} to {plan.after}")
        if self._since is not None:
            desk.goodput.end_probe(self._since)
        plan.probe, self._since = desk.goodput.probe(desk.now), desk.goodput.probe(desk.now)
        self._measuring, self.ended_s = plan, desk.now
        self._keep()
        if plan.steps and plan.predicted.attainment is not None:
            change = f"{plan.before} to {plan.after}"
            self._scored(self.scores.applied(
                Applied(plan.plan_id, plan.actor, change, plan.model, plan.predicted.attainment, plan.gain, desk.now),
                self._outcome,
            ))  # fmt: skip

    def _failed(self, plan: PlanRun, why: Said) -> None:
        desk = self._desk
        plan.status, plan.failed, self.applying, self.ended_s = "failed", why, None, desk.now
        plan.measured = _waiting(desk.now - plan.applied_s, say("basis.failed"))
        desk.fleet.version += 1
        desk.note("error", f"plan {plan.plan_id} failed: {why}")
        self._audit(plan, "failed", why)
        self._keep()

    def _measure(self, plan: PlanRun) -> None:
        """Close the window after a plan: what really came of it, beside what was predicted."""
        desk, probe = self._desk, plan.probe
        self._measuring = plan.probe = None
        if probe is None or plan.measured is None:
            return
        counts, span_s = desk.goodput.end_probe(probe), desk.now - probe.since_s
        plan.measured = outcome(counts, span_s, plan.measured.duration_s, "basis.finished")
        self._audit(plan, "done", counted("plan.done", len(plan.steps), before=plan.before, after=plan.after))
        self._keep()

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
            self._audit(plan, "scored", say(
                "plan.scored", change=plan.change, measured=f"{move.measured:.1%}", num=move.num_requests,
                predicted=f"{move.predicted:.1%}", expected=f"{move.expected:.1%}",
            ), self._whole(move))  # fmt: skip

    def _whole(self, move: ScoredMove) -> Prediction | None:
        """What came of the plan that was done last, in all the time that its score is of."""
        if self._since is None:
            return None
        counts, span_s = self._desk.goodput.end_probe(self._since), self._desk.now - self._since.since_s
        found, self._since = outcome(counts, span_s, None, "basis.finished"), None
        return msgspec.structs.replace(found, attainment=move.measured)

    def _keep(self) -> None:
        self._desk.emit(PlansKept(state=kept(self._plans.values())))

    def _audit(self, plan: PlanRun, action: str, said: Said, measured: Prediction | None = None) -> None:
        """Without a time of its own the shell puts the present one. measured: where the plan's own is not meant."""
        at_s = plan.at_s + max(0.0, self._desk.now - plan.applied_s) if plan.at_s else 0.0
        self._desk.emit(Audit(row=AuditRow(
            at_s=at_s, actor=plan.actor, action=action, subject=plan.plan_id, detail=str(said), said=said,
            predicted=plan.predicted, measured=measured or plan.measured,
        )))  # fmt: skip

    def _refuse_stale(self, event: ApplyWanted, made_for: int) -> None:
        version, seen = self._desk.fleet.version, event.apply.base_version
        self._refuse(event.ask_id, 409, say("refused.stale", version=version, made=made_for, seen=seen))

    def _refuse(self, ask_id: str, status: int, why: Said) -> None:
        self._desk.emit(PlanRefused(ask_id=ask_id, status=status, said=why))


def _drain_s(one: Instance) -> float:
    """Predicted drain: the prefill queue, and the bytes of running requests over the link."""
    token_bytes = kv_token_bytes(one, one.hello.layout) if one.hello.layout is not None else 0
    link = one.hello.hardware.link_bytes_per_s * one.profile.link_efficiency
    return one.queue_s() + one.context_tokens * token_bytes / link + one.rows * MOVE_S


def _waiting(duration_s: float, why: Said) -> Prediction:
    """How long it took; what came of it is not known."""
    return Prediction(duration_s=duration_s, basis=str(why), said=why)


def _with(prediction: Prediction, duration_s: float) -> Prediction:
    fields = {name: getattr(prediction, name) for name in prediction.__struct_fields__}
    return Prediction(**{**fields, "duration_s": duration_s})
