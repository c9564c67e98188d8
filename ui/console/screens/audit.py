"""Audit: who did what, when, what was predicted of it and what was measured."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

import streamlit as st
from markupsafe import Markup

from transfer.api import AuditRow, Prediction
from ui import figures
from ui.console.frame import Frame, show
from ui.console.markup import Column, table
from ui.words import Words

NUM_ROWS = 500
LOOKS = ("hold", "advise")
"""Of the autopilot, every few seconds: left out unless asked for."""


def draw(frame: Frame) -> None:
    say = frame.say
    st.title(say.say("console.nav.audit"))
    text_at, looks_at, again_at = st.columns([3, 2, 1], vertical_alignment="bottom")
    wanted = text_at.text_input(say.say("console.audit.filter"), key="audit filter").strip()
    with_looks = looks_at.toggle(say.say("console.audit.looks"), key="audit looks")
    again_at.button(say.say("console.refresh"), key="audit again")
    rows = frame.ask(lambda client: client.audit(NUM_ROWS))
    if rows is not None:
        shown = [row for row in rows if with_looks or row.action not in LOOKS]
        show(audit_table(matching(shown, wanted, say), say))


def matching(rows: Sequence[AuditRow], wanted: str, say: Words) -> list[AuditRow]:
    """Rows in whose words `wanted` is found, upper or lower case."""
    low = wanted.lower()
    return [
        row
        for row in rows
        if low in " ".join((row.actor, row.action, row.subject, say.sentence(row.said, row.detail))).lower()
    ]


def audit_table(rows: Sequence[AuditRow], say: Words) -> Markup:
    names = ("time", "actor", "action", "subject", "detail")
    columns = [
        *(Column(say.say(f"term.{name}"), wraps=name == "detail") for name in names),
        *(Column(say.say(f"console.audit.{name}"), True)
          for name in ("goodput", "goodput_measured", "attainment", "attainment_measured")),
    ]  # fmt: skip
    found = [
        (
            when(row.at_s), row.actor, row.action, row.subject, say.sentence(row.said, row.detail),
            *(figures.per_s((side or Prediction()).goodput_per_s) for side in (row.predicted, row.measured)),
            *(figures.share((side or Prediction()).attainment) for side in (row.predicted, row.measured)),
        )
        for row in rows
    ]  # fmt: skip
    return table(columns, found, say.say("console.audit.title"))


def when(at_s: float) -> str:
    """Date and time, UTC."""
    return datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
