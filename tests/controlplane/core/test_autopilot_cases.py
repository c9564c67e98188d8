"""The autopilot inside the whole scheduler core: it plans by the plans' rules, sees real requests, and replays."""

from __future__ import annotations

import pytest
from core_kit import Fail, Rig, Slo, config, sends, those
from core_plans import apply, plan

from controlplane.core.events import Audit, AutopilotReady, AutopilotWanted, PlanRefused
from transfer.autopilot import AutopilotRequest, PinRequest
from transfer.terms import Role, SamplingParams
from transfer.wire.messages import RoleOrder, RoleReport

LONG = SamplingParams(max_tokens=4000, temperature=0.0)
BEATS = ("p0", "p1", "p2", "d0")


def flood(rig: Rig, seconds: float) -> None:
    """So many long answers begun that one decode instance cannot keep the pace; nothing ends."""
    for _ in range(int(seconds)):
        for _ in range(40):
            name = f"r{len(rig.core._desk.requests)}"
            rig.decoding(name, 50, sampling=LONG, first=1 + len(rig.core._desk.requests))
        for name in BEATS:
            rig.beat(name, step_s=0.01, free_blocks=25_000)
        for _ in range(10):
            rig.tick()


def heavy(mode: str = "auto", **changes: object) -> Rig:
    rig = Rig(config(autopilot=mode, classes={"default": Slo(ttft_s=2.0, tpot_s=0.05)}, **changes))
    rig.fleet("3P1D", num_blocks=30_000)
    flood(rig, 14)
    return rig


def carry_out(rig: Rig) -> None:
    """Requests end, so that instances drain at once, and nodes take the roles they are told."""
    for name in list(rig.core._desk.requests):
        rig.release(rig.end(name))
    newest = rig.core.plans()[0]
    for step in newest.steps:
        for _ in range(50):
            if rig.instance(step.instance_id).state.value == "switching":
                break
            rig.tick()
        role = Role(step.to_role)
        rig.node(step.instance_id, RoleReport(plan_id=newest.plan_id, epoch=1, role=role, ok=True))
        rig.beat(step.instance_id, role=role)
    assert rig.core.plans()[0].status == "done"


def test_its_move_is_a_plan_like_any_other() -> None:
    rig = heavy()
    made = rig.core.plans()[0]
    assert made.before == "3P1D"
    assert {(step.from_role, step.to_role) for step in made.steps} == {("prefill", "decode")}
    assert made.status == "applying"
    rows = [one.row for one in those(rig.all_effects, Audit)]
    assert ("autopilot", "apply", made.plan_id) in [(row.actor, row.action, row.subject) for row in rows]
    assert ("autopilot", "move") in [(row.actor, row.action) for row in rows]
    other = plan(rig, "2P2D")
    refused = apply(rig, other.plan_id)
    assert isinstance(refused, PlanRefused), "one plan at a time, whoever asks"
    assert refused.status == 409
    made = rig.core.plans()[1]
    for name in list(rig.core._desk.requests):
        rig.release(rig.end(name))
    rig.tick()
    name, order = sends(rig.all_effects, RoleOrder)[0]
    assert (name, order.role) == (made.steps[0].instance_id, Role.DECODE)
    rig.node(name, RoleReport(plan_id=made.plan_id, epoch=1, role=Role.DECODE, ok=True))
    rig.beat(name, role=Role.DECODE)
    assert rig.core.state(rig.now).xpyd in ("2P2D", "1P3D")
    state = rig.core.state(rig.now)
    assert state.autopilot == "auto"
    assert state.advice
    assert rig.core.metrics()["autopilot_moves_total"] == 1.0
    assert not those(rig.all_effects, Fail)


def test_advise_leaves_the_fleet_alone_and_says_it_in_the_state() -> None:
    rig = heavy("advise")
    assert rig.core.plans() == []
    assert rig.core.state(rig.now).advice.startswith("move p")
    assert "P->D" in rig.core.state(rig.now).advice


def test_an_operators_undo_of_its_move_holds() -> None:
    """dynamo#4420: what the operator took back is not made again."""
    rig = heavy()
    made = rig.core.plans()[0]
    carry_out(rig)
    apply(rig, made.plan_id, undo=True)
    carry_out(rig)
    assert rig.core.plans()[0].undo_of == made.plan_id
    view = rig.core.autopilot(rig.now)
    assert [(one.subject, one.who) for one in view.pins] == [("split", "operator")]
    flood(rig, 14)
    assert len(rig.core.plans()) == 2
    assert "pinned by operator" in rig.core.state(rig.now).advice


def test_steering_is_an_event_that_is_answered() -> None:
    rig = Rig()
    rig.fleet("1P1D")
    effects = rig.do(AutopilotWanted(ask_id="x", change=AutopilotRequest(mode="off", actor="alice")))
    view = those(effects, AutopilotReady)[0].view
    assert view.mode == "off"
    assert those(effects, Audit)[0].row.actor == "alice"
    assert those(rig.do(AutopilotWanted(ask_id="y", pin=PinRequest(subject="nobody"))), PlanRefused)[0].status == 404
    rig.wait(30.0, ["p0", "d0"])
    assert rig.core.autopilot(rig.now).evaluations == ()


def test_a_clients_mistake_marks_no_instance() -> None:
    """sglang#25811: a 4xx is the client's; only faults of ours make an instance worth avoiding."""
    rig = Rig()
    rig.fleet("1P1D", num_blocks=40)
    for index in range(5):
        effects = rig.arrive(f"bad{index}", 5000)
        assert [one.status for one in those(effects, Fail)] == [400]
        rig.end(f"bad{index}", outcome="rejected", output_tokens=0, ttft_s=None, tpot_s=None, by_node=False)
    assert rig.core.metrics()["engine_failures_total"] == 0.0
    assert rig.core.metrics()["instances_lost_total"] == 0.0
    rig.arrive("good", 200)
    assert (rig.request("good").prefill, rig.request("good").decode) == ("p0", "d0")
    assert rig.request("good").avoid == {}


@pytest.mark.parametrize("mode", ["off", "advise", "auto"])
def test_idle_fleets_stay_as_they_are(mode: str) -> None:
    rig = Rig(config(autopilot=mode))
    rig.fleet("2P1D")
    rig.wait(60.0, ["p0", "p1", "d0"])
    assert rig.core.plans() == []
    assert those(rig.all_effects, Audit) == []
    assert rig.core.state(rig.now).xpyd == "2P1D"
