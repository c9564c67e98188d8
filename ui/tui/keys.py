"""The keys of the screen: what each does, how it is called in the catalogue and shown. No key needs Ctrl."""

from __future__ import annotations

from typing import NamedTuple

from ui.tui.draw import PANELS
from ui.tui.lines import BLANK, Line, Span, line, pad, wrap
from ui.tui.pen import Pen

NEAR_S, FAR_S = 10.0, 300.0
NAME = 8


class Key(NamedTuple):
    """keys: as the terminal's library calls them; action: what they do; name: below tui.do in the catalogue."""

    keys: str
    action: str
    name: str
    shown: str


KEYS = (
    *(Key(str(number), f"panel('{name}')", name, str(number)) for number, name in enumerate(PANELS, 1)),
    Key("enter", "open", "open", "enter"), Key("escape", "leave", "escape", "esc"),
    Key("slash", "filter", "filter", "/"),
    *(Key(key, action, key, key) for key, action in (
        ("s", "sort"), ("m", "move"), ("d", "drain"), ("p", "plan"), ("u", "undo"), ("a", "autopilot"),
    )),
    Key("space", "pause", "space", "space"),
    Key("left_square_bracket", f"seek(-{NEAR_S})", "back", "["),
    Key("right_square_bracket", f"seek({NEAR_S})", "forward", "]"),
    Key("left_curly_bracket", f"seek(-{FAR_S})", "far_back", "{"),
    Key("right_curly_bracket", f"seek({FAR_S})", "far_forward", "}"),
    Key("L,shift+l", "live", "L", "L"), Key("e", "export", "e", "e"), Key("colon", "palette", "palette", ":"),
    Key("question_mark", "help", "help", "?"), Key("q", "quit", "q", "q"),
)  # fmt: skip
MOVES = (
    ("up,k", "step(-1)"), ("down,j", "step(1)"), ("pageup", "page(-1)"), ("pagedown", "page(1)"),
    ("home,g", "step(-99999)"), ("end,G,shift+g", "step(99999)"),
)  # fmt: skip


def help_lines(pen: Pen, width: int) -> list[Line]:
    """What `?` shows: every key, and what the signs mean."""
    lines: list[Line] = [line(one) for one in wrap(pen.say("tui.help.about"), width)]
    lines.append(BLANK)
    for key in KEYS:
        lines.append((Span(pad(key.shown, NAME, right=True), "bold"), Span(f"  {pen.say(f'tui.do.{key.name}')}")))
    arrows = pad(pen.say("tui.help.arrows"), NAME, right=True)
    lines.append((Span(arrows, "bold"), Span(f"  {pen.say('tui.do.step')}")))
    return [*lines, BLANK, *(line(one, "dim") for one in wrap(pen.say("tui.help.signs"), width))]
