"""A plan of several models for a person: inputs, verdict, who gets what, alternatives, provenance, what to type."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from controlplane.planner.apply import CONFIG
from controlplane.planner.division_report import DivisionPlan, DivisionReport, ModelReport
from controlplane.planner.view import make_table, show_inputs, show_origin, title

LABELS = {"chosen": "Chosen", "equal": "An equal division", "now": "Doing nothing"}


def show_division(console: Console, plan: DivisionPlan) -> None:
    """The whole plan."""
    show_inputs(console, plan.inputs, plan.warnings)
    title(console, "Verdict")
    console.print(plan.verdict[:1].upper() + plan.verdict[1:], style="bold", soft_wrap=True)
    for division in (plan.chosen, *plan.alternatives):
        title(console, LABELS[division.kind])
        console.print(_models(division))
        console.print(_summary(division), soft_wrap=True)
    show_origin(console, plan)
    title(console, "To apply")
    console.print(f"  in {CONFIG}:")
    for line in plan.config.splitlines():
        console.print(f"    {line}", soft_wrap=True)
    for line in plan.commands:
        console.print(f"  {line}", soft_wrap=True)


def _models(division: DivisionReport) -> Table:
    table = make_table("", "fleet", right=("wanted/s", "served/s", "share", "80 %", "within", "$/h", "$ per 1000 good"))
    for one in division.models:
        table.add_row(one.model, *_cells(one))
    return table


def _cells(one: ModelReport) -> tuple[str, ...]:
    fleet = one.fleet
    if fleet is None:
        return ("no instance", f"{one.wanted:.3g}", "0", "0%", "-", "-", "-", "-")
    cost = "-" if fleet.cost_per_good is None else f"{fleet.cost_per_good * 1000:.2f}"
    return (
        f"{fleet.xpyd} ({fleet.fleet})", f"{one.wanted:.3g}", f"{fleet.max_rate:.3g}", f"{one.share:.0%}",
        f"{one.low:.0%}-{one.high:.0%}", f"{fleet.attainment:.0%}", f"{fleet.price_per_hour:.2f}", cost,
    )  # fmt: skip


def _summary(division: DivisionReport) -> str:
    spare = ", ".join(f"{count} {hardware}" for hardware, count in division.spare.items()) or "no GPU"
    cost = "" if division.cost_per_good is None else f", ${division.cost_per_good * 1000:.2f} per 1000 good requests"
    return (
        f"  least share {division.least_share:.0%}; together {division.served:.3g}/s for "
        f"${division.price_per_hour:.2f} an hour{cost}; to spare: {spare}"
    )
