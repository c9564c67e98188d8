"""A plan on the screen: what it changes, what it is predicted to do, how it goes, and what then was measured."""

from __future__ import annotations

import time

import streamlit as st
from markupsafe import Markup

from transfer.api import FleetState, Plan, PlanStep, Prediction
from ui import figures, looks
from ui.console.frame import Frame, show
from ui.console.markup import Column, join, table, tag
from ui.console.views import role_badge, role_name
from ui.insight import present, risk_texts
from ui.rebalance import MEASURE_S
from ui.words import Words

POLL_S = 1.0
STEP_SHARE = {"pending": 0.0, "draining": 0.3, "switching": 0.6, "verifying": 0.8}
WATCHED = "watched_plan"
"""In the session: (plan id, when it was first seen done), as long as the page follows one."""


def diff_table(plan: Plan, say: Words) -> Markup:
    """Which instance goes from which role to which, and how far it is."""
    columns = [Column(say.say("term.instance")), Column(say.say("console.plan.change")), Column(say.say("term.state")),
               Column(say.say("console.plan.migrated"), True), Column(say.say("term.detail"), wraps=True)]  # fmt: skip
    rows = [(step.instance_id, _change(step, say), step_name(step.status, say), str(step.num_migrated),
             say.sentence(step.said, step.detail)) for step in plan.steps]  # fmt: skip
    return table(columns, rows, say.say("console.plan.title", before=plan.before, after=plan.after))


def effect_table(plan: Plan, fleet: FleetState | None, say: Words) -> Markup:
    """Predicted and measured beside each other; before them what is now, where a fleet is given."""
    before, after = plan.predicted, plan.measured or Prediction()
    sides = [("term.predicted", before), ("term.measured", after)]
    if fleet is not None:
        sides.insert(0, ("console.now", present(fleet)))
    interval = figures.NONE
    if before.goodput_low is not None and before.goodput_high is not None:
        interval = f"{figures.per_s(before.goodput_low)} \u2026 {figures.per_s(before.goodput_high)}"
    rows = [
        (say.say("term.goodput"), *(figures.per_s(side.goodput_per_s) for _, side in sides), interval),
        (say.say("term.attainment"), *(figures.share(side.attainment) for _, side in sides), ""),
        (say.say("term.per_gpu"), *(figures.per_gpu(side.goodput_per_gpu) for _, side in sides), ""),
        ("TTFT p50", *(figures.seconds(side.ttft_p50_s) for _, side in sides), ""),
        ("TPOT p50", *(figures.seconds(side.tpot_p50_s) for _, side in sides), ""),
        (say.say("console.plan.duration"), *(figures.seconds(side.duration_s) for _, side in sides), ""),
    ]
    columns = [Column(""), *(Column(say.say(title), True) for title, _ in sides),
               Column(say.say("console.plan.interval"), True)]  # fmt: skip
    return table(columns, rows, say.say("console.plan.effect"))


def risks(plan: Plan, say: Words) -> Markup:
    """What may go wrong, and what prediction and measurement go by."""
    found = [tag("li", risk) for risk in risk_texts(plan, say)]
    sides = (("console.plan.basis", plan.predicted), ("console.plan.measured", plan.measured))
    said = [
        say.say(key, basis=say.sentence(side.said, side.basis))
        for key, side in sides
        if side is not None and side.basis
    ]
    return join([tag("ul", *found) if found else None, *(tag("p", one, class_="pp-quiet") for one in said)])


def follow(frame: Frame, plan_id: str) -> None:
    """Watch a plan until it has ended and its effect is measured, or for MEASURE_S after its end."""

    @st.fragment(run_every=POLL_S)
    def progress() -> None:
        plan = frame.ask(lambda client: client.get_plan(plan_id))
        if plan is None:
            return
        draw_progress(plan, frame.say)
        show(effect_table(plan, frame.state, frame.say))
        done_at = st.session_state[WATCHED][1]
        if plan.status == "done" and done_at is None:
            done_at = time.monotonic()
            st.session_state[WATCHED] = (plan_id, done_at)
        if ended(plan) or (done_at is not None and time.monotonic() - done_at > MEASURE_S):
            st.session_state.pop(WATCHED, None)
            st.rerun()

    progress()


def draw_progress(plan: Plan, say: Words) -> None:
    """A bar over all steps, and each of them."""
    shares = [STEP_SHARE.get(step.status, 1.0) for step in plan.steps]
    text = say.say("console.plan.status", plan=plan.plan_id, status=say.say(f"plan.{plan.status}"))
    if plan.status == "done" and not ended(plan):
        text = say.say("console.plan.measuring", plan=plan.plan_id)
    st.progress(sum(shares) / len(shares) if shares else 1.0, text=text)
    show(diff_table(plan, say))
    if plan.failed:
        st.error(say.say("console.plan.failed", reason=say.sentence(plan.failed_said, plan.failed)))


def ended(plan: Plan) -> bool:
    """Whether nothing more is to come: it failed, or it is done and its goodput is measured."""
    if plan.status == "done":
        return not plan.steps or (plan.measured is not None and plan.measured.goodput_per_s is not None)
    return plan.status in ("failed", "undone")


def step_name(status: str, say: Words) -> str:
    return say.say(f"console.step.{status}")


def _change(step: PlanStep, say: Words) -> Markup:
    return join([
        role_badge(step.from_role, say), role_name(step.from_role, say), " \u2192 ",
        role_badge(step.to_role, say), role_name(step.to_role, say),
    ])  # fmt: skip


def short_moves(plan: Plan) -> str:
    """n3 P→D, n5 P→D."""
    return ", ".join(
        f"{step.instance_id} {looks.role(step.from_role).sign}\u2192{looks.role(step.to_role).sign}"
        for step in plan.steps
    )
