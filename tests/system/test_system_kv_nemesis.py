"""KV that is written, fetched, copied and evicted by a whole fleet under a seeded nemesis: right text or a clear end.

Conversations share prefixes, caches of engines and pools are too small for them, so that KV comes from pools all the
time; links lose, repeat, delay and change frames; instances are killed, cut off and started again meanwhile.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import pytest
from roles_harness import Options
from system_fleet import System, virtual

from controlplane.core.config import CoreConfig
from controlplane.gateway.errors import ApiError
from nodes.engines.emulated import continuation
from transfer.kv.links.inproc import KvFaults
from transfer.terms import Slo
from transfer.wire.inproc import Faults

ENGINES, POOLS = ("p0", "p1", "d0", "d1", "m0"), ("k0", "k1")
OPTIONS = Options(num_blocks=140, pool_blocks=200, token_budget=128, speed=0.25)
CONFIG = CoreConfig(
    classes={"default": Slo(ttft_s=2.0, tpot_s=0.2)}, fetch_latency_s=0.0005, hot_arrivals=3, replicate_again_s=5.0,
    ramp_s=5.0,
)  # fmt: skip
NUM_TALKS, NUM_TURNS = 12, 5


def nemesis(seed: int) -> Counter[str]:
    """One history. Returns how often what happened that the faults are for."""
    seen: Counter[str] = Counter()

    async def scenario() -> None:
        rng = random.Random(seed)
        faults = Faults(min_delay_s=0.0002, max_delay_s=rng.choice([0.001, 0.02]))
        kv_faults = KvFaults(
            lose=rng.choice([0.0, 0.002]), duplicate=rng.choice([0.0, 0.02]), corrupt=rng.choice([0.0, 0.002]),
            delay=rng.choice([0.0, 0.02]), delay_s=rng.choice([0.05, 2.0]),
        )  # fmt: skip
        async with System(*ENGINES, *POOLS, seed=seed, options=OPTIONS, faults=faults, config=CONFIG) as system:
            system.kv.faults = kv_faults
            fronts = [[rng.randrange(97, 123) for _ in range(rng.randrange(60, 200))] for _ in range(3)]
            talks = [asyncio.create_task(talk(system, rng, i, fronts)) for i in range(NUM_TALKS)]
            for _ in range(rng.randrange(2, 6)):
                await asyncio.sleep(rng.uniform(0.2, 3.0))
                await hit(system, rng)
            await asyncio.wait_for(asyncio.gather(*talks), 600)
            system.kv.faults = KvFaults()
            names = [record.request_id for record in system.records]
            assert len(names) == len(set(names)), "a request ended twice"
            done = sum(record.outcome == "ok" for record in system.records)
            assert done >= NUM_TALKS * NUM_TURNS * 3 // 5, [r.error for r in system.records if r.error]
            for name in POOLS:
                assert system.pool(name).store.check() == 0, f"{name} leaks blocks"
            seen["fetched"] += sum(record.fetched_tokens > 0 for record in system.records)
            seen["fetched where it decodes"] += sum(
                record.fetched_tokens > 0 and record.prefill is None for record in system.records
            )
            seen["evicted"] += sum(system.pool(name).store.num_evicted for name in POOLS)
            seen["resumed"] += sum(record.num_resumes for record in system.records)
            now = asyncio.get_running_loop().time()
            seen["replicated"] += system.life.core.state(now).kv.replicated_blocks
        system.check_replay()

    virtual(scenario)
    return seen


async def talk(system: System, rng: random.Random, number: int, fronts: list[list[int]]) -> None:
    """A conversation: each turn's prompt is all that was said before, and a little more."""
    said = list(rng.choice(fronts))
    await asyncio.sleep(rng.uniform(0, 4))
    for turn in range(NUM_TURNS):
        said += [rng.randrange(97, 123) for _ in range(rng.randrange(1, 40))]
        count = rng.randrange(1, 20)
        try:
            await system.right(f"t{number}-{turn}", list(said), count)
        except ApiError as error:  # a clear end, too; nothing may hang or be wrong
            if error.status not in {429, 500, 503}:
                raise
        said += continuation(said, count)
        await asyncio.sleep(rng.uniform(0, 1.5))


async def hit(system: System, rng: random.Random) -> None:
    """Kill an instance and start it again, or cut it off from control or from its peers for a while."""
    victim = rng.choice([*ENGINES, *POOLS, *POOLS])
    if rng.random() < 0.6:
        system.crash(victim)
        await asyncio.sleep(rng.uniform(0.0, 4.0))
        system.start(victim)
        return
    system.network.partition("control", victim)
    await asyncio.sleep(rng.uniform(0.5, 8.0))
    system.network.heal()


def test_right_text_or_a_clear_end() -> None:
    seen: Counter[str] = Counter()
    for seed in range(20):
        seen += nemesis(seed)
    assert set(seen) == {"fetched", "fetched where it decodes", "evicted", "resumed", "replicated"}
    assert min(seen.values()) > 0, seen


@pytest.mark.slow
@pytest.mark.parametrize("first", range(1000, 1200, 20))
def test_right_text_or_a_clear_end_at_length(first: int) -> None:
    for seed in range(first, first + 20):
        nemesis(seed)
