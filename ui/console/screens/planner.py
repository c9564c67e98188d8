"""Planner: what another fleet would serve, run in the background, compared with the present one and with the bound."""

from __future__ import annotations

import errno
import os
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import msgspec
import streamlit as st
from markupsafe import Markup

from transfer.api import InstanceView
from transfer.traces.generating import KINDS
from ui import figures
from ui.console import charts
from ui.console.frame import Frame, show
from ui.console.islands import picture
from ui.console.markup import Column, table, tag
from ui.console.planning import Fleet, Outcome, Planning, busy, flags_of
from ui.console.shapes import ENGINE_ROLES
from ui.words import Words

RUN = "planning"
"""In the session: the Planning that runs or ended last."""
POLL_S = 1.0
NUM_REQUESTS = 200
TRAFFIC = ("conversation", *KINDS)


def draw(frame: Frame) -> None:
    say = frame.say
    st.title(say.say("console.nav.planner"))
    st.caption(say.say("console.planner.intro"))
    wanted = _form(frame)
    run: Planning | None = st.session_state.get(RUN)
    running = run is not None and run.running
    pressed = st.button(say.say("console.planner.run"), type="primary", disabled=running or busy(), key="plan")
    if pressed and not _is_trace(str(wanted["trace"])):
        st.error(say.say("console.planner.failed", reason=f"{wanted['trace']}: {os.strerror(errno.ENOENT)}"))
    elif pressed:
        run = Planning(flags_of(wanted))
        run.start()
        st.session_state[RUN] = run
        running = True
    if run is not None and running:
        _follow(run, say)
    elif run is not None:
        _result(run, say)


def present(instances: Iterable[InstanceView]) -> tuple[str, str]:
    """The engines there are, as `--fleet` (GPUs by class) and as `--current` (instances by role) name them."""
    engines = [view for view in instances if view.role in ENGINE_ROLES and view.state != "lost"]
    gpus: Counter[str] = Counter()
    for view in engines:
        gpus[view.hardware] += view.num_gpus
    roles = Counter((view.hardware, view.num_gpus, view.role) for view in engines)
    fleet = ",".join(f"{count}x{hardware}" for hardware, count in sorted(gpus.items()))
    current = ",".join(
        f"{count}x{hardware}{f'@{size}' if size > 1 else ''}:{role}"
        for (hardware, size, role), count in sorted(roles.items())
    )
    return fleet, current


def _is_trace(source: str) -> bool:
    """A device or a pipe of the console's machine has no end."""
    return source.startswith("generated:") or Path(source).is_file()


def _form(frame: Frame) -> dict[str, object]:
    say, state = frame.say, frame.state
    fleet, current = present(state.instances if state is not None else ())
    slo = next((one.slo for one in state.classes if one.slo), None) if state is not None else None
    left, right = st.columns(2)
    with left:
        wanted: dict[str, object] = {
            "fleet": st.text_input(say.say("console.planner.fleet"), fleet, key="plan fleet"),
            "current": st.text_input(say.say("console.planner.current"), current, key="plan current"),
            "model": st.text_input(say.say("console.planner.model"), state.models[0] if state and state.models else "",
                                   key="plan model"),
            "num": NUM_REQUESTS, "effort": 1, "no-baselines": True,
        }  # fmt: skip
        kind = st.selectbox(say.say("console.planner.trace"), TRAFFIC, key="plan trace")
        file = st.text_input(say.say("console.planner.file"), key="plan file").strip()
    with right:
        ttft = st.number_input(
            say.say("console.planner.ttft"), 0.001, value=slo.ttft_s if slo else 2.0, key="plan ttft"
        )
        tpot = st.number_input(
            say.say("console.planner.tpot"), 0.001, value=slo.tpot_s if slo else 0.2, key="plan tpot"
        )
        target = st.number_input(say.say("console.planner.target"), 0.01, 0.999, 0.9, key="plan target")
        rate = st.number_input(say.say("console.planner.rate"), 0.0, value=0.0, key="plan rate")
    return {**wanted, "trace": file or f"generated:{kind}", "slo": f"ttft={ttft:g},tpot={tpot:g}", "target": target,
            "rate": rate}  # fmt: skip


def _follow(run: Planning, say: Words) -> None:
    @st.fragment(run_every=POLL_S)
    def progress() -> None:
        if not run.running:
            st.rerun()
        st.info(say.say("console.planner.running", time=figures.span(run.age_s)))
        if (at := run.progress()) is not None:
            st.text(say.say("console.planner.progress", num=at[0], fleet=at[1]))
        if st.button(say.say("console.planner.stop"), key="plan stop"):
            run.stop()

    progress()


def _result(run: Planning, say: Words) -> None:
    if run.stopped:
        st.warning(say.say("console.planner.stopped"))
        return
    if (fault := run.fault()) is not None:
        english, said = fault
        st.error(say.say("console.planner.failed", reason=say.sentence(said, english)))
        return
    try:
        found = run.outcome()
    except (msgspec.MsgspecError, KeyError, TypeError) as error:
        st.error(say.say("console.planner.failed", reason=str(error)))
        return
    st.success(say.say("console.planner.done", time=figures.span(run.took_s)))
    show(tag("p", say.sentence(found.verdict_said, found.verdict), class_="pp-h3"))
    show(tag("p", say.sentence(found.bottleneck_said, found.bottleneck)))
    show(compare_table(found, say))
    picture(frontier(found, say), "frontier")
    remarks = [f"{label_of(row, say)}: {say.sentence(row.note_said, row.note)}" for row in found.rows if row.note]
    remarks += [say.sentence(said, english) for english, said in found.warnings]
    show(tag("ul", *(tag("li", one) for one in remarks), class_="pp-quiet"))
    st.code("\n".join(found.commands), language="bash")


def label_of(row: Fleet, say: Words) -> str:
    """What this fleet stands for."""
    return say.say("core.join").join(say.sentence(one, str(one)) for one in row.label_said) or row.label


def compare_table(found: Outcome, say: Words) -> Markup:
    """Fleets by what they serve; the share of what any policy could reach stands with the chosen one."""
    columns = [
        Column(""), Column(say.say("console.planner.fleet_column")), Column("XPYD"),
        Column(say.say("console.planner.max_rate"), True), Column(say.say("console.plan.interval"), True),
        Column(say.say("console.planner.of_possible"), True), Column(say.say("term.per_gpu"), True),
        Column(say.say("console.instances.price"), True), Column(say.say("term.cost"), True),
    ]  # fmt: skip
    rows = [
        (
            label_of(row, say), row.fleet, row.xpyd, figures.per_s(row.max_rate),
            f"{figures.per_s(row.low)} \u2026 {figures.per_s(row.high)}",
            figures.share(found.of_possible) if index == 0 else figures.NONE, figures.per_gpu(row.per_gpu),
            figures.money(row.price_per_hour), figures.money(row.cost_per_good),
        )
        for index, row in enumerate(found.rows)
    ]  # fmt: skip
    return table(columns, rows, say.say("console.planner.compare"))


def frontier(found: Outcome, say: Words) -> Markup:
    """The most that any fleet for at most a price reaches."""
    title = say.say("console.planner.frontier")
    points = sorted(point[:2] for point in found.frontier)
    if len(points) < 2:
        return Markup()
    line = charts.Line(title, "goodput", points)
    return charts.lines([line], 0.0, points[-1][0], title=title, value=lambda value: f"{value:g}/s",
                        time=figures.money, height=180)  # fmt: skip
