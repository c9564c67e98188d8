"""Requests: the last ones, the slowest, those that missed; one in detail with its stages and why it was placed so."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

import streamlit as st
from markupsafe import Markup

from transfer.api import CandidateView, RequestRecord
from ui import figures, looks
from ui.console import charts
from ui.console.frame import Frame, show
from ui.console.markup import Column, table, tag
from ui.console.views import stage_name
from ui.insight import miss_text, reason_text
from ui.words import Words

NUM_ASKED, NUM_SHOWN = 500, 50
VIEWS = ("newest", "slowest", "missed", "failed")


def draw(frame: Frame) -> None:
    say = frame.say
    st.title(say.say("console.nav.requests"))
    view_at, search_at, again_at = st.columns([3, 3, 1], vertical_alignment="bottom")
    view = view_at.segmented_control(say.say("console.requests.show"), VIEWS, default="newest", key="requests view",
                                     format_func=lambda one: say.say(f"console.requests.{one}"))  # fmt: skip
    wanted = search_at.text_input(say.say("console.requests.search"), key="request id").strip()
    again_at.button(say.say("console.refresh"), key="requests again")
    found = frame.ask(lambda client: client.requests(NUM_ASKED))
    if found is None:
        return
    rows = choose(found, view or "newest", wanted)
    if not rows and not wanted:
        st.write(say.say("console.nothing"))
        return
    show(request_table(rows, say))
    ids = [row.request_id for row in rows] or [wanted]
    chosen = st.selectbox(say.say("console.requests.choose"), ids, key=f"request {view} {wanted}")
    by_id = {row.request_id: row for row in rows}
    record = by_id.get(chosen) or frame.ask(lambda client: client.request_record(chosen))
    if record is not None:
        _detail(record, say)


def choose(records: Sequence[RequestRecord], view: str, wanted: str = "") -> list[RequestRecord]:
    """Those of a view whose id has `wanted` in it, NUM_SHOWN at most; records are the newest first."""
    found = [one for one in records if wanted in one.request_id]
    if view == "slowest":
        found.sort(key=lambda one: -(one.ttft_s if one.ttft_s is not None else one.e2e_s))
    elif view == "missed":
        found = [one for one in found if one.good is False]
    elif view == "failed":
        found = [one for one in found if one.outcome != "ok"]
    return found[:NUM_SHOWN]


def request_table(records: Sequence[RequestRecord], say: Words) -> Markup:
    columns = [
        Column(say.say("term.request")), Column(say.say("console.requests.arrived")), Column(say.say("term.class")),
        Column(say.say("console.requests.outcome")), Column("TTFT", True), Column("TPOT", True), Column("E2E", True),
        *(Column(say.say(f"term.{name}"), True) for name in ("prompt", "cached", "output")),
        Column("P"), Column("D"),
    ]  # fmt: skip
    rows = [
        (
            one.request_id, clock(one.arrived_at), one.traffic_class, _outcome(one, say), figures.seconds(one.ttft_s),
            figures.seconds(one.tpot_s), figures.seconds(one.e2e_s), figures.count(one.prompt_tokens),
            figures.count(one.cached_tokens), figures.count(one.output_tokens), one.prefill or figures.NONE,
            one.decode or figures.NONE,
        )
        for one in records
    ]  # fmt: skip
    return table(columns, rows, say.say("console.requests.table", number=len(records)), tall=True)


def waterfall(record: RequestRecord, say: Words) -> Markup:
    """Its stages one after another, which add up to TTFT, then the tokens after the first."""
    names = [*looks.STAGES, *(name for name in record.stages_s if name not in looks.STAGES)]
    steps = [
        charts.Part(f"stage-{name}", looks.stage(name).sign, record.stages_s.get(name, 0.0),
                    f"{stage_name(name, say)} {figures.seconds(record.stages_s.get(name, 0.0))}")
        for name in names
    ]  # fmt: skip
    after_s = max(0.0, record.e2e_s - sum(record.stages_s.values()))
    text = f"{say.say('console.requests.output')} {figures.seconds(after_s)}"
    steps.append(charts.Part("stage-output", "\u2026", after_s, text))
    return charts.waterfall(steps, record.e2e_s, say.say("console.requests.waterfall"))


def candidate_table(candidates: Sequence[CandidateView], say: Words) -> Markup:
    """What placement weighed, with its predictions; queue, prompt and the rest add up to TTFT."""
    columns = [
        Column(""), Column("P"), Column("D"), Column("TTFT", True), Column(say.say("stage.queue"), True),
        Column(say.say("stage.prefill"), True), Column(say.say("console.requests.rest"), True), Column("TPOT", True),
        Column(say.say("term.cached"), True), Column(say.say("console.requests.reason"), wraps=True),
    ]  # fmt: skip
    rows = [
        (
            say.say("console.requests.chosen") if one.chosen else "",
            one.prefill or say.say("console.requests.by_decode"), one.decode,
            *map(figures.seconds, (one.ttft_s, one.queue_s, one.prefill_s)),
            figures.seconds(max(0.0, one.ttft_s - one.queue_s - one.prefill_s)), figures.seconds(one.tpot_s),
            figures.count(one.cached_tokens), reason_text(one, say),
        )
        for one in candidates
    ]  # fmt: skip
    return table(columns, rows, say.say("console.requests.why"))


def clock(at_s: float) -> str:
    """A moment of the day, UTC."""
    return datetime.fromtimestamp(at_s, UTC).strftime("%H:%M:%S")


def _outcome(record: RequestRecord, say: Words) -> Markup:
    text = say.say(f"outcome.{record.outcome}")
    if record.outcome == "ok" and record.good is not None:
        text = say.say("console.requests.good" if record.good else "console.requests.miss")
    style = {True: "pp-good", False: "pp-bad", None: None}[record.good]
    return tag("span", text, class_=style)


def _detail(record: RequestRecord, say: Words) -> None:
    show(tag("h3", f"{record.request_id} ", _outcome(record, say), class_="pp-h3"))
    if missed := miss_text(record, say):
        st.warning(missed)
    if record.error:
        st.error(say.say("request.told", message=say.sentence(record.error_said, record.error)))
    if record.prefill or record.decode:
        st.caption(say.say("console.requests.places", prefill=record.prefill or record.decode, decode=record.decode,
                           resumes=record.num_resumes, migrations=record.num_migrations))  # fmt: skip
    one = [(name, value) for name, value in (
        ("TTFT", figures.seconds(record.ttft_s)), ("TPOT", figures.seconds(record.tpot_s)),
        ("E2E", figures.seconds(record.e2e_s)), (say.say("console.requests.gap"), figures.seconds(record.max_itl_s)),
    )]  # fmt: skip
    for at, (name, value) in zip(st.columns(4), one, strict=True):
        at.metric(name, value)
    show(waterfall(record, say))
    columns = [Column(say.say("console.stage")), Column(say.say("term.time"), True)]
    rows = [(stage_name(name, say), figures.seconds(spent)) for name, spent in record.stages_s.items()]
    with st.expander(say.say("console.as_table")):
        show(table(columns, [*rows, ("TTFT", figures.seconds(record.ttft_s))]))
    if record.why:
        show(candidate_table(record.why, say))
