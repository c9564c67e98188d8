"""Instances: by class and role, with what each has to do; cordon, drain, resume and move, with confirmations; the last
minutes of the chosen one."""

from __future__ import annotations

import msgspec
import streamlit as st
from markupsafe import Markup

from transfer.api import InstanceView, PlanRequest
from transfer.screens import SeriesView
from ui import figures, looks
from ui.console.backend import a_change
from ui.console.frame import REBALANCE_PAGE, Frame, show
from ui.console.islands import picture
from ui.console.markup import Column, join, table, tag
from ui.console.pictures import Picture, percent, pictures, rate
from ui.console.screens.rebalance import DRAFT
from ui.console.views import ago, role_badge, role_name, state_name
from ui.insight import other_roles
from ui.words import Words

POLL_S = 2.0
TO_CONFIRM = ("drain", "move")
"""Actions that take something away: the instance's id is typed to confirm them."""


PAST_S, STEP_S, PAST_POLL_S = 600.0, 2.0, 5.0
"""How much of the past is shown of the chosen instance, its steps, and how often it is drawn anew."""
PAST = (
    Picture("TPOT p50", (("tpot_p50_s", "TPOT p50", "c"),), figures.seconds),
    Picture(
        "console.instances.work", (("num_running", "term.running", "a"), ("num_waiting", "term.waiting", "b")), rate
    ),
    Picture("term.kv_use", (("kv_use", "term.kv_use", "goodput"),), percent, 1.0),
)


def draw(frame: Frame) -> None:
    st.title(frame.say.say("console.nav.instances"))

    @st.fragment(run_every=POLL_S)
    def rows() -> None:
        if (state := frame.state) is not None:
            show(instance_table(state.instances, frame.say))

    rows()
    if frame.state is not None:
        _act(frame, frame.state.instances)


def instance_table(views: tuple[InstanceView, ...], say: Words) -> Markup:
    """One row an instance, by hardware class, role and id."""
    words = ("role", "state", "hardware", "running", "waiting", "queue", "kv_use", "step")
    columns = [
        Column(say.say("term.instance")),
        *(Column(say.say(f"term.{word}"), index > 2) for index, word in enumerate(words)), Column("TPOT p50", True),
        Column(say.say("console.instances.price"), True), Column(say.say("console.instances.seen"), True),
    ]  # fmt: skip
    ordered = sorted(views, key=lambda view: (view.hardware, view.role, view.id))
    return table(columns, [_row(view, say) for view in ordered], say.say("console.instances.title"))


def actions(view: InstanceView) -> tuple[str, ...]:
    """What may be done with it as it is now."""
    if view.state == "lost":
        return ()
    placed = {"ready": ("cordon", "drain"), "cordoned": ("resume", "drain"), "draining": ("resume",)}
    return (*placed.get(view.state, ()), *(("move",) if other_roles(view) and view.state != "switching" else ()))


def _row(view: InstanceView, say: Words) -> tuple[str, ...]:
    sign = tag("b", looks.state(view.state).sign, class_=f"pp-state-sign-{view.state}", aria_hidden="true")
    role = join([role_badge(view.role, say), role_name(view.role, say)])
    return (
        view.id, role, join([sign, " ", state_name(view.state, say)]), view.hardware,
        figures.count(view.num_running), figures.count(view.num_waiting),
        figures.short_count(view.queued_prefill_tokens),
        figures.share(view.kv_use), figures.seconds(view.step_s or None), figures.seconds(view.tpot_p50_s),
        figures.money(view.price_per_hour), figures.span(view.last_seen_s),
    )  # fmt: skip


def _act(frame: Frame, views: tuple[InstanceView, ...]) -> None:
    say = frame.say
    st.subheader(say.say("console.instances.act"))
    by_id = {view.id: view for view in views if actions(view)}
    if not by_id:
        st.write(say.say("console.nothing"))
        return
    chosen_at, action_at, role_at = st.columns(3)
    view = by_id[chosen_at.selectbox(say.say("console.instances.choose"), list(by_id), key="instance")]
    action = action_at.selectbox(
        say.say("term.action"), actions(view), key=f"action {view.id} {view.state}",
        format_func=lambda one: say.say(f"action.{one}"),
    )  # fmt: skip
    role = ""
    if action == "move":
        role = role_at.selectbox(say.say("console.instances.to"), other_roles(view), key=f"to {view.id} {view.role}",
                                 format_func=lambda one: f"{looks.role(one).sign} {role_name(one, say)}")  # fmt: skip
    st.caption(say.say(f"console.instances.what_{action}", id=view.id))
    confirmed = True
    if action in TO_CONFIRM:
        typed = st.text_input(say.say("action.type_id", id=view.id), key=f"confirm {action} {view.id}")
        confirmed = typed.strip() == view.id
    if frame.button(say.say(f"action.{action}"), "do", primary=True, disabled=not confirmed):
        _carry_out(frame, view, action, role)
    _past(frame, view.id)


def _past(frame: Frame, instance_id: str) -> None:
    say = frame.say
    st.subheader(say.say("console.instances.past", id=instance_id))

    @st.fragment(run_every=PAST_POLL_S)
    def charts() -> None:
        names = [f"instance.{instance_id}.{name}" for one in PAST for name, _, _ in one.series]
        past = frame.ask(lambda client: client.series(names, since_s=-PAST_S, step_s=STEP_S))
        if past is not None and len(past.times) > 1:
            picture(past_of(instance_id, past, say), "instance_past")

    charts()


def past_of(instance_id: str, past: SeriesView, say: Words) -> Markup:
    """TPOT, work and KV use of one instance; a chart of which nothing is known, such as TPOT of a prefill instance, is
    left out."""
    lead = f"instance.{instance_id}."
    own = {name.removeprefix(lead): column for name, column in past.series.items()
           if any(value is not None for value in column.last)}  # fmt: skip
    known = [one for one in PAST if any(name in own for name, _, _ in one.series)]
    view = msgspec.structs.replace(past, series=own)
    return pictures(known, view, say, time=ago(past.times[-1], say))


def _carry_out(frame: Frame, view: InstanceView, action: str, role: str) -> None:
    """The state's version goes with it, so that a fleet that has changed since refuses."""
    if action == "move":
        plan = frame.act(lambda client: client.plan(PlanRequest(moves={view.id: role})))
        if plan is not None:
            st.session_state[DRAFT] = (plan, a_change(plan.base_version))
            st.switch_page(st.session_state[REBALANCE_PAGE])
        return
    change = a_change(frame.state.version if frame.state is not None else 0)
    done = frame.act(lambda client: getattr(client, action)(view.id, change))
    if done is not None:
        say = frame.say
        state = state_name(done.instance.state, say)
        st.success(say.say("console.instances.did", id=view.id, state=state, left=done.num_left))
