"""Everything at once, by seed: tight memory, aborts, migrations, crashes. The text is right and nothing is left."""

from __future__ import annotations

import asyncio
import random

import pytest
from roles_harness import LEASE_S, Fleet, Options, prompt, virtual

from nodes.engines.emulated import continuation
from transfer.kv.links.inproc import KvFaults
from transfer.wire.messages import Migrate, Reserved, ReserveRefused

NUM_REQUESTS = 40


class Client:
    """Drives one request as the scheduler would, and sometimes changes its mind."""

    def __init__(self, fleet: Fleet, name: str, rng: random.Random) -> None:
        self.fleet, self.control, self.name, self.rng = fleet, fleet.control, name, rng
        self.tokens = prompt(rng.randrange(1, 160), seed=rng.randrange(6))
        self.max_tokens = rng.randrange(1, 50)
        self.generation = 0

    async def run(self) -> None:
        await asyncio.sleep(self.rng.random())
        decode = await self.place()
        action = self.rng.choice(("finish", "finish", "abort", "migrate"))
        if decode is None or action == "finish":
            return
        await asyncio.sleep(self.rng.random() * 0.4)
        if action == "migrate" and self.name in self.control.output and self.name not in self.control.finished:
            await self.migrate(decode)
        if action == "abort":
            for name in self.fleet.actors:
                if name[0] != "k":
                    self.control.abort(name, self.name, self.generation)

    async def place(self) -> str | None:
        """Reserve and prefill somewhere; the instance that decodes, or None when all are full for long."""
        for _ in range(50):
            self.generation += 1
            decode = self.rng.choice([name for name in self.fleet.actors if name[0] in "dm"])
            local = decode[0] == "m" and self.rng.random() < 0.5
            self.control.reserve(
                decode, self.name, self.tokens, generation=self.generation, remote=not local, max_tokens=self.max_tokens
            )
            reserved = await self.answer(decode)
            if reserved is None:
                await asyncio.sleep(self.rng.random() * 0.2)
                continue
            if not local:
                prefill = self.rng.choice([name for name in self.fleet.actors if name[0] == "p"])
                self.control.prefill(
                    prefill, self.name, self.tokens, decode, generation=self.generation,
                    have_tokens=reserved.have_tokens, source="k0" if self.rng.random() < 0.5 else None,
                    source_blocks=self.rng.randrange(1, 40),
                )  # fmt: skip
            return decode
        return None

    async def answer(self, instance: str) -> Reserved | None:
        def answers() -> list[Reserved | ReserveRefused]:
            mine = [
                *self.control.of(Reserved, self.name, instance),
                *self.control.of(ReserveRefused, self.name, instance),
            ]
            return [m for m in mine if m.generation == self.generation]

        await self.control.until(lambda: bool(answers()), f"an answer for {self.name}")
        first = answers()[0]
        return first if isinstance(first, Reserved) else None

    async def migrate(self, source: str) -> None:
        sofar = list(self.control.output[self.name])
        if len(sofar) >= self.max_tokens:
            return
        target = self.rng.choice([name for name in self.fleet.actors if name[0] in "dm" and name != source])
        old, self.generation = self.generation, self.generation + 1
        self.control.reserve(
            target, self.name, self.tokens + sofar, generation=self.generation, max_tokens=self.max_tokens,
            num_output=len(sofar),
        )  # fmt: skip
        reserved = await self.answer(target)
        if reserved is not None:
            order = Migrate(
                request_id=self.name, generation=old, target=self.control.peer(target),
                target_generation=self.generation, have_tokens=reserved.have_tokens, lease_s=LEASE_S,
            )  # fmt: skip
            self.control.send(source, order)


@pytest.mark.parametrize("seed", range(25))
@virtual
async def test_a_storm_leaves_right_text_and_no_block(seed: int) -> None:
    rng = random.Random(seed)
    options = Options(num_blocks=rng.choice((60, 90, 200)), token_budget=48, pool_blocks=60, max_running=24)
    async with Fleet("p0", "p1", "d0", "d1", "m0", "k0", options=options, seed=seed) as fleet:
        clients = [Client(fleet, f"r{i}", random.Random(1000 * seed + i)) for i in range(NUM_REQUESTS)]
        async with asyncio.TaskGroup() as group:
            for client in clients:
                group.create_task(client.run())
        await fleet.at_rest(within=60.0)
        for client in clients:
            output = fleet.control.output.get(client.name, [])
            assert output == continuation(client.tokens, client.max_tokens)[: len(output)]
            assert client.name not in fleet.control.finished or len(output) == client.max_tokens
        assert len(fleet.control.finished) > NUM_REQUESTS / 3


@pytest.mark.parametrize(
    "kv_faults",
    [KvFaults(lose=0.02), KvFaults(corrupt=0.02), KvFaults(duplicate=0.2), KvFaults(delay=0.05, delay_s=2.0)],
    ids=["lose", "corrupt", "duplicate", "delay"],
)
@pytest.mark.parametrize("seed", range(5))
@virtual
async def test_bad_kv_links_never_make_wrong_text(seed: int, kv_faults: KvFaults) -> None:
    async with Fleet("p0", "p1", "d0", "d1", "m0", "k0", kv_faults=kv_faults, seed=seed) as fleet:
        clients = [Client(fleet, f"r{i}", random.Random(500 * seed + i)) for i in range(NUM_REQUESTS)]
        async with asyncio.TaskGroup() as group:
            for client in clients:
                group.create_task(client.run())
        await fleet.at_rest(within=60.0)
        for client in clients:
            output = fleet.control.output.get(client.name, [])
            assert output == continuation(client.tokens, client.max_tokens)[: len(output)]
        assert len(fleet.control.finished) > NUM_REQUESTS / 4


@pytest.mark.parametrize("seed", range(10))
@virtual
async def test_crashes_in_a_storm_leave_the_survivors_clean(seed: int) -> None:
    rng = random.Random(seed)
    async with Fleet("p0", "p1", "d0", "d1", "m0", "k0", options=Options(num_blocks=200), seed=seed) as fleet:
        clients = [Client(fleet, f"r{i}", random.Random(77 * seed + i)) for i in range(NUM_REQUESTS)]
        tasks = [asyncio.create_task(client.run()) for client in clients]
        await asyncio.sleep(0.3 + rng.random() * 0.5)
        for victim in rng.sample(["p1", "d1", "k0"], 2):
            fleet.crash(victim)
        await asyncio.wait(tasks, timeout=70.0)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await fleet.at_rest(within=60.0)
        for client in clients:
            output = fleet.control.output.get(client.name, [])
            assert output == continuation(client.tokens, client.max_tokens)[: len(output)]
