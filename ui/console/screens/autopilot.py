"""The autopilot on the Rebalance page: its mode, what it last saw, what it must leave alone, and its score."""

from __future__ import annotations

from functools import partial

import streamlit as st

from transfer.autopilot import AutopilotMode, AutopilotRequest, AutopilotView, PinRequest
from ui import figures
from ui.client import FleetClient
from ui.console.frame import Frame, show
from ui.console.markup import Column, table
from ui.render import MAX_LOOKS
from ui.words import Words

MODES: tuple[AutopilotMode, ...] = ("off", "advise", "auto")
SPLIT = "split"
ACTOR = "console"
HOURS = (1, 4, 24, 0)
"""How long a pin holds; 0 until it is released."""


def draw(frame: Frame) -> None:
    say = frame.say
    st.subheader(say.say("console.autopilot.title"))
    view = frame.ask(lambda client: client.autopilot())
    if view is None:
        return
    _mode(frame, view)
    st.caption(say.sentence(view.rule_said, view.rule))
    _pins(frame, view)
    if view.evaluations:
        columns = [Column(say.say("console.ago"), True), Column(say.say("term.model")),
                   Column(say.say("console.autopilot.code")), Column(say.say("term.detail"), wraps=True)]  # fmt: skip
        rows = [(figures.span(one.ago_s), one.model, _code(one.code, say), say.sentence(one.said, one.line))
                for one in view.evaluations[:MAX_LOOKS]]  # fmt: skip
        with st.expander(say.say("console.autopilot.looks")):
            show(table(columns, rows, say.say("console.autopilot.looks")))
    if view.score.moves:
        titles = ("console.autopilot.change", "term.predicted", "console.autopilot.expected", "term.measured")
        columns = [Column(say.say("term.actor")), *(Column(say.say(title), i > 0) for i, title in enumerate(titles)),
                   Column(say.say("term.requests"), True)]  # fmt: skip
        scored = [(one.actor, one.change, *map(figures.share, (one.predicted, one.expected, one.measured)),
                   figures.count(one.num_requests)) for one in view.score.moves]  # fmt: skip
        with st.expander(say.say("console.autopilot.score", error=figures.share(view.score.error))):
            show(table(columns, scored))


def _code(code: str, say: Words) -> str:
    """A newer control plane may have others."""
    return say.say(f"look.{code}") if say.has(f"look.{code}") else code


def _mode(frame: Frame, view: AutopilotView) -> None:
    say = frame.say
    st.text(say.sentence(view.said, view.line))
    key = f"autopilot mode {view.mode}"
    st.segmented_control(
        say.say("console.autopilot.mode"), MODES, default=view.mode, key=key, disabled=frame.stale,
        format_func=lambda one: say.say(f"autopilot.{one}"), on_change=partial(_set_mode, frame, key),
    )  # fmt: skip


def _set_mode(frame: Frame, key: str) -> None:
    """Once for each press, whatever the fleet makes of it."""
    chosen: AutopilotMode | None = st.session_state[key]
    if chosen is not None:
        change = AutopilotRequest(mode=chosen, actor=ACTOR)
        frame.act(lambda client: client.set_autopilot(change))


def _pins(frame: Frame, view: AutopilotView) -> None:
    """What is pinned, each with its release; and a form for another one."""
    say = frame.say
    for pin in view.pins:
        left = say.say("console.autopilot.until") if pin.left_s is None else figures.span(pin.left_s)
        text, release = st.columns([4, 1])
        text.text(say.say("console.autopilot.pin", subject=pin.subject, who=pin.who, left=left, why=pin.why))
        with release:
            pressed = frame.button(say.say("console.autopilot.release"), f"release_{pin.subject}")
        if pressed and frame.act(partial(_unpin, pin.subject)) is not None:
            st.rerun()
    with st.popover(say.say("console.autopilot.pin_more"), disabled=frame.stale):
        instances = [] if frame.state is None else [one.id for one in frame.state.instances if one.role != "kv_pool"]
        subject = st.selectbox(
            say.say("console.autopilot.subject"), [SPLIT, *instances], key="pin subject",
            format_func=lambda one: say.say("console.autopilot.split") if one == SPLIT else one,
        )  # fmt: skip
        hours = st.selectbox(
            say.say("console.autopilot.how_long"), HOURS, key="pin hours",
            format_func=lambda one: figures.span(3600.0 * one) if one else say.say("console.autopilot.until"),
        )  # fmt: skip
        why = st.text_input(say.say("console.autopilot.why"), key="pin why", max_chars=256)
        wanted = PinRequest(subject=subject, ttl_s=3600.0 * hours if hours else None, why=why, actor=ACTOR)
        pressed = frame.button(say.say("console.autopilot.pin_it"), "pin_it", primary=True)
        if pressed and frame.act(lambda client: client.pin(wanted)) is not None:
            st.rerun()


async def _unpin(subject: str, client: FleetClient) -> AutopilotView:
    return await client.unpin(subject)
