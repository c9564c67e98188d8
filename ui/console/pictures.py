"""Charts of series of the past, one below the other, each with its values as a table. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from markupsafe import Markup

from transfer.screens import SeriesView
from ui import figures
from ui.console import charts
from ui.console.markup import Column, folded, join, table, tag
from ui.console.views import TARGET
from ui.words import Words

HEIGHT = 150
NUM_ROWS = 20
"""About so many rows in the table of a chart."""


class Picture(NamedTuple):
    """One chart of the past. series: (name of the series, key of its words or its name, style). target: with the line
    above which objectives are said to be met."""

    title: str
    series: tuple[tuple[str, str, str], ...]
    figure: charts.Say
    top: float | None = None
    target: bool = False


def rate(value: float) -> str:
    return f"{round(value, 2):g}"


def percent(value: float) -> str:
    return f"{value:.0%}"


def pictures(
    wanted: Sequence[Picture], past: SeriesView, say: Words, *, time: charts.Say, marks: Sequence[charts.Mark] = (),
    cursor: float | None = None,
) -> Markup:  # fmt: skip
    """Series that the answer does not have are left out."""
    start, end = float(past.times[0]), float(past.times[-1])
    drawn = []
    for one in wanted:
        title = named(one.title, say)
        lines = [
            charts.Line(named(key, say), style, list(zip(map(float, past.times), past.series[name].last, strict=True)))
            for name, key, style in one.series if name in past.series
        ]  # fmt: skip
        level = (TARGET, say.say("console.target", target=figures.share(TARGET))) if one.target else None
        drawn += [
            tag("h3", title, class_="pp-h3"),
            charts.lines(lines, start, end, title=title, value=one.figure, time=time, height=HEIGHT, top=one.top,
                         level=level, marks=marks, cursor=cursor),
            _values(past, lines, one.figure, time, title, say),
        ]  # fmt: skip
    return join(drawn)


def named(key: str, say: Words) -> str:
    return say.say(key) if say.has(key) else key


def _values(
    past: SeriesView, lines: Sequence[charts.Line], figure: charts.Say, time: charts.Say, title: str, say: Words
) -> Markup:
    stride = max(1, len(past.times) // NUM_ROWS)
    columns = [Column(say.say("term.time")), *(Column(line.name, True) for line in lines)]
    rows = [
        (time(past.times[index]), *(figures.NONE if (value := line.points[index][1]) is None else figure(value)
                                    for line in lines))
        for index in range(len(past.times) - 1, -1, -stride)
    ]  # fmt: skip
    return folded(say.say("console.as_table"), table(columns, rows, title))
