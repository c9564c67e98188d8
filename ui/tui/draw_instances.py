"""Draws the instances panel: a row for each, and what is known of the chosen one."""

from __future__ import annotations

from collections.abc import Iterable

from transfer.api import InstanceView
from ui.figures import count, money, seconds, share, short_count, span
from ui.insight import SILENT_S
from ui.tui.charts import bar
from ui.tui.grid import Grid, Head, Row, figure, stacked_rows, text
from ui.tui.lines import Line, Tone, plain
from ui.tui.pen import Pen

KV_BAR = 5
FULL = 0.9


def instance_grid(pen: Pen, views: Iterable[InstanceView]) -> Grid:
    """By id, role, state, work, KV, step time, prediction, price and silence."""
    terms = [pen.say(f"term.{name}") for name in ("instance", "role", "state", "running", "waiting", "kv_use", "step")]
    heads = (
        Head(terms[0], most=24), Head(terms[1]), Head(terms[2]), Head(terms[3], True), Head(terms[4], True),
        Head(pen.say("tui.col.queued_tokens"), True, 2), Head(terms[5], True), Head(terms[6], True, 1),
        Head(pen.say("tui.col.tpot_p50"), True, 3),
        Head(pen.say("tui.col.predicted_by"), False, 4), Head(pen.say("term.hardware"), False, 2, 14),
        Head(pen.say("tui.col.gpus"), True, 5), Head(pen.say("term.price"), True, 3),
        Head(pen.say("tui.col.seen"), True, 3), Head(pen.say("term.model"), False, 6, 24),
    )  # fmt: skip
    return Grid(heads, tuple(_row(pen, view) for view in views))


def instance_detail(pen: Pen, view: InstanceView, width: int) -> list[Line]:
    """Everything about one instance, name and value."""
    blocks = pen.say(
        "tui.instance.blocks_of", used=count(view.num_blocks - view.free_blocks), all=count(view.num_blocks),
        cached=count(view.cached_blocks),
    )  # fmt: skip
    pairs = {
        pen.say("term.instance"): view.id,
        pen.say("term.role"): pen.role(view.role).text,
        pen.say("term.state"): pen.state(view.state).text,
        pen.say("term.model"): view.model or "-",
        pen.say("term.engine"): view.engine or "-",
        pen.say("term.hardware"): view.hardware,
        pen.say("tui.col.gpus"): str(view.num_gpus),
        pen.say("tui.instance.host"): view.host or "-",
        pen.say("term.running"): str(view.num_running),
        pen.say("term.waiting"): str(view.num_waiting),
        pen.say("tui.col.queued_tokens"): count(view.queued_prefill_tokens),
        pen.say("tui.instance.blocks"): blocks,
        pen.say("term.step"): seconds(view.step_s or None),
        pen.say("tui.col.tpot_p50"): seconds(view.tpot_p50_s),
        pen.say("tui.col.predicted_by"): _predicted(pen, view),
        pen.say("tui.instance.preemptions"): count(view.num_preemptions),
        pen.say("term.price"): _price(pen, view),
        pen.say("tui.col.seen"): span(view.last_seen_s),
    }
    if view.ssd_capacity_blocks:
        of = pen.say("tui.instance.of", used=count(view.ssd_blocks), all=count(view.ssd_capacity_blocks))
        pairs[pen.say("tui.instance.ssd")] = of
    return stacked_rows(pairs, width)


def _row(pen: Pen, view: InstanceView) -> Row:
    role, state = pen.role(view.role), pen.state(view.state)
    full: Tone = "warn" if view.kv_use >= FULL else ""
    gauge = plain(bar(view.kv_use, KV_BAR, "", pen.ascii))
    silent = view.last_seen_s > SILENT_S
    return Row(view.id, (
        text(view.id), text(role.text, role.tone), text(state.text, state.tone),
        figure(str(view.num_running), view.num_running),
        figure(str(view.num_waiting), view.num_waiting, "warn" if view.num_waiting else ""),
        figure(short_count(view.queued_prefill_tokens), view.queued_prefill_tokens),
        figure(f"{gauge} {view.kv_use:>4.0%}", view.kv_use, full),
        figure(seconds(view.step_s or None), view.step_s),
        figure(seconds(view.tpot_p50_s), view.tpot_p50_s or 0.0), text(_predicted(pen, view), "dim"),
        text(view.hardware), figure(str(view.num_gpus), view.num_gpus), figure(_price(pen, view), view.price_per_hour),
        figure(span(view.last_seen_s), view.last_seen_s, "warn" if silent else "dim"), text(view.model, "dim"),
    ))  # fmt: skip


def _predicted(pen: Pen, view: InstanceView) -> str:
    """Where predictions of its steps come from, their error, and how its steps of late compare."""
    if not view.provenance:
        return "-"
    error = "" if view.latency_error is None else f" {'+-' if pen.ascii else '±'}{share(view.latency_error)}"
    late = f" x{view.speed:.2f}" if abs(view.speed - 1.0) >= 0.005 else ""
    return f"{pen.name('tui.provenance', view.provenance)}{error}{late}"


def _price(pen: Pen, view: InstanceView) -> str:
    return pen.say("tui.per_hour", money=money(view.price_per_hour)) if view.price_per_hour else "-"
