"""The autopilot as a whole, around a fleet that flows: it follows what lasts, holds otherwise, and says why."""

from __future__ import annotations

import random
import re
from itertools import pairwise

import pytest
from core_fluid import H20, Mix, Script, World
from core_kit import config

from controlplane.core import moves
from controlplane.core.events import AutopilotReady, AutopilotWanted, PlanRefused
from transfer.autopilot import AutopilotRequest, AutopilotView, PinRequest
from transfer.terms import Role

LONG_PROMPTS = Mix(12, 8000, 150)
"""Serves well on 6P2D."""
LONG_OUTPUTS = Mix(24, 1000, 1500)
"""Needs 2P6D."""
CALM = Mix(4, 3000, 300)


def step_at(at_s: float, before: Mix, after: Mix) -> Script:
    return lambda now: before if now < at_s else after


def swing(period_s: float, one: Mix, other: Mix) -> Script:
    return lambda now: one if int(now // period_s) % 2 == 0 else other


def off(shape: str, script: Script, seconds: float) -> World:
    return World(shape, script, config(autopilot="off")).run(seconds)


def best_fixed(total: int, script: Script, seconds: float, since_s: float, until_s: float) -> float:
    """Goodput of the best split that stays as it is."""
    shapes = [f"{count}P{total - count}D" for count in range(1, total)]
    return max(off(shape, script, seconds).goodput(since_s, until_s) for shape in shapes)


def steer(world: World, **change: object) -> AutopilotView | PlanRefused:
    world.autopilot.wanted(AutopilotWanted(ask_id="a", **change))  # type: ignore[arg-type]
    answer = [one for one in world.desk.take() if isinstance(one, AutopilotReady | PlanRefused)][-1]
    return answer.view if isinstance(answer, AutopilotReady) else answer


# --- bars -------------------------------------------------------------------------------------------------------


def test_a_step_is_followed_within_two_minutes_at_little_loss() -> None:
    """From prefill-heavy to decode-heavy: rebalanced within 120 s, under 5 % of what the best split would have made in
    the 10 minutes around it lost."""
    script = step_at(300.0, LONG_PROMPTS, LONG_OUTPUTS)
    world = World("6P2D", script).run(680)
    moves = [at_s for at_s, _, source, target in world.moves if (source, target) == (Role.PREFILL, Role.DECODE)]
    assert len(moves) == len(world.moves), "none the other way"
    assert moves[0] <= 320.0
    assert world.split in ("1P7D", "2P6D")
    settled = [at_s for at_s in moves if at_s <= 420.0]
    assert len(settled) >= 4, moves
    ideal = off("6P2D", script, 300).goodput(0, 290) * 300 + off("2P6D", script, 680).goodput(300, 600) * 300
    made = world.goodput(0, 600) * 600
    assert made >= 0.95 * ideal, made / ideal


def test_flat_load_for_an_hour_makes_no_move() -> None:
    """dynamo#9294: no oscillation between 2 and 1, also where a phase is well used."""
    world = World("2P1D", lambda _: Mix(3, 8000, 200), dt=1.0).run(3600)
    assert world.moves == []
    assert world.autopilot.counts["moves"] == 0
    assert world.autopilot.counts["looks"] == 1800, "every other second"
    assert world.good >= 0.98 * world.offered


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_flat_load_for_a_day_makes_no_move() -> None:
    for shape, mix in (("2P2D", Mix(2, 3000, 300)), ("2P1D", Mix(6, 6000, 200))):
        world = World(shape, lambda _, mix=mix: mix, dt=1.0).run(86_400)  # type: ignore[misc]
        assert world.moves == []


@pytest.mark.slow
@pytest.mark.parametrize("rate", [20, 24, 28])
@pytest.mark.parametrize("truth", [(1.0, 1.0), (1.25, 1.0), (0.8, 0.8)])
def test_flat_overload_where_two_splits_do_equally_well_makes_no_move(rate: int, truth: tuple[float, float]) -> None:
    """The edge: 4P4D and 3P5D make the same, and the model may be wrong about both phases."""
    world = World("4P4D", lambda _: Mix(rate, 5000, 500), truth=truth).run(3600)
    assert len(world.moves) <= 1


@pytest.mark.slow
@pytest.mark.parametrize("pair", [
    (Mix(14, 9000, 60), Mix(130, 800, 400)), (Mix(20, 6000, 100), Mix(20, 600, 900)),
    (Mix(20, 9000, 60), Mix(100, 800, 400)),
])  # fmt: skip
def test_load_that_swings_costs_no_more_than_the_best_fixed_split(pair: tuple[Mix, Mix]) -> None:
    script = swing(65.0, *pair)
    world = World("5P3D", script).run(1300)
    assert world.goodput(65, 1220) >= 0.97 * best_fixed(8, script, 1300, 65, 1220)


def test_the_first_move_of_a_swing_is_right_and_comes_within_15_s() -> None:
    """Long prompts that 5P3D serves, then many short ones with long answers: P->D is right, D->P never is."""
    world = World("5P3D", swing(65.0, Mix(14, 9000, 60), Mix(130, 800, 400))).run(65)
    assert world.autopilot.counts["moves"] == 0
    while not world.autopilot.counts["moves"]:
        world.run(1.0)
    assert world.now <= 65.0 + 15.0
    assert "P->D" in world.lines("move")[0]


@pytest.mark.slow
def test_no_move_of_a_swing_goes_the_wrong_way() -> None:
    world = World("5P3D", swing(65.0, Mix(14, 9000, 60), Mix(130, 800, 400))).run(520)
    assert world.moves
    wrong = [at_s for at_s, _, source, _ in world.moves if (source is Role.DECODE) != (int((at_s - 8) // 65) % 2 == 0)]
    assert wrong == [], world.moves


# --- when it must hold ------------------------------------------------------------------------------------------


def test_no_traffic_holds_and_keeps_the_floor() -> None:
    """dynamo#3131, dynamo#7067: with nothing to go by it stays as it is."""
    world = World("3P1D", lambda _: Mix(0, 1, 1)).run(120)
    assert world.moves == []
    view = world.autopilot.view(world.now)
    assert {one.code for one in view.evaluations} == {"quiet"}
    assert "0 requests in the last" in view.line
    ended = World("3P1D", step_at(60.0, Mix(20, 3000, 300), Mix(0, 1, 1))).run(150)
    assert "no request in the last 10 s; the split stays" in str(ended.autopilot.said)


def test_without_heartbeats_it_holds_and_says_that_it_is_blind() -> None:
    """dynamo#14575: a metrics outage must not move anything, whatever the load does meanwhile."""
    world = World("6P2D", step_at(100.0, LONG_PROMPTS, LONG_OUTPUTS)).run(95)
    world.muted = {one.id for one in world.desk.fleet.engines()}
    world.run(100)
    assert world.moves == []
    assert "blind, no word for 3 s from d0, d1, p0 and 5 more" in str(world.autopilot.said)
    held = [one.row for one in world.audit if one.row.action == "hold"]
    assert "blind" in held[-1].detail
    world.muted = set()
    world.run(40)
    assert world.moves, "it goes on as soon as it sees"


def test_one_silent_instance_of_many_does_not_blind_it() -> None:
    world = World("12P4D", step_at(100.0, Mix(24, 8000, 150), Mix(48, 1000, 1500))).run(95)
    world.muted = {"p3"}
    assert world.run(60).moves


@pytest.mark.parametrize("straggler", ["d0", "p0"])
def test_one_straggler_at_3x_is_no_reason_to_flap(straggler: str) -> None:
    """It is slow in either role: moving it about heals nothing."""
    world = World("4P4D", lambda _: Mix(10, 5000, 500)).run(60)
    world.slow[straggler] = 3.0
    world.run(400)
    world.slow.clear()
    world.run(200)
    assert len(world.moves) <= 1, world.moves
    assert straggler not in [name for _, name, _, _ in world.moves]


def test_a_pinned_split_is_held_and_it_says_what_it_would_do() -> None:
    """dynamo#4420: an operator's setting is neither ignored nor undone."""
    world = World("6P2D", step_at(100.0, LONG_PROMPTS, LONG_OUTPUTS)).run(50)
    view = steer(world, pin=PinRequest(subject="split", actor="alice", why="a test"))
    assert isinstance(view, AutopilotView)
    assert [(one.subject, one.who, one.left_s) for one in view.pins] == [("split", "alice", None)]
    world.run(100)
    assert world.moves == []
    held = world.lines("pinned")
    assert held
    assert held[0].startswith("hold: it would move p0 P->D")
    assert held[0].endswith("; the split is pinned by alice (a test)")
    steer(world, unpin="split")
    assert world.run(40).moves
    actions = [(one.row.actor, one.row.action) for one in world.audit]
    assert ("autopilot", "hold") in actions


def test_an_operators_plan_pins_the_split_for_a_time() -> None:
    world = World("2P2D", lambda _: Mix(8, 500, 1500), config(autopilot="auto", pin_s=100.0)).run(20)
    world.operator("3P1D")
    world.run(80)
    assert world.split == "3P1D"
    assert any("the split is pinned by alice" in line for line in world.lines("pinned"))
    world.run(60)
    assert world.split in ("2P2D", "1P3D"), "the pin is over"


def test_a_pinned_instance_stays_and_others_go() -> None:
    world = World("6P2D", step_at(60.0, LONG_PROMPTS, LONG_OUTPUTS)).run(50)
    steer(world, pin=PinRequest(subject="p0"))
    world.run(100)
    assert world.moves
    assert "p0" not in [name for _, name, _, _ in world.moves]
    every = World("2P1D", step_at(60.0, Mix(5, 6000, 50), Mix(30, 500, 1500))).run(50)
    for name in ("p0", "p1"):
        steer(every, pin=PinRequest(subject=name, actor="bob"))
    every.run(80)
    assert every.moves == []
    assert any(re.match("hold: it would move p0 P->D.*; p0 is pinned by bob", line) for line in every.lines("pinned"))


def test_never_the_last_of_a_role_and_never_below_the_floor() -> None:
    flood = Mix(20, 300, 3000)
    assert World("3P1D", lambda _: flood).run(150).split == "1P3D"
    assert World("3P1D", lambda _: flood, config(autopilot="auto", autopilot_floor=2)).run(150).split == "2P2D"


def test_a_move_is_bounded_and_followed_by_a_rest() -> None:
    world = World(
        "6P2D", step_at(60.0, LONG_PROMPTS, Mix(40, 800, 1500)), config(autopilot="auto", autopilot_max_moves=1)
    )
    world.run(200)
    times = [at_s for at_s, _, _, _ in world.moves]
    assert len(times) >= 2
    assert all(later - earlier >= 15.0 for earlier, later in pairwise(times))


@pytest.mark.slow
def test_a_wrong_model_is_found_out_and_does_not_oscillate() -> None:
    """Decode is 30 % slower than anybody says, under overload: what a split came to counts more than the model."""
    world = World("4P4D", lambda _: Mix(24, 5000, 500), truth=(1.0, 1.3)).run(1200)
    assert len(world.moves) <= 8
    assert not [at_s for at_s, _, _, _ in world.moves if 600 < at_s <= 1200]


# --- modes, limits, score ---------------------------------------------------------------------------------------


def test_advise_says_and_does_nothing_and_off_does_not_look() -> None:
    advised = World("6P2D", step_at(60.0, LONG_PROMPTS, LONG_OUTPUTS), config(autopilot="advise")).run(100)
    assert advised.moves == []
    assert advised.lines("advise")
    assert advised.lines("advise")[0].startswith("move p0 P->D")
    assert "80 % interval" in advised.lines("advise")[0]
    told = [one.row for one in advised.audit]
    assert (told[0].actor, told[0].action, told[0].at_s) == ("autopilot", "advise", 0.0), "the shell knows the time"
    assert told[0].predicted is not None
    silent = World("6P2D", step_at(60.0, LONG_PROMPTS, LONG_OUTPUTS), config(autopilot="off")).run(100)
    assert silent.autopilot.counts["looks"] == 0
    assert silent.audit == []
    steer(silent, change=AutopilotRequest(mode="auto"))
    assert silent.run(30).moves, "from now on"


def test_of_equal_instances_the_same_are_named_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loads change all the time, so that each look would name another of the idlest. The audit is told once."""
    chance = random.Random(3)
    monkeypatch.setattr(moves, "_load", lambda one: (0, chance.random(), one.id))
    world = World("6P2D", step_at(60.0, LONG_PROMPTS, LONG_OUTPUTS), config(autopilot="advise")).run(75)
    named = []
    for _ in range(60):
        shown = world.run(1.0).autopilot.view(world.now).shown
        assert shown is not None
        named.append(sorted(shown.moves) if shown.code == "advise" else [])
    assert sum(map(bool, named)) > 40
    assert all(set(one) <= set(other) or set(other) <= set(one) for one, other in pairwise(named)), named
    told = [re.sub(r"\bp\d+ ", "", f"{one.row.action} {one.row.detail}".partition(":")[0]) for one in world.audit]
    assert told
    assert all(one != other for one, other in pairwise(told))


def test_a_proposal_ends_with_the_instance_that_it_names() -> None:
    world = World("4P2D", lambda _: Mix(30, 8000, 600), config(autopilot="advise")).run(30)
    shown = world.autopilot.view(world.now).shown
    assert shown is not None
    assert shown.code == "advise"
    (gone,) = shown.moves
    world.desk.fleet.lose(world.desk.fleet.instances[gone], world.now)
    codes = []
    for _ in range(12):
        shown = world.run(1.5).autopilot.view(world.now).shown
        assert shown is not None
        assert gone not in shown.moves
        codes.append(shown.code)
    assert codes[0] == "measuring", "of a fleet that is another one"
    assert codes[-1] != "measuring"


def test_every_look_leaves_a_line_and_the_ring_is_bounded() -> None:
    world = World("2P2D", lambda _: CALM).run(900)
    assert world.autopilot.counts["looks"] == 600
    view = world.autopilot.view(world.now)
    assert len(view.evaluations) == 50
    assert len(world.autopilot._looks) == 256
    assert all(one.line for one in view.evaluations)
    agos = [one.ago_s for one in view.evaluations]
    assert agos == sorted(agos)


def test_moves_are_scored_and_the_score_sets_the_interval() -> None:
    world = World("6P2D", step_at(60.0, LONG_PROMPTS, LONG_OUTPUTS)).run(300)
    score = world.autopilot.view(world.now).score
    assert score.num >= 1
    first = score.moves[-1]
    assert (first.actor, first.change[:4]) == ("autopilot", "6P2D")
    assert first.gain is not None
    assert 0.0 <= first.measured <= 1.0
    assert [one.row for one in world.audit if one.row.action == "scored"]
    worse = World("6P2D", step_at(60.0, LONG_PROMPTS, LONG_OUTPUTS), truth=(1.0, 1.5)).run(300)
    assert worse.scores.error(0.1) > world.scores.error(0.1)
    assert worse.scores.view(0.1).bias < 0, "less came of it than the model says"  # type: ignore[operator]


def test_two_classes_of_hardware_go_where_they_are_good() -> None:
    """Decode on H20 falls short: it is H800s that prefill has to spare."""
    world = World("6P2D", lambda _: Mix(20, 1000, 1500), decode=H20).run(200)
    assert world.moves
    assert all((source, target) == (Role.PREFILL, Role.DECODE) for _, _, source, target in world.moves)
    assert world.good > 1.1 * off("6P2D", lambda _: Mix(20, 1000, 1500), 200).good or world.split != "6P2D"


def test_limits_and_pins_are_changed_by_operators_and_audited() -> None:
    world = World("2P2D", lambda _: CALM).run(10)
    world.audit.clear()
    world.autopilot.wanted(AutopilotWanted(ask_id="a", change=AutopilotRequest(mode="advise", floor=2, max_moves=1,
                                                                               actor="carol")))  # fmt: skip
    world.take(world.desk.take())
    assert [(one.row.actor, one.row.detail) for one in world.audit] == [
        ("carol", "mode auto to advise, floor 1 to 2, most moves a third to 1")
    ]
    missing = steer(world, pin=PinRequest(subject="zz"))
    assert isinstance(missing, PlanRefused)
    assert missing.status == 404
    assert isinstance(steer(world, unpin="p0"), PlanRefused), "it is not pinned"
    view = steer(world, pin=PinRequest(subject="p0", ttl_s=5.0))
    assert isinstance(view, AutopilotView)
    assert view.pins[0].left_s == pytest.approx(5.0)
    world.run(6)
    assert world.autopilot.view(world.now).pins == ()
