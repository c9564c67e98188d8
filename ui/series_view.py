"""Draws a report of series for a terminal: figures, a braille chart with its gaps, rows. English; times are local."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from rich.console import Console
from rich.table import Table

from ui import figures
from ui.series import MIN_GAP_S, Gap, Past, Report, Step
from ui.series_names import CLASS, FLEET, INSTANCE, figure, meaning, owners
from ui.tui.charts import Curve, chart, nice_top, num_columns
from ui.tui.lines import plain

HEIGHT = 8
MAX_WIDTH = 120
MIN_WIDTH = 40
"""A terminal that is narrower gets figures without a chart."""
GUTTER = 10
MAX_OWNERS = 8
LATE_S = 120.0
"""A record that is shorter than asked for by more is said to be."""
CLOCK_S = 8 * 3600
"""Below it the axis of time has no dates."""


def show_names(console: Console, names: Sequence[str]) -> None:
    """Which series there are."""
    own = [name for name in names if not name.startswith(("class.", "model.", "instance."))]
    if own:
        console.print("of the fleet:")
        _list(console, own, "")
    for kind, option in (("class", "--class"), ("model", "--model"), ("instance", "--instance")):
        known = owners(names, kind)
        if known:
            some = ", ".join(known[:MAX_OWNERS]) + (f" and {len(known) - MAX_OWNERS} more" * (len(known) > MAX_OWNERS))
            console.print(f"of one {kind}, with {option} ({some}):")
            fields = dict.fromkeys(n.rpartition(".")[2] for n in names if n.startswith(f"{kind}."))
            _list(console, [*fields], f"{kind}.x.")
    console.print("`phaseplane series goodput attainment --since 24h` shows these two; the unit may be left out")


def show_report(console: Console, found: Report, charted: dict[str, list[Step]], rows: bool, ascii: bool) -> None:
    """charted: what to draw a chart of; empty where there is no terminal."""
    zone = datetime.fromtimestamp(found.until_s).astimezone().tzname()
    console.print(f"{_date(found.since_s)} to {_date(found.until_s)} ({zone})")
    if found.from_s is None:
        console.print("there is no record of this time")
        return
    if found.until_s - found.from_s < found.asked_s - LATE_S:
        console.print(f"the record begins at {_date(found.from_s)}")
    for gap in found.down:
        console.print(f"no record from {_date(gap.from_s)} to {_date(gap.until_s)}: the control plane did not run")
    for name, past in found.series.items():
        console.print()
        what = meaning(name)
        console.print(f"{name}: {what}" if what else name)
        if past.last is None and past.mean is None:
            console.print("  there is no value in this time")
            continue
        console.print(f"  {_figures(name, past, found.until_s - found.step_s - MIN_GAP_S)}")
        width = min(MAX_WIDTH, console.width)
        if len(charted.get(name, ())) > 1 and width >= MIN_WIDTH:
            for text in _chart(name, charted[name], found, width, ascii):
                console.print(text)
        if rows:
            console.print(_rows(name, past, found))


def _list(console: Console, names: Sequence[str], lead: str) -> None:
    table = Table(box=None, show_header=False, pad_edge=True)
    ordered = [name for name in (*FLEET, *CLASS, *INSTANCE) if name in names]
    for name in dict.fromkeys((*ordered, *names)):
        table.add_row(name, meaning(lead + name))
    console.print(table)


def _figures(name: str, past: Past, since_s: float) -> str:
    """since_s: from when on the last value is the present one; of another it is said when it was."""
    reads = figure(name)
    ended_s = past.last_at_s if past.last_at_s is not None and past.last_at_s < since_s else None

    def told(value: float | None, at_s: float | None = None) -> str:
        text = figures.NONE if value is None else reads(value)
        return text if at_s is None else f"{text} at {_date(at_s)}"

    return (f"last {told(past.last, ended_s)}, mean {told(past.mean)}, min {told(past.low, past.low_at_s)}, "
            f"max {told(past.high, past.high_at_s)}")  # fmt: skip


def _chart(name: str, steps: Sequence[Step], found: Report, width: int, ascii: bool) -> list[str]:
    """Each column from the smallest to the largest value in it; nothing where there is none."""
    columns = width - GUTTER
    start, end = steps[0].at_s, steps[-1].at_s + found.step_s
    num = num_columns(columns, ascii)
    lows, highs = _binned(steps, found.step_s, start, end, num)
    top = nice_top([highs])
    reads = figure(name)
    lines = [plain(one) for one in chart([Curve(highs, "", "#", floor=lows)], columns, HEIGHT, top, ascii)]
    scale = {0: reads(top), len(lines) - 1: reads(0.0)}
    drawn = [f"{scale.get(index, ''):>{GUTTER - 2}} {'|' if ascii else '│'}{text}" for index, text in enumerate(lines)]
    axis, clock = "-" if ascii else "─", "%H:%M:%S" if end - start < CLOCK_S else "%m-%d %H:%M"
    each = (end - start) / columns
    marks = ["x" if _is_down(found.down, start + index * each, start + (index + 1) * each) else axis
             for index in range(columns)]  # fmt: skip
    first, last = (datetime.fromtimestamp(at_s).strftime(clock) for at_s in (start, end))
    legend = "x: no record" if found.down else ""
    drawn.append(f"{'':>{GUTTER - 1}}{'+' if ascii else '└'}{''.join(marks)}")
    drawn.append(f"{'':>{GUTTER}}{first}{legend:^{columns - len(first) - len(last)}}{last}")
    return drawn


def _binned(steps: Sequence[Step], step_s: float, start: float, end: float, num: int
            ) -> tuple[list[float | None], list[float | None]]:  # fmt: skip
    """Smallest and largest value in each of num equal parts; a step counts in every part that it reaches into."""
    lows: list[float | None] = [None] * num
    highs: list[float | None] = [None] * num
    for one in steps:
        if one.low is None or one.high is None:
            continue
        first = int((one.at_s - start) / (end - start) * num)
        last = max(first, int((one.at_s + step_s - start) / (end - start) * num - 1e-9))
        for index in range(first, min(last, num - 1) + 1):
            low, high = lows[index], highs[index]
            lows[index] = one.low if low is None else min(low, one.low)
            highs[index] = one.high if high is None else max(high, one.high)
    return lows, highs


def _is_down(gaps: Sequence[Gap], begin: float, end: float) -> bool:
    """In some part of this time."""
    return any(gap.from_s < end and begin < gap.until_s for gap in gaps)


def _rows(name: str, past: Past, found: Report) -> Table:
    """A line for each time; the note says where there is no record."""
    table = Table(box=None, pad_edge=True, header_style="bold")
    table.add_column("from")
    for head in ("last", "mean", "min", "max"):
        table.add_column(head, justify="right")
    table.add_column("")
    reads, short = figure(name), found.every_s % 60 == 0
    for row in past.rows:
        values = (row.last, row.mean, row.low, row.high)
        note = f"no record for {figures.span(row.down_s)}" if row.down_s else ""
        table.add_row(datetime.fromtimestamp(row.at_s).strftime("%m-%d %H:%M" if short else "%m-%d %H:%M:%S"),
                      *(figures.NONE if value is None else reads(value) for value in values), note)  # fmt: skip
    return table


def _date(at_s: float) -> str:
    return datetime.fromtimestamp(at_s).strftime("%m-%d %H:%M:%S")
