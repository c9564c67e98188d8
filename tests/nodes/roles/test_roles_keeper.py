"""Answers of an engine that batches by itself go into the arena and to pools when a request has ended."""

from __future__ import annotations

import asyncio

from roles_harness import Options, prompt, virtual
from roles_served import Alone, ServedFleet

from nodes.engines.emulated import continuation
from nodes.roles.keeper import MAX_COMPUTED, Keeper
from transfer.errors import JobFailed
from transfer.wire.messages import ReserveRefused, StepOutput

LARGE = Options(num_blocks=1024, pool_blocks=256)


def keeper(fleet: ServedFleet, name: str) -> Keeper:
    found = fleet.shell(name)._keeper
    assert found is not None
    return found


async def settled(fleet: ServedFleet, name: str) -> None:
    await fleet.control.until(lambda: not fleet.shell(name).load().unsettled, "stores")


async def cached_tokens(fleet: ServedFleet, request: str) -> list[int | None]:
    return [item.cached_tokens for step in fleet.control.of(StepOutput) for item in step.items
            if item.request_id == request and item.index == 0]  # fmt: skip


@virtual
async def test_the_second_turn_has_the_first_answer_cached_here_and_in_a_pool() -> None:
    tokens = prompt(41)
    turn = [*tokens, *continuation(tokens, 40), *prompt(7, seed=3)]
    async with ServedFleet("m0", "d1", "k0", options=LARGE) as fleet:
        control = fleet.control
        control.reserve("m0", "a", tokens, remote=False, max_tokens=40)
        await control.text("a", tokens, 40)
        await settled(fleet, "m0")
        (saved,) = fleet.engine("m0").answers
        assert (saved.sampling, saved.num_loaded, saved.save_from, len(saved.blocks)) == (None, 40, 10, 20)
        assert fleet.pool("k0").store.cached_blocks == 20, "80 of the 81 tokens"
        for name, instance, source in (("here", "m0", None), ("there", "d1", "k0")):
            control.reserve(instance, name, turn, remote=False, source=source, source_blocks=20 if source else 0)
            await control.text(name, turn, 8)
        assert await cached_tokens(fleet, "here") == [80]
        assert [job.num_loaded for job in fleet.engine("d1").jobs] == [80]


@virtual
async def test_only_what_ended_well_and_is_a_block_or_more_is_kept() -> None:
    tokens = prompt(21)
    async with ServedFleet("m0", "k0") as fleet:
        control, engine = fleet.control, fleet.engine("m0")
        control.reserve("m0", "short", tokens, remote=False, max_tokens=2)
        await control.text("short", tokens, 2)
        control.reserve("m0", "aborted", prompt(20, seed=1), remote=False, max_tokens=200)
        await asyncio.sleep(0.3)
        control.abort("m0", "aborted")
        await settled(fleet, "m0")
        assert engine.answers == []
        assert fleet.pool("k0").store.cached_blocks == 5 + 4, "prompts are stored as before"


@virtual
async def test_a_failed_save_is_nobodys_loss() -> None:
    tokens = prompt(20)
    async with ServedFleet("m0", "k0") as fleet:
        control = fleet.control
        fleet.engine("m0").fails = {"m0/keep-1": JobFailed("no room")}
        for name in ("a", "b"):
            control.reserve("m0", name, tokens, remote=False, max_tokens=20)
            await control.text(name, tokens, 20)
            await settled(fleet, "m0")
        assert keeper(fleet, "m0").num_kept == 1
        assert fleet.pool("k0").store.cached_blocks == 9


@virtual
async def test_a_save_gives_way_when_blocks_are_short() -> None:
    tokens = prompt(40)
    async with ServedFleet("m0", options=Options(num_blocks=24)) as fleet:
        control, engine = fleet.control, fleet.engine("m0")
        control.reserve("m0", "a", tokens, remote=False, max_tokens=9)
        engine.slow = 200.0
        await control.text("a", tokens, 9)
        await control.until(lambda: "m0/keep-1" in engine.running, "the save")
        control.reserve("m0", "b", prompt(92, seed=2), remote=False)  # 23 of 24 blocks
        assert (await control.expect(ReserveRefused, "b")).retry
        await control.until(lambda: "m0/keep-1" not in engine.running, "its end")
        engine.slow = 1.0
        assert keeper(fleet, "m0").num_kept == 0
        control.reserve("m0", "c", prompt(92, seed=2), remote=False)
        await control.text("c", prompt(92, seed=2), 8)


@virtual
async def test_a_save_gives_way_to_a_prompt_that_waits_for_blocks() -> None:
    tokens, prompts = prompt(40), prompt(93, seed=2)
    async with ServedFleet("m0", "d1", options=Options(num_blocks=24)) as fleet:
        control, engine = fleet.control, fleet.engine("m0")
        control.reserve("m0", "a", tokens, remote=False, max_tokens=9)
        engine.slow = 200.0
        await control.text("a", tokens, 9)
        await control.until(lambda: "m0/keep-1" in engine.running, "the save")
        engine.slow = 1e6
        control.reserve("d1", "b", prompts, max_tokens=4)
        control.prefill("m0", "b", prompts, "d1")  # 23 of 24 blocks
        await control.until(lambda: "b" in engine.running, "its turn", within=1.0)
        assert keeper(fleet, "m0").num_kept == 0
        engine.slow = 1.0
        control.abort("m0", "b")
        control.abort("d1", "b")


@virtual
async def test_an_engine_that_takes_too_long_over_an_answer_is_left_alone() -> None:
    """It computes the answer again, beside its requests."""
    async with ServedFleet("m0", options=LARGE) as fleet:
        control, engine = fleet.control, fleet.engine("m0")
        prompts = {f"r{number}": prompt(20, seed=number) for number in range(3)}
        for name, tokens in prompts.items():
            control.reserve("m0", name, tokens, remote=False, max_tokens=9)
        await control.until(lambda: all(len(control.output.get(name, ())) > 5 for name in prompts), "most of them")
        engine.slow = 8000.0
        for name, tokens in prompts.items():
            await control.text(name, tokens, 9)
        await settled(fleet, "m0")
        assert len(engine.answers) == 1
        assert keeper(fleet, "m0").num_kept == 0


@virtual
async def test_an_engine_that_computes_answers_again_is_left_alone() -> None:
    """As one without a prefix cache does; the toy has none."""
    output = MAX_COMPUTED + 20
    async with ServedFleet("m0", options=LARGE) as fleet:
        control, engine = fleet.control, fleet.engine("m0")
        for number in range(3):
            tokens = prompt(20, seed=number)
            control.reserve("m0", f"r{number}", tokens, remote=False, max_tokens=output)
            await control.text(f"r{number}", tokens, output)
            await settled(fleet, "m0")
        assert len(engine.answers) == 1
        await asyncio.sleep(60.0)
        control.reserve("m0", "later", prompt(20, seed=9), remote=False, max_tokens=output)
        await control.text("later", prompt(20, seed=9), output)
        await settled(fleet, "m0")
        assert len(engine.answers) == 2


@virtual
async def test_one_that_keeps_its_kv_to_itself_keeps_nothing_here() -> None:
    tokens = prompt(20)
    async with Alone("m0") as fleet:
        fleet.control.reserve("m0", "a", tokens, remote=False, max_tokens=20)
        await fleet.control.text("a", tokens, 20)
        assert fleet.shell("m0")._keeper is None
        assert fleet.engine("m0").answers == []
