"""The autopilot in the simulator: flat, stepping and swinging load, beside the best that splits which stay can do.

    python benchmarks/bench_autopilot.py [--case NAME] [--seed N] [--json FILE]

One line a case: role switches; seconds until the first right one; those that were wrong for the load of their moment;
good requests beside the ideal, which knows each part's load beforehand and switches in no time: the best fixed split of
each part for `step`, of the whole for `swing`, else all that was offered. Exit status 1 when a bar is missed.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

from controlplane.core.config import CoreConfig
from controlplane.core.events import Event, Tick
from controlplane.sim.driver import Simulation
from controlplane.sim.fleet import parse_fleet
from controlplane.sim.spec import Fault, SimConfig
from nodes.shapes import shape
from transfer.autopilot import AutopilotMode
from transfer.terms import Slo
from transfer.traces.request import TraceRequest

MODEL, BLOCK = "llama-3.1-70b-fp8", 64
HARDWARE = "H20@2"
SLO = Slo(ttft_s=6.0, tpot_s=0.05)

Split = tuple[int, int]


@dataclass(frozen=True)
class Mix:
    """Requests a second, and the mean tokens of prompts and outputs, each varied by a factor of up to 2 both ways."""

    rate: float
    prompt: int
    output: int


@dataclass(frozen=True)
class Case:
    """parts: (seconds, load, role that it wants more instances of); repeated `times`. ideal: "parts", "whole" or ""
    (everything offered)."""

    name: str
    split: Split
    parts: tuple[tuple[float, Mix, str], ...]
    times: int = 1
    ideal: str = "whole"
    least: float = 0.97
    first_s: float | None = None
    settled_s: float | None = None
    most_moves: int | None = None


LONG_PROMPTS = Mix(1.3, 4000, 60)
CASES = (
    Case("flat", (2, 2), ((86_400.0, Mix(0.1, 3000, 150), ""),), ideal="", least=0.98, most_moves=0),
    Case("busy", (2, 1), ((3600.0, Mix(0.5, 4000, 150), ""),), ideal="", least=0.98, most_moves=0),
    Case("step", (4, 2), ((120.0, LONG_PROMPTS, "prefill"), (360.0, Mix(5.0, 200, 1000), "decode")), ideal="parts",
         least=0.95, settled_s=120.0),
    Case("swing", (4, 2), ((65.0, LONG_PROMPTS, "prefill"), (65.0, Mix(17.0, 100, 300), "decode")), times=5,
         first_s=15.0),
)  # fmt: skip
BY_NAME = {case.name: case for case in CASES}


@dataclass
class Found:
    """first_s: from the beginning of the second part to the first switch that is right for it."""

    case: str
    num_requests: int
    moves: int
    wrong: int
    first_s: float | None
    settled_s: float | None
    good: int
    ideal: float
    missed: list[str] = field(default_factory=list)

    @property
    def of_ideal(self) -> float:
        return self.good / self.ideal


def measure(case: Case, seed: int = 0, fixed: Sequence[Split] | None = None) -> Found:
    """The case with the autopilot, and with every split that stays, or only those."""
    requests, spans = trace(case, seed), list(_spans(case))
    simulation, moves = prepared(case.split, requests, "auto", seed)
    result = simulation.run()
    begins_s = spans[0][1]
    right = [at_s for at_s, role in moves if at_s > begins_s and role == _wanted(spans, at_s)]
    wrong = [at_s for at_s, role in moves if role != _wanted(spans, at_s)]
    found = Found(
        case.name, len(requests), len(moves), len(wrong), right[0] - begins_s if right else None,
        moves[-1][0] - begins_s if moves else None, sum(one.good is True for one in result.records),
        _ideal(case, requests, seed, fixed),
    )  # fmt: skip
    found.missed = list(_missed(case, found))
    return found


def trace(case: Case, seed: int) -> list[TraceRequest]:
    rng, made = random.Random(seed), []

    def vary(mean: int) -> int:
        return max(1, round(mean * 2 ** rng.uniform(-1, 1) / 1.082))

    for begin_s, end_s, mix in ((first, last, mix) for first, last, mix, _ in _spans(case)):
        at_s = begin_s + rng.expovariate(mix.rate)
        while at_s < end_s:
            made.append(TraceRequest(at_s=at_s, prompt_tokens=vary(mix.prompt), output_tokens=vary(mix.output)))
            at_s += rng.expovariate(mix.rate)
    return made


def prepared(
    split: Split, requests: Sequence[TraceRequest], mode: AutopilotMode, seed: int = 0, faults: tuple[Fault, ...] = ()
) -> tuple[Simulation, list[tuple[float, str]]]:
    """A simulation to run, and the role switches that it will tell: when each was decided, and the role it leads to."""
    config = SimConfig(
        core=CoreConfig(classes={"default": SLO}, autopilot=mode, early_reject="objective"), model=MODEL,
        token_bytes=shape(MODEL).kv_token_bytes, block_size=BLOCK, seed=seed, faults=faults,
    )  # fmt: skip
    fleet = f"{split[0]}x{HARDWARE}:prefill,{split[1]}x{HARDWARE}:decode"
    simulation = Simulation(parse_fleet(fleet, MODEL, BLOCK), requests, config)
    moves: list[tuple[float, str]] = []
    seen: set[str] = set()

    def look(now: float, event: Event) -> None:
        if type(event) is not Tick:
            return
        for plan in simulation.core.plans():
            if plan.plan_id not in seen:
                seen.add(plan.plan_id)
                moves.extend((now, step.to_role) for step in plan.steps)

    simulation.journal = look
    return simulation, moves


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=list(BY_NAME), action="append", help="only this; repeatable")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write one JSON line a case there")
    options = parser.parse_args(arguments)
    table = Table("case", "requests", "moves", "first right after", "wrong", "last after", "good", "of ideal", "missed")
    rows = []
    for case in CASES:
        if options.case and case.name not in options.case:
            continue
        found = measure(case, options.seed)
        rows.append(found)
        table.add_row(
            found.case, str(found.num_requests), str(found.moves), _seconds(found.first_s), str(found.wrong),
            _seconds(found.settled_s), str(found.good), f"{found.of_ideal:.1%}", "; ".join(found.missed) or "-",
        )  # fmt: skip
    Console(width=None if sys.stdout.isatty() else 140).print(table)
    if options.json is not None:
        options.json.write_text("".join(json.dumps(asdict(one)) + "\n" for one in rows), encoding="utf-8")
    return 1 if any(one.missed for one in rows) else 0


def _spans(case: Case) -> Iterator[tuple[float, float, Mix, str]]:
    at_s = 0.0
    for seconds, mix, role in case.parts * case.times:
        yield at_s, at_s + seconds, mix, role
        at_s += seconds


def _wanted(spans: Sequence[tuple[float, float, Mix, str]], at_s: float) -> str:
    return next((role for first, last, _, role in spans if first <= at_s < last), "")


def _ideal(case: Case, requests: Sequence[TraceRequest], seed: int, fixed: Sequence[Split] | None) -> float:
    if not case.ideal:
        return float(len(requests))
    total, spans = sum(case.split), list(_spans(case))
    best = [0] * len(spans) if case.ideal == "parts" else [0]
    for split in fixed or [(prefill, total - prefill) for prefill in range(1, total)]:
        simulation, _ = prepared(split, requests, "off", seed)
        good = [one.arrived_at for one in simulation.run().records if one.good is True]
        parts = [sum(first <= at_s < last for at_s in good) for first, last, _, _ in spans]
        if case.ideal == "whole":
            parts = [sum(parts)]
        best = [max(one, other) for one, other in zip(best, parts, strict=True)]
    return float(sum(best))


def _missed(case: Case, found: Found) -> Iterator[str]:
    if found.of_ideal < case.least:
        yield f"good under {case.least:.0%}"
    if found.wrong:
        yield "a wrong move"
    if case.most_moves is not None and found.moves > case.most_moves:
        yield f"more than {case.most_moves} moves"
    if case.first_s is not None and (found.first_s is None or found.first_s > case.first_s):
        yield f"first move later than {case.first_s:g} s"
    if case.settled_s is not None and (found.settled_s is None or found.settled_s > case.settled_s):
        yield f"last move later than {case.settled_s:g} s"


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f} s"


if __name__ == "__main__":
    sys.exit(main())
