"""The dialogs: a choice, a text, a confirmation, something to read, and a plan from dry run to measured.

Each begins with the focus where Enter does no harm. They decide nothing and talk to nobody.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

from textual import events, on
from textual.app import ComposeResult
from textual.containers import Horizontal, Vertical
from textual.screen import ModalScreen
from textual.widgets import Button, Input

from ui.tui.canvas import Canvas
from ui.tui.lines import Line, Span, line, pad, wrap
from ui.tui.pen import Pen

Draw = Callable[[int], Sequence[Line]]
"""Lines for a width."""

T = TypeVar("T")


DIALOG_CSS = """
Dialog { align: center middle; background: $background 60%; }
Dialog > Vertical {
    width: 76; max-width: 96%; height: auto; max-height: 96%; padding: 0 2;
    background: $surface; border: round $primary;
}
Dialog > .tall { width: 100; height: 96%; }
Read > .tall { width: 100%; }
Choice Canvas { height: 15; }
Dialog Input { border: none; height: 1; padding: 0 1; margin: 1 0; background: $background; }
Dialog Horizontal { height: 1; align-horizontal: right; margin: 1 0 0 0; }
Dialog Button { border: none; height: 1; min-width: 12; margin: 0 0 0 2; background: $background; }
Dialog Button:focus { background: $primary; color: $background; text-style: bold; }
"""


class Dialog(ModalScreen[T]):
    """What all of them are. Where a text has the focus, `?` is a part of it."""

    BINDINGS = [("question_mark", "app.help")]


def _box(pen: Pen, title: str, tall: bool = False) -> Vertical:
    box = Vertical(classes="tall" if tall else None)
    box.border_title = title
    if pen.ascii:
        box.styles.border = ("ascii", "ansi_default")
    return box


class Option(NamedTuple):
    id: str
    label: str
    hint: str = ""


class Choice(Dialog[str | None]):
    """One of several, narrowed by typing; returns its id, or None. preset: the id that Enter takes."""

    BINDINGS = [("escape", "dismiss_none"), ("up", "step(-1)"), ("down", "step(1)")]

    def __init__(self, pen: Pen, title: str, options: Sequence[Option], preset: str = "") -> None:
        super().__init__()
        self._pen, self._title, self._all = pen, title, options
        self._shown = list(options)
        self._at = next((index for index, one in enumerate(options) if one.id == preset), 0)

    def compose(self) -> ComposeResult:
        with _box(self._pen, self._title):
            yield Input(placeholder=self._pen.say("tui.dialog.narrow"))
            yield Canvas(self._pen.ascii)

    def on_mount(self) -> None:
        self.query_one(Input).focus()
        self.call_after_refresh(self._redraw)

    def on_resize(self, _: events.Resize) -> None:
        self.call_after_refresh(self._redraw)

    @on(Input.Changed)
    def _narrow(self, event: Input.Changed) -> None:
        words = event.value.casefold().split()
        self._shown = [one for one in self._all if all(word in f"{one.label} {one.hint}".casefold() for word in words)]
        if words:
            self._at = 0
        self._redraw()

    @on(Input.Submitted)
    def _take(self) -> None:
        if self._shown:
            self.dismiss(self._shown[self._at].id)

    def action_dismiss_none(self) -> None:
        self.dismiss(None)

    def action_step(self, by: int) -> None:
        self._at = max(0, min(len(self._shown) - 1, self._at + by))
        self._redraw()

    def _redraw(self) -> None:
        canvas = self.query_one(Canvas)
        height = max(1, canvas.size.height)
        top = max(0, self._at - height + 1)
        size = max((len(one.hint) for one in self._all), default=0)
        room = max(10, canvas.size.width - size - 4)
        lines: list[Line] = []
        for index, one in enumerate(self._shown[top : top + height], top):
            here = index == self._at
            mark = (">" if self._pen.ascii else "▸") if here else " "
            label = Span(f"{mark} {pad(one.label, room)}", "cursor" if here else "")
            lines.append((label, Span(f" {one.hint}", "dim")))
        canvas.show(lines or [line(self._pen.say("tui.dialog.no_match"), "dim")])


class Ask(Dialog[str | None]):
    """A text; returns it, or None."""

    BINDINGS = [("escape", "dismiss_none")]

    def __init__(self, pen: Pen, title: str, hint: str, value: str) -> None:
        super().__init__()
        self._pen, self._title, self._hint, self._value = pen, title, hint, value

    def compose(self) -> ComposeResult:
        with _box(self._pen, self._title):
            yield Reading(self._pen, lambda width: [line(one, "dim") for one in wrap(self._hint, width)])
            yield Input(value=self._value)

    def on_mount(self) -> None:
        self.query_one(Input).focus()

    @on(Input.Submitted)
    def _take(self, event: Input.Submitted) -> None:
        self.dismiss(event.value.strip())

    def action_dismiss_none(self) -> None:
        self.dismiss(None)


class Confirm(Dialog[bool]):
    """Cancel has the focus. typed: what must be typed before the other button works."""

    BINDINGS = [("escape", "cancel"), ("left,up", "app.focus_previous"), ("right,down", "app.focus_next")]

    def __init__(self, pen: Pen, title: str, draw: Draw, do: str, typed: str = "") -> None:
        super().__init__()
        self._pen, self._title, self._draw, self._do, self._typed = pen, title, draw, do, typed

    def compose(self) -> ComposeResult:
        with _box(self._pen, self._title):
            yield Reading(self._pen, self._draw)
            if self._typed:
                yield Input(placeholder=self._pen.say("action.type_id", id=self._typed), select_on_focus=False)
            with Horizontal():
                yield Button(self._pen.say("action.cancel"), id="cancel")
                yield Button(self._do, id="do", disabled=bool(self._typed))

    def on_mount(self) -> None:
        self.query_one("#cancel").focus()

    @on(Input.Changed)
    def _typing(self, event: Input.Changed) -> None:
        self.query_one("#do", Button).disabled = event.value.strip() != self._typed

    def on_key(self, event: events.Key) -> None:
        """What is typed goes into the field, although Cancel has the focus."""
        if self._typed and event.is_printable and event.character and isinstance(self.focused, Button):
            field = self.query_one(Input)
            field.focus()
            field.insert_text_at_cursor(event.character)
            event.stop()

    @on(Input.Submitted)
    def _typed_all(self) -> None:
        if not self.query_one("#do", Button).disabled:
            self.query_one("#do").focus()

    @on(Button.Pressed)
    def _pressed(self, event: Button.Pressed) -> None:
        self.dismiss(event.button.id == "do")

    def action_cancel(self) -> None:
        self.dismiss(False)


class Read(Dialog[None]):
    """Something to read, longer than the screen if need be."""

    BINDINGS = [
        ("escape,enter,q", "close"), ("up", "scroll(-1)"), ("down", "scroll(1)"), ("pageup", "scroll(-10)"),
        ("pagedown,space", "scroll(10)"), ("home", "scroll(-9999)"), ("end", "scroll(9999)"),
    ]  # fmt: skip

    def __init__(self, pen: Pen, title: str, draw: Draw) -> None:
        super().__init__()
        self._pen, self._title, self._draw, self._top = pen, title, draw, 0

    def compose(self) -> ComposeResult:
        with _box(self._pen, self._title, tall=True):
            yield Canvas(self._pen.ascii)

    def on_resize(self, _: events.Resize) -> None:
        self.call_after_refresh(self.redraw)

    def on_mount(self) -> None:
        self.call_after_refresh(self.redraw)

    def action_close(self) -> None:
        self.dismiss(None)

    def action_scroll(self, by: int) -> None:
        self._top = max(0, self._top + by)
        self.redraw()

    def redraw(self) -> None:
        canvas = self.query_one(Canvas)
        lines = self._draw(canvas.size.width)
        self._top = max(0, min(self._top, len(lines) - canvas.size.height))
        canvas.show(lines[self._top : self._top + canvas.size.height])


class Help(Read):
    """What `?` shows; there is one at a time."""


class PlanDialog(Dialog[None]):
    """A plan: dry run, then its progress, then predicted against measured. on_do: told "apply" or "undo"; the dialog
    stays and shows what comes of it."""

    BINDINGS = [("escape", "close"), ("left", "app.focus_previous"), ("right", "app.focus_next"), ("u", "undo")]

    def __init__(self, pen: Pen, title: str, on_do: Callable[[str], None]) -> None:
        super().__init__()
        self._pen, self._title, self._on_do = pen, title, on_do
        self._draw: Draw = lambda width: [line(pen.say("tui.plan.asking"), "dim")]
        self._offer = ""

    def compose(self) -> ComposeResult:
        with _box(self._pen, self._title, tall=True):
            yield Canvas(self._pen.ascii)
            with Horizontal():
                yield Button(self._pen.say("action.cancel"), id="cancel")
                yield Button(self._pen.say("action.apply"), id="do", disabled=True)

    def on_mount(self) -> None:
        self.query_one("#cancel").focus()
        self.call_after_refresh(self._redraw)

    def on_resize(self, _: events.Resize) -> None:
        self.call_after_refresh(self._redraw)

    def show(self, draw: Draw, offer: str, may_act: bool) -> None:
        """offer: "apply" or "undo", what the second button does; "" for nothing."""
        self._draw, self._offer = draw, offer
        do, cancel = self.query_one("#do", Button), self.query_one("#cancel", Button)
        do.label = self._pen.say(f"action.{offer or 'apply'}")
        do.display = bool(offer)
        do.disabled = not may_act
        cancel.label = self._pen.say("action.cancel" if offer == "apply" else "action.close")
        self._redraw()

    @on(Button.Pressed)
    def _pressed(self, event: Button.Pressed) -> None:
        if event.button.id == "cancel":
            self.dismiss(None)
        elif self._offer:
            self.query_one("#cancel").focus()
            self._on_do(self._offer)

    def action_close(self) -> None:
        self.dismiss(None)

    def action_undo(self) -> None:
        if self._offer == "undo" and not self.query_one("#do", Button).disabled:
            self._on_do("undo")

    def _redraw(self) -> None:
        canvas = self.query_one(Canvas)
        canvas.show(list(self._draw(max(20, canvas.size.width)))[: canvas.size.height])


class Reading(Canvas):
    """Lines that take the height they need."""

    DEFAULT_CSS = "Reading { height: auto; }"

    def __init__(self, pen: Pen, draw: Draw) -> None:
        super().__init__(pen.ascii)
        self._draw = draw

    def get_content_height(self, container: object, viewport: object, width: int) -> int:
        return len(self._draw(width))

    def on_resize(self, event: events.Resize) -> None:
        self.show(self._draw(event.size.width))
