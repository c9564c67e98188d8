"""The whole system on the virtual clock: right text under a seeded nemesis, nothing left behind, replay identical."""

from __future__ import annotations

import asyncio
import random

import pytest
from roles_harness import Options
from system_fleet import System, prompts, virtual

from controlplane.gateway.errors import ApiError
from transfer.wire.inproc import Faults


def test_requests_through_2p2d_and_a_pool_replay_to_identical_decisions() -> None:
    async def scenario() -> None:
        async with System("p0", "p1", "d0", "d1", "k0", seed=3) as system:
            for turn in range(2):
                await asyncio.gather(*(system.right(f"r{turn}-{i}", *p) for i, p in enumerate(prompts(1, 40))))
            assert all(record.outcome == "ok" for record in system.records)
            assert len({record.decode for record in system.records}) == 2
            assert sum(record.cached_tokens for record in system.records[40:]) > 0
            for record in system.records:
                assert record.ttft_s is not None
                assert sum(record.stages_s.values()) == pytest.approx(record.ttft_s, rel=0.02)
        assert len(system.life.digests) > 500
        system.check_replay()

    virtual(scenario)


def test_rebalance_under_load_migrates_and_loses_nothing() -> None:
    async def scenario() -> None:
        async with System("p0", "p1", "d0", seed=4, options=Options(num_blocks=8192)) as system:
            work = []
            for shape in ("1P2D", "2P1D"):
                for prompt, _ in prompts(len(work), 15):
                    work.append(asyncio.create_task(system.right(f"r{len(work)}", prompt, 400)))
                await asyncio.sleep(0.4)
                made = await system.rebalance(shape)
                await system.until(lambda: system.plan(made.plan_id).status != "applying", shape)  # noqa: B023
                assert system.plan(made.plan_id).status == "done", system.plan(made.plan_id)
            await asyncio.gather(*work)
            assert sum(record.num_migrations for record in system.records) > 0
            assert [record.outcome for record in system.records] == ["ok"] * 30
        system.check_replay()

    virtual(scenario)


def test_the_control_plane_dies_and_its_nodes_rejoin_and_serve() -> None:
    async def scenario() -> None:
        async with System("p0", "d0", "k0", seed=5) as system:
            lost = [asyncio.create_task(system.complete(f"l{i}", p, 500)) for i, (p, _) in enumerate(prompts(3, 10))]
            await asyncio.sleep(0.5)
            await system.kill_control()
            for task in lost:
                task.cancel()
            await asyncio.gather(*lost, return_exceptions=True)
            await system.start_control()
            started = asyncio.get_running_loop().time()
            await system.until(system._all_ready, "the nodes rejoined")
            assert asyncio.get_running_loop().time() - started < 5.0
            for actor in system.actors.values():
                assert actor.role is not None
                assert actor.role.holdings() == (), "abandoned work holds blocks"
            await asyncio.gather(*(system.right(f"n{i}", *p) for i, p in enumerate(prompts(4, 20))))
        system.check_replay()

    virtual(scenario)


def nemesis(seed: int) -> None:
    """Deaths with restart, partitions and slow links while 60 requests run, some abandoned by their clients."""

    async def scenario() -> None:
        rng = random.Random(seed)
        faults = Faults(min_delay_s=0.0002, max_delay_s=rng.choice([0.001, 0.05]))
        async with System("p0", "p1", "d0", "d1", "d2", "k0", seed=seed, faults=faults) as system:

            async def client(name: str, prompt: list[int], count: int) -> None:
                await asyncio.sleep(rng.uniform(0, 8))
                if rng.random() < 0.15:
                    try:
                        async with asyncio.timeout(rng.uniform(0.01, 1.0)):
                            await system.complete(name, prompt, count)
                    except TimeoutError:
                        return
                else:
                    try:
                        await system.right(name, prompt, count)
                    except ApiError as error:  # a clear refusal is an end too; nothing may hang or be wrong
                        if error.status not in {429, 503}:
                            raise

            work = [asyncio.create_task(client(f"r{i}", *p)) for i, p in enumerate(prompts(seed, 60, 200))]
            for _ in range(rng.randrange(2, 6)):
                await asyncio.sleep(rng.uniform(0.2, 3.0))
                victim = rng.choice(["p0", "p1", "d0", "d1", "d2", "k0"])
                if rng.random() < 0.6:
                    system.crash(victim)
                    await asyncio.sleep(rng.uniform(0.0, 4.0))
                    system.start(victim)
                else:
                    system.network.partition("control", victim)
                    await asyncio.sleep(rng.uniform(0.5, 8.0))
                    system.network.heal()
            await asyncio.wait_for(asyncio.gather(*work), 600)
            names = [record.request_id for record in system.records]
            assert len(names) == len(set(names)), "a request ended twice"
            done = sum(record.outcome == "ok" for record in system.records)
            assert done >= 40, f"only {done} of 60 finished: {[r.error for r in system.records if r.error]}"
        system.check_replay()

    virtual(scenario)


@pytest.mark.parametrize("seed", range(8))
def test_nemesis(seed: int) -> None:
    nemesis(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 160))
def test_nemesis_at_length(seed: int) -> None:
    nemesis(seed)
