"""Rebalance: steppers, prediction, dry run, diff, apply, progress, predicted against measured, undo; then autopilot."""

from __future__ import annotations

from collections.abc import Mapping

import streamlit as st

from transfer.api import ApplyRequest, FleetState, Plan, PlanRequest
from ui.console.backend import a_change
from ui.console.frame import Frame, show
from ui.console.markup import tag
from ui.console.plans import WATCHED, diff_table, draw_progress, effect_table, follow, risks, short_moves
from ui.console.screens import autopilot
from ui.console.shapes import ENGINE_ROLES, Group, counts, groups, moves
from ui.console.views import role_name
from ui.insight import advised, last_done

DRAFT = "draft_plan"
"""In the session: (plan, the request that would apply it), after a dry run."""
NUM_PLANS = 5


def draw(frame: Frame) -> None:
    say = frame.say
    st.title(say.say("console.nav.rebalance"))
    state = frame.state
    if state is None:
        st.info(say.say("app.never"))
        return
    if (watched := st.session_state.get(WATCHED)) is not None:
        follow(frame, watched[0])
        return
    _advised(frame)
    wanted = _steppers(frame, state)
    if frame.button(say.say("console.rebalance.predict"), "predict", primary=True, disabled=not wanted):
        _dry_run(frame, wanted)
    if (draft := st.session_state.get(DRAFT)) is not None:
        _review(frame, state, *draft)
    _past(frame)
    autopilot.draw(frame)


def _advised(frame: Frame) -> None:
    """The move that the autopilot would make, one press away from its dry run."""
    view = frame.ask(lambda client: client.autopilot())
    found = advised(view)
    if view is None or not found:
        return
    st.info(frame.say.say("console.rebalance.advised", line=frame.say.sentence(view.said, view.line)))
    if frame.button(frame.say.say("console.rebalance.take"), "take"):
        _dry_run(frame, found)


def _steppers(frame: Frame, state: FleetState) -> dict[str, str]:
    """How many of each class should prefill, and how many do both; decode is the rest. Returns the moves."""
    say = frame.say
    found: dict[str, str] = {}
    for group, members in groups(state.instances).items():
        now, total = counts(members), len(members)
        st.html(str(tag("p", say.say("console.rebalance.group", model=group.model, hardware=group.hardware,
                                     total=total), class_="pp-h3")))  # fmt: skip
        prefill_at, mixed_at, rest_at = st.columns(3)
        prefill = _stepper(prefill_at, frame, group, "prefill", now["prefill"], total)
        mixed = _stepper(mixed_at, frame, group, "mixed", now["mixed"], total - prefill)
        decode = total - prefill - mixed
        rest_at.metric(f"D {role_name('decode', say)}", decode, delta=decode - now["decode"] or None, delta_color="off")
        wanted = dict(zip(ENGINE_ROLES, (prefill, decode, mixed), strict=True))
        found |= moves(members, wanted)
    return found


def _stepper(at: st.delta_generator.DeltaGenerator, frame: Frame, group: Group, role: str, now: int, most: int) -> int:
    key = f"step {group.model} {group.hardware} {role}"
    if key in st.session_state:
        st.session_state[key] = min(st.session_state[key], most)
    sign = {"prefill": "P", "mixed": "M"}[role]
    return at.number_input(f"{sign} {role_name(role, frame.say)}", 0, most, min(now, most), key=key)


def _dry_run(frame: Frame, wanted: Mapping[str, str]) -> None:
    plan = frame.ask(lambda client: client.plan(PlanRequest(moves=dict(wanted))))
    if plan is not None:
        st.session_state[DRAFT] = (plan, a_change(plan.base_version))


def _review(frame: Frame, state: FleetState, plan: Plan, change: ApplyRequest) -> None:
    """The diff and the prediction; apply, or put away."""
    say = frame.say
    show(diff_table(plan, say))
    show(effect_table(plan, state, say))
    show(risks(plan, say))
    changed = state.version != plan.base_version
    if changed:
        st.warning(say.say("action.changed", seen=plan.base_version, now=state.version))
    left, right, _ = st.columns([1, 1, 3])
    with left:
        if st.button(say.say("action.cancel"), key="put away", width="stretch"):
            st.session_state.pop(DRAFT)
            st.rerun()
    with right:
        if frame.button(say.say("action.apply"), "apply", primary=True, disabled=changed, wide=True):
            _apply(frame, plan, change)


def _apply(frame: Frame, plan: Plan, change: ApplyRequest) -> None:
    running = frame.act(lambda client: client.apply(plan.plan_id, change))
    if running is not None:
        _watch(running)


def _watch(plan: Plan) -> None:
    """Follow it from the next run on; the steppers then begin at what the fleet will be."""
    for key in [key for key in st.session_state if str(key).startswith("step ")]:
        del st.session_state[key]
    st.session_state.pop(DRAFT, None)
    st.session_state[WATCHED] = (plan.plan_id, None)
    st.rerun()


def _past(frame: Frame) -> None:
    """The last plans; the newest one that can be taken back has its button."""
    say = frame.say
    plans = frame.ask(lambda client: client.plans()) or []
    plans = [plan for plan in plans if plan.status != "planned"][:NUM_PLANS]
    undoable = last_done(plans)
    if undoable is not None and frame.button(
        say.say("console.rebalance.undo", plan=undoable.plan_id, moves=short_moves(undoable)), "undo"
    ):
        plan_id, version = undoable.plan_id, frame.state.version if frame.state else 0
        inverse = frame.act(lambda client: client.undo(plan_id, a_change(version)))
        if inverse is not None:
            _watch(inverse)
    for index, plan in enumerate(plans):
        title = say.say("console.rebalance.past", plan=plan.plan_id, before=plan.before, after=plan.after,
                        status=say.say(f"plan.{plan.status}"))  # fmt: skip
        with st.expander(title, expanded=index == 0):
            draw_progress(plan, say)
            show(effect_table(plan, None, say))
            show(risks(plan, say))
