"""Draws curves over the last ten minutes: their scale, their axis of time, and those of one instance."""

from __future__ import annotations

from transfer.screens import SeriesView
from ui.figures import count, seconds, share
from ui.tui.charts import Curve, Values, chart, nice_top, num_columns, sampled
from ui.tui.lines import BLANK, Line, Span, Tone, pad
from ui.tui.model import Picture
from ui.tui.pen import Pen

SPAN_S = 600.0
HOLD_S = 15.0
"""How long a point stands for the time after it: the past is told every ten seconds."""
GUTTER = 6
OWN_GUTTER, OWN_HEIGHT = 9, 3
OWN = (("tui.col.tpot_p50", "tpot_p50_s", seconds, None), ("term.waiting", "num_waiting", count, None),
       ("term.kv_use", "kv_use", share, 1.0))  # fmt: skip
"""Curves of one instance: their words, their field, how their values read, and the top of their scale."""


def of_instance(instance_id: str) -> list[str]:
    """The series that instance_past draws."""
    return [f"instance.{instance_id}.{field}" for _, field, _, _ in OWN]


def instance_past(pen: Pen, picture: Picture, instance_id: str, width: int) -> list[Line]:
    """TPOT, waiting and KV use of one instance; what is not known of it is left out."""
    if picture.past is None or picture.at_s <= 0:
        return []
    columns = width - OWN_GUTTER
    lines: list[Line] = []
    for (word, _, reads, top), name in zip(OWN, of_instance(instance_id), strict=True):
        values = _sampled(pen, picture, picture.past, name, columns)
        known = [value for value in values if value is not None]
        if not known:
            continue
        most = top or nice_top([values])
        tone: Tone = "decode"
        lines += [BLANK, (Span(pen.say(word), "title"), Span(f" {reads(known[-1])}"))]
        drawn = chart([Curve(values, tone, "#")], columns, OWN_HEIGHT, most, pen.ascii)
        lines += with_scale(drawn, reads(most), reads(0.0), OWN_GUTTER)
    return [*lines, axis(pen, picture, width, OWN_GUTTER)] if lines else []


def with_scale(lines: list[Line], top: str, bottom: str, gutter: int = GUTTER) -> list[Line]:
    """Values beside the first and the last line."""
    last = len(lines) - 1
    return [
        (Span(pad({0: top, last: bottom}.get(index, ""), gutter - 1, right=True) + " ", "dim"), *spans)
        for index, spans in enumerate(lines)
    ]


def axis(pen: Pen, picture: Picture, width: int, gutter: int = GUTTER) -> Line:
    """Begin and end of the time shown, and marks where roles changed."""
    columns = width - gutter
    begin, end = pen.clock(picture.at_s - SPAN_S)[:5], pen.clock(picture.at_s)
    middle = columns - len(begin) - len(end)
    marks = [" "] * max(0, middle)
    changed = [one.at_s for one in picture.happenings if one.kind in ("role", "xpyd")]
    changed += [row.at_s for row in picture.audit if row.action == "done"]
    for at_s in changed:
        place = round((at_s - picture.at_s + SPAN_S) / SPAN_S * columns) - len(begin)
        if 0 <= place < len(marks):
            marks[place] = "^" if pen.ascii else "▲"
    return (Span(" " * gutter), Span(begin, "dim"), Span("".join(marks), "warn"), Span(end, "dim"))


def _sampled(pen: Pen, picture: Picture, past: SeriesView, name: str, columns: int) -> Values:
    column = past.series.get(name)
    if column is None:
        return ()
    num = num_columns(columns, pen.ascii)
    return sampled(past.times, column.last, picture.at_s - SPAN_S, picture.at_s, num, HOLD_S)
