"""The six panels: what each draws, and where its reader is in it (cursor, order, filter). Pure."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from ui.tui.draw import PANELS
from ui.tui.draw_events import autopilot_head, event_detail, event_grid, look_grid
from ui.tui.draw_instances import instance_detail, instance_grid
from ui.tui.draw_kv import kv_lines
from ui.tui.draw_overview import overview
from ui.tui.draw_past import instance_past
from ui.tui.draw_requests import request_detail, request_grid
from ui.tui.grid import Grid, Order, arranged, drawn, shown_columns
from ui.tui.lines import BLANK, Line, beside, line, wrap
from ui.tui.model import Picture, moments
from ui.tui.pen import Pen

WANTED: dict[str, tuple[str, ...]] = {
    "overview": (), "instances": (), "requests": ("requests",), "kv": ("kv",), "events": ("audit",),
    "autopilot": ("autopilot",),
}  # fmt: skip
"""Answers beside the live feed that a panel shows."""
WIDE = 150
GRIDS = ("instances", "requests", "events", "autopilot")


@dataclass
class Panel:
    """One panel and its reader's place."""

    name: str
    order: Order = field(default_factory=Order)
    held: str | None = None
    """Id of the row the cursor was put on, which it follows; place: its number, where it stays when the row goes."""
    place: int = 0
    top: int = 0
    num_rows: int = 0
    page: int = 10
    widest: dict[int, int] = field(default_factory=dict)
    _ids: tuple[str, ...] = ()
    _columns: list[int] = field(default_factory=list)

    @property
    def chosen(self) -> str | None:
        """Id of the row under the cursor."""
        return self._ids[self.place] if self.place < len(self._ids) else None

    @property
    def has_rows(self) -> bool:
        return self.name in GRIDS

    def draw(self, pen: Pen, picture: Picture, width: int, height: int) -> list[Line]:
        """At most `height` lines."""
        if picture.fleet is None:
            return []
        if self.name == "overview":
            return overview(pen, picture, width, height)
        if self.name == "kv":
            return self._scrolled(kv_lines(pen, picture, width), height)
        if width >= WIDE and self.name != "autopilot":
            half = width * 3 // 5
            left = self._browsed(pen, picture, half, height)
            return beside([left, self.detail(pen, picture, width - half - 3)[:height]], [half, width - half - 3], gap=3)
        return self._browsed(pen, picture, width, height)

    def detail(self, pen: Pen, picture: Picture, width: int) -> list[Line]:
        """The chosen row in full; nothing where there is none."""
        if picture.fleet is None or self.chosen is None:
            return []
        if self.name == "instances":
            views = [view for view in picture.fleet.instances if view.id == self.chosen]
            past = instance_past(pen, picture, self.chosen, width)
            return [*instance_detail(pen, views[0], width), *past] if views else []
        if self.name == "requests":
            records = [record for record in picture.records if record.request_id == self.chosen]
            return request_detail(pen, records[0], width) if records else []
        if self.name == "events":
            found = [moment for moment in moments(picture) if moment.id == self.chosen]
            return event_detail(pen, found[0], width) if found else []
        if self.name == "autopilot" and picture.autopilot is not None:
            looks = picture.autopilot.evaluations[int(self.chosen) :]
            return [line(one) for one in wrap(pen.sentence(looks[0].said, looks[0].line), width)] if looks else []
        return []

    def step(self, by: int) -> None:
        """Move the cursor, or scroll where there is none."""
        if not self.has_rows:
            self.top = max(0, min(self.num_rows - self.page, self.top + by))
            return
        self.place = max(0, min(len(self._ids) - 1, self.place + by))
        self.held = self.chosen

    def sort(self) -> None:
        self.order = self.order.next(self._columns)

    def filter(self, needle: str) -> None:
        self.order = replace(self.order, needle=needle)

    def _scrolled(self, lines: list[Line], height: int) -> list[Line]:
        self.num_rows, self.page = len(lines), height
        self.top = max(0, min(self.top, len(lines) - height))
        return lines[self.top : self.top + height]

    def _browsed(self, pen: Pen, picture: Picture, width: int, height: int) -> list[Line]:
        head, grid = self._grid(pen, picture, width)
        shown = arranged(grid, self.order)
        self._columns = shown_columns(shown, width, self.widest)
        self._ids = tuple(row.id for row in shown.rows)
        if self.held in self._ids:
            self.place = self._ids.index(self.held)
        self.place = max(0, min(len(self._ids) - 1, self.place))
        lines = head[: max(0, height - 4)]
        notes = self._notes(pen, len(grid.rows), len(shown.rows))
        room = height - len(lines) - len(notes)
        self.page = max(1, room - 1)
        self.top = max(0, min(max(self.place - self.page + 1, min(self.top, self.place)), len(shown.rows) - self.page))
        lines += drawn(shown, width, room, order=self.order, cursor=self.place if self._ids else None, top=self.top,
                       widest=self.widest, ascii=pen.ascii)  # fmt: skip
        if not grid.rows:
            lines.append(line(pen.say(f"tui.nothing.{self.name}"), "dim"))
        return lines[: height - len(notes)] + [BLANK] * (height - len(notes) - len(lines)) + notes

    def _grid(self, pen: Pen, picture: Picture, width: int) -> tuple[list[Line], Grid]:
        if self.name == "instances" and picture.fleet is not None:
            return [], instance_grid(pen, picture.fleet.instances)
        if self.name == "requests":
            return [], request_grid(pen, picture.records)
        if self.name == "events":
            return [], event_grid(pen, picture)
        if picture.autopilot is None:
            return [], Grid((), ())
        return autopilot_head(pen, picture.autopilot, width), look_grid(pen, picture.autopilot)

    def _notes(self, pen: Pen, num_all: int, num_shown: int) -> list[Line]:
        """What is filtered, and which rows are seen, below the table."""
        if self.order.needle:
            return [line(pen.say("tui.filtered", needle=self.order.needle, num=num_shown, all=num_all), "warn")]
        if num_all > self.page:
            last = min(num_shown, self.top + self.page)
            return [line(pen.say("tui.rows", first=self.top + 1, last=last, all=num_all), "dim")]
        return []


def panels() -> dict[str, Panel]:
    return {name: Panel(name) for name in PANELS}
