"""Draws a plan in the rebalance dialog: its steps, its risks, predicted against measured."""

from __future__ import annotations

from transfer.api import Plan, PlanStep, Prediction
from ui.figures import per_gpu, seconds, share, span
from ui.insight import risk_texts
from ui.tui.draw_events import goodput_text
from ui.tui.grid import Grid, Head, Row, drawn, text
from ui.tui.lines import BLANK, Line, Span, Tone, line, wrap
from ui.tui.pen import ROLE_TONES, Pen

STEP_TONES: dict[str, Tone] = {"done": "good", "failed": "bad", "rolled_back": "warn", "pending": "dim"}
STEP_SIGNS = {"pending": ("·", "."), "done": ("✓", "+"), "failed": ("✕", "x"), "rolled_back": ("↶", "<")}
RUNS = ("▸", ">")


def plan_lines(pen: Pen, plan: Plan, width: int, now: Prediction | None = None) -> list[Line]:
    """now: what is measured of the present fleet, beside which the prediction stands."""
    status = pen.name("plan", plan.status)
    lines: list[Line] = [(
        Span(f"{plan.before} {pen.arrow()} {plan.after}", "bold"), Span(f"  {status}", _plan_tone(plan)),
        Span(f"  {plan.plan_id}", "dim"),
    )]  # fmt: skip
    if not plan.steps:
        return [*lines, line(pen.say("tui.plan.nothing"))]
    lines += [_step(pen, step) for step in plan.steps]
    if plan.failed:
        lines += [
            line(one, "bad")
            for one in wrap(pen.say("tui.plan.failed", reason=pen.sentence(plan.failed_said, plan.failed)), width, 4)
        ]
    lines += [BLANK, *_compared(pen, plan, width, now)]
    for risk in risk_texts(plan, pen.words):
        lines += [line(one, "warn") for one in wrap(pen.say("tui.plan.risk", risk=risk), width, 3)]
    if plan.predicted.basis:
        basis = pen.sentence(plan.predicted.said, plan.predicted.basis)
        lines += [line(one, "dim") for one in wrap(pen.say("tui.plan.basis", basis=basis), width, 3)]
    if plan.measured is not None and plan.measured.basis:
        basis = pen.sentence(plan.measured.said, plan.measured.basis)
        lines += [line(one, "dim") for one in wrap(pen.say("tui.plan.measured", basis=basis), width, 2)]
    return lines


def _step(pen: Pen, step: PlanStep) -> Line:
    sign = STEP_SIGNS.get(step.status, RUNS)[1 if pen.ascii else 0]
    moved = pen.say("tui.plan.migrated", num=step.num_migrated) if step.num_migrated else ""
    after = "".join(f"  {part}" for part in (moved, pen.sentence(step.said, step.detail)) if part)
    return (
        Span(f"{sign} ", STEP_TONES.get(step.status, "warn")), Span(f"{step.instance_id}  "),
        Span(pen.role(step.from_role).text, ROLE_TONES.get(step.from_role, "")), Span(f" {pen.arrow()} "),
        Span(pen.role(step.to_role).text, ROLE_TONES.get(step.to_role, "")),
        Span(f"  {pen.name('tui.step', step.status)}", STEP_TONES.get(step.status, "warn")), Span(after, "dim"),
    )  # fmt: skip


def _compared(pen: Pen, plan: Plan, width: int, now: Prediction | None) -> list[Line]:
    """A row for every figure: as it is, as predicted, as measured afterwards."""
    sides = (now, plan.predicted, plan.measured)
    rows = []
    for name in ("goodput", "attainment", "per_gpu", "ttft", "tpot", "duration"):
        values = [_of(pen, side, name) for side in sides]
        if any(value != "-" for value in values):
            rows.append(Row(name, (text(pen.say(f"tui.plan.{name}")), *(text(value) for value in values))))
    heads = (
        Head(" "), Head(pen.say("tui.plan.now"), True), Head(pen.say("term.predicted"), True),
        Head(pen.say("term.measured"), True),
    )  # fmt: skip
    return drawn(Grid(heads, tuple(rows)), width, len(rows) + 1, ascii=pen.ascii)


def _of(pen: Pen, side: Prediction | None, name: str) -> str:
    if side is None:
        return "-"
    return {
        "goodput": goodput_text(pen, side), "attainment": share(side.attainment),
        "per_gpu": per_gpu(side.goodput_per_gpu), "ttft": seconds(side.ttft_p50_s), "tpot": seconds(side.tpot_p50_s),
        "duration": duration(side.duration_s),
    }[name]  # fmt: skip


def duration(value: float | None) -> str:
    """Of a plan: what is short exactly, what is long in round figures."""
    return seconds(value) if value is None or value < 10 else span(value)


def _plan_tone(plan: Plan) -> Tone:
    tones: dict[str, Tone] = {"done": "good", "failed": "bad", "applying": "warn"}
    return tones.get(plan.status, "")
