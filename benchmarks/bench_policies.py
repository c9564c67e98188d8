"""`make bench-policies`: every placement policy on the same simulated traffic, fleets and objectives.

Goodput is good requests over the time in which requests came, so that one long answer at the end changes nothing.
Rates are set at the knee of the best policy, the highest at which 90 % of requests are good, and beyond it. Beside each
cell stands what no policy could exceed (controlplane/planner/bound.py). Policies that are far behind with the first
seed are not run with others. Each line of the results is one run; what is there already is not run again, so that it
may be stopped and resumed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from controlplane.sim.compiled import use_copy

use_copy()  # before anything that is in it

from bench_cells import (
    AUTOPILOT,
    BLOCK_SIZE,
    EARLY_REJECT,
    FLEETS,
    KNEE_POLICIES,
    LOADS,
    MODEL,
    OBJECTIVES,
    OURS,
    PEERS,
    SEED_START_S,
    WORKLOADS,
)
from bench_verdict import Compared, Outcome, verdict
from msgspec.structs import replace
from rich.console import Console
from rich.table import Table

from controlplane.core.config import CoreConfig
from controlplane.sim.driver import simulate
from controlplane.sim.fleet import parse_fleet
from controlplane.sim.possible import most_goodput_per_s
from controlplane.sim.spec import SimConfig
from nodes.shapes import shape
from transfer.traces.loading import Wanted, load_trace

RESULTS = Path(__file__).resolve().parent / "results" / "policies.jsonl"
SPAN_S = 45.0
OBJECTIVES_LONG = 5.0
"""A run lasts so many TTFT objectives at least: a queue as long as the run would hide any overload."""
MAX_REQUESTS = 1200
KNEE = 0.90
BEHIND = 0.85
"""With the first seed less than this part of the best peer: the others would not change the order."""
KNEE_STEPS = 7
LEAST_RATE = 0.2
"""Where not even one request at a time can be good."""
Cell = tuple[str, str, str]
Row = dict[str, Any]


class OutOfTime(Exception):
    """The budget of this call is spent."""


class Bench:
    def __init__(self, options: argparse.Namespace) -> None:
        self._options, self._began = options, time.monotonic()
        self._path: Path = options.json
        self._path.parent.mkdir(parents=True, exist_ok=True)
        lines = self._path.read_text(encoding="utf-8").splitlines() if self._path.exists() else []
        self.rows: list[Row] = [json.loads(line) for line in lines]
        self._possible: dict[tuple[Any, ...], float | None] = {}

    def run(self) -> None:
        """Every cell, policy and seed that is wanted and not there."""
        for cell, load in itertools.product(self.cells(), self._options.loads):
            rate, policies = self._knee(cell) * load, self._options.policies
            for seed in range(self._options.seeds):
                runs = [self._run(cell, load, seed, policy, rate) for policy in policies]
                if not seed:
                    best = max((run["goodput_per_s"] for run in runs if run["policy"] in PEERS), default=0.0)
                    policies = [
                        run["policy"] for run in runs
                        if run["policy"] == OURS or run["goodput_per_s"] >= BEHIND * best
                    ]  # fmt: skip

    def _run(self, cell: Cell, load: float, seed: int, policy: str, rate: float) -> Row:
        name = {"cell": list(cell), "policy": policy, "seed": seed, "load": load}
        row = self._find(name)
        if row is None:
            row = {**name, "rate": rate, **self._measure(cell, policy, rate, seed)}
            self._keep(row)
        return row

    def cells(self) -> list[Cell]:
        options = self._options
        return list(itertools.product(options.workloads, options.fleets, options.objectives))

    def _knee(self, cell: Cell) -> float:
        """Requests a second at which the best policy keeps 90 % good; found by bisection on short runs."""
        found = self._find({"cell": list(cell), "knee": True})
        if found is not None:
            return float(found["rate"])
        best = 0.0
        for policy in KNEE_POLICIES:
            low, high = best, 0.0
            rate = best * 1.1 or 2.0
            for _ in range(KNEE_STEPS):
                short = self._measure(cell, policy, rate, 0, most=MAX_REQUESTS // 2, bounded=False)
                good = short["attainment"] >= KNEE
                low, high = (rate, high) if good else (low, rate)
                rate = math.sqrt(low * high) if low and high else rate * (2.0 if good else 0.5)
                if high and (high / max(low, 1e-9) < 1.06 or (best and high <= best)):
                    break
            best = max(best, low)
        best = max(best, LEAST_RATE)
        self._keep({"cell": list(cell), "knee": True, "rate": best})
        return best

    def _measure(
        self, cell: Cell, policy: str, rate: float, seed: int, most: int = MAX_REQUESTS, bounded: bool = True
    ) -> Row:  # fmt: skip
        if self._options.minutes and time.monotonic() - self._began > 60 * self._options.minutes:
            raise OutOfTime
        workload, fleet = WORKLOADS[cell[0]], FLEETS[cell[1]]
        slo = workload.tight if cell[2] == "tight" else workload.loose
        source, recorded = workload.trace(self._options.data)
        num = min(most, max(200, round(rate * max(SPAN_S, OBJECTIVES_LONG * slo.ttft_s))))
        start_s = SEED_START_S * seed if recorded else 0.0
        wanted = Wanted(rate=rate, num=num, seed=seed, start_s=start_s)
        text = fleet.text(workload, policy)
        nodes = parse_fleet(text, MODEL, BLOCK_SIZE)
        core = replace(
            CoreConfig(), policy=OURS if policy == AUTOPILOT else policy, classes={"default": slo}, num_explained=1,
            early_reject=EARLY_REJECT.get(policy, "never"), autopilot="auto" if policy == AUTOPILOT else "off",
        )  # fmt: skip
        config = SimConfig(
            core=core, model=MODEL, token_bytes=shape(MODEL).kv_token_bytes, block_size=BLOCK_SIZE, seed=seed,
            drain_s=60.0, timeout_s=60.0 + slo.ttft_s,
        )  # fmt: skip
        requests = load_trace(source, wanted).requests
        result = simulate(nodes, requests, config)
        window_s = max(1e-9, requests[-1].at_s - requests[0].at_s)
        gpus = sum(one.num_gpus for one in nodes if one.latency is not None)
        dollars = sum(one.price_per_hour for one in nodes) * window_s / 3600
        asked, possible = (text, core.autopilot, cell, rate, seed), None
        if bounded:
            if asked not in self._possible:
                self._possible[asked] = most_goodput_per_s(nodes, requests, config, window_s)
            possible = self._possible[asked]
        return {
            "goodput_per_s": result.good / window_s, "goodput_per_gpu": result.good / window_s / gpus,
            "good_per_dollar": result.good / dollars, "attainment": result.attainment,
            "rejected": result.rejected / max(1, result.counted), "possible_per_s": possible,
            "of_bound": result.good / window_s / possible if possible else None,
            "requests": len(result.records), "wall_s": result.wall_s,
        }  # fmt: skip

    def _find(self, name: Row) -> Row | None:
        return next((row for row in self.rows if all(row.get(key) == value for key, value in name.items())), None)

    def _keep(self, row: Row) -> None:
        self.rows.append(row)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        if "policy" in row:
            print(f"{'/'.join(row['cell'])} {row['policy']} seed {row['seed']}: {row['attainment']:.1%} good at "
                  f"{row['rate']:.1f}/s, {row['wall_s']:.1f} s", file=sys.stderr, flush=True)  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    flag = parser.add_argument
    flag("--data", type=Path, help="folder with mooncake/ and azure/ traces; generated traffic without")
    flag("--json", type=Path, default=RESULTS, help="results, added to")
    flag("--quick", action="store_true", help="two workloads, two fleets, tight, seven policies, one seed")
    flag("--minutes", type=float, default=0.0, help="stop after so many; run it again to go on")
    flag("--seeds", type=int, default=3)
    flag("--loads", type=float, nargs="*", default=list(LOADS), help="rates as parts of the knee", metavar="PART")
    flag("--policies", nargs="*", choices=(OURS, AUTOPILOT, *PEERS), default=[OURS, AUTOPILOT, *PEERS], metavar="NAME")
    flag("--workloads", nargs="*", choices=WORKLOADS, default=list(WORKLOADS), metavar="NAME")
    flag("--fleets", nargs="*", choices=FLEETS, default=list(FLEETS), metavar="NAME")
    flag("--objectives", nargs="*", choices=OBJECTIVES, default=list(OBJECTIVES), metavar="NAME")
    flag("--table", action="store_true", help="only show what there is")
    options = parser.parse_args(arguments)
    if options.quick:
        options.workloads, options.objectives, options.seeds = ["azure", "bursty"], ["tight"], 1
        options.fleets = ["8xH800", "8xH800+16xH20+4CPU"]
        options.policies = [OURS, "round_robin", "cache_aware", "kv_cost", "conductor", "splitwise", "colocated"]
    bench, done = Bench(options), True
    if not options.table:
        try:
            bench.run()
        except OutOfTime:
            done = False
    show(bench, options)
    if not done:
        print(f"stopped after {options.minutes:g} minutes; run it again to go on", file=sys.stderr)
    return 0


def show(bench: Bench, options: argparse.Namespace) -> None:
    """One row a cell, load and policy, then ours beside the best peer; at last what it comes to."""
    console = Console(width=None if sys.stdout.isatty() else 160)
    table = Table(
        "cell", "load", "policy", "seeds", "good/s a GPU", "good a $", "attainment", "rejected", "of possible"
    )
    compared = []
    for cell, load in itertools.product(bench.cells(), options.loads):
        found = dict(_policies(bench, load, cell))
        for policy, rows in sorted(found.items(), key=lambda one: -_mean(one[1], "goodput_per_gpu")):
            table.add_row(
                "/".join(cell), f"{load:g}", policy, str(len(rows)), _spread(rows, "goodput_per_gpu"),
                _spread(rows, "good_per_dollar"), f"{_mean(rows, 'attainment'):.1%}", f"{_mean(rows, 'rejected'):.1%}",
                _share(rows),
            )  # fmt: skip
        peers = {name: rows for name, rows in found.items() if name in PEERS}
        if OURS in found and peers:
            best = max(peers, key=lambda name: (len(peers[name]), _mean(peers[name], "goodput_per_s")))
            mixed = FLEETS[cell[1]].mixed_classes
            one = Compared("/".join(cell), load, mixed, best, _by_seed(found[OURS]), _by_seed(peers[best]))
            compared.append(one)
            table.add_row(
                one.cell, f"{load:g}", f"{OURS} / {best}", "", f"{one.ratio:.2f}{one.spread}", "", "", "",
                f"at most {one.most_ratio:.2f}" if one.most_ratio else "", end_section=True,
            )  # fmt: skip
    console.print(table)
    for line in verdict(compared):
        print(line)


def _by_seed(rows: list[Row]) -> dict[int, Outcome]:
    return {row["seed"]: Outcome(row["goodput_per_s"], row["of_bound"]) for row in rows}


def _policies(bench: Bench, load: float, cell: Cell) -> Iterator[tuple[str, list[Row]]]:
    for policy in (OURS, AUTOPILOT, *PEERS):
        rows = [row for row in bench.rows if row["cell"] == list(cell) and row.get("policy") == policy
                and row["load"] == load]  # fmt: skip
        if rows:
            yield policy, rows


def _mean(rows: list[Row], key: str) -> float:
    return statistics.fmean(row[key] for row in rows)


def _share(rows: list[Row]) -> str:
    shares = [row["of_bound"] for row in rows if row["of_bound"] is not None]
    return f"{statistics.fmean(shares):.0%}" if shares else ""


def _spread(rows: list[Row], key: str) -> str:
    values = [row[key] for row in rows]
    half = (max(values) - min(values)) / 2
    return f"{statistics.fmean(values):.3g} ± {half:.1g}" if len(values) > 1 else f"{values[0]:.3g}"


if __name__ == "__main__":
    sys.exit(main())
