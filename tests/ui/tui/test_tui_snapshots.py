"""Screens as pictures, with a fixed clock and fixed data. After a change that is meant:
`pytest tests/ui/tui/test_tui_snapshots.py --snapshot-update`, and look at the SVGs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from textual.pilot import Pilot
from top_fakes import PEN, FixedApp
from ui_fakes import a_plan

from ui.insight import present
from ui.tui.draw_plan import plan_lines
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
