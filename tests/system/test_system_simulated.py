"""The simulator beside the system: the same workload is placed request for request as the live scheduler places it."""

from __future__ import annotations

import asyncio
import random

import pytest
from roles_harness import BLOCK, Options
from system_fleet import MODEL, System, virtual

from controlplane.core.config import CoreConfig
from controlplane.sim.driver import simulate
from controlplane.sim.spec import NodeSpec, SimConfig
from nodes.engines.emulated import emulated_layout
from nodes.hardware import preset
from nodes.shapes import latency_profile, shape
from transfer.api import RequestRecord
from transfer.kv.links.inproc import InprocKvNetwork
from transfer.terms import Role, Slo
from transfer.traces.request import TraceRequest
from transfer.wire.inproc import Faults

START_S = 3.0
STEP_S = 0.011
"""A decode step of these engines, with some prefill in it."""
OPTIONS = Options(num_blocks=256, token_budget=64, max_running=32)
CONFIG = CoreConfig(classes={"default": Slo(ttft_s=0.5, tpot_s=0.05)}, policy="slo")
POOLED = Options(num_blocks=700, pool_blocks=8192, token_budget=512, max_running=32)
"""Engines that forget what the pool keeps."""
ROLES = {"p": Role.PREFILL, "d": Role.DECODE, "m": Role.MIXED, "k": Role.KV_POOL}


def workload(seed: int, count: int) -> list[TraceRequest]:
    """Prompts of blocks, many of which share a front, at times that no message of the fleet coincides with."""
    rng = random.Random(seed)
    at_s, made = START_S, []
    for number in range(count):
        at_s += rng.expovariate(25.0)
        length, front = rng.randrange(8, 300), rng.randrange(3)
        shared = rng.randrange(0, length // BLOCK) if rng.random() < 0.6 else 0
        blocks = [1000 * front + place for place in range(shared)]
        blocks += [100_000 + 1000 * number + place for place in range(length // BLOCK + 1 - shared)]
        made.append(
            TraceRequest(
                at_s=at_s, prompt_tokens=length, output_tokens=rng.randrange(1, 60), blocks=tuple(blocks),
                block_tokens=BLOCK,
            )
        )  # fmt: skip
    return made


def fronts(seed: int, count: int) -> list[TraceRequest]:
    """Long fronts that come again, one request at a time."""
    rng = random.Random(seed)
    at_s, made = START_S, []
    for number in range(count):
        at_s += rng.uniform(1.5, 2.5)
        front, length, shared = rng.randrange(6), rng.randrange(1200, 2400), rng.randrange(200, 280)
        blocks = [1000 * front + place for place in range(shared)]
        blocks += [100_000 + 1000 * number + place for place in range(length // BLOCK + 1 - shared)]
        made.append(
            TraceRequest(
                at_s=at_s, prompt_tokens=length, output_tokens=rng.randrange(1, 60), blocks=tuple(blocks),
                block_tokens=BLOCK,
            )
        )  # fmt: skip
    return made


def prompt_of(request: TraceRequest) -> list[int]:
    """Tokens that are equal where the ids of blocks are."""
    tokens = [token for block in request.blocks for token in random.Random(block).choices(range(97, 123), k=BLOCK)]
    return tokens[: request.prompt_tokens]


def live_records(
    names: tuple[str, ...], trace: list[TraceRequest], options: Options = OPTIONS
) -> dict[str, RequestRecord]:
    found: dict[str, RequestRecord] = {}

    async def scenario() -> None:
        faults = Faults(min_delay_s=1e-5, max_delay_s=1e-5)
        system = System(*names, options=options, config=CONFIG, faults=faults)
        system.kv = InprocKvNetwork(0, latency_s=1e-6, bytes_per_s=1e13)  # the emulated links take the time
        async with system:
            loop = asyncio.get_running_loop()

            async def one(number: int, request: TraceRequest) -> None:
                await asyncio.sleep(request.at_s - loop.time())
                await system.complete(f"r{number}", prompt_of(request), request.output_tokens, timeout_s=600.0)

            await asyncio.gather(*(one(number, request) for number, request in enumerate(trace)))
            found.update({record.request_id: record for record in system.records})

    virtual(scenario)
    return found


def simulated_records(
    names: tuple[str, ...], trace: list[TraceRequest], options: Options = OPTIONS
) -> dict[str, RequestRecord]:
    hardware, model = preset("H800"), shape(MODEL)
    nodes = [
        NodeSpec(
            id=name, role=ROLES[name[0]], hardware="H800", num_gpus=1, price_per_hour=hardware.price_per_hour,
            latency=None if name[0] == "k" else latency_profile(hardware, model),
            link_bytes_per_s=hardware.link_bytes_per_s,
            num_blocks=options.pool_blocks if name[0] == "k" else options.num_blocks,
            token_budget=options.token_budget, max_running=options.max_running, host="host",
        )
        for name in names
    ]  # fmt: skip
    config = SimConfig(
        core=CONFIG, model=MODEL, token_bytes=model.kv_token_bytes, block_size=BLOCK, layout=emulated_layout(BLOCK)
    )
    return {record.request_id: record for record in simulate(nodes, trace, config).records}


@pytest.mark.parametrize(
    ("names", "seed"),
    [
        (("p0", "p1", "d0", "d1"), 1),
        (("p0", "d0", "d1", "m0"), 2),
        (("m0", "m1", "m2"), 3),
        (("p0", "p1", "p2", "d0", "d1"), 9),
    ],
)
def test_the_simulator_places_every_request_as_the_live_system_does(names: tuple[str, ...], seed: int) -> None:
    trace = workload(seed, 60)
    live, simulated = live_records(names, trace), simulated_records(names, trace)
    assert {record.outcome for record in live.values()} == {"ok"}
    assert live.keys() == simulated.keys()
    different = [
        (name, (live[name].prefill, live[name].decode), (simulated[name].prefill, simulated[name].decode))
        for name in live
        if (live[name].prefill, live[name].decode) != (simulated[name].prefill, simulated[name].decode)
    ]
    assert different == []
    assert [live[name].cached_tokens for name in live] == [simulated[name].cached_tokens for name in live]
    for name, record in live.items():
        other = simulated[name]
        assert record.ttft_s is not None
        assert other.ttft_s is not None
        assert abs(record.ttft_s - other.ttft_s) < STEP_S, name  # what arrives at a step's end may miss that step
        if record.tpot_s is not None:
            assert record.tpot_s == pytest.approx(other.tpot_s, rel=0.02), name


def test_the_simulator_fetches_where_it_decodes_as_the_live_system_does() -> None:
    trace, names = fronts(3, 24), ("m0", "m1", "k0")
    live, simulated = live_records(names, trace, POOLED), simulated_records(names, trace, POOLED)
    assert [record.outcome for record in live.values()] == ["ok"] * 24
    assert sum(record.fetched_tokens > 0 for record in live.values()) >= 8
    for name, record in live.items():
        other = simulated[name]
        assert (record.decode, record.cached_tokens) == (other.decode, other.cached_tokens), name
        assert abs(record.fetched_tokens - other.fetched_tokens) <= 2 * BLOCK, (
            name
        )  # an end stored just before or after
        assert record.ttft_s == pytest.approx(other.ttft_s, abs=0.004), name
