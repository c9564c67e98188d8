"""The operator's plans: parsed, planned, applied losslessly, verified, rolled back, undone, measured, audited."""

from __future__ import annotations

import pytest
from core_kit import Rig, config, sends, sent, those
from core_plans import apply, finish, plan, refused, report

from controlplane.core.events import (
    Audit,
    Fail,
    NodeLost,
    PlanRefused,
)
from controlplane.core.instance import InstanceState
from controlplane.core.planrun import FIRST_SWITCH_S
from controlplane.core.rebalance import Target, parse_xpyd
from transfer.api import Plan
from transfer.errors import InvalidValue
from transfer.terms import Role
from transfer.wire.messages import (
    PoolMap,
    RoleOrder,
)


@pytest.mark.parametrize(
    ("text", "target"),
    [
        ("1P2D", Target(1, 2)), ("10p3d", Target(10, 3)), (" 2P1D+1M ", Target(2, 1, 1)), ("2P1D1M", Target(2, 1, 1)),
        ("3M", Target(0, 0, 3)),
    ],
)  # fmt: skip
def test_shapes_are_read(text: str, target: Target) -> None:
    assert parse_xpyd(text) == target
    assert parse_xpyd(str(target)) == target


@pytest.mark.parametrize(
    "text", ["", "P", "1P", "2D1P", "1P2D3", "-1P2D", "onePtwoD", "1P2D+", "9999999P1D", "5000P1D"]
)
def test_shapes_that_are_none_get_a_sentence(text: str) -> None:
    with pytest.raises(InvalidValue):
        parse_xpyd(text)


def test_a_plan_names_the_fewest_moves_and_the_least_loaded() -> None:
    rig = Rig()
    rig.fleet("3P1D")
    rig.arrive("r1", 3000)
    busy = rig.request("r1").prefill
    version = rig.core.version
    made = plan(rig, "2P2D")
    assert (made.before, made.after, made.status) == ("3P1D", "2P2D", "planned")
    assert len(made.steps) == 1
    assert made.steps[0].instance_id != busy
    assert (made.steps[0].from_role, made.steps[0].to_role, made.steps[0].status) == ("prefill", "decode", "pending")
    assert rig.core.version == version == made.base_version, "a dry run changes nothing"
    assert rig.core.plan(made.plan_id) == made


def test_nothing_is_predicted_without_traffic_and_the_plan_says_so() -> None:
    rig = Rig()
    rig.fleet("2P1D")
    predicted = plan(rig, "1P2D").predicted
    assert predicted.goodput_per_s is None
    assert "no prediction" in predicted.basis
    assert predicted.duration_s == pytest.approx(FIRST_SWITCH_S)


def test_the_predicted_duration_learns_from_the_switches_seen() -> None:
    rig = Rig()
    rig.fleet("2P1D")
    made = plan(rig, "1P2D")
    apply(rig, made.plan_id)
    rig.wait(1.5)  # the node takes its time to switch
    finish(rig)
    done = rig.core.plan(made.plan_id)
    assert done is not None
    took = done.measured
    assert took is not None
    assert took.duration_s is not None
    assert took.duration_s >= 1.5
    again = plan(rig, "2P1D").predicted.duration_s
    assert again == pytest.approx((FIRST_SWITCH_S + took.duration_s) / 2)


@pytest.mark.parametrize(
    ("xpyd", "moves", "words"),
    [
        ("3P0D", None, "leaves no decode"),
        ("0P3D", None, "leaves no prefill"),
        ("1P1D", None, "names 2 instances and the fleet has 3"),
        ("2P2D", None, "names 4 instances"),
        ("nonsense", None, "not a shape"),
        (None, None, "exactly one"),
        ("1P2D", {"p0": "decode"}, "exactly one"),
        (None, {"zz": "decode"}, "no instance 'zz'"),
        (None, {"p0": "kv_pool"}, "cannot become"),
        (None, {"p0": "king"}, "cannot become"),
        (None, {"d0": "prefill"}, "leaves no decode"),
    ],
)
def test_plans_that_cannot_serve_are_refused(xpyd: str | None, moves: dict[str, str] | None, words: str) -> None:
    rig = Rig()
    rig.fleet("2P1D1K")
    found = refused(rig, xpyd, moves)
    assert found.status == 400
    assert words in found.message


def test_an_idle_instance_switches_is_verified_and_serves() -> None:
    """vllm#56133: a no-op switch looks successful elsewhere; here the node's word and its next beat are needed."""
    rig = Rig()
    rig.fleet("2P1D")
    made = plan(rig, "1P2D")
    name = made.steps[0].instance_id
    applied = apply(rig, made.plan_id)
    assert isinstance(applied, Plan)
    assert applied.status == "applying"
    assert applied.steps[0].status == "switching"
    order = sent(rig.effects, RoleOrder)
    assert (order[0], order[1].role, order[1].plan_id) == (name, Role.DECODE, made.plan_id)
    assert rig.instance(name).state is InstanceState.SWITCHING
    assert rig.core.state(rig.now).xpyd == "2P1D", "not before it is verified"
    rig.beat(name)
    assert rig.core.plans()[0].steps[0].status == "switching", "ready is not enough without the report"
    report(rig, name, Role.DECODE)
    assert rig.core.plans()[0].steps[0].status == "verifying"
    effects = rig.beat(name, role=Role.DECODE)
    assert rig.core.plans()[0].status == "done"
    assert rig.core.state(rig.now).xpyd == "1P2D"
    assert sends(effects, PoolMap)[0][0] == name, "its new role learns of the pools"
    rig.arrive("r1")
    assert rig.request("r1").decode in ("d0", name)


def test_a_switch_that_the_heartbeat_contradicts_is_rolled_back() -> None:
    rig = Rig()
    rig.fleet("2P1D")
    made = plan(rig, "1P2D")
    name = made.steps[0].instance_id
    apply(rig, made.plan_id)
    report(rig, name, Role.DECODE)
    effects = rig.beat(name, role=Role.PREFILL)
    failed = rig.core.plans()[0]
    assert (failed.status, failed.steps[0].status) == ("failed", "rolled_back")
    assert "still serves" in str(failed.failed)
    assert sent(effects, RoleOrder)[1].role is Role.PREFILL
    rig.beat(name, role=Role.PREFILL)
    assert rig.instance(name).ready


def test_a_node_that_refuses_is_asked_again_then_given_up_and_stays_routable() -> None:
    """aibrix#2651: a failed drain leaves the instance routable."""
    rig = Rig(config(max_role_orders=3))
    rig.fleet("2P1D")
    made = plan(rig, "1P2D")
    name = made.steps[0].instance_id
    apply(rig, made.plan_id)
    orders = 1
    for _ in range(3):
        report(rig, name, Role.PREFILL, ok=False, detail="not idle")
        orders += len([one for one in sends(rig.beat(name, after=1.0), RoleOrder) if "/" not in one[1].plan_id])
    assert orders == 3
    found = rig.core.plans()[0]
    assert (found.status, found.steps[0].status) == ("failed", "rolled_back")
    assert "not idle" in str(found.failed)
    rig.beat(name)
    assert rig.instance(name).ready
    assert rig.core.state(rig.now).xpyd == "2P1D"
    assert [one.row.action for one in those(rig.all_effects, Audit)] == ["apply", "failed"]


def test_a_switch_that_never_reports_times_out_and_is_rolled_back() -> None:
    rig = Rig(config(switch_timeout_s=5.0))
    rig.fleet("2P1D")
    made = plan(rig, "1P2D")
    name = made.steps[0].instance_id
    apply(rig, made.plan_id)
    rig.wait(6.0, [name])
    assert rig.core.plans()[0].status == "failed"
    assert "within 5 s" in str(rig.core.plans()[0].failed)
    rig.beat(name)
    assert rig.instance(name).ready


def test_steps_shrink_the_larger_role_first_and_go_one_at_a_time() -> None:
    rig = Rig()
    rig.fleet("4P1D")
    made = plan(rig, "2P3D")
    assert [step.from_role for step in made.steps] == ["prefill", "prefill"]
    apply(rig, made.plan_id)
    assert [step.status for step in rig.core.plans()[0].steps] == ["switching", "pending"]
    for step in made.steps:
        report(rig, step.instance_id, Role.DECODE)
        rig.beat(step.instance_id)
    assert rig.core.plans()[0].status == "done"
    assert rig.core.state(rig.now).xpyd == "2P3D"
    swap = plan(rig, moves={"p0": "decode", "d0": "prefill"} if rig.instance("p0").role is Role.PREFILL else
                {"p2": "decode", "d0": "prefill"})  # fmt: skip
    assert [step.from_role for step in swap.steps] == ["decode", "prefill"], "the role with most instances gives first"


def test_apply_is_refused_when_the_fleet_changed() -> None:
    rig = Rig()
    rig.fleet("2P1D")
    made = plan(rig, "1P2D")
    rig.join("p9", Role.PREFILL)
    for version in (made.base_version, None):
        found = apply(rig, made.plan_id, version=version)
        assert isinstance(found, PlanRefused)
        assert found.status == 409
        assert "plan again" in found.message


def test_apply_is_idempotent_by_key_and_one_at_a_time() -> None:
    rig = Rig()
    rig.fleet("3P1D")
    first, second = plan(rig, "2P2D"), plan(rig, "1P3D")
    apply(rig, first.plan_id, key="k")
    again = apply(rig, first.plan_id, key="k", version=0)
    assert isinstance(again, Plan)
    assert again.status == "applying"
    assert len(sends(rig.all_effects, RoleOrder)) == 1
    for plan_id, key in ((first.plan_id, "other"), (second.plan_id, "")):
        found = apply(rig, plan_id, key=key)
        assert isinstance(found, PlanRefused)
        assert found.status == 409
    missing = apply(rig, "plan-nope")
    assert isinstance(missing, PlanRefused)
    assert missing.status == 404


def test_undo_is_the_inverse_plan() -> None:
    rig = Rig()
    rig.fleet("2P1D")
    made = plan(rig, "1P2D")
    nothing = apply(rig, made.plan_id, undo=True)
    assert isinstance(nothing, PlanRefused)
    apply(rig, made.plan_id)
    finish(rig)
    undone = apply(rig, made.plan_id, undo=True, key="u")
    assert isinstance(undone, Plan)
    assert (undone.undo_of, undone.after, undone.status) == (made.plan_id, "2P1D", "applying")
    repeated = apply(rig, made.plan_id, undo=True, key="u")
    assert isinstance(repeated, Plan)
    assert repeated.plan_id == undone.plan_id
    finish(rig)
    assert rig.core.state(rig.now).xpyd == "2P1D"
    found = rig.core.plan(made.plan_id)
    assert found is not None
    assert found.status == "undone"


def test_an_undo_that_is_refused_leaves_no_plan_behind() -> None:
    rig = Rig()
    rig.fleet("2P1D")
    made = plan(rig, "1P2D")
    apply(rig, made.plan_id)
    finish(rig)
    stale = apply(rig, made.plan_id, undo=True, key="u", version=rig.core.version - 1)
    assert isinstance(stale, PlanRefused)
    assert stale.status == 409
    assert f"it is at version {rig.core.version}" in stale.message
    assert [one.plan_id for one in rig.core.plans()] == [made.plan_id]
    assert isinstance(apply(rig, made.plan_id, undo=True, key="u"), Plan), "the same key works when it is asked anew"


@pytest.mark.parametrize(
    ("xpyd", "moves"),
    [
        ("9" * 1_000_000 + "P1D", None), ("x" * 1_000_000, None), (None, {"y" * 1_000_000: "decode"}),
        (None, {"d0": "z" * 1_000_000}), (None, {"k0": "z" * 1_000_000}),
        (None, {f"m{index}": "mixed" for index in range(100_000)}),
    ],
)  # fmt: skip
def test_a_refused_plan_repeats_little_of_what_was_asked(xpyd: str | None, moves: dict[str, str] | None) -> None:
    rig = Rig()
    rig.fleet("20P90D1K")
    found = refused(rig, xpyd, moves)
    assert found.status == 400
    assert len(found.message) < 400


def test_what_was_predicted_is_kept_beside_what_was_measured() -> None:
    rig = Rig(config(measure_s=5.0))
    rig.fleet("2P1D")
    for index in range(20):
        rig.decoding(f"r{index}")
        rig.end(f"r{index}")
        rig.tick(0.5)
    made = plan(rig, "1P2D")
    assert made.predicted.goodput_per_s is not None
    assert made.predicted.goodput_low is not None
    assert made.predicted.goodput_high is not None
    assert made.predicted.goodput_low <= 2.0 <= made.predicted.goodput_high
    apply(rig, made.plan_id)
    finish(rig)
    rig.decoding("x")
    rig.end("x", ttft_s=0.25)
    rig.wait(5.5)
    rows = [one.row for one in those(rig.all_effects, Audit)]
    assert [row.action for row in rows] == ["apply", "done"]
    assert rows[1].predicted == made.predicted
    assert rows[1].measured is not None
    assert rows[1].measured.goodput_per_s == pytest.approx(0.2, rel=0.05)
    assert rows[1].measured.ttft_p50_s == pytest.approx(0.25, rel=0.02)
    assert rows[1].measured.duration_s is not None
    assert rows[0].at_s == 5000.0
    assert rows[1].at_s > 5004.0


def test_the_shape_it_has_already_is_a_plan_without_steps() -> None:
    rig = Rig()
    rig.fleet("2P1D")
    made = plan(rig, "2P1D")
    assert made.steps == ()
    assert "nothing would change" in made.risks[0]
    found = apply(rig, made.plan_id)
    assert isinstance(found, Plan)
    assert found.status == "done"


def test_risks_are_told_before() -> None:
    rig = Rig()
    rig.fleet("1P2D")
    rig.decoding("r0")
    found = plan(rig, moves={str(rig.request("r0").decode): "prefill"})
    assert any("1 running request moves to another instance" in text for text in found.risks)
    assert any("one decode instance is left" in text for text in found.risks)


def test_an_instance_lost_while_it_switches_fails_the_plan() -> None:
    rig = Rig()
    rig.fleet("2P1D")
    made = plan(rig, "1P2D")
    apply(rig, made.plan_id)
    rig.do(NodeLost(instance_id=made.steps[0].instance_id))
    assert rig.core.plans()[0].status == "failed"
    assert rig.core.plans()[0].steps[0].status == "failed"
    later = plan(rig, "1P1D")
    assert isinstance(apply(rig, later.plan_id), Plan), "the way is free for another plan"
    assert not those(rig.all_effects, Fail)


def test_old_plans_are_forgotten() -> None:
    rig = Rig(config(max_plans=3))
    rig.fleet("2P1D")
    for _ in range(6):
        plan(rig, "1P2D")
    assert len(rig.core.plans()) == 3


def test_a_report_of_another_role_is_not_a_switch() -> None:
    """vllm#56133: `ok` alone proves nothing."""
    rig = Rig(config(max_role_orders=1))
    rig.fleet("2P1D")
    made = plan(rig, "1P2D")
    apply(rig, made.plan_id)
    report(rig, made.steps[0].instance_id, Role.PREFILL)
    assert rig.core.plans()[0].status == "failed"
    assert "did not become decode" in str(rig.core.plans()[0].failed)


def test_an_order_without_any_answer_is_repeated() -> None:
    rig = Rig()
    rig.fleet("2P1D")
    made = plan(rig, "1P2D")
    apply(rig, made.plan_id)
    assert not sends(rig.beat(made.steps[0].instance_id, after=4.0), RoleOrder)
    assert sends(rig.beat(made.steps[0].instance_id, after=2.0), RoleOrder)
