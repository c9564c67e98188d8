"""What `phaseplane plan` does: reads what is wanted, plans, reports."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from controlplane.core.policies.names import DEFAULT_POLICY, POLICY_NAMES
from controlplane.planner.division_report import DivisionPlan
from controlplane.planner.division_view import show_division
from controlplane.planner.fleets import EXAMPLE, Fleet, Inventory, parse_current
from controlplane.planner.judge import MIN_SPAN_S, OnRun
from controlplane.planner.plan import Wish, make_plan
from controlplane.planner.plots import terminal_plot, write_png
from controlplane.planner.prepare import TRACE, prepare
from controlplane.planner.report import Input, PlanReport
from controlplane.planner.several import plan_several
from controlplane.planner.view import show
from controlplane.planner.wants import EXAMPLE as WANT
from controlplane.planner.wants import is_several
from controlplane.sim.plots import check_packages
from controlplane.sim.view import make_console
from transfer.errors import InvalidValue, PhaseplaneError
from transfer.program import Parser, run
from transfer.said import Said, said_of, say
from transfer.traces.generating import KINDS

PROGRAM = "phaseplane plan"


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(prog=PROGRAM, description="Find the best fleet for traffic, hardware and objectives.")
    flag = parser.add_argument
    flag("--fleet", required=True, help=f"GPUs there are or may be bought, and KV pools: {EXAMPLE}")
    flag("--model", required=True, action="append", help=f"like llama-3.1-70b; several share the fleet: {WANT}, ...")
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
    flag("--no-compile", action="store_true", help="plain Python, also where the simulator is compiled")
    flag("--progress", action="store_true", help="say on standard error what is simulated, a line each")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Make one plan; returns the exit status. Never raises."""
    flags = make_parser().parse_args(arguments)
    return run(PROGRAM, "plan", lambda: _answer(flags))


def _answer(flags: argparse.Namespace) -> None:
    """With --json, a refusal is an answer as well, for screens of other languages."""
    try:
        _run(flags)
    except PhaseplaneError as error:
        if flags.json:
            _print_json({"error": str(error), "said": said_of(error)})
        raise


def _run(flags: argparse.Namespace) -> None:
    _check(flags)
    if is_several(flags.model):
        _run_several(flags)
        return
    model = flags.model[0]
    made = prepare(flags, model, flags.fleet, flags.slo, flags.trace, flags.format)
    current = None if flags.current is None else parse_current(
        flags.current, model, flags.block_size, made.inventory.pools
    )  # fmt: skip
    wish = Wish(
        target=flags.target, rate=flags.rate, budget=flags.budget, effort=flags.effort,
        baselines=not flags.no_baselines, current=current,
    )  # fmt: skip
    warnings = [*made.notes, *_warnings(flags)]
    inputs = _inputs(flags, made.inventory, current, min(flags.num, len(made.trace)))
    with _progress(flags.progress) as on_run:
        report = make_plan(made.inventory, made.workload, made.judge(on_run, flags.rate), wish, inputs, warnings)
    if flags.json:
        _print_json(report)
    else:
        console = make_console()
        has_plots = importlib.util.find_spec("plotext") is not None
        show(console, report, terminal_plot(report, max(60, min(console.width, 110))) if has_plots else "")
    if flags.png is not None:
        write_png(flags.png, report)
        print(f"wrote {flags.png}", file=sys.stderr)


def _run_several(flags: argparse.Namespace) -> None:
    with _progress(flags.progress) as on_run:
        report = plan_several(flags, on_run)
    if flags.json:
        _print_json(report)
    else:
        show_division(make_console(), report)


def _print_json(report: PlanReport | DivisionPlan | dict[str, str | Said]) -> None:
    print(msgspec.json.format(msgspec.json.encode(report), indent=2).decode(), flush=True)


def _check(flags: argparse.Namespace) -> None:
    for flag in ("rate", "budget", "num", "effort", "block_size"):
        value = getattr(flags, flag)
        if value is not None and not value > 0:
            raise InvalidValue(say("planner.above", flag=flag.replace("_", "-"), got=f"{value:g}"))
    if not 0 < flags.target < 1:
        raise InvalidValue(say("planner.target", got=f"{flags.target:g}"))
    if importlib.util.find_spec("scipy") is None:
        raise InvalidValue(say("planner.scipy"))
    if flags.png is not None and not Path(flags.png).resolve().parent.is_dir():
        raise InvalidValue(say("planner.plot", path=flags.png, reason="no such directory"))
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
        Input("model", flags.model[0], False),
        Input("objectives", "; ".join(flags.slo) or "the control plane's", not flags.slo),
        Input("wanted", f"{wish}, {flags.target:.0%} within objectives", flags.rate is None),
        Input("budget", "none" if flags.budget is None else f"${flags.budget:g} an hour", flags.budget is None),
        Input("now", "unknown" if current is None else str(current), current is None),
        Input("policy", flags.policy, flags.policy == DEFAULT_POLICY),
    ]


def _warnings(flags: argparse.Namespace) -> Iterator[Said]:
    if flags.trace is None:
        yield say("planner.no_trace", trace=TRACE)
    if flags.current is None:
        yield say("planner.no_current")
    yield say("divide.prices")


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
