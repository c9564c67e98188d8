"""The report of a simulated run for a person: verdict first, then numbers, then where they come from."""

from __future__ import annotations

import sys
from typing import TextIO

from rich.console import Console
from rich.table import Table

from controlplane.sim.report import SimReport, reason_text
from transfer.api import Quantiles
from transfer.terms import Role

PIPED_WIDTH = 160
MAX_ROWS = 40


def make_console(file: TextIO | None = None) -> Console:
    target = file or sys.stdout
    return Console(file=target, width=None if target.isatty() else PIPED_WIDTH, highlight=False, markup=False)


def show(console: Console, report: SimReport) -> None:
    """The whole report but for plots."""
    about = report.about
    console.print(report.verdict, style="bold", soft_wrap=True)
    console.print(
        f"{about.fleet} serving {about.model} by policy {about.policy}; {report.requests} requests of {about.trace} "
        f"({about.format}), {report.offered_per_s:.2f}/s offered, seed {about.seed}"
    )
    console.print(
        f"completed {report.completed} ({report.throughput_per_s:.2f}/s), rejected {report.rejected}, timed out "
        f"{report.timed_out}, errors {report.errors}; {_count(report.prompt_tokens)} prompt tokens, "
        f"{_share(report.cached_tokens, report.prompt_tokens)} of them from KV; "
        f"{_count(report.output_tokens)} output tokens"
    )
    possible = "no bound is known" if report.bound is None else f"at most {report.bound:.3g}/s is possible"
    console.print(
        f"fleet cost ${report.dollars:.2f} over {report.span_s:.0f} s; {possible}; preemptions {report.preemptions}, "
        f"migrations {report.migrations}, resumed {report.resumes}, role switches {report.moves}"
    )
    _show_latencies(console, report)
    _show_classes(console, report)
    _show_missed(console, report)
    _show_instances(console, report)
    for text in report.predicted_from:
        console.print(f"step times from: {text}")
    for text in report.notes:
        console.print(f"note: {text}", soft_wrap=True)
    console.print(
        f"simulated {report.requests} requests in {report.wall_s:.2f} s, {report.requests_per_wall_s:,.0f} a second, "
        + ("compiled" if report.compiled else "in plain Python")
    )


def _show_latencies(console: Console, report: SimReport) -> None:
    table = _table("", right=("p50", "p90", "p99"))
    for label, values in (
        ("TTFT", report.ttft_s), ("TPOT", report.tpot_s), ("whole answer", report.e2e_s),
        ("largest gap between tokens", report.max_itl_s),
    ):  # fmt: skip
        table.add_row(label, *_triple(values))
    console.print(table)


def _show_classes(console: Console, report: SimReport) -> None:
    table = _table(
        "class", "objectives", right=("good", "total", "attainment", "TTFT p50", "TTFT p99", "TPOT p50", "TPOT p99")
    )
    for row in report.classes:
        slo = "none" if row.slo is None else f"TTFT {row.slo.ttft_s:g} s, TPOT {row.slo.tpot_s:g} s"
        if row.slo is not None and row.slo.e2e_s is not None:
            slo += f", whole answer {row.slo.e2e_s:g} s"
        table.add_row(
            row.name, slo, str(row.good), str(row.total), "-" if row.attainment is None else f"{row.attainment:.1%}",
            _seconds(row.ttft_s.p50), _seconds(row.ttft_s.p99), _seconds(row.tpot_s.p50), _seconds(row.tpot_s.p99),
        )  # fmt: skip
    console.print(table)


def _show_missed(console: Console, report: SimReport) -> None:
    if report.missed:
        reasons = ", ".join(f"{reason_text(name)} {count}" for name, count in report.missed.items())
        console.print(f"missed by: {reasons}")
    total = sum(report.missed_stages_s.values())
    if total > 0:
        stages = ", ".join(
            f"{name.replace('_', ' ')} {spent / total:.0%}" for name, spent in report.missed_stages_s.items()
        )
        console.print(f"before their first token those spent: {stages}")


def _show_instances(console: Console, report: SimReport) -> None:
    table = _table(
        "instance", "role", "hardware", right=("requests", "prompt tokens made", "output tokens", "fetched", "busy")
    )
    rows = report.instances
    for row in rows[:MAX_ROWS]:
        is_pool = row.role == Role.KV_POOL
        table.add_row(
            row.id, row.role, f"{row.num_gpus} x {row.hardware}" if row.num_gpus > 1 else row.hardware,
            "-" if is_pool else str(row.num_requests), "-" if is_pool else _count(row.prefill_tokens),
            "-" if is_pool else _count(row.output_tokens), _count(row.fetched_tokens) if is_pool else "-",
            "-" if row.use is None else f"{row.use:.0%}",
        )  # fmt: skip
    console.print(table)
    if len(rows) > MAX_ROWS:
        console.print(f"and {len(rows) - MAX_ROWS} more; --json lists all")


def _table(*columns: str, right: tuple[str, ...] = ()) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in columns:
        table.add_column(name, overflow="fold")
    for name in right:
        table.add_column(name, justify="right")
    return table


def _triple(values: Quantiles) -> tuple[str, str, str]:
    return _seconds(values.p50), _seconds(values.p90), _seconds(values.p99)


def _seconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value * 1000:.1f} ms" if value < 1 else f"{value:.2f} s"


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.0%}" if whole else "-"


def _count(number: int) -> str:
    return f"{number:,}"
