"""What an engine that batches by itself cannot do, says of itself, and takes its instance down with when it is lost."""

from __future__ import annotations

import asyncio

import pytest
from roles_harness import Fleet, Options, prompt, virtual
from roles_served import Alone, ServedFleet

from nodes.engines.emulated import continuation
from nodes.roles.context import Bounds
from transfer.errors import EngineFailed, JobFailed
from transfer.terms import Role
from transfer.wire.messages import (
    Goodbye,
    Migrate,
    MigrateFailed,
    PrefillDone,
    PrefillFailed,
    RequestLost,
    Reserved,
    ReserveRefused,
    RoleOrder,
    RoleReport,
)


@virtual
async def test_hello_tells_what_kind_of_engine_it_is() -> None:
    async with Alone("p0", "m0", "k0") as fleet:
        served, alone, pool = (fleet.control.hellos[name] for name in ("p0", "m0", "k0"))
        assert (served.engine, served.engine_version, served.shares_kv, served.moves) == ("toy", "1.0", True, False)
        assert (alone.shares_kv, alone.moves, alone.num_blocks) == (False, False, 4096)
        assert (pool.engine_version, pool.shares_kv, pool.moves) == ("", True, True)
    async with Fleet("d0") as fleet:
        assert (fleet.control.hellos["d0"].engine_version, fleet.control.hellos["d0"].moves) == ("", True)


@virtual
async def test_a_failed_job_is_refused_or_lost_alone() -> None:
    tokens = prompt(60)
    async with ServedFleet("p0", "d0") as fleet:
        control = fleet.control
        too_long = JobFailed("the request is too long for the engine")
        fleet.engine("p0").fails["a"] = fleet.engine("d0").fails["b"] = too_long
        await control.hand_off("a", tokens)
        assert (await control.expect(PrefillFailed, "a")).reason == "the request is too long for the engine"
        control.abort("d0", "a")
        await control.hand_off("b", tokens)
        assert (await control.expect(RequestLost, "b")).reason == "the request is too long for the engine"
        await control.hand_off("c", tokens)
        await control.text("c", tokens, 8)


async def another_life(fleet: ServedFleet, name: str, epoch: int) -> None:
    await fleet.control.until(lambda: fleet.control.beats[name].epoch != epoch, "another life")


@virtual
async def test_an_engine_lost_while_it_is_idle_ends_the_life() -> None:
    async with ServedFleet("p0", "d0") as fleet:
        epoch = fleet.control.hellos["d0"].epoch
        fleet.engine("d0").lose()
        assert "EngineFailed" in (await fleet.control.expect(Goodbye, instance="d0")).reason
        await another_life(fleet, "d0", epoch)
        await fleet.control.hand_off("r", prompt(40))
        await fleet.control.text("r", prompt(40), 8)


@virtual
async def test_an_engine_lost_by_one_request_loses_all_and_says_so() -> None:
    async with ServedFleet("d0") as fleet:
        control, epoch = fleet.control, fleet.control.hellos["d0"].epoch
        control.reserve("d0", "a", prompt(40), remote=False, max_tokens=500)
        await control.until(lambda: len(control.output.get("a", ())) > 3, "tokens")
        fleet.engine("d0").fails["b"] = EngineFailed("the engine's process has ended with status 137")
        control.reserve("d0", "b", prompt(30), remote=False)
        assert "status 137" in (await control.expect(RequestLost, "b")).reason
        await control.expect(Goodbye, instance="d0")
        await another_life(fleet, "d0", epoch)
        assert control.output["a"] == continuation(prompt(40), len(control.output["a"]))


@pytest.mark.parametrize("fault", ["silent", "keeps"])
@virtual
async def test_an_engine_that_stands_still_or_does_not_let_go_is_lost(fault: str) -> None:
    async with ServedFleet("d0", options=Options(bounds=Bounds(step_s=8.0))) as fleet:
        control, epoch = fleet.control, fleet.control.hellos["d0"].epoch
        control.reserve("d0", "a", prompt(40), remote=False, max_tokens=100_000)
        await control.until(lambda: len(control.output.get("a", ())) > 3, "tokens")
        setattr(fleet.engine("d0"), fault, True)
        if fault == "keeps":
            control.abort("d0", "a")
            control.reserve("d0", "b", prompt(40), remote=False, max_tokens=100_000)
        await asyncio.sleep(7.0)
        assert not control.of(Goodbye)
        await control.expect(Goodbye, instance="d0", within=8.0)
        await another_life(fleet, "d0", epoch)


@virtual
async def test_an_idle_engine_may_be_silent() -> None:
    async with ServedFleet("d0", options=Options(bounds=Bounds(step_s=2.0))) as fleet:
        await asyncio.sleep(30.0)
        fleet.control.reserve("d0", "a", prompt(40), remote=False)
        await fleet.control.text("a", prompt(40), 8)


@virtual
async def test_a_request_that_runs_does_not_move() -> None:
    tokens = prompt(60)
    async with ServedFleet("p0", "d0", "d1") as fleet:
        control = fleet.control
        await control.hand_off("r", tokens, max_tokens=40)
        await control.until(lambda: len(control.output.get("r", ())) > 3, "tokens")
        control.reserve("d1", "r", tokens, generation=2)
        await control.expect(Reserved, "r", "d1")
        for _ in range(2):
            control.send(
                "d0",
                Migrate(
                    request_id="r", generation=1, target=control.peer("d1"), target_generation=2, have_tokens=0,
                    lease_s=5.0,
                ),
            )  # fmt: skip
            await asyncio.sleep(0.02)
        failed = control.of(MigrateFailed, "r")
        assert len(failed) == 2
        assert "batches by itself and cannot let go of a request that runs" in failed[0].reason
        control.abort("d1", "r", generation=2)
        await control.text("r", tokens, 40)


@virtual
async def test_an_engine_that_keeps_its_kv_serves_whole_requests_only() -> None:
    tokens = prompt(60)
    async with Alone("p0", "m0", "k0") as fleet:
        control = fleet.control
        control.reserve("m0", "a", tokens)
        refused = await control.expect(ReserveRefused, "a")
        assert not refused.retry
        assert "keeps its KV to itself" in refused.reason
        control.reserve("p0", "b", tokens, remote=False)
        control.prefill("m0", "b", tokens, "p0")
        assert "keeps its KV to itself" in (await control.expect(PrefillFailed, "b", "m0")).reason

        control.reserve("m0", "c", tokens, remote=False, max_tokens=30, source="k0", source_blocks=15)
        await control.text("c", tokens, 30)
        assert (await control.expect(PrefillDone, "c")).computed_tokens == 60
        control.reserve("m0", "d", tokens, remote=False, max_tokens=100_000)
        await control.until(lambda: len(control.output.get("d", ())) > 3, "tokens")
        control.abort("m0", "d")
        await fleet.at_rest()
        assert fleet.shell("m0").writer._num_stores == 0, "nothing is written through"

        control.send("m0", RoleOrder(plan_id="plan", epoch=control.hellos["m0"].epoch, role=Role.DECODE))
        report = await control.expect(RoleReport, instance="m0")
        assert (report.ok, report.role) == (False, Role.MIXED)
        assert "m0 cannot be a decode instance" in report.detail


@virtual
async def test_an_engine_that_keeps_its_kv_does_not_start_in_another_role() -> None:
    class Wrong(Alone):
        alone = ("d0",)

    fleet = Wrong("d0")
    await fleet.control.endpoint.start()
    fleet.start("d0")
    await asyncio.sleep(0.1)
    assert fleet.given_up[0][1] == 2
    assert "d0 cannot be a decode instance" in fleet.given_up[0][0]
    await fleet._supervisor.stop(5.0)


@virtual
async def test_speed_and_step_time_are_measured_from_outputs() -> None:
    async with ServedFleet("p0", "d0", options=Options(num_blocks=2048)) as fleet:
        control = fleet.control
        for name in ("p0", "d0"):
            fleet.engine(name).slow = 2.0
            assert fleet.shell(name).load().speed == 1.0
        for i in range(25):
            await control.hand_off(f"r{i}", prompt(120, seed=i), max_tokens=60)
        for i in range(25):
            await control.text(f"r{i}", prompt(120, seed=i), 60)
        assert fleet.shell("d0").load().speed == pytest.approx(2.0, rel=0.1)
        step_s = fleet.engine("d0").latency.decode_step_s(8, 8 * 150) * 2.0
        assert fleet.shell("d0").load().step_s == pytest.approx(step_s, rel=0.3)
        # A prompt of 120 tokens goes through this engine in five chunks, each of which reads all weights.
        assert fleet.shell("p0").load().speed > 3.0
        await asyncio.sleep(100.0)
        assert fleet.shell("d0").load().speed == pytest.approx(1.0, abs=0.01), "it fades while nothing runs"
