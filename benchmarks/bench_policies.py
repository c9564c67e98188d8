"""`make bench-policies`: every placement policy on the same simulated traffic, fleets and objectives.

Goodput is good requests over the time in which requests came, so that one long answer at the end changes nothing.
Rates are set at the knee of the best policy: the highest at which 90 % of requests are good. Each line of the results
is one run; what is there already is not run again, so that it may be stopped and resumed.
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

from bench_cells import (
    BLOCK_SIZE,
    EARLY_REJECT,
    FLEETS,
    KNEE_POLICIES,
    MODEL,
    OBJECTIVES,
    OURS,
    PEERS,
    SEED_START_S,
    WORKLOADS,
)
from msgspec.structs import replace
from rich.console import Console
from rich.table import Table

from controlplane.core.config import CoreConfig
from controlplane.sim.driver import simulate
from controlplane.sim.fleet import parse_fleet
from controlplane.sim.spec import SimConfig
from nodes.shapes import shape
from transfer.traces.loading import Wanted, load_trace

RESULTS = Path(__file__).resolve().parent / "results" / "policies.jsonl"
SPAN_S = 120.0
MAX_REQUESTS = 4000
KNEE = 0.90
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

    def run(self) -> None:
        """Every cell, policy and seed that is wanted and not there."""
        for cell in self.cells():
            rate = self._knee(cell) * self._options.load
            for seed, policy in itertools.product(range(self._options.seeds), self._options.policies):
                name = {"cell": list(cell), "policy": policy, "seed": seed, "load": self._options.load}
                if self._find(name) is None:
                    self._keep({**name, "rate": rate, **self._measure(cell, policy, rate, seed, MAX_REQUESTS)})

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
                good = self._measure(cell, policy, rate, 0, MAX_REQUESTS // 4)["attainment"] >= KNEE
                low, high = (rate, high) if good else (low, rate)
                rate = math.sqrt(low * high) if low and high else rate * (2.0 if good else 0.5)
                if high and (high / max(low, 1e-9) < 1.06 or (best and high <= best)):
                    break
            best = max(best, low)
        best = max(best, LEAST_RATE)
        self._keep({"cell": list(cell), "knee": True, "rate": best})
        return best

    def _measure(self, cell: Cell, policy: str, rate: float, seed: int, most: int) -> Row:
        if self._options.minutes and time.monotonic() - self._began > 60 * self._options.minutes:
            raise OutOfTime
        workload, fleet = WORKLOADS[cell[0]], FLEETS[cell[1]]
        slo = workload.tight if cell[2] == "tight" else workload.loose
        source, recorded = workload.trace(self._options.data)
        num = min(most, max(200, round(rate * SPAN_S)))
        start_s = SEED_START_S * seed if recorded else 0.0
        wanted = Wanted(rate=rate, num=num, seed=seed, start_s=start_s)
        nodes = parse_fleet(fleet.text(workload, policy), MODEL, BLOCK_SIZE)
        core = replace(
            CoreConfig(), policy=policy, classes={"default": slo}, early_reject=EARLY_REJECT.get(policy, "never"),
            num_explained=1,
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
        return {
            "goodput_per_s": result.good / window_s, "goodput_per_gpu": result.good / window_s / gpus,
            "good_per_dollar": result.good / dollars,
            "attainment": result.attainment, "rejected": result.rejected / max(1, result.counted),
            "preemptions": result.num_preemptions, "requests": len(result.records), "wall_s": result.wall_s,
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
    flag("--load", type=float, default=1.0, help="rate as a part of the knee")
    flag("--policies", nargs="*", choices=(OURS, *PEERS), default=[OURS, *PEERS], metavar="NAME")
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
    """One row a cell and policy, then ours beside the best peer."""
    console = Console(width=None if sys.stdout.isatty() else 160)
    table = Table("cell", "policy", "good/s a GPU", "good a $", "attainment", "rejected", "preemptions")
    ratios: dict[bool, list[float]] = {True: [], False: []}
    for cell in bench.cells():
        found = dict(_policies(bench, options, cell))
        for policy, rows in sorted(found.items(), key=lambda one: -_mean(one[1], "goodput_per_gpu")):
            table.add_row(
                "/".join(cell), policy, _spread(rows, "goodput_per_gpu"), _spread(rows, "good_per_dollar"),
                f"{_mean(rows, 'attainment'):.1%}", f"{_mean(rows, 'rejected'):.1%}",
                f"{_mean(rows, 'preemptions'):.0f}",
            )  # fmt: skip
        peers = {name: _mean(rows, "goodput_per_gpu") for name, rows in found.items() if name != OURS}
        if OURS in found and peers:
            best = max(peers, key=lambda name: peers[name])
            ratio = _mean(found[OURS], "goodput_per_gpu") / max(peers[best], 1e-9)
            ratios[FLEETS[cell[1]].mixed_classes].append(ratio)
            table.add_row("/".join(cell), f"{OURS} / {best}", f"{ratio:.2f}", "", "", "", "", end_section=True)
    console.print(table)
    for mixed, name in ((True, "heterogeneous"), (False, "homogeneous")):
        if ratios[mixed]:
            mean = math.exp(statistics.fmean(math.log(max(one, 1e-9)) for one in ratios[mixed]))
            print(f"ours / best peer of each cell on {name} fleets: {mean:.3f} in the geometric mean of "
                  f"{len(ratios[mixed])} cells, least {min(ratios[mixed]):.3f}")  # fmt: skip


def _policies(bench: Bench, options: argparse.Namespace, cell: Cell) -> Iterator[tuple[str, list[Row]]]:
    for policy in (OURS, *PEERS):
        rows = [row for row in bench.rows if row["cell"] == list(cell) and row.get("policy") == policy
                and row["load"] == options.load]  # fmt: skip
        if rows:
            yield policy, rows


def _mean(rows: list[Row], key: str) -> float:
    return statistics.fmean(row[key] for row in rows)


def _spread(rows: list[Row], key: str) -> str:
    values = [row[key] for row in rows]
    half = (max(values) - min(values)) / 2
    return f"{statistics.fmean(values):.3g} ± {half:.1g}" if len(values) > 1 else f"{values[0]:.3g}"


if __name__ == "__main__":
    sys.exit(main())
