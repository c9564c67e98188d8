"""Charts as SVG, drawn on the server: lines over time, a sparkline, a stacked bar, a waterfall, a matrix. Figures and
words come in ready; under each chart its caller puts the same values as a table."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from markupsafe import Markup

from ui.console.markup import join, tag

WIDTH = 960
LEFT, RIGHT, TOP, BOTTOM = 52, 12, 10, 24
NUM_LEVELS, NUM_TIMES = 4, 5
"""Gaps between the lines of the grid, and between the times below it."""

Say = Callable[[float], str]
Points = Sequence[tuple[float, float | None]]


class Line(NamedTuple):
    """style: a class of the style sheet (goodput, throughput, objective). fill: shade what is below it."""

    name: str
    style: str
    points: Points
    fill: bool = False


class Mark(NamedTuple):
    """Something that happened at a moment."""

    at: float
    text: str


class _Scale(NamedTuple):
    start: float
    end: float
    top: float
    height: int

    def x(self, at: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (at - self.start) / max(1e-9, self.end - self.start)

    def y(self, value: float) -> float:
        return TOP + (self.height - TOP - BOTTOM) * (1 - min(1.0, max(0.0, value / self.top)))


def lines(
    drawn: Sequence[Line], start: float, end: float, *, title: str, value: Say, time: Say, height: int = 220,
    top: float | None = None, level: tuple[float, str] | None = None, marks: Sequence[Mark] = (),
    cursor: float | None = None,
) -> Markup:  # fmt: skip
    """Lines from `start` to `end` with a legend. top: of the axis, by default just above the largest value. level: a
    horizontal line and what it is; cursor: a moment that is pointed at."""
    largest = max((v for line in drawn for _, v in line.points if v is not None), default=0.0)
    scale = _Scale(start, end, top or nice_top(largest), height)
    shown = [mark for mark in marks if start <= mark.at <= end]
    inner = join([
        tag("title", title), _grid(scale, value, time),
        *(_area(scale, line) for line in drawn if line.fill), *(_line(scale, line) for line in drawn),
        None if level is None else _level(scale, *level), *(_mark(scale, mark) for mark in shown),
        None if cursor is None else _vertical(scale, cursor, "cursor"),
    ])  # fmt: skip
    picture = tag("svg", inner, viewBox=f"0 0 {WIDTH} {height}", class_="pp-lines", role="img", aria_label=title)
    return tag("figure", legend([(line.style, line.name) for line in drawn]), picture, class_="pp-figure")


def legend(entries: Sequence[tuple[str, str]]) -> Markup:
    """What each style stands for."""
    keys = (tag("span", tag("i", class_=f"pp-key pp-{style}"), name) for style, name in entries)
    return tag("figcaption", *keys, class_="pp-legend")


def sparkline(values: Sequence[float | None], label: str, width: int = 180, height: int = 36) -> Markup:
    """The shape of the last minutes, without axes; `label` says the value at its end."""
    known = [value for value in values if value is not None]
    top = nice_top(max(known, default=0.0))
    step = width / max(1, len(values) - 1)
    path = _path([
        None if value is None else (index * step, height - 2 - (height - 4) * min(1.0, value / top))
        for index, value in enumerate(values)
    ])  # fmt: skip
    line = tag("path", d=path, class_="pp-line pp-goodput")
    return tag("svg", line, viewBox=f"0 0 {width} {height}", class_="pp-sparkline", role="img", aria_label=label)


class Part(NamedTuple):
    """One stretch of a bar. sign: the letter that stands for it besides its colour; text: said on hovering."""

    style: str
    sign: str
    size: float
    text: str


def bar(parts: Sequence[Part], label: str) -> Markup:
    """Parts of a whole next to each other; without any, an empty bar."""
    total = sum(part.size for part in parts)
    inner = [
        tag("span", part.sign, class_=f"pp-part pp-{part.style}", style=f"flex-grow:{part.size / total:.4f}",
            title=part.text)
        for part in parts if total > 0 and part.size / total >= 0.002
    ]  # fmt: skip
    return tag("div", *inner, class_="pp-bar", role="img", aria_label=label)


def waterfall(steps: Sequence[Part], total: float, label: str) -> Markup:
    """One row for each step, beginning where the one before it ended; the text stands beside the bar."""
    rows, begun = [], 0.0
    for step in steps:
        left, width = (100 * begun / total, 100 * step.size / total) if total > 0 else (0.0, 0.0)
        block = tag("i", class_=f"pp-part pp-{step.style}", style=f"left:{left:.2f}%;width:{max(width, 0.3):.2f}%")
        rows.append(tag("div", tag("b", step.sign), tag("span", block, class_="pp-track"), tag("em", step.text)))
        begun += step.size
    return tag("div", *rows, class_="pp-waterfall", role="img", aria_label=label)


def matrix(
    rows: Sequence[str], columns: Sequence[str], cell: Callable[[str, str], tuple[float, str] | None], corner: str,
    label: str,
) -> Markup:  # fmt: skip
    """A table whose cells are shaded by a share from 0 to 1 and say their figure; None is an empty cell."""
    head = tag("tr", tag("th", corner, scope="col"), *(tag("th", name, scope="col") for name in columns))
    body = []
    for row in rows:
        cells = []
        for column in columns:
            found = cell(row, column)
            shade = None if found is None else f"--pp-share:{100 * min(1.0, max(0.0, found[0])):.0f}%"
            cells.append(tag("td", "" if found is None else found[1], style=shade, class_="n"))
        body.append(tag("tr", tag("th", row, scope="row"), *cells))
    inner = tag("table", tag("caption", label), tag("thead", head), tag("tbody", *body), class_="pp-table pp-matrix")
    return tag("div", inner, class_="pp-scroll", tabindex="0", role="region", aria_label=label)


def nice_top(largest: float) -> float:
    """1, 2 or 5 times a power of ten, or four or eight: at or above the value; 1 for nothing."""
    if largest <= 0:
        return 1.0
    power: float = 10.0 ** math.floor(math.log10(largest))
    return next((step * power for step in (1, 2, 4, 5, 8) if step * power >= largest), 10 * power)


def _grid(scale: _Scale, value: Say, time: Say) -> Markup:
    drawn = []
    for number in range(NUM_LEVELS + 1):
        at = scale.top * number / NUM_LEVELS
        y = scale.y(at)
        drawn.append(tag("line", x1=LEFT, x2=WIDTH - RIGHT, y1=y, y2=y, class_="pp-gridline"))
        drawn.append(tag("text", value(at), x=LEFT - 6, y=y + 4, text_anchor="end"))
    for number in range(NUM_TIMES + 1):
        when = scale.start + (scale.end - scale.start) * number / NUM_TIMES
        anchor = "start" if number == 0 else "end" if number == NUM_TIMES else "middle"
        drawn.append(tag("text", time(when), x=scale.x(when), y=scale.height - 6, text_anchor=anchor))
    return join(drawn)


def _line(scale: _Scale, line: Line) -> Markup:
    points = [None if value is None else (scale.x(at), scale.y(value)) for at, value in line.points]
    return tag("path", d=_path(points), class_=f"pp-line pp-{line.style}")


def _area(scale: _Scale, line: Line) -> Markup:
    floor = scale.y(0.0)
    known = [(scale.x(at), scale.y(value)) for at, value in line.points if value is not None]
    if not known:
        return Markup()
    path = f"{_path(known)}L{known[-1][0]:.1f} {floor:.1f}L{known[0][0]:.1f} {floor:.1f}Z"
    return tag("path", d=path, class_=f"pp-area pp-{line.style}")


def _level(scale: _Scale, at: float, text: str) -> Markup:
    y = scale.y(at)
    line = tag("line", x1=LEFT, x2=WIDTH - RIGHT, y1=y, y2=y, class_="pp-line pp-objective")
    return join([line, tag("text", text, x=WIDTH - RIGHT - 4, y=y - 4, text_anchor="end", class_="pp-label")])


def _mark(scale: _Scale, mark: Mark) -> Markup:
    x = scale.x(mark.at)
    sign = tag("path", d=f"M{x - 5:.1f} {TOP}L{x + 5:.1f} {TOP}L{x:.1f} {TOP + 8}Z", class_="pp-flag")
    return tag("g", tag("title", mark.text), _vertical(scale, mark.at, "mark"), sign)


def _vertical(scale: _Scale, at: float, style: str) -> Markup:
    x = scale.x(at)
    return tag("line", x1=x, x2=x, y1=TOP, y2=scale.height - BOTTOM, class_=f"pp-{style}")


def _path(points: Sequence[tuple[float, float] | None]) -> str:
    """A line that is broken where a value is unknown."""
    parts, pen_down = [], False
    for point in points:
        if point is not None:
            parts.append(f"{'L' if pen_down else 'M'}{point[0]:.1f} {point[1]:.1f}")
        pen_down = point is not None
    return "".join(parts)
