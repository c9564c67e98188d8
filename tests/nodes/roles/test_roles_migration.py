"""A running request changes instance without a token lost, or stays where it is when that fails."""

from __future__ import annotations

import asyncio

import pytest
from roles_harness import LEASE_S, Fleet, Options, prompt, virtual

from nodes.engines.emulated import continuation
from transfer.wire.messages import KvReceived, Migrate, MigrateFailed, Released, RequestLost, Reserved, StepOutput

TOKENS = prompt(46)


async def start(fleet: Fleet, *, outputs: int = 5, max_tokens: int = 40) -> None:
    """A request that runs on d0 and has delivered some tokens."""
    await fleet.control.hand_off("r", TOKENS, max_tokens=max_tokens)
    await fleet.control.until(lambda: len(fleet.control.output.get("r", ())) >= outputs, "some tokens")


def reserve_target(fleet: Fleet, *, max_tokens: int = 40) -> None:
    sofar = fleet.control.output["r"]
    fleet.control.reserve("d1", "r", TOKENS + sofar, generation=2, max_tokens=max_tokens, num_output=len(sofar))


async def migrate(fleet: Fleet, have_tokens: int | None = None) -> None:
    if have_tokens is None:
        have_tokens = (await fleet.control.expect(Reserved, "r", "d1")).have_tokens
    message = Migrate(
        request_id="r", generation=1, target=fleet.control.peer("d1"), target_generation=2, have_tokens=have_tokens,
        lease_s=LEASE_S,
    )  # fmt: skip
    fleet.control.send("d0", message)


@pytest.mark.parametrize("wait_ms", [0, 10, 60, 100])
@virtual
async def test_a_migration_moves_the_request_and_everything_it_has_generated(wait_ms: int) -> None:
    async with Fleet("p0", "d0", "d1") as fleet:
        control = fleet.control
        await start(fleet)
        reserve_target(fleet)
        await control.expect(Reserved, "r", "d1")
        await asyncio.sleep(wait_ms / 1000)  # it runs on: the target's reservation has to grow
        await migrate(fleet)
        await control.text("r", TOKENS, 40)
        released = await control.expect(Released, "r", "d0")
        assert (released.generation, released.num_blocks > 0) == (1, True)
        assert (await control.expect(KvReceived, "r", "d1")).generation == 2
        items = [i for m in control.of(StepOutput) for i in m.items]
        assert {i.generation for i in items} == {1, 2}
        assert len({i.index for i in items}) == len(items) == 40, "no token was drawn twice"


@virtual
async def test_a_prefix_that_the_target_has_is_not_sent() -> None:
    async with Fleet("p0", "d0", "d1") as fleet:
        control = fleet.control
        await control.hand_off("other", TOKENS, decode="d1", max_tokens=1)
        await start(fleet)
        reserve_target(fleet)
        assert (await control.expect(Reserved, "r", "d1")).have_tokens == 44
        await migrate(fleet)
        await control.text("r", TOKENS, 40)


@virtual
async def test_a_refused_migration_leaves_it_running() -> None:
    async with Fleet("p0", "d0", "d1") as fleet:
        await start(fleet)
        await migrate(fleet, have_tokens=0)  # nothing was reserved
        failed = await fleet.control.expect(MigrateFailed, "r")
        assert failed.generation == 1
        assert "no reservation" in failed.reason
        await fleet.control.text("r", TOKENS, 40)


@virtual
async def test_a_target_without_room_to_grow_leaves_it_running() -> None:
    async with Fleet("p0", "d0", "d1", options=Options(num_blocks=24)) as fleet:
        control = fleet.control
        await start(fleet)
        reserve_target(fleet)
        await control.expect(Reserved, "r", "d1")
        control.reserve("d1", "filler", prompt(40, seed=5), lease_s=60.0)
        await control.expect(Reserved, "filler", "d1")
        await asyncio.sleep(0.08)
        await migrate(fleet)
        await control.expect(MigrateFailed, "r")
        assert "outgrew" in (await control.expect(RequestLost, "r", "d1")).reason
        await control.text("r", TOKENS, 40)
        control.abort("d1", "filler")


@virtual
async def test_a_target_that_dies_in_mid_migration_leaves_it_running() -> None:
    async with Fleet("p0", "d0", "d1", options=Options(speed=0.2)) as fleet:
        await start(fleet)
        reserve_target(fleet)
        await migrate(fleet)
        await asyncio.sleep(0.002)
        fleet.crash("d1")
        await fleet.control.expect(MigrateFailed, "r")
        await fleet.control.text("r", TOKENS, 40)


@virtual
async def test_a_request_that_ends_first_is_not_moved() -> None:
    async with Fleet("p0", "d0", "d1") as fleet:
        control = fleet.control
        await start(fleet, outputs=5, max_tokens=6)
        reserve_target(fleet, max_tokens=6)
        await migrate(fleet)
        await control.text("r", TOKENS, 6)
        await control.expect(MigrateFailed, "r")
        control.abort("d1", "r", generation=2)
        await control.expect(Released, "r", "d1")


@virtual
async def test_a_repeated_order_and_one_for_a_stranger() -> None:
    async with Fleet("p0", "d0", "d1") as fleet:
        await start(fleet)
        reserve_target(fleet)
        await migrate(fleet)
        await migrate(fleet)
        await fleet.control.text("r", TOKENS, 40)
        await migrate(fleet)
        assert "not here" in (await fleet.control.expect(MigrateFailed, "r")).reason


@pytest.mark.parametrize("tenth_ms", range(0, 200, 9))
@virtual
async def test_an_abort_at_any_moment_of_a_migration_returns_every_block(tenth_ms: int) -> None:
    async with Fleet("p0", "d0", "d1") as fleet:
        control = fleet.control
        await start(fleet)
        reserve_target(fleet)
        await migrate(fleet)
        await asyncio.sleep(tenth_ms / 10_000)
        control.abort("d0", "r", generation=2)
        control.abort("d1", "r", generation=2)
        for name in ("d0", "d1"):
            await control.expect(Released, "r", name, within=1.0)
        await fleet.at_rest(within=1.0)
        output = control.output["r"]
        assert output == continuation(TOKENS, len(output))
