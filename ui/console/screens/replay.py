"""Replay: scrub through the past of the last hour or day, clearly marked as such."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

import streamlit as st
from markupsafe import Markup

from transfer.screens import SeriesView
from ui import figures
from ui.console.frame import Frame, show
from ui.console.islands import picture
from ui.console.markup import tag
from ui.console.pictures import Picture, named, percent, pictures, rate
from ui.console.screens.audit import audit_table, when
from ui.console.views import ACTS, marks_of
from ui.series import from_record
from ui.words import Words

END = "replay_end"
"""In the session: Unix time at which the window ends, so that it stays while one scrubs."""
NEAR_S = 300
CLOCK_JS = "HH:mm:ss [UTC]"
"""As the browser formats a moment of the slider."""
NUM_AUDIT = 500


class Range(NamedTuple):
    """key and number: its words."""

    span_s: int
    step_s: int
    key: str
    number: int


RANGES = (Range(600, 2, "minutes", 10), Range(3600, 10, "minutes", 60), Range(6 * 3600, 60, "hours", 6),
          Range(24 * 3600, 120, "hours", 24))  # fmt: skip


PICTURES = (
    Picture("console.replay.rates", (("offered_per_s", "console.replay.offered", "b"),
                                     ("throughput_per_s", "term.throughput", "throughput"),
                                     ("goodput_per_s", "term.goodput", "goodput")), rate),
    Picture("term.attainment", (("attainment", "term.attainment", "attainment"),), percent, 1.0, target=True),
    Picture("console.replay.latency", (("ttft_p50_s", "TTFT p50", "a"), ("ttft_p90_s", "TTFT p90", "b"),
                                       ("tpot_p50_s", "TPOT p50", "c"), ("tpot_p90_s", "TPOT p90", "d")),
            figures.seconds),
    Picture("console.replay.split", (("num_prefill", "role.prefill", "a"), ("num_decode", "role.decode", "b"),
                                     ("num_mixed", "role.mixed", "c")), rate),
    Picture("console.replay.queue", (("queue_depth", "term.queue", "b"), ("in_flight", "term.in_flight", "a")), rate),
)  # fmt: skip
NAMES = [name for wanted in PICTURES for name, _, _ in wanted.series]


def draw(frame: Frame) -> None:
    say = frame.say
    st.title(say.say("console.nav.replay"))
    range_at, again_at = st.columns([4, 1], vertical_alignment="bottom")
    index = range_at.segmented_control(
        say.say("console.replay.range"), range(len(RANGES)), default=0, key="replay range",
        format_func=lambda one: say.say(f"console.replay.{RANGES[one].key}", number=RANGES[one].number),
    )  # fmt: skip
    chosen = RANGES[index or 0]
    if again_at.button(say.say("console.refresh"), key="replay again") or END not in st.session_state:
        st.session_state[END] = time.time()
    end = st.session_state[END]
    past = frame.ask(
        lambda client: client.series(NAMES, since_s=end - chosen.span_s, step_s=chosen.step_s, until_s=end)
    )
    rows = frame.ask(lambda client: client.audit(NUM_AUDIT))
    if past is None or rows is None:
        return
    past = from_record(past)
    if len(past.times) < 2:
        st.write(say.say("console.nothing"))
        return
    first, last = (datetime.fromtimestamp(past.times[index], UTC) for index in (0, -1))
    at = st.slider(say.say("console.replay.at"), first, last, last, timedelta(seconds=past.step_s), CLOCK_JS,
                   key=f"replay at {chosen.span_s} {past.times[0]}")  # fmt: skip
    show(tag("p", say.say("console.replay.past", time=when(at.timestamp())), class_="pp-past", role="status"))
    show(moment(past, at.timestamp(), say))
    drawn = pictures(PICTURES, past, say, time=_clock, marks=marks_of(rows), cursor=at.timestamp())
    picture(drawn, "replay_pictures")
    near = [row for row in rows if row.action in ACTS and abs(row.at_s - at.timestamp()) <= NEAR_S]
    if near:
        st.subheader(say.say("console.replay.happened"))
        show(audit_table(near, say))


def moment(past: SeriesView, at_s: float, say: Words) -> Markup:
    """Every series at the last step that began by then."""
    index = max((i for i, begun in enumerate(past.times) if begun <= at_s), default=0)
    shown = []
    for wanted in PICTURES:
        for name, key, _ in wanted.series:
            value = past.series[name].last[index] if name in past.series else None
            text = figures.NONE if value is None else wanted.figure(value)
            shown.append((named(key, say), text))
    cells = (tag("div", tag("dt", name), tag("dd", text)) for name, text in shown)
    return tag("div", tag("dl", *cells), class_="pp-figures", aria_label=say.say("console.replay.figures"))


def _clock(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%H:%M:%S")
