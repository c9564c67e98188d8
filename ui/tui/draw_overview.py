"""Draws the first panel: curves of goodput and attainment, where time goes, roles, classes, instances."""

from __future__ import annotations

from collections import Counter

from transfer.api import FleetState, Goodput, InstanceView
from ui import looks
from ui.figures import per_s, seconds, share, short_count, span
from ui.insight import over_text, stage_shares
from ui.tui.charts import Curve, chart, nice_top, num_columns, sampled, stacked
from ui.tui.draw_instances import instance_grid
from ui.tui.draw_past import GUTTER, HOLD_S, SPAN_S, axis, with_scale
from ui.tui.grid import Grid, Head, Row, drawn, figure, text
from ui.tui.lines import BLANK, Line, Span, Tone, beside, fit, line, pad, spaced, wrap
from ui.tui.model import Picture
from ui.tui.pen import ROLE_TONES, STAGE_TONES, STATE_TONES, Pen

WIDE = 100
MIN_CHART, MAX_CHART = 3, 18
MAX_NOTICE = 5


def overview(pen: Pen, picture: Picture, width: int, height: int) -> list[Line]:
    """At most `height` lines of `width` columns."""
    fleet = picture.fleet
    if fleet is None:
        return []
    below = [*notice_lines(pen, fleet, width), *stage_lines(pen, fleet, width), *role_lines(pen, fleet, width)]
    tall = height >= 30
    tables = class_lines(pen, fleet, width) if tall or not fleet.stages_s else []
    if tall:
        below += [BLANK, *tables, BLANK]
    room = height - len(below)
    if width >= WIDE:
        num = max(MIN_CHART, min(MAX_CHART, room - 2 - (len(fleet.instances) + 2 if tall else 0)))
        each = (width - 3) // 2
        charts = beside(
            [goodput_chart(pen, picture, each, num), attainment_chart(pen, picture, width - 3 - each, num)],
            [each, width - 3 - each], gap=3,
        )  # fmt: skip
    else:
        num = max(2 * MIN_CHART - 1, room - 3)
        upper = (num + 1) * 3 // 5
        charts = goodput_chart(pen, picture, width, upper)[:-1]
        charts += attainment_chart(pen, picture, width, max(2, num - upper))
    lines = [*charts, *below]
    left = height - len(lines)
    if tall and left > 2:
        lines += drawn(instance_grid(pen, fleet.instances), width, left, ascii=pen.ascii)
    return lines[:height]


def goodput_chart(pen: Pen, picture: Picture, width: int, height: int) -> list[Line]:
    """height + 2 lines: what is seen, the curves, the time axis."""
    columns = width - GUTTER
    throughput, goodput = (_values(pen, picture, name, columns) for name in ("throughput_per_s", "goodput_per_s"))
    top = nice_top([throughput, goodput])
    curves = [
        Curve(throughput, "throughput", "*"),
        Curve(goodput, "goodput", "#", filled=True),
    ]
    now = picture.fleet.goodput if picture.fleet is not None else Goodput()
    filled, drawn_line = ("#", "*") if pen.ascii else ("⣿", "⠒")
    title = spaced([
        (Span(filled, "goodput"), Span(f" {pen.say('term.goodput')} {per_s(now.per_s)}")),
        (Span(drawn_line, "throughput"), Span(f" {pen.say('term.throughput')} {per_s(now.throughput_per_s)}")),
    ])  # fmt: skip
    scaled = with_scale(chart(curves, columns, height, top, pen.ascii), f"{top:g}", "0")
    return [title, *scaled, axis(pen, picture, width)]


def attainment_chart(pen: Pen, picture: Picture, width: int, height: int) -> list[Line]:
    """As goodput_chart; the target is a dotted line."""
    columns = width - GUTTER
    values = _values(pen, picture, "attainment", columns)
    target = [picture.target] * num_columns(columns, pen.ascii)
    curves = [Curve(target, "objective", ".", dotted=True), Curve(values, "goodput", "#")]
    now = picture.fleet.recent_attainment if picture.fleet is not None else None
    aim = pen.say("tui.overview.target", target=f"{picture.target:.0%}")
    title = spaced([
        (Span(pen.say("term.attainment")), Span(f" {share(now)}", "bold")),
        (Span("." if pen.ascii else "⠄⠄", "objective"), Span(f" {aim}", "dim")),
    ])  # fmt: skip
    scaled = with_scale(chart(curves, columns, height, 1.0, pen.ascii), "100%", "0%")
    return [title, *scaled, axis(pen, picture, width)]


def notice_lines(pen: Pen, fleet: FleetState, width: int) -> list[Line]:
    """How many of those that wait are late, and why they wait; nothing while none is."""
    if not fleet.queue_late:
        return []
    late = pen.say("tui.overview.late", num=fleet.queue_depth, late=fleet.queue_late)
    notice = pen.sentence(fleet.notice_said, fleet.notice)
    return [line(text, "warn") for text in wrap(f"{late} {notice}", width, MAX_NOTICE)]


def stage_lines(pen: Pen, fleet: FleetState, width: int) -> list[Line]:
    """Where requests that missed lose their time: a bar and its legend."""
    shares = stage_shares(fleet.stages_s)
    if not shares:
        return [line(pen.say("tui.overview.no_misses", window=span(fleet.goodput.window_s)), "dim")]
    bar = stacked(
        [(part, STAGE_TONES.get(name, ""), looks.stage(name).sign) for name, _, part in shares], width, pen.ascii
    )
    named = sorted(shares, key=lambda one: -one[2])
    legend = spaced([
        (Span(f"{looks.stage(name).sign} {pen.name('stage', name)}", STAGE_TONES.get(name, "")), Span(f" {part:.0%}"))
        for name, _, part in named if part >= 0.005
    ])  # fmt: skip
    worst = pen.name("stage", named[0][0])
    lost = pen.say("tui.overview.stages", stage=worst, share=f"{named[0][2]:.0%}")
    return [
        spaced([line(said, "title") for said in (over_text(fleet, pen.words), lost) if said]),
        bar,
        fit(legend, width),
    ]


def role_lines(pen: Pen, fleet: FleetState, width: int) -> list[Line]:
    """A line for each role: its instances' states, work, KV."""
    found = []
    for role in looks.ROLES:
        views = [view for view in fleet.instances if view.role == role]
        if views:
            found.append(fit(_role_line(pen, role, views, max(4, width // 4)), width))
    return found


def _role_line(pen: Pen, role: str, views: list[InstanceView], room: int) -> Line:
    counted = Counter(view.state for view in views)
    if len(views) <= room:
        states = [Span(pen.sign(looks.state(view.state)), STATE_TONES.get(view.state, "")) for view in views]
    else:
        states = [Span(f"{pen.sign(looks.state(one))}{num} ", STATE_TONES.get(one, "")) for one, num in counted.items()]
    uses = [view.kv_use for view in views]
    tone: Tone = ROLE_TONES.get(role, "")
    parts: list[Line] = [
        (
            Span(f"{looks.role(role).sign} {pad(pen.name('role', role), 8)}", tone),
            Span(f"{len(views):>4} ", "bold"),
            *states,
        ),
    ]
    if role != "kv_pool":
        running, waiting = (sum(getattr(view, f"num_{what}") for view in views) for what in ("running", "waiting"))
        tokens = sum(view.queued_prefill_tokens for view in views)
        parts.append(line(f"{running} {pen.say('term.running')}"))
        parts.append(line(f"{waiting} {pen.say('term.waiting')}", "warn" if waiting else ""))
        if tokens:
            parts.append(line(pen.say("tui.overview.queued_tokens", num=short_count(tokens))))
    parts.append(line(pen.say("tui.overview.kv", mean=f"{sum(uses) / len(uses):.0%}")))
    if len(uses) > 1:
        parts.append(line(pen.say("tui.overview.most", most=f"{max(uses):.0%}"), "dim"))
    return spaced(parts)


def class_lines(pen: Pen, fleet: FleetState, width: int) -> list[Line]:
    """A table of the traffic classes."""
    rows = []
    for one in fleet.classes:
        slo = pen.say("tui.overview.no_objectives") if one.slo is None else pen.say(
            "tui.overview.slo", ttft=seconds(one.slo.ttft_s), tpot=seconds(one.slo.tpot_s)
        )  # fmt: skip
        attainment = one.recent_good / one.recent_total if one.recent_total and one.slo is not None else None
        rows.append(Row(one.name, (
            text(one.name), text(slo, "dim"), figure(share(attainment), attainment),
            figure(per_s(one.recent_per_s), one.recent_per_s),
            *(figure(seconds(value), value) for kind in (one.ttft_s, one.tpot_s) for value in (kind.p50, kind.p99)),
            figure(str(one.doomed), one.doomed, "warn" if one.doomed else ""),
        )))  # fmt: skip
    heads = (
        Head(pen.say("term.class")), Head(pen.say("term.objectives"), rank=3), Head(pen.say("term.attainment"), True),
        Head(pen.say("term.goodput"), True), Head(pen.say("tui.col.ttft_p50"), True, 1),
        Head(pen.say("tui.col.ttft_p99"), True, 2), Head(pen.say("tui.col.tpot_p50"), True, 1),
        Head(pen.say("tui.col.tpot_p99"), True, 2), Head(pen.say("term.doomed"), True, 1),
    )  # fmt: skip
    return drawn(Grid(heads, tuple(rows)), width, len(rows) + 1, ascii=pen.ascii)


def _values(pen: Pen, picture: Picture, name: str, columns: int) -> list[float | None]:
    points = picture.points
    num = num_columns(columns, pen.ascii)
    return [*sampled(points.times, points.values[name], picture.at_s - SPAN_S, picture.at_s, num, HOLD_S)]
