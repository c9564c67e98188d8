"""What of plans outlives the control plane, and by how much a request missed."""

from __future__ import annotations

import msgspec
from core_kit import Rig
from ui_fakes import a_record

from controlplane.core.events import ApplyWanted, PlanReady, PlanRefused, PlansRestored, PlansState
from controlplane.core.goodput import missed_by_s
from controlplane.core.planbook import MAX_KEPT, kept, restored
from transfer.api import ApplyRequest, Plan, PlanStep, Prediction
from transfer.said import say
from transfer.terms import Slo


def a_done_plan(instance: str, number: int = 1) -> Plan:
    """It made a decode instance a prefill one."""
    step = PlanStep(
        instance_id=instance, from_role="decode", to_role="prefill", status="done", said=say("step.verified", id="n")
    )
    return Plan(
        plan_id=f"plan-1-{number}", status="done", base_version=4, before="1P2D", after="2P1D", steps=(step,),
        predicted=Prediction(),
    )  # fmt: skip


def undone(rig: Rig, plan: Plan) -> PlanReady | PlanRefused:
    """What a control plane answers that knows the plan from its earlier life."""
    state = msgspec.json.decode(msgspec.json.encode(PlansState(plans=(plan,))), type=PlansState)
    rig.do(PlansRestored(state=state))
    asked = ApplyRequest(base_version=rig.core.version, idempotency_key="k")
    effects = rig.do(ApplyWanted(ask_id="undo", plan_id=plan.plan_id, apply=asked, undo=True, at_s=1.0))
    return next(one for one in effects if isinstance(one, PlanReady | PlanRefused))


def test_a_plan_of_an_earlier_life_is_undone_where_the_fleet_is_as_it_left_it() -> None:
    rig = Rig()
    rig.fleet("2P1D")
    answer = undone(rig, a_done_plan("p1"))
    assert isinstance(answer, PlanReady)
    assert (answer.plan.undo_of, answer.plan.before, answer.plan.after) == ("plan-1-1", "2P1D", "1P2D")
    assert [(step.instance_id, step.to_role) for step in answer.plan.steps] == [("p1", "decode")]


def test_it_is_refused_where_somebody_has_changed_the_fleet_since() -> None:
    rig = Rig()
    rig.fleet("1P2D")
    answer = undone(rig, a_done_plan("d0"))
    assert isinstance(answer, PlanRefused)
    assert answer.status == 409
    assert answer.message == "plan plan-1-1 cannot be undone: d0 is no longer prefill, as that plan left it"
    assert answer.said is not None
    assert answer.said.code == "refused.not_undone"


def test_the_last_plans_that_ended_are_kept_as_they_were() -> None:
    plans = [a_done_plan("p1", number) for number in range(MAX_KEPT + 3)]
    runs = [restored(plan) for plan in plans]
    assert kept(runs).plans == tuple(
        msgspec.structs.replace(one, steps=tuple(msgspec.structs.replace(step, detail="verified on n")
                                                 for step in one.steps)) for one in plans[-MAX_KEPT:]
    )  # fmt: skip
    assert kept([restored(msgspec.structs.replace(plans[0], status="planned"))]).plans == ()


def test_a_missed_request_names_its_objectives_and_by_how_much() -> None:
    record = msgspec.structs.replace(a_record(), ttft_s=2.5, tpot_s=0.1, e2e_s=9.0)
    assert missed_by_s(record, Slo(ttft_s=2.0, tpot_s=0.2, e2e_s=8.0)) == {"ttft": 0.5, "e2e": 1.0}
    assert missed_by_s(record, Slo(ttft_s=3.0, tpot_s=0.2)) == {}
    assert missed_by_s(msgspec.structs.replace(record, ttft_s=None, e2e_s=1.0), Slo(ttft_s=2.0, tpot_s=0.2)) == {}
    assert missed_by_s(record, None) == {}
