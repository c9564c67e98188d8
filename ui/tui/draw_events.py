"""Draws the events panel (audit log and what the feed showed) and the autopilot panel."""

from __future__ import annotations

from transfer.api import AuditRow, Prediction
from transfer.autopilot import AutopilotView
from ui.figures import per_s, share, signed_share, span
from ui.tui.grid import Grid, Head, Row, figure, text
from ui.tui.lines import BLANK, Line, beside, cells, line, spaced, wrap
from ui.tui.model import Moment, Picture, moments
from ui.tui.pen import Pen


def event_grid(pen: Pen, picture: Picture) -> Grid:
    """The newest first."""
    heads = (
        Head(pen.say("term.time")), Head(pen.say("term.actor"), False, 1, 14), Head(pen.say("term.action"), most=16),
        Head(pen.say("term.subject"), most=24), Head(pen.say("term.predicted"), True, 2),
        Head(pen.say("term.measured"), True, 2), Head(pen.say("term.detail"), most=200),
    )  # fmt: skip
    return Grid(heads, tuple(_event_row(pen, one) for one in moments(picture)))


def event_detail(pen: Pen, moment: Moment, width: int) -> list[Line]:
    """One of them in full."""
    lines: list[Line] = [spaced([
        line(pen.date(moment.at_s), "dim"), line(_actor(pen, moment), "bold"), line(_action(pen, moment)),
        line(moment.subject, "bold"),
    ])]  # fmt: skip
    lines += [line(one) for one in wrap(_detail(pen, moment), width)]
    if moment.row is not None:
        for side in ("predicted", "measured"):
            found: Prediction | None = getattr(moment.row, side)
            if found is not None:
                lines += [BLANK, line(pen.say(f"term.{side}"), "title"), *prediction_lines(pen, found, width)]
    return lines


def prediction_lines(pen: Pen, found: Prediction, width: int) -> list[Line]:
    """What a plan does or did, and by what it is known."""
    said = [pen.say("tui.plan.goodput_of", value=goodput_text(pen, found))]
    if found.attainment is not None:
        said.append(pen.say("tui.plan.attainment_of", value=share(found.attainment)))
    if found.duration_s is not None:
        said.append(pen.say("tui.plan.duration_of", value=span(found.duration_s)))
    lines: list[Line] = [line(one) for one in said]
    if found.basis:
        lines += [line(one, "dim") for one in wrap(pen.sentence(found.said, found.basis), width, 3)]
    return lines


def goodput_text(pen: Pen, found: Prediction | None) -> str:
    """With its 80 % interval."""
    if found is None or found.goodput_per_s is None:
        return "-"
    if found.goodput_low is None or found.goodput_high is None:
        return per_s(found.goodput_per_s)
    return pen.say("tui.plan.interval", value=per_s(found.goodput_per_s), low=f"{found.goodput_low:.2f}",
                   high=f"{found.goodput_high:.2f}")  # fmt: skip


def autopilot_head(pen: Pen, view: AutopilotView, width: int) -> list[Line]:
    """Mode, what it says, its rule, what it must leave alone, how it has done."""
    limits = view.settings
    mode = line(pen.say("tui.autopilot.mode", mode=pen.name("autopilot", view.mode)), "title")
    room = width - cells(mode) - 2
    lines = beside([[mode], [line(one) for one in wrap(pen.sentence(view.said, view.line), room, 3)]],
                   [cells(mode), room])  # fmt: skip
    lines += [line(one, "dim") for one in wrap(pen.sentence(view.rule_said, view.rule), width, 3)]
    most = pen.say("tui.autopilot.third") if limits.max_moves is None else str(limits.max_moves)
    lines.append(line(pen.say("tui.autopilot.limits", floor=limits.floor, most=most)))
    for pin in view.pins:
        left = (
            pen.say("tui.autopilot.kept")
            if pin.left_s is None
            else pen.say("tui.autopilot.left", left=span(pin.left_s))
        )
        why = f" ({pin.why})" if pin.why else ""
        lines.append(line(pen.say("tui.autopilot.pin", subject=pin.subject, who=pin.who, left=left, why=why), "warn"))
    score = view.score
    if score.num and score.bias is not None and score.error is not None:
        lines.append(
            line(pen.say("tui.autopilot.score", num=score.num, bias=f"{score.bias:+.1%}", error=share(score.error)))
        )
    for move in score.moves[:2]:
        lines.append(line(pen.say(
            "tui.autopilot.move", plan=move.plan_id, actor=move.actor, change=move.change,
            predicted=share(move.predicted), measured=share(move.measured),
        ), "dim"))  # fmt: skip
    return [*lines, BLANK]


def look_grid(pen: Pen, view: AutopilotView) -> Grid:
    """Its last looks, each with a reason."""
    heads = (
        Head(pen.say("tui.col.ago"), True), Head(pen.say("tui.col.code")), Head(pen.say("tui.col.gain"), True),
        Head(pen.say("term.model"), False, 1, 20), Head(pen.say("term.detail"), most=300),
    )  # fmt: skip
    rows = [
        Row(str(number), (
            figure(span(one.ago_s), one.ago_s), text(pen.name("look", one.code)),
            figure(signed_share(one.gain), one.gain), text(one.model, "dim"), text(pen.sentence(one.said, one.line)),
        ))
        for number, one in enumerate(view.evaluations)
    ]  # fmt: skip
    return Grid(heads, tuple(rows))


def _event_row(pen: Pen, one: Moment) -> Row:
    row = one.row or AuditRow(at_s=one.at_s, actor="", action="", subject="")
    cells = (
        figure(pen.date(one.at_s), one.at_s), text(_actor(pen, one), "" if one.row else "dim"),
        text(_action(pen, one), "bold" if one.row else ""), text(one.subject),
        figure(_short(row.predicted), None), figure(_short(row.measured), None), text(_detail(pen, one)),
    )  # fmt: skip
    return Row(one.id, cells)


def _actor(pen: Pen, one: Moment) -> str:
    return one.actor if one.row is not None else pen.say("tui.events.seen")


def _action(pen: Pen, one: Moment) -> str:
    return one.action if one.seen is None else pen.say(f"tui.events.{one.seen.kind}")


def _detail(pen: Pen, one: Moment) -> str:
    """What changed from what to what, as words where they are roles or states."""
    if one.seen is None:
        return one.detail if one.row is None else pen.sentence(one.row.said, one.detail)
    group = {"role": "role", "joined": "role", "left": "role", "state": "state", "autopilot": "autopilot"}.get(
        one.seen.kind, ""
    )
    return f" {pen.arrow()} ".join(pen.name(group, value) for value in (one.seen.old, one.seen.new) if value)


def _short(found: Prediction | None) -> str:
    if found is None:
        return ""
    if found.goodput_per_s is not None:
        return per_s(found.goodput_per_s)
    return share(found.attainment) if found.attainment is not None else ""
