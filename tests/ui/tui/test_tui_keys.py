"""Every key, pressed on a screen: panels, rows, filter, time, help, commands. Nothing here changes a fleet."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from top_fakes import PEN, START_S, Clock, FixedApp, shown, standing, tape, until

from transfer.api import LiveFrame
from ui.tui.app import TopApp
from ui.tui.keys import KEYS
from ui.tui.model import Picture
from ui.tui.pen import Pen
from ui.tui.session import ReplaySession
from ui.words import words


async def test_numbers_choose_panels_and_escape_leads_back() -> None:
    app = FixedApp()
    async with standing(app, (120, 40)) as pilot:
        signs = ("Those that miss", "h800", "cmpl-1", "Prompt tokens found in KV", "alice", "every 3 s it asks")
        for key, sign in zip("123456", signs, strict=True):
            await pilot.press(key)
            assert sign.lower() in shown(app).lower(), key
        await pilot.press("escape")
        assert "[1 Overview]" in shown(app)
        await pilot.press("enter")
        assert "[2 Instances]" in shown(app)


async def test_rows_are_chosen_sorted_filtered_and_opened() -> None:
    app = FixedApp()
    async with standing(app, (120, 40)) as pilot:
        await pilot.press("2", "down", "j", "up")
        assert "▸ n1" in shown(app)
        await pilot.press("end")
        assert "▸ pool-0" in shown(app)
        await pilot.press("home", "s", "s")
        assert "instance▼" in shown(app)
        assert shown(app).index("pool-0 ") < shown(app).index("n3 ")
        await pilot.press("slash", *"decode", "enter")
        assert 'only rows with "decode": 2 of 5' in shown(app)
        await pilot.press("escape")
        assert "only rows" not in shown(app)
        assert "[2 Instances]" in shown(app)
        await pilot.press("3", "down", "enter")
        await pilot.pause()
        assert "Where its time went" in shown(app)
        await pilot.press("escape")
        assert "Where its time went" not in shown(app)
        await pilot.press("pagedown", "pageup", "4", "pagedown", "5", "enter")
        await pilot.pause()
        assert "Events" in str(app.screen.query_one("Vertical").border_title)


async def test_the_chosen_instance_is_looked_at_and_goes_on_while_it_is_read() -> None:
    app = FixedApp()
    async with standing(app, (80, 24)) as pilot:
        assert app.session.instance is None
        await pilot.press("2", "down", "enter")
        await pilot.pause()
        assert app.session.instance == "n1"
        before = app.picture.fleet
        assert before is not None
        views = [msgspec.structs.replace(one, host="another") for one in before.instances]
        app.session.tape.add(
            LiveFrame(seq=9999, kind="delta", at_s=START_S + 700, changed={"instances": views}),
            msgspec.structs.replace(before, instances=tuple(views)),
        )
        app.redraw()
        assert "another" in shown(app)
        await pilot.press("escape", "1")
        assert app.session.instance is None


async def test_letters_typed_into_the_filter_are_no_commands() -> None:
    app = FixedApp()
    async with standing(app, (120, 40)) as pilot:
        await pilot.press("2", "slash", *"mdq1 ")
        assert app.is_running
        assert len(app.screen_stack) == 1
        assert "[2 Instances]" in shown(app)


async def test_time_goes_back_and_forth() -> None:
    app = FixedApp()
    async with standing(app, (120, 40)) as pilot:
        newest = START_S + 599
        await pilot.press("left_square_bracket")
        assert app.picture.at_s == newest - 10
        assert "PAST" in shown(app)
        await pilot.press("left_curly_bracket")
        assert app.picture.at_s == newest - 310
        await pilot.press("2")
        assert app.picture.fleet is not None
        assert app.picture.fleet.xpyd == "1P3D"
        await pilot.press("right_square_bracket", "right_curly_bracket")
        assert "live" in shown(app), "forward beyond now is now"
        await pilot.press(*["left_curly_bracket"] * 3)
        assert app.picture.at_s == START_S, "no further than what is known"
        await pilot.press("L")
        assert app.picture.at_s == newest
        await pilot.press("space")
        assert "PAUSED" in shown(app)
        await pilot.press("m", "d", "p", "u", "a")
        assert len(app.screen_stack) == 1, "the past cannot be changed"
        assert "this is the past" in shown(app)
        await pilot.press("space")
        assert "PAUSED" not in shown(app)


async def test_help_names_every_key_and_the_palette_runs_by_name() -> None:
    app = FixedApp()
    async with standing(app, (120, 60)) as pilot:
        await pilot.press("question_mark")
        await pilot.pause()
        for key in KEYS:
            assert PEN.say(f"tui.do.{key.name}") in shown(app)
        await pilot.press("escape", "colon", *"hit")
        await pilot.pause()
        await pilot.press("enter")
        await until(pilot, lambda: "[4 KV]" in shown(app))
        await pilot.press("colon", *"light")
        await pilot.press("enter")
        await until(pilot, lambda: app.theme == "phaseplane-light")
        await pilot.press("colon", *"zzz")
        await pilot.pause()
        assert "nothing of that name" in shown(app)
        await pilot.press("escape", "q")
    assert not app.is_running


async def test_e_writes_what_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    app = FixedApp()
    async with standing(app, (120, 40)) as pilot:
        await pilot.press("e")
        await until(pilot, lambda: "Written to" in shown(app))
        await pilot.press("e")
        await until(pilot, lambda: len([*tmp_path.iterdir()]) == 2)
    written = json.loads((tmp_path / "phaseplane-20231114-222319.json").read_text())
    assert written["verdict"]["kind"] == "met"
    assert len(written["fleet"]["instances"]) == 5
    assert written["requests"][0]["request_id"] == "cmpl-1"


async def test_old_figures_disable_every_action() -> None:
    app = FixedApp(age_s=3.2)
    async with standing(app, (100, 30)) as pilot:
        assert "STALE: nothing new for 3 s" in shown(app)
        for key in "mdpua":
            await pilot.press(key)
            assert "Disabled: the figures are older than 3 s" in shown(app), key
        assert len(app.screen_stack) == 1


async def test_a_recording_plays_and_pauses() -> None:
    clock = Clock()
    session = ReplaySession(tape(), "x.rec")
    app = TopApp(session, PEN, Picture(url="x.rec"), clock=clock)
    async with standing(app, (100, 30)) as pilot:
        app.redraw()
        assert app.picture.at_s == START_S
        clock.now += 7
        app.redraw()
        assert app.picture.at_s == START_S + 7
        assert "REPLAY" in shown(app)
        await pilot.press("space")
        clock.now += 50
        app.redraw()
        assert app.picture.at_s == START_S + 7
        await pilot.press("space")
        clock.now += 3
        app.redraw()
        assert app.picture.at_s == START_S + 10
        await pilot.press("right_square_bracket", "p")
        assert app.picture.at_s == START_S + 20
        assert "read only" in shown(app)
        await pilot.press("L")
        assert app.picture.at_s == START_S + 599


async def test_a_new_verdict_is_announced_once() -> None:
    app = FixedApp()
    async with standing(app, (100, 30)) as pilot:
        bottom = shown(app).splitlines()[-1]
        assert "[1 Overview]" in bottom
        app.session.age_s = 4.0  # type: ignore[attr-defined]
        app.redraw()
        await pilot.pause()
        assert "STALE" in shown(app).splitlines()[-1]
        app._clock.now += 9  # type: ignore[attr-defined]
        app.redraw()
        await pilot.pause()
        assert "[1 Overview]" in shown(app).splitlines()[-1]


async def test_ascii_is_ascii_dialogs_included() -> None:
    app = FixedApp(Pen(words("en", {}), ascii=True, zone=PEN.zone))
    async with standing(app, (100, 40)) as pilot:
        for key in ("1", "2", "3", "4", "5", "6", "question_mark", "escape", "colon", "escape", "3", "enter"):
            await pilot.press(key)
            await pilot.pause()
            assert shown(app).isascii(), (key, [one for one in shown(app) if not one.isascii()])


@pytest.mark.parametrize("size", [(80, 24), (40, 10), (200, 60)])
async def test_a_screen_may_be_resized(size: tuple[int, int]) -> None:
    app = FixedApp()
    async with standing(app, (120, 40)) as pilot:
        await pilot.resize_terminal(*size)
        await pilot.pause()
        assert "Phaseplane" in shown(app)
        assert len(shown(app).splitlines()) == size[1]
