"""Joining, losing and regaining the control plane, role orders, and the end of a life."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from roles_harness import BLOCK, Control, Fleet, Options, prompt, virtual

from nodes.engines.emulated import EmulatedEngine, continuation
from nodes.engines.engine import StepResult
from transfer.terms import Role
from transfer.wire.endpoint import PeerEvent
from transfer.wire.messages import (
    CacheEvents,
    Goodbye,
    Hello,
    NotWelcome,
    Reserved,
    RoleOrder,
    RoleReport,
)


def order(fleet: Fleet, name: str, role: Role, *, epoch: int | None = None, plan: str = "plan") -> None:
    known = fleet.control.hellos[name].epoch
    fleet.control.send(name, RoleOrder(plan_id=plan, epoch=known if epoch is None else epoch, role=role))


async def new_control(fleet: Fleet, epoch: int) -> Control:
    fleet.network.crash("control")
    fleet.control = Control(fleet.network, epoch)
    await fleet.control.endpoint.start()
    await fleet.control.until(lambda: set(fleet.actors) <= set(fleet.control.beats), "everybody rejoined")
    return fleet.control


@virtual
async def test_heartbeats_tell_state_load_and_holdings() -> None:
    async with Fleet("p0", "d0", "k0") as fleet:
        control = fleet.control
        hello = control.hellos["d0"]
        assert (hello.role, hello.engine, hello.num_blocks, hello.token_budget) == (Role.DECODE, "emulated", 256, 64)
        assert (control.hellos["k0"].model, control.hellos["k0"].engine) == (None, "dram")
        control.reserve("d0", "r", prompt(10 * BLOCK))
        await control.expect(Reserved, "r")
        await asyncio.sleep(1.1)
        beat = control.beats["d0"]
        assert beat.state == "ready"
        assert [(h.request_id, h.generation, h.num_blocks) for h in beat.holdings] == [("r", 1, 10)]
        assert (beat.load.num_waiting, beat.load.free_blocks) == (1, 246)
        control.abort("d0", "r")
        await control.hand_off("s", prompt(60), max_tokens=60)
        await control.text("s", prompt(60), 60)
        await asyncio.sleep(1.1)
        load = control.beats["d0"].load
        assert load.speed == pytest.approx(1.0)
        assert load.step_s > 0.005


@virtual
async def test_a_slow_machine_reports_its_speed() -> None:
    async with Fleet("p0", "d0", options=Options(speed=0.5)) as fleet:
        await fleet.control.hand_off("r", prompt(60), max_tokens=60)
        await fleet.control.text("r", prompt(60), 60)
        assert 1.9 < fleet.shell("d0").load().speed <= 2.01


@virtual
async def test_what_lies_between_steps_counts_in_the_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its requests wait for the whole of it, whatever part the engine says is its own."""
    step = EmulatedEngine.step

    async def told_half(self: EmulatedEngine, *args: Any) -> StepResult:
        result = await step(self, *args)
        return replace(result, duration_s=result.duration_s / 2)

    monkeypatch.setattr(EmulatedEngine, "step", told_half)
    async with Fleet("p0", "d0") as fleet:
        await fleet.control.hand_off("r", prompt(60), max_tokens=60)
        await fleet.control.text("r", prompt(60), 60)
        assert fleet.shell("d0").load().speed == pytest.approx(1.0, abs=0.01)


@virtual
async def test_another_control_plane_means_a_clean_start_and_a_full_directory() -> None:
    async with Fleet("p0", "d0", "k0") as fleet:
        await fleet.control.hand_off("r", prompt(100), max_tokens=500)
        await fleet.control.until(lambda: len(fleet.control.output.get("r", ())) > 3, "tokens")
        control = await new_control(fleet, epoch=2)
        await fleet.at_rest(within=1.0)
        assert control.hellos["d0"].holdings[0].request_id == "r", "it says what it still holds, then drops it"
        await control.until(
            lambda: all(any(e.snapshot for e in control.of(CacheEvents, instance=n)) for n in ("p0", "d0", "k0")),
            "snapshots",
        )
        known = {h for e in control.of(CacheEvents, instance="p0") for h in e.stored}
        assert known == set(fleet.shell("p0").core.cached_hashes()) != set()
        await control.hand_off("r", prompt(100))  # the same id, and generations count from 1 again
        await control.text("r", prompt(100), 8)


@virtual
async def test_the_same_control_plane_back_in_time_finds_the_work_going_on() -> None:
    async with Fleet("p0", "d0") as fleet:
        control = fleet.control
        await control.hand_off("r", prompt(50), max_tokens=2000)
        await control.until(lambda: len(control.output.get("r", ())) > 3, "tokens")
        fleet.network.partition("control", "d0")
        await asyncio.sleep(5.0)
        assert ("d0", PeerEvent.LOST) in control.events
        fleet.network.heal()
        await control.until(lambda: len(control.of(Hello, instance="d0")) > 1, "another Hello")
        assert control.of(Hello, instance="d0")[-1].holdings[0].request_id == "r"
        assert len(fleet.shell("d0").core.holdings()) == 1
        control.abort("d0", "r")


@virtual
async def test_without_a_control_plane_work_ends_after_the_grace() -> None:
    async with Fleet("p0", "d0", options=Options(grace_s=6.0, num_blocks=4096)) as fleet:
        control = fleet.control
        await control.hand_off("r", prompt(50), max_tokens=20000)
        await control.until(lambda: len(control.output.get("r", ())) > 3, "tokens")
        fleet.network.partition("control", "d0")
        await asyncio.sleep(3.0 + 5.5)
        assert len(fleet.shell("d0").core.holdings()) == 1
        await asyncio.sleep(1.0)
        assert fleet.shell("d0").core.holdings() == ()
        fleet.network.heal()
        await asyncio.sleep(1.0)


@virtual
async def test_a_role_switch_is_refused_unless_idle_and_verified_after() -> None:
    tokens = prompt(60)
    async with Fleet("p0", "d0", "d1", "k0") as fleet:
        control = fleet.control
        await control.hand_off("r", tokens, max_tokens=30)
        order(fleet, "d0", Role.PREFILL)
        report = await control.expect(RoleReport, instance="d0")
        assert (report.ok, report.role) == (False, Role.DECODE)
        assert "not idle: it holds KV for 1 requests" in report.detail
        await control.text("r", tokens, 30)

        assert fleet.shell("d0").load().step_s == pytest.approx(0.008, rel=0.1)
        order(fleet, "d0", Role.PREFILL, epoch=7)
        assert "restarted" in (await control.expect(RoleReport, instance="d0", count=2)).detail
        order(fleet, "d0", Role.PREFILL)
        report = await control.expect(RoleReport, instance="d0", count=3)
        assert (report.ok, report.role, report.detail) == (True, Role.PREFILL, "")
        await asyncio.sleep(0.1)
        assert (control.beats["d0"].role, control.beats["d0"].load.step_s) == (Role.PREFILL, 0.0)
        order(fleet, "d0", Role.PREFILL)
        assert (await control.expect(RoleReport, instance="d0", count=4)).ok
        await control.hand_off("s", tokens, "d0", "d1")
        await control.text("s", tokens, 8)
        assert control.of(CacheEvents, instance="d0"), "the prefix cache outlived the switch"
        assert fleet.shell("d0").core.cached_hashes()

        order(fleet, "k0", Role.DECODE)
        assert "only memory" in (await control.expect(RoleReport, instance="k0")).detail


@virtual
async def test_a_lost_engine_ends_the_life_and_another_begins() -> None:
    tokens = prompt(60)
    async with Fleet("p0", "d0") as fleet:
        control = fleet.control
        await control.hand_off("r", tokens, max_tokens=200)
        await control.until(lambda: len(control.output.get("r", ())) > 3, "tokens")
        epoch = control.hellos["d0"].epoch
        block = fleet.shell("d0").leg("r", 1).blocks[0]
        fleet.shell("d0").context.engine.arena.views(0, block, 1)[0][0] ^= 0xFF
        goodbye = await control.expect(Goodbye, instance="d0")
        assert (goodbye.epoch, "EngineFailed" in goodbye.reason) == (epoch, True)
        await control.until(lambda: control.hellos["d0"].epoch != epoch, "another life")
        delivered = control.output["r"]
        assert delivered == continuation(tokens, len(delivered)), "no token was drawn from wrong KV"
        await control.until(lambda: control.beats["d0"].epoch != epoch, "its heartbeat")
        await control.hand_off("s", tokens)
        await control.text("s", tokens, 8)


@virtual
async def test_leaving_says_goodbye_and_gives_everything_back() -> None:
    async with Fleet("p0", "d0") as fleet:
        control = fleet.control
        await control.hand_off("r", prompt(50), max_tokens=5000)
        await control.until(lambda: len(control.output.get("r", ())) > 3, "tokens")
        shell = fleet.shell("d0")
        await fleet.stop("d0")
        await control.expect(Goodbye, instance="d0")
        assert shell.core.holdings() == ()
        assert shell.core.check() == 0
        await control.until(lambda: ("d0", PeerEvent.LOST) in control.events, "its end")


@virtual
async def test_a_refusal_is_told_to_the_agent() -> None:
    async with Fleet("p0") as fleet:
        fleet.control.send("p0", NotWelcome(reason="another model is served here"))
        await asyncio.sleep(0.1)
        assert fleet.given_up == [("p0: another model is served here", 3)]
