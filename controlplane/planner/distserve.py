"""DistServe's placement search (OSDI'24, section 4) as baselines: Algorithm 1 for fast networks, 2 for slow ones.

Both find the rate of one configuration by simulation, here that of the judge, and then replicate it. A phase alone is
simulated beside a partner that takes no time; the paper's search space is kept (one class of hardware, all shapes).
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from controlplane.planner.capacity import Rates, Workload, highest
from controlplane.planner.fleets import Fleet, Inventory, Part, Shape, Stock, build
from controlplane.planner.judge import Judge
from controlplane.planner.search import best_shapes
from controlplane.sim.spec import NodeSpec
from nodes.hardware import preset
from transfer.profile import LatencyProfile
from transfer.terms import Role

POLICY = "distserve"
FASTER = 1e5
"""A partner's speed, so that a phase is simulated as if alone."""
SHAPES_TRIED, PAIRS_TRIED, PRECISION = 3, 2, 0.08


class Placement(NamedTuple):
    """rate: what the algorithm expects of it, requests a second."""

    fleet: Fleet
    rate: float
    algorithm: str


def algorithm_1(inventory: Inventory, workload: Workload, judge: Judge, rate: float | None = None) -> Placement | None:
    """The best shape of each phase by goodput a GPU, then n = ceil(R / g_p) and m = ceil(R / g_d) of them. R: the rate
    wanted, or the highest for which there are GPUs, the shapes being chosen so that there are. Of the classes, the one
    that reaches most; None if none does."""
    found = []
    for stock in inventory.stocks:
        prefills = _phase_rates(stock, workload, judge, Role.PREFILL)
        decodes = _phase_rates(stock, workload, judge, Role.DECODE)
        if not prefills or not decodes:
            continue
        first, second = max(itertools.product(prefills, decodes), key=lambda pair: _most(stock.num_gpus, *pair))
        most = _most(stock.num_gpus, first, second)
        wanted = most if rate is None else min(rate, most)
        if wanted <= 0:
            continue
        parts = tuple(
            Part(shape, role, max(1, math.ceil(wanted / goodput - 1e-9)))
            for role, (shape, goodput) in ((Role.PREFILL, first), (Role.DECODE, second))
        )
        found.append(Placement(Fleet(parts, inventory.pools), wanted, "DistServe algorithm 1"))
    return max(found, key=lambda one: one.rate, default=None)


def algorithm_2(inventory: Inventory, workload: Workload, judge: Judge, rate: float | None = None) -> Placement | None:
    """Prefill and decode of the same number of stages share a node, KV staying in it; pairs are simulated together, the
    best by goodput a GPU is replicated."""
    found = []
    for stock in inventory.stocks:
        domain = min(stock.num_gpus, preset(stock.hardware).scale_up_size)
        pairs = [
            (first, second)
            for first in best_shapes(stock, workload, _prefill, 99)
            for second in best_shapes(stock, workload, _decode, 99)
            if first.pp == second.pp and first.num_gpus + second.num_gpus <= domain
        ]
        pairs.sort(key=lambda pair: -_expected(pair, workload) / sum(one.num_gpus for one in pair))
        judged = [(pair, _pair_rate(pair, workload, judge)) for pair in pairs[:PAIRS_TRIED]]
        judged = [one for one in judged if one[1] > 0]
        if not judged:
            continue
        (first, second), goodput = max(judged, key=lambda one: one[1] / sum(shape.num_gpus for shape in one[0]))
        most = stock.num_gpus // (first.num_gpus + second.num_gpus)
        count = most if rate is None else min(most, math.ceil(rate / goodput - 1e-9))
        parts = (Part(first, Role.PREFILL, count), Part(second, Role.DECODE, count))
        found.append(Placement(Fleet(parts, inventory.pools), count * goodput, "DistServe algorithm 2"))
    return max(found, key=lambda one: one.rate, default=None)


def md1_wait_s(rate: float, service_s: float, tp_speedup: float = 1.0, stages: int = 1) -> float:
    """Mean TTFT of equal prompts that come at random to one instance: D + R D^2 / (2 (1 - R D)); with two stages of a
    pipeline D + R D^2 / (4 (2 - R D)); with a speed-up of K by tensor parallelism D/K + R D^2 / (2 K (K - R D)). inf
    when overloaded (section 3.1). Used to check the simulator, and nothing else."""
    load = rate * service_s
    if load >= tp_speedup * stages:
        return math.inf
    if stages == 2:
        return service_s + load * service_s / (4.0 * (2.0 - load))
    return service_s / tp_speedup + load * service_s / (2.0 * tp_speedup * (tp_speedup - load))


def _phase_rates(stock: Stock, workload: Workload, judge: Judge, role: Role) -> list[tuple[Shape, float]]:
    """The shapes that closed forms put first, with their goodput, highest a GPU first; those that have any."""
    score = _prefill if role is Role.PREFILL else _decode
    tried = []
    for shape in best_shapes(stock, workload, score, SHAPES_TRIED):
        fleet = Fleet((Part(shape, role, 1),))
        nodes = build(fleet, workload.model, workload.block_size)
        partner = _partner(nodes[0], Role.DECODE if role is Role.PREFILL else Role.PREFILL)
        rate = _rate([*nodes, partner], judge, score(workload.rates(shape)), f"{role} alone on {shape}")
        tried.append((shape, rate))
    return sorted((one for one in tried if one[1] > 0), key=lambda one: -one[1] / one[0].num_gpus)


def _pair_rate(pair: tuple[Shape, Shape], workload: Workload, judge: Judge) -> float:
    fleet = Fleet((Part(pair[0], Role.PREFILL, 1), Part(pair[1], Role.DECODE, 1)))
    nodes = [replace(node, host="one") for node in build(fleet, workload.model, workload.block_size)]
    return _rate(nodes, judge, _expected(pair, workload), f"{fleet} on one node")


def _rate(nodes: Sequence[NodeSpec], judge: Judge, guess: float, what: str) -> float:
    """With arrivals at random, as the paper has them."""
    draw, at_s, trace = random.Random(f"distserve-{judge.config.seed}"), 0.0, []
    for request in judge.trace:
        at_s += draw.expovariate(1.0)
        trace.append(replace(request, at_s=at_s))

    def reaches(rate: float) -> bool:
        return judge.run(nodes, rate, POLICY, what, trace).attainment >= judge.target

    return highest(reaches, guess, PRECISION)[0]


def _partner(node: NodeSpec, role: Role) -> NodeSpec:
    """An instance of the other phase that takes next to no time and has room for everything."""
    latency = node.latency
    assert latency is not None
    hardware = replace(
        latency.hardware, peak_flops=latency.hardware.peak_flops * FASTER, peak_flops_fp8=0.0, peak_flops_fp4=0.0,
        memory_bytes_per_s=latency.hardware.memory_bytes_per_s * FASTER, link_bytes_per_s=1e15,
        scale_up_bytes_per_s=0.0,
    )  # fmt: skip
    profile: LatencyProfile = replace(
        latency, hardware=hardware, allreduce_s=0.0, alpha_s=1e-6, beta_s=0.0, send_s=0.0
    )  # fmt: skip
    return NodeSpec(
        id="other", role=role, hardware=node.hardware, num_gpus=1, price_per_hour=0.0, latency=profile,
        link_bytes_per_s=1e15, num_blocks=50 * node.num_blocks, token_budget=65536, max_running=4096, host=node.host,
    )  # fmt: skip


def _most(num_gpus: int, first: tuple[Shape, float], second: tuple[Shape, float]) -> float:
    """The highest rate for which both phases fit."""
    best = 0.0
    for count in range(1, num_gpus // first[0].num_gpus + 1):
        left = (num_gpus - count * first[0].num_gpus) // second[0].num_gpus
        best = max(best, min(count * first[1], left * second[1]))
    return best


def _expected(pair: tuple[Shape, Shape], workload: Workload) -> float:
    return min(_prefill(workload.rates(pair[0])), _decode(workload.rates(pair[1])))


_prefill: Callable[[Rates], float] = lambda rates: rates.prefill  # noqa: E731
_decode: Callable[[Rates], float] = lambda rates: rates.decode  # noqa: E731
