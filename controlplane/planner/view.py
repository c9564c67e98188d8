"""A plan for a person: inputs, verdict, frontier, why, alternatives, where it all comes from, and what to type."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from controlplane.planner.division_report import DivisionPlan
from controlplane.planner.report import FleetReport, Input, PlanReport


def show(console: Console, report: PlanReport, plot: str) -> None:
    """plot: the frontier, drawn; may be empty."""
    show_inputs(console, report.inputs, report.warnings)
    title(console, "Verdict")
    console.print(report.verdict, style="bold", soft_wrap=True)
    if report.possible_rate is not None and report.of_possible is not None:
        console.print(
            f"{report.of_possible:.0%} of possible: no policy serves more than {report.possible_rate:.3g}/s with these "
            "instances in these roles",
            soft_wrap=True,
        )
    title(console, "Frontier: the most requests a second for a price an hour")
    if plot:
        console.file.write(f"{plot}\n")
    for point in report.frontier:
        known = "simulated" if point.simulated else "estimated"
        console.print(
            f"  ${point.price_per_hour:8.2f}  {point.max_rate:8.3g}/s  {known}  {point.fleet}", soft_wrap=True
        )
    title(console, "Why")
    console.print(report.bottleneck, soft_wrap=True)
    for row in report.phases:
        shares = ", ".join(f"{name} {share:.0%}" for name, share in row.shares.items() if share >= 0.005)
        busy = "" if row.use is None else f", busy {row.use:.0%}"
        console.print(f"  {row.phase} on {row.where}: {row.step} take {row.step_s * 1000:.1f} ms: {shares}{busy}")
    title(console, "Alternatives")
    console.print(_fleets((report.chosen, *report.alternatives)))
    for fleet in (report.chosen, *report.alternatives):
        if fleet.note:
            console.print(f"  {fleet.label}: {fleet.note}", soft_wrap=True)
    gpu, dollar = report.best_per_gpu, report.best_per_dollar
    console.print(f"  most a GPU: {gpu.fleet}, {gpu.per_gpu:.3g} requests a second each", soft_wrap=True)
    console.print(f"  most a dollar an hour: {dollar.fleet}, {dollar.per_dollar:.3g} requests a second", soft_wrap=True)
    show_origin(console, report)
    title(console, "To apply")
    for line in report.commands:
        console.print(f"  {line}", soft_wrap=True)


def show_inputs(console: Console, inputs: Sequence[Input], warnings: Sequence[str]) -> None:
    """What it was made of, and what to beware of."""
    title(console, "Inputs")
    table = make_table("", "", "")
    for one in inputs:
        table.add_row(one.name, one.value, "by default" if one.is_default else "")
    console.print(table)
    for text in warnings:
        console.print(f"warning: {text}", soft_wrap=True)


def show_origin(console: Console, report: PlanReport | DivisionPlan) -> None:
    """What it rests on, and how much was tried."""
    title(console, "Where this comes from")
    for text in report.provenance:
        console.print(f"  {text}", soft_wrap=True)
    console.print(
        f"  {report.num_fleets} fleets were estimated and {report.num_runs} runs simulated in {report.wall_s:.0f} s; "
        "ranges are 80 % intervals of the latency model's error and the bisection"
    )


def _fleets(rows: tuple[FleetReport, ...]) -> Table:
    table = make_table("", "fleet", right=("max/s", "80 %", "a GPU", "$/h", "/s per $/h", "$ per 1000 good"))
    for place, one in enumerate(rows):
        cost = "-" if one.cost_per_good is None else f"{one.cost_per_good * 1000:.2f}"
        table.add_row(
            f"chosen ({one.label})" if place == 0 else one.label, one.fleet, f"{one.max_rate:.3g}",
            f"{one.low:.3g}-{one.high:.3g}", f"{one.per_gpu:.3g}", f"{one.price_per_hour:.2f}",
            f"{one.per_dollar:.3g}", cost,
        )  # fmt: skip
    return table


def make_table(*columns: str, right: tuple[str, ...] = ()) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", show_header=any(columns))
    for name in columns:
        table.add_column(name, overflow="fold")
    for name in right:
        table.add_column(name, justify="right")
    return table


def title(console: Console, text: str) -> None:
    console.print(f"\n{text}", style="bold")
