"""Traffic and objectives: the classes as they are, and what attainment recorded requests would have under others."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import streamlit as st
from markupsafe import Markup

from transfer.api import ClassView, RequestRecord
from transfer.terms import Slo
from ui import figures
from ui.console.frame import Frame, show
from ui.console.markup import Column, table
from ui.console.views import classes, objectives
from ui.words import Words

NUM_RECORDED = 1000
DEFAULT = Slo(ttft_s=2.0, tpot_s=0.2)
"""What the fields begin with for a class that has no objectives yet."""


class Tally(NamedTuple):
    good: int
    total: int

    @property
    def attainment(self) -> float | None:
        return self.good / self.total if self.total else None


def draw(frame: Frame) -> None:
    say = frame.say
    st.title(say.say("console.nav.traffic"))
    if frame.state is None:
        st.write(say.say("app.never"))
        return
    show(classes(frame.state.classes, say))
    show(_since_start(frame.state.classes, say))
    _preview(frame, frame.state.classes)


def tally(records: Iterable[RequestRecord], slo: Slo) -> Tally:
    """Good requests under these objectives, of those that count: a client's cancel only once TTFT was missed."""
    good = total = 0
    for one in records:
        late = one.ttft_s is None or one.ttft_s > slo.ttft_s
        if one.outcome == "cancelled" and not (late and (one.ttft_s is not None or one.e2e_s > slo.ttft_s)):
            continue
        total += 1
        slow = one.tpot_s is not None and one.tpot_s > slo.tpot_s
        too_long = slo.e2e_s is not None and one.e2e_s > slo.e2e_s
        good += one.outcome == "ok" and not (late or slow or too_long)
    return Tally(good, total)


def toml(name: str, slo: Slo) -> str:
    """The lines of the control plane's file that set it."""
    lines = [f"[classes.{name}]", f"ttft_s = {slo.ttft_s:g}", f"tpot_s = {slo.tpot_s:g}"]
    return "\n".join(lines if slo.e2e_s is None else [*lines, f"e2e_s = {slo.e2e_s:g}"])


def _since_start(views: tuple[ClassView, ...], say: Words) -> Markup:
    columns = [Column(say.say("term.class")), Column(say.say("term.good"), True), Column(say.say("term.total"), True),
               Column(say.say("term.attainment"), True)]  # fmt: skip
    rows = [
        (one.name, figures.count(one.good), figures.count(one.total), figures.share(one.attainment)) for one in views
    ]
    return table(columns, rows, say.say("console.traffic.since"))


def _preview(frame: Frame, views: tuple[ClassView, ...]) -> None:
    say = frame.say
    st.subheader(say.say("console.traffic.preview"))
    class_at, ttft_at, tpot_at = st.columns(3)
    by_name = {one.name: one for one in views}
    name = class_at.selectbox(say.say("console.traffic.class"), list(by_name), key="traffic class")
    now = by_name[name].slo
    base = now or DEFAULT
    ttft_s = ttft_at.number_input(say.say("console.traffic.ttft"), 0.001, 3600.0, base.ttft_s, format="%.3f",
                                  key=f"ttft of {name}")  # fmt: skip
    tpot_s = tpot_at.number_input(say.say("console.traffic.tpot"), 0.0001, 60.0, base.tpot_s, format="%.4f",
                                  key=f"tpot of {name}")  # fmt: skip
    records = frame.ask(lambda client: client.requests(NUM_RECORDED))
    if records is None:
        return
    own = [one for one in records if one.traffic_class == name]
    if not own:
        st.write(say.say("console.traffic.none"))
        return
    wanted = Slo(ttft_s=ttft_s, tpot_s=tpot_s, e2e_s=base.e2e_s)
    sides = (None if now is None else tally(own, now), tally(own, wanted))
    columns = [Column(""), Column(say.say("console.traffic.now"), True), Column(say.say("console.traffic.then"), True)]
    pair = f"TTFT {figures.seconds(ttft_s)}, TPOT {figures.seconds(tpot_s)}"
    rows = [
        (say.say("term.objectives"), objectives(by_name[name], say), pair),
        (say.say("console.traffic.good"), *(figures.count(None if one is None else one.good) for one in sides)),
        (say.say("term.attainment"), *(figures.share(None if one is None else one.attainment) for one in sides)),
    ]
    show(table(columns, rows, say.say("console.traffic.basis", number=len(own))))
    st.caption(say.say("console.traffic.edit"))
    st.code(toml(name, wanted), language="toml")
