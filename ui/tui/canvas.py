"""The one widget that shows drawn lines. It repaints only lines that changed, and knows what a tone looks like."""

from __future__ import annotations

from collections.abc import Sequence

from rich.segment import Segment
from rich.style import Style
from textual.geometry import Region
from textual.strip import Strip
from textual.theme import Theme
from textual.widget import Widget

from ui import looks
from ui.tui.lines import Line, Tone, ascii_only, fit, visible

DARK, LIGHT = "phaseplane-dark", "phaseplane-light"
_INK: dict[looks.Theme, str] = {"dark": "#d7dee6", "light": "#1f2328"}
_DIM: dict[looks.Theme, str] = {"dark": "#9aa7b4", "light": "#57606a"}
_PANEL: dict[looks.Theme, str] = {"dark": "#1b232c", "light": "#eef1f4"}


def theme(kind: looks.Theme) -> Theme:
    """Textual's colours for its own parts: inputs and buttons."""
    return Theme(
        name=DARK if kind == "dark" else LIGHT, dark=kind == "dark", primary=looks.ROLES["prefill"].colour(kind),
        background=looks.GROUNDS[kind], surface=_PANEL[kind], panel=_PANEL[kind], foreground=_INK[kind],
        success=looks.VERDICTS["met"].colour(kind), error=looks.VERDICTS["missed"].colour(kind),
        warning=looks.VERDICTS["degraded"].colour(kind),
    )  # fmt: skip


def tone_styles(kind: looks.Theme) -> dict[Tone, Style]:
    def ink(look: looks.Look, bold: bool = False) -> Style:
        return Style(color=look.colour(kind), bold=bold or None)

    return {
        "": Style(color=_INK[kind]), "dim": Style(color=_DIM[kind]), "bold": Style(color=_INK[kind], bold=True),
        "title": Style(color=_INK[kind], bold=True), "good": ink(looks.VERDICTS["met"]),
        "bad": ink(looks.VERDICTS["missed"], True), "warn": ink(looks.VERDICTS["degraded"]),
        "goodput": ink(looks.VERDICTS["met"]), "throughput": ink(looks.ROLES["prefill"]),
        "objective": ink(looks.VERDICTS["degraded"]), "prefill": ink(looks.ROLES["prefill"]),
        "decode": ink(looks.ROLES["decode"]), "mixed": ink(looks.ROLES["mixed"]),
        "kv_pool": ink(looks.ROLES["kv_pool"]), "cursor": Style(color=_INK[kind], reverse=True),
    }  # fmt: skip


STYLES: dict[str, dict[Tone, Style]] = {DARK: tone_styles("dark"), LIGHT: tone_styles("light")}


class Canvas(Widget):
    """Lines from `top` on; `show` replaces them."""

    DEFAULT_CSS = "Canvas { height: 1fr; }"

    def __init__(self, ascii: bool = False, id: str | None = None) -> None:
        super().__init__(id=id)
        self._ascii = ascii
        self.lines: Sequence[Line] = ()

    def show(self, lines: Sequence[Line]) -> None:
        """Repaint what differs from what is shown."""
        before, self.lines = self.lines, [ascii_only(one) for one in lines] if self._ascii else lines
        lines = self.lines
        for y in range(max(len(before), len(lines))):
            if y >= len(before) or y >= len(lines) or before[y] != lines[y]:
                self.refresh(Region(0, y, self.size.width, 1))

    def render_line(self, y: int) -> Strip:
        width = self.size.width
        base = self.rich_style
        if y >= len(self.lines):
            return Strip.blank(width, base)
        styles = STYLES.get(self.app.theme, STYLES[DARK])
        spans = fit(self.lines[y], width)
        return Strip([Segment(visible(span.text), base + styles[span.tone]) for span in spans], width)
