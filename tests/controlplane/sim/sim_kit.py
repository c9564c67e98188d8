"""Small simulated fleets and workloads, drawn from a seed, and the books that must balance after each run."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from controlplane.core.config import CoreConfig
from controlplane.sim.driver import Simulation
from controlplane.sim.node import SimEngine
from controlplane.sim.pool import SimPool
from controlplane.sim.spec import Fault, NodeSpec, Order, SimConfig, SimResult
from nodes.hardware import preset
from nodes.shapes import latency_profile, shape
from transfer.terms import Role, Slo
from transfer.traces.request import TraceRequest

MODEL = "llama-3.1-8b"
BLOCK = 16
LETTERS = {"p": Role.PREFILL, "d": Role.DECODE, "m": Role.MIXED, "k": Role.KV_POOL}
CLASSES: dict[str, Slo | None] = {"default": Slo(ttft_s=2.0, tpot_s=0.2)}


def node(name: str, num_blocks: int = 200, **changes: Any) -> NodeSpec:
    """An instance by its name: "p0", "d1", "m0", "k0"."""
    role, hardware = LETTERS[name[0]], preset("H20")
    base: dict[str, Any] = {
        "id": name, "role": role, "hardware": "H20", "num_gpus": 1, "price_per_hour": 0.7,
        "latency": latency_profile(hardware, shape(MODEL)), "link_bytes_per_s": hardware.link_bytes_per_s,
        "num_blocks": num_blocks, "token_budget": 256, "max_running": 32,
    }  # fmt: skip
    if role is Role.KV_POOL:
        base |= {"hardware": "CPU", "num_gpus": 0, "price_per_hour": 0.5, "latency": None}
    return NodeSpec(**base | changes)


def fleet(names: str, **changes: Any) -> list[NodeSpec]:
    """ "p0 d0 d1" """
    return [node(name, **changes) for name in names.split()]


def config(**changes: Any) -> SimConfig:
    base: dict[str, Any] = {
        "core": CoreConfig(classes=CLASSES), "model": MODEL, "token_bytes": shape(MODEL).kv_token_bytes,
        "block_size": BLOCK, "max_context": 4096, "timeout_s": 60.0, "drain_s": 100.0,
    }  # fmt: skip
    return SimConfig(**base | changes)


def request(at_s: float = 0.0, prompt: int = 100, output: int = 10, **changes: Any) -> TraceRequest:
    return TraceRequest(at_s=at_s, prompt_tokens=prompt, output_tokens=output, **changes)


def workload(seed: int) -> list[TraceRequest]:
    """A few dozen requests, some of which share fronts of whole spans of four blocks."""
    rng, at_s, made = random.Random(seed), 0.0, []
    for _ in range(rng.randrange(20, 60)):
        at_s += rng.expovariate(rng.choice([2, 20, 60]))
        length, front = rng.randrange(1, 600), 100 * rng.randrange(4)
        blocks = tuple(front + place for place in range(length // 64 + 1)) if rng.random() < 0.5 else ()
        made.append(request(
            at_s, length, rng.randrange(1, 200), blocks=blocks, block_tokens=64, priority=rng.randrange(2)
        ))  # fmt: skip
    return made


def anything(seed: int, **changes: Any) -> tuple[list[NodeSpec], list[TraceRequest], SimConfig]:
    """A fleet of any kind, with what may go wrong with it and an operator who wants another split."""
    rng = random.Random(7 * seed + 1)
    nodes = [node(f"p{i}", rng.choice([40, 100]), latency_error=rng.choice([0.0, 0.0, 0.1]))
             for i in range(rng.randrange(3))]  # fmt: skip
    nodes += [node(f"d{i}", rng.choice([40, 80, 200]), latency_error=rng.choice([0.0, 0.0, 0.1]))
              for i in range(rng.randrange(1, 4))]  # fmt: skip
    nodes += [node(f"m{i}", rng.choice([40, 100])) for i in range(rng.randrange(3))]
    nodes += [node(f"k{i}", rng.choice([40, 100]), ssd_blocks=rng.choice([0, 64])) for i in range(rng.randrange(3))]
    faults = tuple(
        Fault(
            at_s=5 * rng.random(), kind=rng.choice(["kill", "slow", "mute"]), instance=rng.choice(nodes).id,
            duration_s=4 * rng.random(), factor=rng.choice([3.0, 1.7]),
        )
        for _ in range(rng.randrange(4))
    )  # fmt: skip
    counts = [sum(one.id.startswith(letter) for one in nodes) for letter in "pdm"]
    orders: tuple[Order, ...] = ()
    if rng.random() < 0.6 and counts[1] >= 2:
        split = f"{counts[0] + 1}P{counts[1] - 1}D" + (f"+{counts[2]}M" if counts[2] else "")
        orders = (Order(at_s=3 * rng.random(), xpyd=split),)
    made = config(
        faults=faults,
        orders=orders,
        seed=seed,
        keep_decisions=True,
        max_tokens=rng.choice([None, None, 400]),
        **changes,
    )
    return nodes, workload(seed), made


def run(nodes: Sequence[NodeSpec], trace: Sequence[TraceRequest], made: SimConfig) -> tuple[Simulation, SimResult]:
    """Simulate, and check every book afterwards."""
    simulation = Simulation(nodes, trace, made)
    result = simulation.run()
    check_books(simulation, result, len(trace))
    return simulation, result


def check_books(simulation: Simulation, result: SimResult, count: int) -> None:
    """Each request ended once; nothing is held, charged, leaked or orphaned."""
    names = [record.request_id for record in result.records]
    assert len(names) == count == len(set(names))
    for one in simulation.world.nodes.values():
        if one.alive and isinstance(one, SimEngine):
            assert (one.holdings(), one.shell.core.check()) == ((), 0), one.id
        elif one.alive and isinstance(one, SimPool):
            assert one.store.check() == 0, one.id
    core = simulation.core
    state = core.state(simulation.world.now)
    assert (state.orphaned_kv_blocks, state.in_flight, core.ledger.num_legs) == (0, 0, 0)
    for name in simulation.world.nodes:
        instance = core.instance(name)
        assert instance is None or not any(instance.charges), name
