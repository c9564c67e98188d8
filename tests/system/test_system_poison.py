"""A request that no engine survives, on the virtual clock: it takes three lives, its neighbours lose no token."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from roles_harness import Options
from system_fleet import System, prompts, virtual

from controlplane.gateway.errors import ApiError
from nodes.engines.emulated import EmulatedEngine
from nodes.engines.engine import Engine, StepBatch, StepResult
from nodes.instance import PoolMemory
from transfer.errors import EngineFailed
from transfer.terms import Role

MARK = [3, 1, 4, 1, 5, 9, 2, 6]
"""In a prompt, it makes the engine of whoever decodes it fail after a few tokens."""
PROMPT = [7, *MARK, 7]
NUM_GOOD = 5


Step = Callable[..., Awaitable[StepResult]]


class FragileSystem(System):
    """A System whose engines fail on any step that draws output token NUM_GOOD of a marked prompt."""

    num_failed = 0

    def _engine_maker(self, role: Role) -> Callable[[], Awaitable[Engine | PoolMemory]]:
        make = super()._engine_maker(role)

        async def made() -> Engine | PoolMemory:
            engine = await make()
            if isinstance(engine, EmulatedEngine):
                engine.step = self._fragile(engine.step)  # type: ignore[method-assign]
            return engine

        return made

    def _fragile(self, step: Step) -> Step:
        async def run(batch: StepBatch, *rest: Any) -> StepResult:
            if any(chunk.start + len(chunk.tokens) >= len(PROMPT) + NUM_GOOD and chunk.sampling is not None
                   and list(chunk.sampling.history[1 : 1 + len(MARK)]) == MARK for chunk in batch.chunks):  # fmt: skip
                self.num_failed += 1
                raise EngineFailed("the marked request")
            return await step(batch, *rest)

        return run


@pytest.mark.parametrize(("names", "seed"), [(("p0", "d0"), 1), (("p0", "d0", "d1", "d2"), 2), (("m0", "m1"), 3)])
def test_a_poisonous_request_takes_three_lives_and_its_neighbours_complete(names: tuple[str, ...], seed: int) -> None:
    async def scenario() -> None:
        async with FragileSystem(*names, seed=seed, options=Options(num_blocks=2048)) as system:
            work = [
                asyncio.create_task(system.right(f"n{i}", prompt, 150 + 10 * i))
                for i, (prompt, _) in enumerate(prompts(seed, 12))
            ]
            await asyncio.sleep(0.3)
            with pytest.raises(ApiError, match="its engine failed three times while it ran") as failed:
                await system.complete("poison", PROMPT, 50)
            assert failed.value.status == 500
            await asyncio.gather(*work)
            await asyncio.gather(*(system.right(f"after{i}", *p) for i, p in enumerate(prompts(seed + 50, 6))))
            assert system.num_failed == 3
            assert {r.request_id: r.outcome for r in system.records if r.outcome != "ok"} == {"poison": "error"}
            poison = next(record for record in system.records if record.request_id == "poison")
            assert poison.output_tokens == NUM_GOOD
            assert sum(record.num_resumes for record in system.records) > 2, "nobody shared a batch with it"
        system.check_replay()

    virtual(scenario)
