"""`phaseplane top`: the screen, its keys, and when it is drawn. Panels are in panels.py, actions in flows.py."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from textual import events, on
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.screen import Screen
from textual.widgets import Input

from transfer.api import HoldAction, InstanceView, Plan
from ui.client import FleetClient
from ui.errors import CliError
from ui.tui.canvas import DARK, LIGHT, Canvas, theme
from ui.tui.dialogs import DIALOG_CSS, Choice, Help, Option, Read
from ui.tui.draw import NUM_HEAD_LINES, footer, head, verdict_sentence
from ui.tui.export import export
from ui.tui.flows import Flows
from ui.tui.keys import KEYS, MOVES, help_lines
from ui.tui.lines import Line, Span, Tone
from ui.tui.model import Picture
from ui.tui.panels import WANTED, panels
from ui.tui.pen import Pen
from ui.tui.session import Session
from ui.tui.timeline import Timeline

S = TypeVar("S")

SAID_S = 8.0
"""How long a message stands at the bottom."""
HOLDS: tuple[HoldAction, ...] = ("cordon", "resume")
COMMANDS = (*HOLDS, "theme")
"""In the palette beside the keys' actions."""


class TopApp(App[None]):
    """One screen over one session. clock: of the loop's time, for what plays and what is shown for a while."""

    CSS = f"""{DIALOG_CSS}
    #head {{ height: {NUM_HEAD_LINES}; }}
    #foot {{ height: 1; }}
    #filter {{ height: 1; border: none; padding: 0 1; display: none; }}
    """
    AUTO_FOCUS = None
    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = [
        *(Binding(key.keys, key.action, show=False) for key in KEYS),
        *(Binding(key, action, show=False) for key, action in MOVES),
    ]

    def __init__(
        self, session: Session, pen: Pen, basis: Picture, *, every_s: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        super().__init__()
        self.session, self.pen = session, pen
        self.plan: Plan | None = None
        self.flows = Flows(self)
        self.picture = self._basis = basis
        self._every_s, self._clock = every_s, clock
        self._panels = panels()
        self._panel = self._panels["overview"]
        self._time = Timeline.of(session.tape, session.client is not None, clock())
        self._said: tuple[str, Tone, float] = ("", "", 0.0)
        self._verdict = ""
        self.title = pen.say("app.name")
        for kind in ("dark", "light"):
            self.register_theme(theme(kind))
        self.theme = DARK

    @property
    def client(self) -> FleetClient | None:
        return self.session.client

    def compose(self) -> ComposeResult:
        yield Canvas(self.pen.ascii, id="head")
        yield Canvas(self.pen.ascii, id="body")
        yield Input(id="filter", placeholder=self.pen.say("tui.filter"), compact=True)
        yield Canvas(self.pen.ascii, id="foot")

    def on_mount(self) -> None:
        self.begin(self.session.run())
        self.begin(self._follow())

    def on_resize(self, _: events.Resize) -> None:
        self.call_after_refresh(self.redraw)

    def begin(self, work: Coroutine[Any, Any, None], alone: str = "") -> None:
        """Run until it ends or the screen is left. alone: what runs under this name already is ended first."""
        self.run_worker(work, group=alone or "default", exclusive=bool(alone))

    def open(self, screen: Screen[S], then: Callable[[S | None], None]) -> None:
        """Show a dialog; `then` is called with what it returns."""
        self.push_screen(screen, then)

    def say(self, text: str, tone: Tone = "") -> None:
        """A sentence at the bottom, for a while."""
        self._said = (text, tone, self._clock() + SAID_S)
        self.redraw()

    def redraw(self) -> None:
        """Take the moment to be shown and draw it."""
        if not self.is_running or not self.screen_stack:
            return
        self._time.advance(self._clock())
        self.picture = self._taken()
        width, height = self.size
        self._announce()
        base = self.screen_stack[0]
        base.query_one("#head", Canvas).show(head(self.pen, self.picture, width))
        body = base.query_one("#body", Canvas)
        body.show(self._panel.draw(self.pen, self.picture, width, body.size.height or height - NUM_HEAD_LINES - 1))
        base.query_one("#foot", Canvas).show([self._bottom(width)])
        self._look_at(self._panel.chosen if self._panel.name == "instances" else None)
        if isinstance(self.screen, Read) and self.screen.is_mounted:
            self.screen.redraw()
        self.flows.refresh()

    # --- keys ---------------------------------------------------------------------------------------------------

    def action_panel(self, name: str) -> None:
        self._panel = self._panels[name]
        self.session.wanted = WANTED[name]
        self.session.ask_now()
        self._show_filter(False)
        self.redraw()

    def action_step(self, by: int) -> None:
        self._panel.step(by)
        self.redraw()

    def action_page(self, by: int) -> None:
        self.action_step(by * self._panel.page)

    def action_open(self) -> None:
        """The chosen row in full, an instance as it goes on; on the overview, the instances."""
        panel, taken = self._panel, self.picture
        if panel.name == "overview":
            self.action_panel("instances")
            return
        panel.step(0)
        if panel.detail(self.pen, taken, 80):
            title = self.pen.say(f"tui.panel.{panel.name}")
            self.push_screen(Read(self.pen, title, lambda width: panel.detail(
                self.pen, self.picture if panel.name == "instances" else taken, width)))  # fmt: skip

    def action_leave(self) -> None:
        """Out of the filter, then back to the overview."""
        if self._panel.order.needle or self.query_one("#filter").display:
            self._panel.filter("")
            self._show_filter(False)
            self.redraw()
        else:
            self.action_panel("overview")

    def action_filter(self) -> None:
        if self._panel.has_rows:
            self._show_filter(True)

    def action_sort(self) -> None:
        self._panel.sort()
        self.redraw()

    def action_move(self) -> None:
        self.flows.move(self._chosen())

    def action_drain(self) -> None:
        self.flows.hold(self._chosen())

    def action_plan(self) -> None:
        self.flows.rebalance()

    def action_undo(self) -> None:
        self.flows.undo()

    def action_autopilot(self) -> None:
        self.flows.autopilot(self._chosen())

    def action_pause(self) -> None:
        self._time.pause(self._clock())
        self.redraw()

    def action_seek(self, by_s: float) -> None:
        self._time.seek(by_s)
        self.redraw()

    def action_live(self) -> None:
        self._time.live()
        self.redraw()

    def action_export(self) -> None:
        self.begin(self._export())

    def action_help(self) -> None:
        if not isinstance(self.screen, Help):
            self.push_screen(Help(self.pen, self.pen.say("tui.key.help"), lambda width: help_lines(self.pen, width)))

    def action_palette(self) -> None:
        """Everything that can be done, by name."""
        options = [Option(key.action, self.pen.say(f"tui.do.{key.name}"), key.shown) for key in KEYS]
        options += [Option(name, self.pen.say(f"tui.do.{name}")) for name in COMMANDS]

        def chosen(action: str | None) -> None:
            hold = next((one for one in HOLDS if one == action), None)
            if hold is not None:
                self.flows.hold(self._chosen(), hold)
            elif action:
                self.begin(self._carry(action))

        self.push_screen(Choice(self.pen, self.pen.say("tui.key.palette"), options), chosen)

    def action_theme(self) -> None:
        self.theme = LIGHT if self.theme == DARK else DARK
        self.screen_stack[0].refresh(layout=True)

    # --- events -------------------------------------------------------------------------------------------------

    @on(Input.Changed, "#filter")
    def _filtering(self, event: Input.Changed) -> None:
        self._panel.filter(event.value)
        self.redraw()

    @on(Input.Submitted, "#filter")
    def _filtered(self) -> None:
        self.set_focus(None)
        self.query_one("#filter").display = False
        self.redraw()

    def on_mouse_scroll_down(self) -> None:
        self.action_step(3)

    def on_mouse_scroll_up(self) -> None:
        self.action_step(-3)

    async def _follow(self) -> None:
        """Draw whatever is new, but no more often than wanted; a changed verdict at once."""
        drawn_s = float("-inf")
        while True:
            await self.session.news(1.0)
            fresh = self._taken().verdict.kind != self.picture.verdict.kind
            if fresh or self._clock() - drawn_s >= self._every_s * 0.9:
                drawn_s = self._clock()
                self.redraw()

    async def _carry(self, action: str) -> None:
        await self.run_action(action)

    async def _export(self) -> None:
        try:
            path = await asyncio.to_thread(export, self.picture, Path.cwd(), self.pen)
        except CliError as error:
            self.say(str(error), "bad")
        else:
            self.say(self.pen.say("tui.exported", path=path), "good")

    def _taken(self) -> Picture:
        return self.session.picture(replace(self._basis, mode=self._time.mode), self._time.at_s)

    def _look_at(self, instance_id: str | None) -> None:
        """Have the past of this instance asked for."""
        if instance_id != self.session.instance:
            self.session.instance = instance_id
            self.session.ask_now()

    def _announce(self) -> None:
        """Say a new verdict once."""
        if self.picture.fleet is None:
            return
        found = self.picture.verdict
        if self._verdict and found.kind != self._verdict:
            said = verdict_sentence(self.pen, self.picture, found)
            self._said = (said, "bold", self._clock() + SAID_S)
        self._verdict = found.kind

    def _bottom(self, width: int) -> Line:
        text, tone, until = self._said
        if text and self._clock() < until:
            return (Span(f" {text}", tone or "bold"),)
        return footer(self.pen, self._panel.name, width)

    def _chosen(self) -> InstanceView | None:
        """The instance under the cursor of the instances panel."""
        fleet = self.picture.fleet
        if self._panel.name != "instances" or fleet is None:
            return None
        return next((view for view in fleet.instances if view.id == self._panel.chosen), None)

    def _show_filter(self, shown: bool) -> None:
        entry = self.query_one("#filter", Input)
        entry.display = shown
        if shown:
            entry.value = self._panel.order.needle
            entry.focus()
        else:
            self.set_focus(None)
        self.call_after_refresh(self.redraw)
