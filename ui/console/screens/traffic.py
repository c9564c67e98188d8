"""Traffic and objectives: the classes, their objectives changed with a preview on recorded requests, and prices."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import streamlit as st
from markupsafe import Markup

from transfer.api import ClassView, RequestRecord
from transfer.classes import MAX_OBJECTIVE_S, ClassesRequest, ClassesView, PriceView
from transfer.terms import Slo
from ui import figures
from ui.console.frame import Frame, show
from ui.console.markup import Column, table
from ui.console.views import classes, models, objectives
from ui.words import Words

NUM_RECORDED = 1000
LEAST_S = 1e-6
ACTOR = "console"
SEEN = "classes_version"
"""In the session: the fleet's version when the objectives were shown that the button was pressed beside."""
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
    if frame.state.by_model:
        show(models(frame.state.by_model, say))
    show(_since_start(frame.state.classes, say))
    if (found := frame.ask(lambda client: client.classes())) is not None:
        _change(frame, found)
        st.subheader(say.say("console.traffic.prices"))
        show(_prices(found.prices, say))


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


def _since_start(views: tuple[ClassView, ...], say: Words) -> Markup:
    columns = [Column(say.say("term.class")), Column(say.say("term.good"), True), Column(say.say("term.total"), True),
               Column(say.say("term.attainment"), True)]  # fmt: skip
    rows = [
        (one.name, figures.count(one.good), figures.count(one.total), figures.share(one.attainment)) for one in views
    ]
    return table(columns, rows, say.say("console.traffic.since"))


def _change(frame: Frame, found: ClassesView) -> None:
    """Fields, what they would have made of recorded requests, and the button that puts them in force."""
    say = frame.say
    st.subheader(say.say("console.traffic.change"))
    by_name = {one.name: one for one in found.classes}
    class_at, *fields = st.columns(4)
    name = class_at.selectbox(say.say("console.traffic.class"), list(by_name), key="traffic class")
    now = by_name[name].slo
    limited = class_at.checkbox(say.say("console.traffic.limited"), now is not None, key=f"limited {name}")
    base = now or DEFAULT
    values = [
        field.number_input(say.say(f"console.traffic.{key}"), least, MAX_OBJECTIVE_S, value, format="%.4f",
                           key=f"{key} of {name}", disabled=not limited)
        for field, key, least, value in zip(fields, ("ttft", "tpot", "e2e"), (LEAST_S, LEAST_S, 0.0),
                                            (base.ttft_s, base.tpot_s, base.e2e_s or 0.0), strict=True)
    ]  # fmt: skip
    wanted = Slo(ttft_s=values[0], tpot_s=values[1], e2e_s=values[2] or None) if limited else None
    _preview(frame, name, now, wanted)
    seen = st.session_state.get(SEEN, found.version)
    st.session_state[SEEN] = found.version
    settings = objectives(by_name[name].configured, say)
    st.caption(say.say("console.traffic.after", settings=settings))
    if frame.button(say.say("console.traffic.apply", name=name), "apply_objectives", primary=True,
                    disabled=wanted == now):  # fmt: skip
        change = ClassesRequest(base_version=seen, classes={name: wanted}, actor=ACTOR)
        if frame.act(lambda client: client.set_classes(change)) is not None:
            st.rerun()


def _preview(frame: Frame, name: str, now: Slo | None, wanted: Slo | None) -> None:
    say = frame.say
    records = frame.ask(lambda client: client.requests(NUM_RECORDED))
    own = [one for one in records or () if one.traffic_class == name]
    if not own:
        st.write(say.say("console.traffic.none"))
        return
    sides = [None if slo is None else tally(own, slo) for slo in (now, wanted)]
    columns = [Column(""), Column(say.say("console.traffic.now"), True), Column(say.say("console.traffic.then"), True)]
    rows = [
        (say.say("term.objectives"), objectives(now, say), objectives(wanted, say)),
        (say.say("console.traffic.good"), *(figures.count(None if one is None else one.good) for one in sides)),
        (say.say("term.attainment"), *(figures.share(None if one is None else one.attainment) for one in sides)),
    ]
    show(table(columns, rows, say.say("console.traffic.basis", number=len(own))))


def _prices(prices: tuple[PriceView, ...], say: Words) -> Markup:
    columns = [Column(say.say("term.hardware")), Column(say.say("console.traffic.gpus"), True),
               Column(say.say("term.instances"), True), Column(say.say("console.traffic.each"), True)]  # fmt: skip
    rows = [
        (one.hardware, figures.count(one.num_gpus), figures.count(one.num_instances), figures.money(one.price_per_hour))
        for one in prices
    ]
    return table(columns, rows, say.say("console.traffic.prices_note"))
