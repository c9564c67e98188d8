"""What `phaseplane simulate` does: reads, simulates, reports. It decides nothing."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from controlplane.sim.driver import simulate
from controlplane.sim.fleet import parse_fleet
from controlplane.sim.options import PROGRAM, core_config, make_parser, parse_faults, read_input
from controlplane.sim.plots import check_packages, terminal_plots, write_png
from controlplane.sim.possible import most_goodput_per_s
from controlplane.sim.report import About, SimReport, summarize
from controlplane.sim.series import make_series
from controlplane.sim.spec import SimConfig
from controlplane.sim.view import make_console, show
from nodes.shapes import shape
from transfer.errors import InvalidValue
from transfer.program import run
from transfer.traces.loading import Wanted

OnProgress = Callable[[int, int], None]
MANY = 5000
"""Requests, from which on compiling first is worth its time: who simulates so many does so again."""


def main(arguments: Sequence[str] | None = None, before_many: Callable[[], None] | None = None) -> int:
    """Run one simulation; returns the exit status. Never raises. before_many: called before a run of MANY requests."""
    flags = make_parser().parse_args(arguments)
    return run(PROGRAM, "plan", lambda: _run(flags, before_many))


def _run(flags: argparse.Namespace, before_many: Callable[[], None] | None) -> None:
    _check(flags)
    core, notes = core_config(flags.policy, flags.slo, flags.reject, flags.autopilot)
    nodes = parse_fleet(flags.fleet, flags.model, flags.block_size)
    faults = parse_faults(flags.fault, nodes)
    wanted = Wanted(
        rate=flags.rate, num=flags.num, duration_s=flags.duration, start_s=flags.trace_start, seed=flags.seed
    )
    trace = read_input(flags.trace, flags.format, wanted, flags.block_size)
    if before_many is not None and len(trace.requests) >= MANY:
        before_many()
    config = SimConfig(
        core=core, model=flags.model, token_bytes=shape(flags.model).kv_token_bytes, block_size=flags.block_size,
        seed=flags.seed, stepwise=flags.stepwise, faults=faults,
    )  # fmt: skip
    with _progress(len(trace.requests)) as on_progress:
        result = simulate(nodes, trace.requests, config, on_progress)
    about = About(
        trace=flags.trace, format=trace.format, fleet=flags.fleet, model=flags.model, policy=flags.policy,
        seed=flags.seed,
    )  # fmt: skip
    bound = most_goodput_per_s(nodes, trace.requests, config, result.span_s)
    report = summarize(about, nodes, trace.requests, config, result, bound, tuple(map(str, (*trace.notes, *notes))))
    if flags.json:
        print(msgspec.json.format(msgspec.json.encode(report), indent=2).decode(), flush=True)
    if flags.png is None and not flags.plot and flags.json:
        return
    series = make_series(nodes, trace.requests, result)
    if not flags.json:
        _show(report, terminal_plots(series, report, _width()) if flags.plot else "")
    if flags.png is not None:
        write_png(flags.png, series, report)
        print(f"wrote {flags.png}", file=sys.stderr)


def _check(flags: argparse.Namespace) -> None:
    """What must be known to be possible before anything takes time."""
    for flag in ("rate", "num", "duration", "block_size"):
        value = getattr(flags, flag)
        if value is not None and not value > 0:
            raise InvalidValue(f"--{flag.replace('_', '-')} must be above 0, got {value:g}")
    if flags.plot and flags.json:
        raise InvalidValue("--json prints one document, so it cannot draw with --plot; use --png FILE")
    if flags.png is not None and not Path(flags.png).resolve().parent.is_dir():
        raise InvalidValue(f"cannot write the plot {flags.png} (no such directory); give another file with --png")
    check_packages(flags.plot, flags.png is not None)


def _show(report: SimReport, plots: str) -> None:
    console = make_console()
    show(console, report)
    if plots:
        print(plots, flush=True)


def _width() -> int:
    """Of plots: the terminal's, within what reads well."""
    return max(60, min(make_console().width, 120))


@contextlib.contextmanager
def _progress(num: int) -> Iterator[OnProgress | None]:
    """A bar on standard error, on a terminal only."""
    console = make_console(sys.stderr)
    if not console.is_terminal:
        yield None
        return
    columns = (
        TextColumn("simulating"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn()
    )  # fmt: skip
    with Progress(*columns, console=console, transient=True) as bars:
        task = bars.add_task("", total=num)
        yield lambda ended, total: bars.update(task, completed=ended, total=total)
