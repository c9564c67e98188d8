"""What a session shows and remembers: a picture, its rows, and any moment of the past."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from top_fakes import START_S, fleet, instances, tape, told

from transfer.screens import Column, SeriesView
from ui.tui.model import Picture, cost_per_hour, moments
from ui.tui.tape import KEYFRAME_EVERY, Points, Tape, happenings


def picture(**changes: object) -> Picture:
    return replace(Picture(fleet=fleet(), at_s=START_S, age_s=0.5), **changes)  # type: ignore[arg-type]


def test_old_figures_give_no_verdict_and_allow_nothing() -> None:
    assert picture(age_s=3.1).verdict.kind == "stale"
    assert Picture().verdict.kind == "stale"
    assert picture().may_act
    assert not picture(age_s=3.1).may_act
    assert not picture(read_only=True).may_act
    assert not picture(mode="past").may_act
    assert not picture(mode="paused").may_act
    assert not picture(mode="replay", age_s=0.0).may_act


def test_the_price_of_a_fleet_leaves_out_what_is_lost() -> None:
    views = list(instances())
    assert cost_per_hour(fleet()) == pytest.approx(8.5)
    views[0] = msgspec.structs.replace(views[0], state="lost")
    assert cost_per_hour(fleet(instances=tuple(views))) == pytest.approx(6.5)


def test_events_are_the_log_and_what_was_seen_up_to_the_moment_shown() -> None:
    seen = tape()
    found = Picture(fleet=fleet(), at_s=START_S + 350, happenings=seen.happenings, audit=seen.answer_at("audit", 0.0))
    names = [(one.action, one.subject) for one in moments(found)]
    assert names == [("role", "n0"), ("state", "n0"), ("xpyd", ""), ("apply", "plan-1"), ("state", "n0")]
    assert moments(replace(found, at_s=START_S + 100)) == []


def test_what_changed_between_two_states_is_noticed() -> None:
    old = fleet()
    views = [msgspec.structs.replace(old.instances[0], role="decode"), *old.instances[2:]]
    views.append(msgspec.structs.replace(old.instances[1], id="n9"))
    new = fleet(instances=tuple(views), xpyd="1P3D", autopilot="auto")
    assert [(one.kind, one.subject, one.old, one.new) for one in happenings(old, new, 5.0)] == [
        ("role", "n0", "prefill", "decode"), ("joined", "n9", "", "prefill"), ("left", "n1", "prefill", ""),
        ("xpyd", "", "2P2D", "1P3D"), ("autopilot", "", "advise", "auto"),
    ]  # fmt: skip


def test_any_moment_of_a_tape_is_the_state_of_then() -> None:
    seen, states = tape(400), told(400)
    for second in (399, 0, 1, 31, 30, 301, 302, 303, 120, 121, 122):
        assert seen.state_at(START_S + second) == (START_S + second, states[second][1])
    assert seen.state_at(0.0) == (START_S, states[0][1])
    assert seen.state_at(START_S + 1e6) == (START_S + 399, states[-1][1])
    assert Tape().state_at(5.0) is None


def test_a_tape_is_bounded_and_what_is_left_is_right() -> None:
    seen, states = Tape(max_frames=100), told(400)
    for frame, state in states:
        seen.add(frame, state)
    first = seen.first_s
    assert first is not None
    assert 100 - KEYFRAME_EVERY <= START_S + 399 - first <= 100
    for second in range(int(first - START_S), 400, 7):
        assert seen.state_at(START_S + second) == (START_S + second, states[second][1])


def test_answers_are_those_known_then() -> None:
    seen = Tape()
    seen.answer("kv", 10.0, "old")
    seen.answer("kv", 20.0, "old")
    seen.answer("kv", 30.0, "new")
    assert [seen.answer_at("kv", at_s) for at_s in (5.0, 25.0, 30.0, 99.0)] == ["old", "old", "new", "new"]
    assert seen.answer_at("audit", 1.0) is None


def test_the_past_told_by_the_fleet_comes_before_what_was_seen() -> None:
    points = Points()
    points.add(100.0, {"goodput_per_s": 5.0, "throughput_per_s": 6.0, "attainment": 1.0})
    points.add(99.0, {"goodput_per_s": 9.0})
    series = {"goodput_per_s": Column(last=(1.0, 2.0, 3.0)), "attainment": Column(last=(None, 0.5, 0.6))}
    points.put_before(SeriesView(step_s=1.0, times=(98, 99, 100), series=series))
    assert points.times == [98.0, 99.0, 100.0]
    assert points.values["goodput_per_s"] == [1.0, 2.0, 5.0]
    assert points.values["throughput_per_s"] == [None, None, 6.0]
    assert points.values["attainment"] == [None, 0.5, 1.0]
    points.add(39.0, {"goodput_per_s": 7.0})
    assert (points.times, points.values["goodput_per_s"]) == ([39.0], [7.0]), "its clock was set back"
