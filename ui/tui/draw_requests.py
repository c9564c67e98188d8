"""Draws the requests panel, and one request: its waterfall and why it was placed where it was."""

from __future__ import annotations

from collections.abc import Iterable

from transfer.api import CandidateView, RequestRecord
from ui import looks
from ui.figures import count, seconds
from ui.insight import miss_text, reason_text
from ui.tui.grid import Cell, Grid, Head, Row, drawn, figure, text
from ui.tui.lines import BLANK, ELLIPSIS, Line, Span, Tone, cut, line, pad, spaced, wrap
from ui.tui.pen import STAGE_TONES, Pen

OUTCOME_TONES: dict[str, Tone] = {"ok": "", "cancelled": "dim", "rejected": "bad", "timed_out": "bad", "error": "bad"}
NAME_WIDTH, TIME_WIDTH = 18, 12
ID_WIDTH = 16


def request_grid(pen: Pen, records: Iterable[RequestRecord]) -> Grid:
    """Finished requests as they came, the newest first."""
    heads = (
        Head(pen.say("term.request"), most=22), Head(pen.say("term.good")), Head(pen.say("tui.col.ttft"), True),
        Head(pen.say("tui.col.tpot"), True), Head(pen.say("tui.col.slowest")), Head(pen.say("tui.col.e2e"), True, 2),
        Head(pen.say("tui.col.prompt"), True, 3), Head(pen.say("term.cached"), True, 4),
        Head(pen.say("tui.col.output"), True, 3), Head(pen.say("tui.col.place"), False, 1, 28),
        Head(pen.say("term.class"), False, 4, 14), Head(pen.say("tui.col.ended"), True, 2),
    )  # fmt: skip
    return Grid(heads, tuple(_row(pen, record) for record in records))


def request_detail(pen: Pen, record: RequestRecord, width: int) -> list[Line]:
    """What it was, a waterfall of its stages, and the placements that were weighed."""
    arrived = pen.date(record.arrived_at)
    lines: list[Line] = [
        spaced([
            (Span(record.request_id, "bold"),), line(record.model), line(record.traffic_class),
            _verdict_span(pen, record), line(arrived, "dim"),
        ]),
    ]  # fmt: skip
    if missed := miss_text(record, pen.words):
        lines.append(line(missed, "bad"))
    if record.error:
        told = pen.say("request.told", message=pen.sentence(record.error_said, record.error))
        lines += [line(text_line, "bad") for text_line in wrap(told, width, 3)]
    said = (
        pen.say(
            "tui.request.tokens", prompt=count(record.prompt_tokens), cached=count(record.cached_tokens),
            fetched=count(record.fetched_tokens), output=count(record.output_tokens),
        ),
        pen.say(
            "tui.request.times", ttft=seconds(record.ttft_s), tpot=seconds(record.tpot_s), e2e=seconds(record.e2e_s),
            gap=seconds(record.max_itl_s),
        ),
        _places(pen, record),
    )  # fmt: skip
    lines += [line(part) for one in said for part in wrap(one, width)]
    lines += [BLANK, *waterfall(pen, record, width)]
    if record.why:
        lines += [BLANK, pen.rule(pen.say("tui.request.why"), width), *_candidates(pen, record.why, width)]
    return lines


def waterfall(pen: Pen, record: RequestRecord, width: int) -> list[Line]:
    """Every stage where it began and ended on the way to the first token, and what came after it."""
    if record.ttft_s is None:
        return [line(pen.say("tui.request.no_first_token"), "dim")]
    room = max(10, width - NAME_WIDTH - TIME_WIDTH)
    lines: list[Line] = [pen.rule(pen.say("tui.request.waterfall"), width)]
    begun = 0.0
    for name in looks.STAGES:
        spent = record.stages_s.get(name, 0.0)
        start, end = (round(at / max(record.ttft_s, 1e-9) * room) for at in (begun, begun + spent))
        start = min(start, room - 1)
        bar = " " * start + ("=" if pen.ascii else "█") * max(1 if spent > 0 else 0, end - start)
        lines.append(_timed(pen.name("stage", name), Span(cut(bar, room), STAGE_TONES.get(name, "")), spent))
        begun += spent
    lines.append(_timed(pen.say("tui.request.first_token"), Span(" " * room), record.ttft_s))
    return [*lines, _timed(pen.say("tui.request.stream"), Span(" " * room), max(0.0, record.e2e_s - record.ttft_s))]


def _timed(label: str, bar: Span, spent_s: float) -> Line:
    return (Span(pad(label, NAME_WIDTH)), bar, Span(pad(seconds(spent_s), TIME_WIDTH, right=True)))


def _candidates(pen: Pen, why: Iterable[CandidateView], width: int) -> list[Line]:
    rows = []
    for number, one in enumerate(why):
        tone: Tone = "bold" if one.chosen else ""
        chosen = pen.sign(looks.VERDICTS["met"]) if one.chosen else ""
        place = f"{one.prefill} {pen.arrow()} {one.decode}" if one.prefill else one.decode
        cells_of: tuple[Cell, ...] = (
            text(chosen, "good"), text(place, tone), figure(seconds(one.ttft_s), one.ttft_s),
            figure(seconds(one.queue_s), one.queue_s), figure(seconds(one.prefill_s), one.prefill_s),
            figure(seconds(one.transfer_s), one.transfer_s), figure(seconds(one.tpot_s), one.tpot_s),
            figure(count(one.cached_tokens), one.cached_tokens), text(_source(pen, one)),
            text(reason_text(one, pen.words)),
        )  # fmt: skip
        rows.append(Row(str(number), cells_of))
    names = ("place", "ttft", "queue", "prefill", "transfer", "tpot")
    heads = (
        Head(" "), *(Head(pen.say(f"tui.col.{name}"), name != "place", rank) for name, rank in
                     zip(names, (0, 0, 1, 1, 2, 0), strict=True)),
        Head(pen.say("term.cached"), True, 3), Head(pen.say("tui.col.source"), False, 4, 26),
        Head(pen.say("tui.col.reason"), most=80),
    )  # fmt: skip
    return drawn(Grid(heads, tuple(rows)), width, len(rows) + 1, ascii=pen.ascii)


def _source(pen: Pen, one: CandidateView) -> str:
    if one.kv_way == "compute" or one.kv_source is None:
        return pen.say("tui.request.compute")
    return pen.say(f"tui.request.{one.kv_way}", num=one.fetched_blocks, source=one.kv_source)


def _row(pen: Pen, record: RequestRecord) -> Row:
    ended = record.arrived_at + record.e2e_s
    stages = record.stages_s
    slowest = max(stages, key=lambda name: stages[name]) if any(stages.values()) else ""
    verdict = _verdict_span(pen, record)[0]
    places = f" {pen.arrow()} ".join(dict.fromkeys(one for one in (record.prefill, record.decode) if one))
    return Row(record.request_id, (
        text(_tail(record.request_id)), text(verdict.text, verdict.tone), figure(seconds(record.ttft_s), record.ttft_s),
        figure(seconds(record.tpot_s), record.tpot_s),
        text(pen.name("stage", slowest) if slowest else "-", STAGE_TONES.get(slowest, "")),
        figure(seconds(record.e2e_s), record.e2e_s), figure(count(record.prompt_tokens), record.prompt_tokens),
        figure(count(record.cached_tokens), record.cached_tokens),
        figure(count(record.output_tokens), record.output_tokens), text(places or "-"), text(record.traffic_class),
        figure(pen.clock(ended), ended),
    ))  # fmt: skip


def _tail(request_id: str) -> str:
    """The end, which tells requests of one control plane apart."""
    return request_id if len(request_id) <= ID_WIDTH else ELLIPSIS + request_id[1 - ID_WIDTH :]


def _verdict_span(pen: Pen, record: RequestRecord) -> Line:
    """Good, missed, or how it ended otherwise."""
    if record.outcome != "ok":
        sign = pen.sign(looks.VERDICTS["missed" if record.outcome != "cancelled" else "idle"])
        return (Span(f"{sign} {pen.name('outcome', record.outcome)}", OUTCOME_TONES[record.outcome]),)
    kind = {True: "met", False: "missed", None: "idle"}[record.good]
    tones: dict[str, Tone] = {"met": "good", "missed": "bad", "idle": "dim"}
    return (Span(f"{pen.sign(looks.VERDICTS[kind])} {pen.say(f'tui.request.{kind}')}", tones[kind]),)


def _places(pen: Pen, record: RequestRecord) -> str:
    if record.decode is None and record.prefill is None:
        return pen.say("tui.request.nowhere")
    found = pen.say("tui.request.places", prefill=record.prefill or "-", decode=record.decode or "-")
    if record.kv_source:
        found += pen.say("tui.request.kv_source", source=record.kv_source)
    if record.num_resumes or record.num_migrations:
        found += pen.say("tui.request.moved", resumes=record.num_resumes, migrations=record.num_migrations)
    return found
