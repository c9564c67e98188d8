"""Engines that batch by themselves, over real instances in virtual time: KV goes through arenas, the text is right."""

from __future__ import annotations

import asyncio

import pytest
from roles_harness import BLOCK, LEASE_S, Options, prompt, serve_thirty_two, virtual
from roles_served import Mixed, ServedFleet

from nodes.engines.emulated import continuation
from transfer.terms import Role
from transfer.wire.messages import (
    KvReceived,
    PrefillDone,
    PrefillStarted,
    Released,
    RequestLost,
    Reserved,
    ReserveRefused,
    RoleOrder,
    RoleReport,
    StepOutput,
)


@pytest.mark.parametrize("length", [1, 2, BLOCK, BLOCK + 1, 4 * BLOCK, 4 * BLOCK + 1, 150])
@virtual
async def test_a_handoff_gives_the_reference_text(length: int) -> None:
    tokens = prompt(length)
    async with ServedFleet("p0", "d0") as fleet:
        await fleet.control.hand_off("r", tokens, max_tokens=9)
        await fleet.control.text("r", tokens, 9)
        done = await fleet.control.expect(PrefillDone, "r")
        assert (done.computed_tokens, done.cached_tokens, done.fetched_tokens) == (length - 1, 0, 0)
        layout = fleet.engine("p0").layout
        assert done.transfer_bytes == layout.num_blocks(length - 1) * layout.block_bytes
        assert len(fleet.control.of(PrefillStarted, "r")) == len(fleet.control.of(KvReceived, "r")) == 1
        assert fleet.control.finished["r"] == "length"
        loaded = [job.num_loaded for job in fleet.engine("d0").jobs]
        assert loaded == [length - 1]


@virtual
async def test_wrong_kv_gives_wrong_text() -> None:
    """Or the other tests would show nothing."""
    tokens = prompt(41)
    async with ServedFleet("p0", "d0") as fleet:
        await fleet.control.hand_off("a", tokens, max_tokens=1)
        await fleet.control.text("a", tokens, 1)
        held = fleet.shell("d0").core
        fleet.engine("d0").arena.views(3, held._pool.find(held.cached_hashes())[2], 1)[0][0] ^= 1
        fleet.control.reserve("d0", "b", tokens, remote=False, max_tokens=4)
        await fleet.control.until(lambda: "b" in fleet.control.finished, "the end of b")
        assert fleet.control.output["b"] != continuation(tokens, 4)


@pytest.mark.parametrize(("prefill", "decode"), [("p0", "d1"), ("p1", "d0")])
@virtual
async def test_either_kind_of_engine_hands_off_to_the_other(prefill: str, decode: str) -> None:
    tokens = prompt(150)
    async with Mixed("p0", "d0", "p1", "d1") as fleet:
        for name, prompt_tokens in (("a", tokens), ("b", [*tokens, *prompt(30, seed=3)])):
            await fleet.control.hand_off(name, prompt_tokens, prefill, decode)
            await fleet.control.text(name, prompt_tokens, 8)
        assert (await fleet.control.expect(PrefillDone, "b")).cached_tokens == 148


@virtual
async def test_layers_leave_as_they_are_saved() -> None:
    tokens = prompt(2001)
    async with ServedFleet("p0", "d0", options=Options(num_blocks=1024)) as fleet:
        fleet.engine("p0").slow = 4.0
        await fleet.control.hand_off("r", tokens, max_tokens=1)
        done = await fleet.control.expect(PrefillDone, "r")
        link_s = done.transfer_bytes / 1e7
        assert done.prefill_s > link_s
        assert done.exposed_s < 0.2 * link_s


@virtual
async def test_thirty_two_at_once_are_all_right() -> None:
    async with ServedFleet("p0", "p1", "d0", "d1", options=Options(num_blocks=1024)) as fleet:
        await serve_thirty_two(fleet)


@virtual
async def test_what_comes_together_is_told_in_one_message() -> None:
    async with ServedFleet("d0") as fleet:
        for i in range(8):
            fleet.control.reserve("d0", f"r{i}", prompt(5 + 9 * i, seed=i), remote=False, max_tokens=40)
        for i in range(8):
            await fleet.control.text(f"r{i}", prompt(5 + 9 * i, seed=i), 40)
        steps = [step for step in fleet.control.of(StepOutput) if len(step.items) == 8]
        assert len(steps) > 20
        step_s = fleet.engine("d0").latency.decode_step_s(8, 8 * 50)
        assert steps[-1].step_s == pytest.approx(step_s, rel=0.1)
        assert steps[-1].num_prefill_tokens == 0


@virtual
async def test_a_local_prompt_is_computed_and_cached() -> None:
    tokens = prompt(43)
    async with ServedFleet("d0", "m0", "m1") as fleet:
        control = fleet.control
        for name, instance in (("a", "d0"), ("b", "m0"), ("c", "m0")):
            control.reserve(instance, name, tokens, remote=False)
            await control.text(name, tokens, 8)
        cached = {item.request_id: item.cached_tokens for step in control.of(StepOutput) for item in step.items
                  if item.index == 0}  # fmt: skip
        assert cached == {"a": 0, "b": 0, "c": 40}
        assert sum(step.num_prefill_tokens for step in control.of(StepOutput, instance="m0")) == 43 + 3
        await control.hand_off("d", tokens, "m0", "m1")
        await control.text("d", tokens, 8)
        assert (await control.expect(PrefillDone, "d")).cached_tokens == 40


@virtual
async def test_prefixes_go_through_to_a_pool_and_come_back_from_it() -> None:
    tokens = prompt(257)
    async with ServedFleet("p0", "p1", "d0", "d1", "k0", options=Options(num_blocks=1024, pool_blocks=256)) as fleet:
        await fleet.fill_pool(tokens)
        await fleet.control.hand_off("r", tokens, "p1", "d1", source="k0", source_blocks=64)
        await fleet.control.text("r", tokens, 8)
        done = await fleet.control.expect(PrefillDone, "r")
        assert (done.fetched_tokens, done.computed_tokens) == (256, 0)
        assert done.fetch_exposed_s == pytest.approx(done.fetch_s), "nothing is computed beside it"
    async with ServedFleet("p0", "d0", "d1", "k0", options=Options(num_blocks=1024, pool_blocks=256)) as fleet:
        await fleet.fill_pool(tokens)
        longer = tokens + prompt(30, seed=4)
        fleet.control.reserve("d1", "l", longer, remote=False, source="k0", source_blocks=64)
        await fleet.control.text("l", longer, 8)
        done = await fleet.control.expect(PrefillDone, "l")
        assert (done.fetched_tokens, done.computed_tokens) == (256, 31)
        assert [job.num_loaded for job in fleet.engine("d1").jobs] == [256]


@pytest.mark.parametrize("tenth_ms", [*range(0, 60, 5), *range(60, 600, 45)])
@virtual
async def test_an_abort_at_any_moment_returns_every_block(tenth_ms: int) -> None:
    """Queue, admission, grant, fetch, compute, commit, decode: the abort meets all of them."""
    tokens = prompt(170)
    async with ServedFleet("p0", "d0", "k0") as fleet:
        control = fleet.control
        await control.hand_off("warm", tokens[:60], max_tokens=1)
        await control.until(lambda: fleet.pool("k0").store.cached_blocks >= 14, "write-through")
        control.reserve("d0", "r", tokens, max_tokens=20)
        control.prefill("p0", "r", tokens, "d0", source="k0", source_blocks=14)
        control.reserve("d0", "l", tokens[40:], remote=False, max_tokens=20)
        await asyncio.sleep(tenth_ms / 10_000)
        for name, request in (("p0", "r"), ("d0", "r"), ("d0", "l")):
            control.abort(name, request)
            control.abort(name, request)
        for name, request in (("p0", "r"), ("d0", "r"), ("d0", "l")):
            await control.expect(Released, request, name, within=1.0)
        await fleet.at_rest(within=1.0)
        for request, whole in (("r", tokens), ("l", tokens[40:])):
            output = control.output.get(request, [])
            assert output == continuation(whole, 20)[: len(output)]


@virtual
async def test_a_request_that_has_its_last_token_is_not_disturbed_any_more() -> None:
    async with ServedFleet("d0") as fleet:
        control, engine = fleet.control, fleet.engine("d0")
        engine.tidy_s = 0.5
        control.reserve("d0", "r", prompt(30), remote=False)
        await control.text("r", prompt(30), 8)
        control.abort("d0", "r")
        await asyncio.sleep(0.4)
        assert not control.of(Released, "r"), "the engine still has its blocks"
        assert (await control.expect(Released, "r", within=0.2)).num_blocks == 8
        assert engine.num_disturbed == 0


@virtual
async def test_a_storm_of_aborts_leaves_nothing_behind() -> None:
    async with ServedFleet("p0", "d0", "m0", options=Options(num_blocks=96)) as fleet:
        control = fleet.control
        for i in range(60):
            tokens = prompt(20 + i % 70, seed=i % 7)
            control.reserve("d0", f"r{i}", tokens, max_tokens=30, remote=i % 3 != 0)
            control.prefill("p0", f"r{i}", tokens, "d0")
            control.reserve("m0", f"m{i}", tokens, max_tokens=30, remote=False)
            await asyncio.sleep(0.002)
            for name, request in (("p0", f"r{i - 3}"), ("d0", f"r{i - 3}"), ("m0", f"m{i - 5}")):
                control.abort(name, request)
        for i in range(60):
            for name, request in (("p0", f"r{i}"), ("d0", f"r{i}"), ("m0", f"m{i}")):
                control.abort(name, request)
        await fleet.at_rest(within=5.0)
        for name in ("p0", "d0", "m0"):
            assert fleet.shell(name).load().free_blocks == 96


@virtual
async def test_a_repeated_order_changes_nothing_and_a_newer_one_follows_the_older() -> None:
    tokens = prompt(90)
    async with ServedFleet("p0", "d0") as fleet:
        control = fleet.control
        await control.hand_off("r", tokens, max_tokens=300)
        await control.until(lambda: len(control.output.get("r", ())) > 3, "tokens")
        control.reserve("d0", "r", tokens, max_tokens=300)
        control.prefill("p0", "r", tokens, "d0")
        await asyncio.sleep(0.05)
        assert len(fleet.engine("d0").jobs) == len(fleet.engine("p0").jobs) == 1
        delivered = list(control.output["r"])
        resumed = tokens + delivered
        control.reserve("d0", "r", resumed, generation=2, num_output=len(delivered), max_tokens=60, remote=False)
        control.reserve("d0", "r", tokens, generation=1, max_tokens=300, remote=False)
        await control.until(lambda: "r" in control.finished, "the end of r")
        assert control.output["r"] == continuation(tokens, 60)
        assert [job.generation for job in fleet.engine("d0").jobs] == [1, 2]
        assert fleet.engine("d0").jobs[1].num_output == len(delivered)


@virtual
async def test_admission_is_bounded_by_the_engines_memory() -> None:
    class Small(ServedFleet):
        capacity_blocks = 30

    async with Small("d0") as fleet:
        control = fleet.control
        control.reserve("d0", "a", prompt(60), max_tokens=20, remote=False)
        await control.expect(Reserved, "a")
        control.reserve("d0", "b", prompt(60, seed=1), max_tokens=20, remote=False)
        refused = await control.expect(ReserveRefused, "b")
        assert (refused.retry, refused.free_blocks) == (True, 10)
        control.reserve("d0", "c", prompt(120), remote=False)
        assert not (await control.expect(ReserveRefused, "c")).retry
        await control.text("a", prompt(60), 20)
        assert (fleet.shell("d0").load().num_blocks, fleet.shell("d0").load().free_blocks) == (30, 30)


@virtual
async def test_a_reservation_without_kv_ends_with_its_lease() -> None:
    async with ServedFleet("d0") as fleet:
        fleet.control.reserve("d0", "r", prompt(30))
        await fleet.control.expect(Reserved, "r")
        await asyncio.sleep(LEASE_S + 0.5)
        assert "no KV arrived" in (await fleet.control.expect(RequestLost, "r")).reason


@virtual
async def test_a_role_switch_keeps_engine_and_cache() -> None:
    tokens = prompt(60)
    async with ServedFleet("p0", "d0", "d1") as fleet:
        control = fleet.control
        await control.hand_off("a", tokens)
        await control.text("a", tokens, 8)
        control.send("d0", RoleOrder(plan_id="plan", epoch=control.hellos["d0"].epoch, role=Role.PREFILL))
        assert (await control.expect(RoleReport, instance="d0")).ok
        await control.hand_off("b", tokens, "d0", "d1")
        await control.text("b", tokens, 8)
        assert (await control.expect(PrefillDone, "b", "d0")).cached_tokens == 56
