"""KV as shared data in the whole system, on the virtual clock: tenants kept apart, pools that go in mid-fetch, hot
prefixes copied, new pools ramped. Right text and nothing left behind in every case."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

import pytest
from roles_harness import BLOCK, Options, prompt
from system_fleet import System, virtual

from controlplane.core.config import CoreConfig
from transfer.kv.port import KvFetch, KvPort
from transfer.terms import Slo

LENGTH = 801
WHOLE = LENGTH // BLOCK * BLOCK
OPTIONS = Options(num_blocks=4096, pool_blocks=4096, token_budget=512)


def stored(system: System, pool: str) -> int:
    return system.pool(pool).store.cached_blocks


async def restart(system: System, *names: str) -> None:
    for name in names:
        system.crash(name)
    await system.until(lambda: not set(names) & ready(system), "the control plane saw them go")
    for name in names:
        system.start(name)
    await system.until(lambda: set(names) <= ready(system), "they are back")


def ready(system: System) -> set[str]:
    state = system.life.core.state(asyncio.get_running_loop().time())
    return {one.id for one in state.instances if one.state == "ready"}


def test_tenants_with_the_same_prompt_share_nothing_and_each_hits_its_own() -> None:
    """CVE-2025-46570: neither in the caches of engines nor in the pool."""

    async def scenario() -> None:
        async with System("p0", "d0", "k0", seed=1, options=OPTIONS) as system:
            tokens = prompt(LENGTH)

            async def ask(name: str, salt: str) -> tuple[int, int]:
                await system.right(name, tokens, 4, salt)
                await asyncio.sleep(2.0)  # written through, and the directory told
                record = system.record(name)
                return record.cached_tokens, record.fetched_tokens

            assert await ask("a1", "alice") == (0, 0)
            assert stored(system, "k0") >= WHOLE // BLOCK
            assert await ask("b1", "bob") == (0, 0), "alice's KV is on p0, on d0 and in the pool"
            assert await ask("n1", "") == (0, 0)
            for name, salt in (("a2", "alice"), ("b2", "bob"), ("n2", "")):
                cached, _ = await ask(name, salt)
                assert cached == WHOLE
            await restart(system, "p0", "d0")  # engines are empty, the pool is warm
            for name, salt in (("c3", "carol"), ("A3", "Alice"), ("a3x", "alice ")):
                assert await ask(name, salt) == (0, 0), "no hit across tenants in the pool"
            assert await ask("a3", "alice") == (WHOLE, WHOLE)
            assert system.record("a3").kv_source == "k0"
            kv = system.life.core.state(asyncio.get_running_loop().time()).kv
            assert (kv.pool_dram_tokens, kv.pool_ssd_tokens, kv.device_tokens) == (WHOLE, 0, 3 * WHOLE)
        system.check_replay()

    virtual(scenario)


def on_fetch(system: System, act: Callable[[str], None]) -> list[str]:
    """Call act(pool) once, when the first fetch of any engine has begun; the pools fetched from, as they are asked."""
    asked: list[str] = []
    for name in ("p0", "p1"):
        if name not in system.actors:
            continue
        port: KvPort = system.shell(name).context.port
        fetch = port.fetch

        async def watched(peer, wanted: KvFetch, *rest, fetch=fetch, **more) -> int:  # type: ignore[no-untyped-def]
            asked.append(peer.instance_id)
            if len(asked) == 1:
                asyncio.get_running_loop().call_later(0.05, act, peer.instance_id)
            return await fetch(peer, wanted, *rest, **more)

        port.fetch = watched  # type: ignore[method-assign]
    return asked


@pytest.mark.parametrize("way", ["killed", "stopped", "cut off"])
def test_a_pool_that_goes_in_mid_fetch_costs_a_recomputation(way: str) -> None:
    """The text is right, the decode's blocks return, and others go on being fetched from."""

    async def scenario() -> None:
        async with System("p0", "d0", "k0", "k1", "k2", seed=2, options=OPTIONS) as system:
            prompts = [prompt(LENGTH, seed) for seed in range(6)]
            for number, tokens in enumerate(prompts):
                await system.right(f"first-{number}", tokens, 4)
            await asyncio.sleep(3.0)
            assert sum(stored(system, name) > 0 for name in ("k0", "k1", "k2")) > 1, "prefixes are spread"
            await restart(system, "p0", "d0")
            system.kv.bytes_per_s = 3e4  # a fetch takes about a second

            def go(pool: str) -> None:
                if way == "killed":
                    system.crash(pool)
                elif way == "stopped":
                    stops.append(asyncio.get_running_loop().create_task(system.leave(pool)))
                else:
                    system.network.partition("control", pool)
                    system.kv.crash(pool)

            stops: list[asyncio.Task[None]] = []
            asked = on_fetch(system, go)
            await system.right("second-0", prompts[0], 4)
            assert asked, "it was to be fetched"
            system.kv.bytes_per_s = 1e7
            await asyncio.gather(*stops)
            for number, tokens in enumerate(prompts):
                await system.right(f"third-{number}", tokens, 4)
            assert all(record.outcome == "ok" for record in system.records)
            others = [record for record in system.records if record.kv_source not in (None, asked[0])]
            assert sum(record.fetched_tokens for record in others) > 0
            if way == "cut off":
                system.network.heal()
        system.check_replay()

    virtual(scenario)


def test_a_hot_prefix_is_copied_to_the_other_pool_and_outlives_the_first() -> None:
    config = CoreConfig(classes={"default": Slo(ttft_s=2.0, tpot_s=0.2)}, hot_arrivals=3, replicate_timeout_s=5.0)

    async def scenario() -> None:
        async with System("p0", "d0", "k0", "k1", seed=3, options=OPTIONS, config=config) as system:
            front = prompt(400)
            for number in range(12):
                await system.right(f"r{number}", front + prompt(50, seed=number + 1), 4)
                await asyncio.sleep(0.5)
            await asyncio.sleep(6.0)
            assert system.life.core._replication.num_in_flight == 0
            kv = system.life.core.state(asyncio.get_running_loop().time()).kv
            assert kv.replicated_blocks >= 64, "most of the 100 blocks that all share"
            assert system.life.core.metrics()["prefix_copies_failed_total"] == 0
            first = max(("k0", "k1"), key=lambda name: stored(system, name))
            system.crash(first)
            await restart(system, "p0", "d0")
            await system.right("last", front + prompt(50, seed=99), 4)
            await asyncio.sleep(1.0)  # the control plane has recorded it
            assert system.record("last").kv_source not in (None, first)
            assert system.record("last").fetched_tokens >= 64 * BLOCK
        system.check_replay()

    virtual(scenario)


def test_a_new_pool_among_old_ones_gets_few_prefixes_at_first() -> None:
    """Mooncake#3688, as the engines' writers see it through the pool map."""

    async def scenario() -> None:
        options = Options(num_blocks=4096, pool_blocks=4096)
        async with System("p0", "d0", "k0", "k1", "k2", seed=4, options=options) as system:
            await asyncio.sleep(20.0)
            system.start("k9")
            await system.until(lambda: "k9" in ready(system), "the new pool")
            rng, shares = random.Random(4), []
            for turn in range(2):
                before = {name: stored(system, name) for name in ("k0", "k1", "k2", "k9")}
                for number in range(120):
                    tokens = [rng.randrange(256) for _ in range(2 * BLOCK + 1)]
                    await system.right(f"r{turn}-{number}", tokens, 1)
                await asyncio.sleep(2.0)
                gained = {name: stored(system, name) - was for name, was in before.items()}
                shares.append(gained["k9"] / sum(gained.values()))
                await asyncio.sleep(65.0)
            assert shares[0] < 0.12, "about 0.1 of 3.1"
            assert 0.13 < shares[1] < 0.4, "its full share once it is warm"
        system.check_replay()

    virtual(scenario)


@pytest.mark.parametrize("seed", range(6))
def test_pools_come_and_go_under_load(seed: int) -> None:
    """Kills, restarts and partitions of pools only: every request ends with the right text, none is even resumed."""

    async def scenario() -> None:
        rng = random.Random(seed)
        options = Options(num_blocks=250, pool_blocks=4096, token_budget=512)
        async with System("p0", "p1", "d0", "d1", "k0", "k1", "k2", seed=seed, options=options) as system:
            fronts = [prompt(400, seed=front) for front in range(12)]  # more than engines hold

            async def client(number: int) -> None:
                await asyncio.sleep(rng.uniform(0.0, 20.0))
                tokens = rng.choice(fronts) + prompt(rng.randrange(1, 60), seed=number)
                await system.right(f"r{number}", tokens, rng.randrange(1, 20))

            work = [asyncio.create_task(client(number)) for number in range(80)]
            for _ in range(6):
                await asyncio.sleep(rng.uniform(0.5, 4.0))
                victim = rng.choice(["k0", "k1", "k2"])
                if rng.random() < 0.6:
                    system.crash(victim)
                    await asyncio.sleep(rng.uniform(0.0, 2.0))
                    system.start(victim)
                else:
                    system.network.partition("control", victim)
                    await asyncio.sleep(rng.uniform(0.5, 8.0))
                    system.network.heal()
            await asyncio.wait_for(asyncio.gather(*work), 300)
            assert [record.outcome for record in system.records] == ["ok"] * 80
            assert sum(record.num_resumes for record in system.records) == 0
            assert sum(record.fetched_tokens for record in system.records) > 0
        system.check_replay()

    virtual(scenario)
