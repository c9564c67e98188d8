"""Follows a running plan on the terminal: a live table, or plain lines when piped, then predicted against measured."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Coroutine
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table

from transfer.api import Plan, Prediction
from ui.errors import EXIT_INTERRUPTED, CliError
from ui.rebalance import OnPlan, report_of
from ui.render import make_console, print_json, show_plan

Work = Callable[[OnPlan], Coroutine[Any, Any, tuple[Prediction, Plan]]]
"""Returns how it was before, and the plan at its end."""


def run_plan(work: Work, json: bool, url: str) -> None:
    """Follow a plan with a live table on a terminal and plain lines elsewhere; fails when the plan failed."""
    console = make_console(sys.stderr)
    try:
        before, plan = _watch(work, console)
    except KeyboardInterrupt:
        raise CliError(
            f"stopped watching; a plan that runs goes on, run `phaseplane status --url {url}`", EXIT_INTERRUPTED
        ) from None
    if json:
        print_json(report_of(plan))
    else:
        show_plan(make_console(), plan, before)
    if plan.status == "failed" or plan.failed:
        raise CliError(
            f"plan {plan.plan_id} failed ({plan.failed or 'no reason given'}); run `phaseplane status --url {url}`"
        )


def _watch(work: Work, console: Console) -> tuple[Prediction, Plan]:
    if not console.is_terminal:
        return asyncio.run(work(PlanLines(console)))
    with Live(console=console, transient=True, auto_refresh=False) as live:
        return asyncio.run(work(lambda plan: live.update(plan_table(plan), refresh=True)))


class PlanLines:
    """Prints a line whenever a step changes."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._seen: dict[str, str] = {}

    def __call__(self, plan: Plan) -> None:
        for step in plan.steps:
            text = f"{step.instance_id}: {step.from_role} -> {step.to_role}, {step.status}"
            text += f", {step.num_migrated} migrated" if step.num_migrated else ""
            if self._seen.get(step.instance_id) != text:
                self._seen[step.instance_id] = text
                self._console.print(text)


def plan_table(plan: Plan) -> Table:
    """The steps as they stand."""
    table = Table(title=f"{plan.before} -> {plan.after} ({plan.status})", box=None, title_justify="left")
    for name in ("instance", "move", "status", "migrated", "detail"):
        table.add_column(name)
    for step in plan.steps:
        move = f"{step.from_role} -> {step.to_role}"
        table.add_row(step.instance_id, move, step.status, str(step.num_migrated), step.detail)
    return table
