"""What changes a fleet, by keys, against a control plane: confirmed, followed, and refused when it must be."""

from __future__ import annotations

import time
from collections.abc import Iterator

import msgspec
import pytest
from textual.widgets import Button, Input
from top_fakes import TopFake, fleet, instances, opened, shown, until
from ui_fakes import a_plan, an_autopilot, serving

from transfer.api import Prediction
from transfer.screens import Column, SeriesView


@pytest.fixture
def fake() -> Iterator[TopFake]:
    with serving(TopFake()) as running:  # type: ignore[arg-type]
        yield running  # type: ignore[misc]


MEASURED = Prediction(duration_s=0.9, goodput_per_s=2.4)


async def test_a_split_is_planned_confirmed_followed_and_undone(fake: TopFake) -> None:
    fake.plans = [a_plan(), a_plan("applying"), a_plan("done"), a_plan("done", measured=MEASURED)]
    async with opened(fake) as (app, pilot):
        await pilot.press("p")
        await pilot.pause()
        assert "Now 2P2D: 4 instances can change role: 1P3D, 2P2D, 3P1D, 4M" in shown(app)
        field = app.screen.query_one(Input)
        field.value = "1P3D"
        await pilot.press("enter")
        await until(pilot, lambda: "planned" in shown(app))
        assert fake.posts() == [("POST /v1/plans", {"xpyd": "1P3D", "moves": None})]
        assert "2.00/s (1.00 to 3.00)" in shown(app)
        assert "Risk: prefill queue grows" in shown(app)
        assert app.focused is app.screen.query_one("#cancel", Button)
        await pilot.press("right", "enter")
        await until(pilot, lambda: "2.40/s" in shown(app))
        apply = fake.posts()[1]
        assert apply[0] == "POST /v1/plans/plan-1/apply"
        assert apply[1]["base_version"] == 4
        assert apply[1]["idempotency_key"]
        await pilot.press("u")
        await until(pilot, lambda: fake.posts()[-1][0] == "POST /v1/plans/plan-1/undo")
        await pilot.press("escape")
        assert len(app.screen_stack) == 1


async def test_help_is_there_in_a_dialog_and_leads_back_to_it(fake: TopFake) -> None:
    async with opened(fake) as (app, pilot):
        await pilot.press("p", "enter")
        await until(pilot, lambda: "planned" in shown(app))
        await pilot.press("question_mark", "question_mark")
        await until(pilot, lambda: app.pen.say("tui.help.arrows") in shown(app))
        assert len(app.screen_stack) == 3
        await pilot.press("escape")
        await until(pilot, lambda: "planned" in shown(app))
        await pilot.press("escape")
        assert len(app.screen_stack) == 1


async def test_cancel_changes_nothing(fake: TopFake) -> None:
    async with opened(fake) as (app, pilot):
        await pilot.press("p", "enter")
        await until(pilot, lambda: "planned" in shown(app))
        await pilot.press("enter")
        assert len(app.screen_stack) == 1
        await pilot.press("u")
        await until(pilot, lambda: "Take back plan-1 (1P3D to 2P2D)" in shown(app))
        await pilot.press("enter")
        assert [what for what, _ in fake.posts()] == ["POST /v1/plans"]


async def test_one_instance_moves_to_a_role_that_is_chosen(fake: TopFake) -> None:
    async with opened(fake) as (app, pilot):
        await pilot.press("2", "m")
        await pilot.pause()
        assert "Move n0 (prefill) to" in str(app.screen.query_one("Vertical").border_title)
        await pilot.press("enter")
        await until(pilot, lambda: "planned" in shown(app))
        assert fake.posts() == [("POST /v1/plans", {"xpyd": None, "moves": {"n0": "decode"}})]
        await pilot.press("escape", "end", "m")
        await pilot.pause()
        assert "pools do not change role" in shown(app)


async def test_m_on_the_overview_takes_the_advice(fake: TopFake) -> None:
    async with opened(fake) as (app, pilot):
        await pilot.press("m")
        await until(pilot, lambda: "planned" in shown(app))
        assert fake.posts() == [("POST /v1/plans", {"xpyd": None, "moves": {"n3": "decode"}})]
        await pilot.press("escape")
        fake.autopilot = an_autopilot(evaluations=(), shown=None)
        await pilot.press("m")
        await until(pilot, lambda: "Choose an instance first" in shown(app))


async def test_a_drain_wants_the_id_typed_and_a_resume_does_not(fake: TopFake) -> None:
    held = msgspec.structs.replace(instances()[1], state="draining")
    fake.fleet = fleet(instances=(instances()[0], held, *instances()[2:]))
    async with opened(fake) as (app, pilot):
        await pilot.press("2", "d")
        await pilot.pause()
        do = app.screen.query_one("#do", Button)
        assert do.disabled
        await pilot.press("n", "1", "enter")
        assert do.disabled
        assert fake.posts() == []
        await pilot.press("backspace", "0")
        assert not do.disabled
        await pilot.press("enter", "enter")
        await until(pilot, lambda: "Done: Drain n0" in shown(app))
        assert [what for what, _ in fake.posts()] == ["POST /v1/instances/n0/drain"]
        assert fake.posts()[0][1]["base_version"] == 4
        await pilot.press("down", "d")
        await pilot.pause()
        assert "Requests are placed on n1 again" in shown(app)
        await pilot.press("right", "enter")
        await until(pilot, lambda: "Done: Resume n1" in shown(app))
        assert fake.posts()[-1][0] == "POST /v1/instances/n1/resume"


async def test_a_refusal_is_said_in_its_own_words(fake: TopFake) -> None:
    fake.apply_status = 409
    async with opened(fake) as (app, pilot):
        await pilot.press("p", "enter")
        await until(pilot, lambda: "planned" in shown(app))
        await pilot.press("right", "enter")
        await until(pilot, lambda: "the fleet changed since the plan was made" in shown(app))
        await pilot.press("escape", "2", "colon", *"cord", "enter")
        await until(pilot, lambda: "Cordon n0" in str(app.screen.query("Vertical").first().border_title))
        await pilot.press("right", "enter")
        await until(pilot, lambda: "the last ready decode instance" in shown(app))
        fake.plan_refusal = "9P9D does not add up"
        await pilot.press("p", "enter")
        await until(pilot, lambda: "9P9D does not add up" in shown(app))
        assert "can be 1P3D" in shown(app)


async def test_nothing_to_undo_is_said(fake: TopFake) -> None:
    fake.done = [a_plan("done", plan_id="plan-2", undo_of="plan-1"), a_plan("done")]
    async with opened(fake) as (app, pilot):
        await pilot.press("u")
        await until(pilot, lambda: "Nothing to undo" in shown(app))


async def test_the_autopilot_and_its_pins_are_set(fake: TopFake) -> None:
    async with opened(fake) as (app, pilot):
        await pilot.press("2", "a")
        await until(pilot, lambda: "Set to advise" in shown(app))
        for choice in ("Set to off", "Set to auto", "Pin split", "Release cpu-0", "Pin n0"):
            assert choice in shown(app)
        await pilot.press("down", "enter")
        await until(pilot, lambda: "Done: Set to auto" in shown(app))
        assert fake.posts()[-1] == (
            "PUT /v1/autopilot", {"mode": "auto", "floor": None, "max_moves": None, "actor": "operator"}
        )  # fmt: skip
        await pilot.press("a")
        await until(pilot, lambda: "Pin split" in shown(app))
        await pilot.press(*"pin s", "enter")
        await until(pilot, lambda: fake.posts()[-1][0] == "POST /v1/autopilot/pins")
        assert fake.posts()[-1][1]["subject"] == "split"


async def test_read_only_changes_nothing(fake: TopFake) -> None:
    async with opened(fake, read_only=True) as (app, pilot):
        for key in "mdpua":
            await pilot.press(key)
            assert len(app.screen_stack) == 1, key
            assert "this session is read only" in shown(app)
        assert fake.posts() == []


async def test_a_plan_offered_before_the_figures_grew_old_cannot_be_applied(fake: TopFake) -> None:
    async with opened(fake) as (app, pilot):
        await pilot.press("p", "enter")
        await until(pilot, lambda: "planned" in shown(app))
        app.session.feed._heard_s -= 10  # type: ignore[attr-defined]
        fake.silent_live = True
        await pilot.pause(0.25)
        app.session.feed._heard_s = 0.0  # type: ignore[attr-defined]
        app.redraw()
        assert app.screen.query_one("#do", Button).disabled
        await pilot.press("right", "enter")
        assert [what for what, _ in fake.posts()] == ["POST /v1/plans"]


async def test_a_lost_fleet_is_stale_and_comes_back_by_itself(fake: TopFake) -> None:
    async with opened(fake) as (app, pilot):
        fake.web_status = 503
        fake.silent_live = True
        await pilot.pause(0.25)
        app.session.feed._heard_s -= 10  # type: ignore[attr-defined]
        app.redraw()
        await pilot.pause()
        assert "STALE" in shown(app)
        assert not app.picture.may_act
        fake.web_status, fake.silent_live = 0, False
        app.session.feed._heard_s += 10  # type: ignore[attr-defined]
        await until(pilot, lambda: app.picture.may_act)


async def test_panels_ask_for_what_they_show(fake: TopFake) -> None:
    panels = {
        "3": ("GET /v1/requests", "cmpl-2"), "4": ("GET /v1/kv", "9f86d081884c"), "5": ("GET /v1/audit", "alice"),
        "6": ("GET /v1/autopilot", "every 3 s it asks"),
    }  # fmt: skip
    async with opened(fake) as (app, pilot):
        for key, (path, sign) in panels.items():
            before = [what for what, _ in fake.asked].count(path)
            await pilot.press(key)
            await until(pilot, lambda sign=sign: sign in shown(app))  # type: ignore[misc]
            assert [what for what, _ in fake.asked].count(path) > before
        assert any(what.startswith("GET /v1/series") for what, _ in fake.asked)
        waiting = Column(last=(7.0,) * 20)
        times = tuple(int(time.time()) - 95 + 5 * index for index in range(20))
        fake.series = SeriesView(step_s=5.0, times=times, series={"instance.n1.num_waiting": waiting})
        await pilot.press("2", "down", "enter", "end")
        await until(pilot, lambda: "waiting 7" in shown(app))
        assert any("instance.n1.tpot_p50_s" in what for what, _ in fake.asked)
