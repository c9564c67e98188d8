"""`python -m controlplane.planner`, which `phaseplane plan` starts: reads what is wanted, plans, reports."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
from msgspec.structs import replace

from controlplane.core.policies.names import DEFAULT_POLICY, POLICY_NAMES
from controlplane.planner.capacity import Workload
from controlplane.planner.fleets import EXAMPLE, Fleet, Inventory, parse_current, parse_inventory
from controlplane.planner.judge import MIN_SPAN_S, Judge, OnRun
from controlplane.planner.plan import Wish, make_plan
from controlplane.planner.plots import terminal_plot, write_png
from controlplane.planner.report import Input
from controlplane.planner.view import show
from controlplane.sim.options import core_config, read_input
from controlplane.sim.plots import check_packages
from controlplane.sim.spec import SimConfig
from controlplane.sim.view import make_console
from nodes.shapes import shape
from transfer.errors import InvalidValue
from transfer.program import Parser, run
from transfer.traces.cutting import cut
from transfer.traces.generating import KINDS, is_generated
from transfer.traces.loading import Wanted

PROGRAM = "phaseplane plan"
TRACE = "generated:conversation"
NUM_GENERATED = 8000


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(prog=PROGRAM, description="Find the best fleet for traffic, hardware and objectives.")
    flag = parser.add_argument
    flag("--fleet", required=True, help=f"GPUs there are or may be bought, and KV pools: {EXAMPLE}")
    flag("--model", required=True, help="like llama-3.1-70b")
    flag("--trace", help=f"a file, or generated:NAME of {', '.join(KINDS)}; by default {TRACE}")
    flag("--format", help="of the file; by default recognised")
    flag("--slo", action="append", default=[], help="ttft=2,tpot=0.2, or CLASS=ttft:2,tpot:0.2; may repeat")
    flag("--target", type=float, default=0.9, help="share of requests within their objectives")
    flag("--rate", type=float, help="requests a second to serve as cheaply as possible; by default as many as possible")
    flag("--budget", type=float, metavar="$", help="dollars an hour at most")
    flag("--current", metavar="FLEET", help="what there is now: 4xH800@4:prefill,2xH800@4:decode")
    flag("--num", type=int, default=500, help="requests simulated at each rate, at least")
    flag("--effort", type=int, default=2, help="how many splits are simulated")
    flag("--no-baselines", action="store_true", help="leave DistServe's algorithms out")
    flag("--policy", default=DEFAULT_POLICY, help=", ".join(POLICY_NAMES))
    flag("--seed", type=int, default=0, help="equal seeds give equal plans")
    flag("--block-size", type=int, default=512, help="tokens of a KV block")
    flag("--png", type=Path, metavar="FILE", help="draw the frontier into a file")
    flag("--json", action="store_true", help="one JSON document on standard output")
    flag("--progress", action="store_true", help="say on standard error what is simulated, a line each")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Make one plan; returns the exit status. Never raises."""
    flags = make_parser().parse_args(arguments)
    return run(PROGRAM, "plan", lambda: _run(flags))


def _run(flags: argparse.Namespace) -> None:
    _check(flags)
    model = shape(flags.model)
    core, notes = core_config(flags.policy, flags.slo)
    inventory = parse_inventory(flags.fleet, flags.model, flags.block_size)
    current = None if flags.current is None else _current(flags, inventory)
    trace = read_input(flags.trace or TRACE, flags.format, _wanted(flags), flags.block_size)
    part = cut(trace.requests, num=flags.num)
    config = SimConfig(
        core=replace(core, autopilot="off"), model=flags.model, token_bytes=model.kv_token_bytes,
        block_size=flags.block_size, seed=flags.seed,
    )  # fmt: skip
    workload = Workload(part, core.classes, model, flags.block_size, flags.target, core.default_class)
    wish = Wish(
        target=flags.target, rate=flags.rate, budget=flags.budget, effort=flags.effort,
        baselines=not flags.no_baselines, current=current,
    )  # fmt: skip
    warnings = [*notes, *trace.notes, *_warnings(flags)]
    with _progress(flags.progress) as on_run:
        judge = Judge(trace.requests, config, model, flags.target, flags.num, on_run, flags.rate)
        report = make_plan(inventory, workload, judge, wish, _inputs(flags, inventory, current, len(part)), warnings)
    if flags.json:
        print(msgspec.json.format(msgspec.json.encode(report), indent=2).decode(), flush=True)
    else:
        console = make_console()
        has_plots = importlib.util.find_spec("plotext") is not None
        show(console, report, terminal_plot(report, max(60, min(console.width, 110))) if has_plots else "")
    if flags.png is not None:
        write_png(flags.png, report)
        print(f"wrote {flags.png}", file=sys.stderr)


def _wanted(flags: argparse.Namespace) -> Wanted:
    """Of generated traffic whose text does not say how much: enough for any rate."""
    source = flags.trace or TRACE
    endless = is_generated(source) and "num=" not in source
    return Wanted(num=max(flags.num, NUM_GENERATED) if endless else None, seed=flags.seed)


def _current(flags: argparse.Namespace, inventory: Inventory) -> Fleet:
    return parse_current(flags.current, flags.model, flags.block_size, inventory.pools)


def _check(flags: argparse.Namespace) -> None:
    for flag in ("rate", "budget", "num", "effort", "block_size"):
        value = getattr(flags, flag)
        if value is not None and not value > 0:
            raise InvalidValue(f"--{flag.replace('_', '-')} must be above 0, got {value:g}")
    if not 0 < flags.target < 1:
        raise InvalidValue(f"--target must be between 0 and 1, like 0.9, got {flags.target:g}")
    if importlib.util.find_spec("scipy") is None:
        raise InvalidValue(
            "planning needs scipy, which is not installed; install it with `pip install 'phaseplane[plan]'`"
        )
    if flags.png is not None and not Path(flags.png).resolve().parent.is_dir():
        raise InvalidValue(f"cannot write the plot {flags.png} (no such directory); give another file with --png")
    check_packages(False, flags.png is not None)


def _inputs(
    flags: argparse.Namespace, inventory: Inventory, current: Fleet | None, num: int
) -> list[Input]:  # fmt: skip
    prices = ", ".join(f"{one.hardware} ${one.price_per_hour:g}" for one in inventory.stocks)
    wish = "as many requests as possible" if flags.rate is None else f"{flags.rate:g} requests a second, cheaply"
    return [
        Input(
            "traffic", f"{flags.trace or TRACE}, at each rate the first {num} or {MIN_SPAN_S:g} s", flags.trace is None
        ),
        Input("hardware", flags.fleet, False),
        Input("price of a GPU-hour", prices, True),
        Input("model", flags.model, False),
        Input("objectives", "; ".join(flags.slo) or "the control plane's", not flags.slo),
        Input("wanted", f"{wish}, {flags.target:.0%} within objectives", flags.rate is None),
        Input("budget", "none" if flags.budget is None else f"${flags.budget:g} an hour", flags.budget is None),
        Input("now", "unknown" if current is None else str(current), current is None),
        Input("policy", flags.policy, flags.policy == DEFAULT_POLICY),
    ]


def _warnings(flags: argparse.Namespace) -> Iterator[str]:
    if flags.trace is None:
        yield f"nobody said what the traffic is like: {TRACE} decides; give yours with --trace"
    if flags.current is None:
        yield "nobody said what there is now: doing nothing is taken as all instances mixed; say with --current"
    yield "prices are indicative"


@contextlib.contextmanager
def _progress(lines: bool) -> Iterator[OnRun | None]:
    """One line on standard error that changes, on a terminal only; with `lines` one after another."""
    console = make_console(sys.stderr)
    if lines:
        yield lambda what, num: console.print(f"simulated {num} runs, now {what}", soft_wrap=True)
    elif not console.is_terminal:
        yield None
    else:
        with console.status("planning") as status:
            yield lambda what, num: status.update(f"simulated {num} runs, now {what}")


if __name__ == "__main__":
    sys.exit(main())
