"""Screens as pictures, with a fixed clock and fixed data. After a change that is meant:
`pytest tests/ui/tui/test_tui_snapshots.py --snapshot-update`, and look at the SVGs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import msgspec
import pytest
from textual.pilot import Pilot
from top_fakes import PEN, FixedApp
from ui_fakes import a_plan, an_autopilot

from transfer.said import say
from ui.insight import present
from ui.tui.draw import head
from ui.tui.draw_plan import plan_lines
from ui.tui.lines import plain
from ui.tui.model import Picture
from ui.tui.pen import Pen
from ui.words import words

Compare = Callable[..., bool]
CHINESE = Pen(words("zh-Hant", {}), zone=PEN.zone)


async def drawn(pilot: Pilot[None]) -> None:
    await pilot.pause()
    pilot.app.redraw()  # type: ignore[attr-defined]
    await pilot.pause()


@pytest.mark.parametrize("size", [(80, 24), (120, 40), (200, 60)], ids=lambda size: f"{size[0]}x{size[1]}")
def test_overview(snap_compare: Compare, size: tuple[int, int]) -> None:
    assert snap_compare(FixedApp(), terminal_size=size, run_before=drawn)


@pytest.mark.parametrize("key", ["2", "3", "4", "5", "6"])
def test_panels_at_120x40(snap_compare: Compare, key: str) -> None:
    async def pressed(pilot: Pilot[None]) -> None:
        await drawn(pilot)
        await pilot.press(key, "down")
        await pilot.pause()

    assert snap_compare(FixedApp(), terminal_size=(120, 40), run_before=pressed)


def test_requests_at_200x60(snap_compare: Compare) -> None:
    async def pressed(pilot: Pilot[None]) -> None:
        await drawn(pilot)
        await pilot.press("3", "down")
        await pilot.pause()

    assert snap_compare(FixedApp(), terminal_size=(200, 60), run_before=pressed)


def test_instances_in_chinese_at_80x24(snap_compare: Compare) -> None:
    async def pressed(pilot: Pilot[None]) -> None:
        await drawn(pilot)
        await pilot.press("2")
        await pilot.pause()

    assert snap_compare(FixedApp(CHINESE), terminal_size=(80, 24), run_before=pressed)


def test_a_move_that_a_pin_holds_back_is_read_at_80x24(snap_compare: Compare) -> None:
    """Of a line that is too long its end is cut: the pin and its reason, not the move."""
    pin = say("pin.because", pin=say("pin.one", id="n0", who="alice"), why="a benchmark runs on it until the evening")
    move = say(
        "advice.move", moves="n0 P->D", promise=say("advice.promise", gain="+18", low="12", high="23"), seconds=6
    )
    held = say("hold.why", why=say("hold.would", why=(pin,), advice=move))

    class Pinned(FixedApp):
        def _taken(self) -> Picture:
            taken = super()._taken()
            assert taken.fleet is not None
            fleet = msgspec.structs.replace(taken.fleet, advice=str(held), advice_said=held)
            view = an_autopilot(line=str(held), said=held)
            return replace(taken, fleet=fleet, autopilot=view)

    async def pressed(pilot: Pilot[None]) -> None:
        await drawn(pilot)
        await pilot.press("6")
        await pilot.pause()
        app = pilot.app
        assert isinstance(app, FixedApp)
        for pen, move_text in ((PEN, "move n0 P->D: +18 %"), (CHINESE, "\u79fb\u52d5 n0 P->D")):
            assert move_text in plain(head(pen, app.picture, 80)[3])

    assert snap_compare(Pinned(), terminal_size=(80, 24), run_before=pressed)


def test_a_plan_at_80x24(snap_compare: Compare) -> None:
    async def opened(pilot: Pilot[None]) -> None:
        await drawn(pilot)
        app = pilot.app
        assert isinstance(app, FixedApp)
        app.flows._open(PEN.say("tui.plan.title"))
        await pilot.pause()
        assert app.picture.fleet is not None
        now = present(app.picture.fleet)
        dialog = app.flows._dialog
        assert dialog is not None
        dialog.show(lambda width: plan_lines(PEN, a_plan(), width, now), "apply", may_act=True)
        await pilot.pause()

    assert snap_compare(FixedApp(), terminal_size=(80, 24), run_before=opened)
