"""Cordon, drain and resume: nothing new is placed, what runs moves, nothing is lost, and nobody is left unserved."""

from __future__ import annotations

import pytest
from core_kit import Rig, config, hello, only, sends, those
from core_plans import apply, finish, plan, refused

from controlplane.core import holds
from controlplane.core.events import Audit, Finished, HoldReady, HoldWanted, NeedTokens, NodeLost, PlanRefused
from controlplane.core.instance import InstanceState
from controlplane.core.lifecycle import RequestState
from transfer.api import ActionView, ApplyRequest, HoldAction, Plan
from transfer.terms import Role
from transfer.wire.messages import PoolMap, Released, Reserve


def hold(
    rig: Rig, name: str, action: HoldAction, *, version: int | None = None, key: str = ""
) -> ActionView | PlanRefused:
    asked = ApplyRequest(
        base_version=rig.core.version if version is None else version, idempotency_key=key, actor="ann"
    )
    effects = rig.do(HoldWanted(ask_id="h", instance_id=name, action=action, apply=asked, at_s=5000.0))
    ready = those(effects, HoldReady)
    return ready[0].view if ready else only(effects, PlanRefused)


def held(rig: Rig, name: str, action: HoldAction, **options: object) -> ActionView:
    found = hold(rig, name, action, **options)  # type: ignore[arg-type]
    assert isinstance(found, ActionView), found
    return found


def why_not(rig: Rig, name: str, action: HoldAction, **options: object) -> PlanRefused:
    found = hold(rig, name, action, **options)  # type: ignore[arg-type]
    assert isinstance(found, PlanRefused), found
    return found


def test_nothing_new_comes_to_a_cordoned_instance_and_what_runs_there_stays() -> None:
    rig = Rig()
    rig.fleet("1P2D")
    rig.decoding("r0")
    name = str(rig.request("r0").decode)
    other = {"d0": "d1", "d1": "d0"}[name]
    before = rig.core.version
    view = held(rig, name, "cordon")
    assert (view.instance.state, view.num_left, view.version) == ("cordoned", 1, rig.core.version)
    assert rig.core.version > before
    row = only(rig.effects, Audit).row
    assert (row.at_s, row.actor, row.action, row.subject) == (5000.0, "ann", "cordon", name)
    for index in range(4):
        rig.arrive(f"n{index}")
        assert rig.request(f"n{index}").decode == other
    rig.wait(3.0, ["p0", "d0", "d1"])
    assert rig.request("r0").state is RequestState.DECODING
    assert f"set aside by an operator: {name}" in rig.core.state(rig.now).verdict.lower()
    assert held(rig, name, "resume").instance.state == "ready"
    assert rig.instance(name).ready
    assert "set aside" not in rig.core.state(rig.now).verdict


def test_a_drained_instance_is_emptied_and_stays_so_until_it_is_resumed() -> None:
    rig = Rig(config(max_migrations=2))
    rig.fleet("1P2D")
    for index in range(8):
        rig.decoding(f"r{index}")
    here = [f"r{index}" for index in range(8) if rig.request(f"r{index}").decode == "d0"]
    assert len(here) == 4
    assert held(rig, "d0", "drain").num_left == 4
    assert [name for name, _ in sends(rig.effects, Reserve)] == ["d1", "d1"]
    for _ in here:
        name = next(one for one in here if rig.request(one).move is not None)
        rig.reserved(name, have=16)
        rig.received(name)
        rig.node("d0", Released(request_id=name, generation=1, num_blocks=7))
        rig.tick()
    assert not those(rig.all_effects, NeedTokens)
    assert {rig.request(name).decode for name in here} == {"d1"}
    rig.wait(2.0, ["p0", "d0", "d1"])
    assert held(rig, "d0", "drain").instance.state == "draining"
    assert held(rig, "d0", "cordon").instance.state == "draining", "draining is more than cordoned"
    assert held(rig, "d0", "resume").num_left == 0
    assert rig.instance("d0").ready
    for index in range(8):
        assert only(rig.end(f"r{index}"), Finished).record.outcome == "ok"
    rig.at_rest()


@pytest.mark.parametrize(("shape", "name", "role"), [("1P2D", "p0", "prefill"), ("2P1D", "d0", "decode")])
@pytest.mark.parametrize("action", ["cordon", "drain"])
def test_the_last_of_a_phase_is_refused(shape: str, name: str, role: str, action: HoldAction) -> None:
    rig = Rig()
    rig.fleet(shape)
    found = why_not(rig, name, action)
    assert found.status == 409
    assert f"{name} is the last ready {role} instance of m" in found.message
    assert rig.instance(name).ready
    rig.join("m0", Role.MIXED)
    assert held(rig, name, action).instance.state in ("cordoned", "draining"), "a mixed instance serves both"
    assert why_not(rig, "m0", action).status == 409
    held(rig, name, "resume")
    assert isinstance(hold(rig, "m0", action), ActionView)


def test_a_phase_that_nobody_serves_keeps_no_instance_of_the_other_from_being_set_aside() -> None:
    rig = Rig()
    rig.fleet("2P1D")
    rig.do(NodeLost(instance_id="d0"))
    assert held(rig, "p0", "cordon").instance.state == "cordoned"
    assert "p1 is the last ready prefill instance of m" in why_not(rig, "p1", "drain").message


def test_what_is_set_aside_no_longer_counts_for_others() -> None:
    rig = Rig()
    rig.fleet("1P2D")
    held(rig, "d0", "cordon")
    assert "last ready decode" in why_not(rig, "d1", "drain").message
    assert "leaves no decode instance of m" in refused(rig, moves={"d1": "prefill"}).message
    assert "d0 is cordoned and cannot change role" in refused(rig, moves={"d0": "prefill"}).message


def test_a_fleet_that_changed_since_is_refused_and_repeats_change_nothing() -> None:
    rig = Rig()
    rig.fleet("2P2D")
    seen = rig.core.version
    first = held(rig, "p0", "cordon", key="k1")
    assert held(rig, "p0", "cordon", version=seen).version == first.version, "in force: nothing to refuse"
    found = why_not(rig, "d0", "cordon", version=seen)
    assert (found.status, f"version {rig.core.version} and you saw {seen}" in found.message) == (409, True)
    held(rig, "p0", "resume")
    assert held(rig, "p0", "cordon", version=seen, key="k1").instance.state == "ready", "the same click twice"
    assert len(those(rig.all_effects, Audit)) == 2
    assert held(rig, "p1", "cordon", key="k1").instance.state == "cordoned", "a key stands for one change only"
    assert why_not(rig, "nobody", "drain").status == 404
    assert held(rig, "p0", "resume", version=0).instance.state == "ready"


def test_what_a_plan_moves_cannot_be_set_aside_and_the_other_way_round() -> None:
    rig = Rig()
    rig.fleet("2P2D")
    made = plan(rig, moves={"d0": "prefill"})
    assert isinstance(apply(rig, made.plan_id), Plan)
    for action in ("cordon", "drain"):
        assert made.plan_id in why_not(rig, "d0", action).message  # type: ignore[arg-type]
    rig2 = Rig()
    rig2.fleet("2P2D")
    made = plan(rig2, moves={"d0": "prefill"})
    held(rig2, "d0", "drain")
    late = apply(rig2, made.plan_id, version=made.base_version)
    assert isinstance(late, PlanRefused)
    assert "the fleet changed" in late.message
    assert rig2.instance("d0").state is InstanceState.DRAINING


def test_what_a_plan_will_take_away_is_not_left_to_serve() -> None:
    rig = Rig()
    rig.fleet("3P1D")
    for index in range(4):
        rig.decoding(f"r{index}")
    made = plan(rig, moves={"p0": "decode", "p1": "decode"})
    assert isinstance(apply(rig, made.plan_id), Plan)
    assert rig.instance("p1").ready, "its step has not begun"
    assert "p2 is the last ready prefill instance of m" in why_not(rig, "p2", "cordon").message
    finish(rig)
    assert "p2 is the last ready prefill instance of m" in why_not(rig, "p2", "cordon").message
    assert held(rig, "d0", "cordon").instance.state == "cordoned", "p0 and p1 decode now"


def test_it_outlasts_a_restart_of_the_instance_and_a_spell_of_not_being_ready() -> None:
    rig = Rig()
    rig.fleet("1P2D")
    held(rig, "d0", "cordon")
    rig.beat("d0", state="starting")
    assert rig.instance("d0").state is InstanceState.JOINING
    rig.beat("d0")
    assert rig.instance("d0").state is InstanceState.CORDONED
    rig.do(NodeLost(instance_id="d0"))
    rig.node("d0", hello("d0", Role.DECODE, epoch=2))
    rig.beat("d0")
    assert rig.instance("d0").state is InstanceState.CORDONED
    assert why_not(rig, "d1", "cordon").status == 409
    held(rig, "d0", "resume")
    assert rig.instance("d0").ready
    rig.beat("d0")
    assert rig.instance("d0").ready


def test_an_instance_that_is_not_ready_is_not_set_aside() -> None:
    rig = Rig()
    rig.fleet("1P2D")
    rig.node("d2", hello("d2", Role.DECODE))
    assert "d2 is joining" in why_not(rig, "d2", "cordon").message


def test_what_is_set_aside_is_no_part_of_what_a_plan_would_bring() -> None:
    found = []
    for shape in ("2P2D", "3P2D"):
        rig = Rig()
        rig.fleet(shape)
        if shape == "3P2D":
            held(rig, "p2", "drain")
        for index in range(60):
            rig.decoding(f"r{index}", 4000)
            rig.end(f"r{index}")
            rig.tick(0.05)
        predicted = plan(rig, moves={"p1": "decode"}).predicted
        assert predicted.goodput_per_s is not None
        found.append((predicted.goodput_per_s, predicted.attainment, predicted.ttft_p50_s))
    assert found[0] == pytest.approx(found[1])
    rig = Rig()
    rig.fleet("3P2D")
    held(rig, "p1", "cordon")
    held(rig, "p2", "drain")
    made = plan(rig, moves={"p0": "decode", "d0": "prefill"})
    assert [step.instance_id for step in made.steps] == ["d0", "p0"], "one prefill instance serves at any time"
    held(rig, "d1", "cordon")
    made = plan(rig, moves={"p0": "decode", "d0": "prefill"})
    assert "no decode instance serves while d0 switches" in made.risks


def test_those_that_have_long_gone_make_room_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(holds, "MAX_HELD", 2)
    rig = Rig()
    rig.fleet("2P3D")
    held(rig, "d0", "drain")
    held(rig, "d1", "cordon")
    assert "2 instances are set aside already" in why_not(rig, "p0", "drain").message
    rig.do(NodeLost(instance_id="d0"))
    assert "2 instances are set aside already" in why_not(rig, "p0", "drain").message, "it may come back"
    rig.wait(rig.core.config.forget_s + 1.0, ["p0", "p1", "d1", "d2"])
    assert held(rig, "p0", "drain").instance.state == "draining"
    assert "2 instances are set aside already" in why_not(rig, "d2", "drain").message


def test_a_pool_that_is_set_aside_is_taken_off_the_engines_maps() -> None:
    rig = Rig()
    rig.fleet("1P1D2K")
    held(rig, "k0", "cordon")
    maps = dict(sends(rig.effects, PoolMap))
    assert [one.instance_id for one in maps["p0"].pools] == ["k1"]
    held(rig, "k1", "drain")
    assert dict(sends(rig.effects, PoolMap))["p0"].pools == ()
    held(rig, "k0", "resume")
    assert [one.instance_id for one in dict(sends(rig.effects, PoolMap))["p0"].pools] == ["k0"]
