"""Prefill, handoff, decode over real instances in virtual time: the text is right and no block stays behind."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from roles_harness import BLOCK, LEASE_S, Fleet, Options, prompt, serve_thirty_two, virtual
from roles_served import ServedFleet

from nodes.core.legs import FENCE_S
from nodes.engines.emulated import continuation
from transfer.errors import Refused
from transfer.kv.port import KvKind, KvOffer, KvTrailer
from transfer.terms import pack_tokens
from transfer.wire.inproc import Faults
from transfer.wire.messages import (
    KvReceived,
    Prefill,
    PrefillDone,
    PrefillFailed,
    PrefillStarted,
    Released,
    RequestLost,
    Reserved,
    ReserveRefused,
    StepOutput,
)

EITHER_ENGINE = pytest.mark.parametrize("kind", [Fleet, ServedFleet])
"""One that is given steps, and one that batches by itself."""


@pytest.mark.parametrize("length", [1, 2, BLOCK, BLOCK + 1, 4 * BLOCK, 4 * BLOCK + 1, 150])
@virtual
async def test_a_handoff_gives_the_reference_text(length: int) -> None:
    tokens = prompt(length)
    async with Fleet("p0", "d0") as fleet:
        await fleet.control.hand_off("r", tokens, max_tokens=9)
        await fleet.control.text("r", tokens, 9)
        done = await fleet.control.expect(PrefillDone, "r")
        assert done.computed_tokens + done.cached_tokens + done.fetched_tokens == length - 1
        assert (
            done.transfer_bytes
            == (length - 1 + -(length - 1) % BLOCK) * fleet.shell("p0").context.engine.layout.token_bytes
        )
        assert len(fleet.control.of(PrefillStarted, "r")) == len(fleet.control.of(KvReceived, "r")) == 1
        assert fleet.control.finished["r"] == "length"


@EITHER_ENGINE
@virtual
async def test_what_decode_has_is_not_sent_and_what_prefill_has_is_not_computed(kind: type[Fleet]) -> None:
    tokens = prompt(41)
    async with kind("p0", "d0") as fleet:
        await fleet.control.hand_off("a", tokens)
        await fleet.control.text("a", tokens, 8)
        first = await fleet.control.expect(PrefillDone, "a")
        longer = tokens + prompt(20, seed=9)
        await fleet.control.hand_off("b", longer)
        await fleet.control.text("b", longer, 8)
        second = await fleet.control.expect(PrefillDone, "b")
        assert fleet.control.of(Reserved, "b")[0].have_tokens == 40
        assert (second.cached_tokens, second.computed_tokens) == (40, 20)
        assert second.transfer_bytes * 2 == first.transfer_bytes


@virtual
async def test_thirty_two_at_once_are_all_right() -> None:
    async with Fleet("p0", "p1", "d0", "d1") as fleet:
        await serve_thirty_two(fleet)
        steps = fleet.control.of(StepOutput)
        assert max(len(step.items) for step in steps) > 4, "one message a step carries the whole batch"


@virtual
async def test_a_link_slower_than_compute_is_waited_for() -> None:
    async with Fleet("p0", "d0") as fleet:
        fleet.shell("p0").context.engine.handoff_s = lambda num_tokens: num_tokens * 0.001
        await fleet.control.hand_off("r", prompt(401), max_tokens=1)
        done = await fleet.control.expect(PrefillDone, "r")
        assert done.prefill_s + done.exposed_s == pytest.approx(0.4, abs=0.02)


@virtual
async def test_blocks_that_change_hands_are_marked_for_slow_readers() -> None:
    async with Fleet("p0", "d0") as fleet:
        await fleet.control.hand_off("r", prompt(41), max_tokens=2)
        await fleet.control.text("r", prompt(41), 2)
        for name, num_blocks in (("p0", 10), ("d0", 11)):
            arena = fleet.shell(name).context.engine.arena
            assert sum(arena.generation(block) for block in range(256)) == num_blocks


@virtual
async def test_kv_that_was_not_reserved_for_is_refused() -> None:
    tokens = prompt(41)
    async with Fleet("p0", "d0") as fleet:
        control, role = fleet.control, fleet.actors["d0"].role
        assert role is not None
        await control.hand_off("warm", tokens, max_tokens=1)
        await control.text("warm", tokens, 1)
        control.reserve("d0", "r", tokens + prompt(40))
        assert (await control.expect(Reserved, "r")).have_tokens == 40
        control.prefill("p0", "r", tokens + prompt(40), "d0", have_tokens=0)
        assert "needed from block 10, offered from 0" in (await control.expect(PrefillFailed, "r")).reason

        offer = KvOffer(
            kind=KvKind.HANDOFF, request_id="r", generation=1, source="p0", source_epoch=1,
            target_epoch=control.hellos["d0"].epoch, fingerprint=fleet.shell("d0").context.root(""), first_block=10,
            num_blocks=10,
        )  # fmt: skip
        other = msgspec.structs.replace(offer, source="p1")
        for wrong, sentence in (
            ({"kind": KvKind.STORE}, "not a KV pool"),
            ({"target_epoch": 7}, "restarted"),
            ({"fingerprint": bytes(32)}, "another model, layout or tenant"),
            ({"num_blocks": 11}, "up to block 20, the offer ends at 21"),
            ({"generation": 2}, "no reservation for generation 2"),
        ):
            with pytest.raises(Refused, match=sentence):
                role.kv_offered(msgspec.structs.replace(offer, **wrong))
        assert len(role.kv_offered(offer)) == 10
        with pytest.raises(Refused, match="arriving already, from p0"):
            role.kv_offered(other)
        with pytest.raises(Refused, match="does not wait for this KV"):
            role.kv_arrived(other, KvTrailer(num_tokens=80))
        with pytest.raises(Refused, match="KV of 79 tokens arrived"):
            role.kv_arrived(offer, KvTrailer(num_tokens=79))
        role.kv_failed(offer, "the link broke")
        assert len(role.kv_offered(other)) == 10, "after a failure another try is welcome"
        control.abort("d0", "r")


@virtual
async def test_a_short_prompt_and_a_mixed_instance_compute_themselves() -> None:
    tokens = prompt(23)
    async with Fleet("d0", "m0", "m1") as fleet:
        for name, instance in (("a", "d0"), ("b", "m0")):
            fleet.control.reserve(instance, name, tokens, remote=False)
            await fleet.control.text(name, tokens, 8)
            items = [item for m in fleet.control.of(StepOutput) for item in m.items if item.request_id == name]
            assert [item.cached_tokens for item in items][:2] == [0, None]
        await fleet.control.hand_off("c", tokens, "m0", "m1")
        await fleet.control.text("c", tokens, 8)
        assert (await fleet.control.expect(PrefillDone, "c")).cached_tokens == 20


@virtual
async def test_decode_refuses_at_once_and_says_whether_to_try_again() -> None:
    async with Fleet("p0", "d0", options=Options(num_blocks=16)) as fleet:
        fleet.control.reserve("d0", "big", prompt(16 * BLOCK + 1))
        refused = await fleet.control.expect(ReserveRefused, "big")
        assert not refused.retry
        fleet.control.reserve("d0", "a", prompt(10 * BLOCK))
        await fleet.control.expect(Reserved, "a")
        fleet.control.reserve("d0", "b", prompt(10 * BLOCK, seed=1))
        refused = await fleet.control.expect(ReserveRefused, "b")
        assert refused.retry
        assert refused.free_blocks == 6
        fleet.control.reserve("p0", "c", prompt(9))
        assert "prefill instance" in (await fleet.control.expect(ReserveRefused, "c")).reason
        fleet.control.prefill("d0", "d", prompt(9), "d0")
        assert "decode instance" in (await fleet.control.expect(PrefillFailed, "d")).reason
        fleet.control.abort("d0", "a")
        assert (await fleet.control.expect(Released, "a")).num_blocks == 10


@pytest.mark.parametrize("tenth_ms", [*range(0, 40, 4), *range(40, 900, 37)])
@virtual
async def test_an_abort_at_any_moment_returns_every_block(tenth_ms: int) -> None:
    """Queue, admission, grant, fetch, compute, commit, decode: the abort meets all of them."""
    tokens = prompt(170)
    async with Fleet("p0", "d0", "k0") as fleet:
        control = fleet.control
        await control.hand_off("warm", tokens[:60], max_tokens=1)
        await control.until(lambda: fleet.pool("k0").store.cached_blocks >= 14, "write-through")
        fleet.shell("p0").drop_all("")
        control.reserve("d0", "r", tokens, max_tokens=20)
        control.prefill("p0", "r", tokens, "d0", source="k0", source_blocks=14)
        await asyncio.sleep(tenth_ms / 10_000)
        control.abort("p0", "r")
        control.abort("d0", "r")
        for name in ("p0", "d0"):
            await control.expect(Released, "r", name, within=1.0)
        await fleet.at_rest(within=1.0)
        assert not control.of(PrefillFailed, "r") or control.of(PrefillFailed, "r")[0].reason
        assert control.output.get("r", []) == continuation(tokens, 20)[: len(control.output.get("r", []))]
        num_reserved = len(control.of(Reserved, "r"))
        control.reserve("d0", "r", tokens, remote=False)  # a late repetition of what was aborted
        await asyncio.sleep(0.5)
        assert len(control.of(Reserved, "r")) == num_reserved


@virtual
async def test_a_reservation_without_kv_ends_with_its_lease() -> None:
    async with Fleet("p0", "d0") as fleet:
        fleet.control.reserve("d0", "r", prompt(30))
        await fleet.control.expect(Reserved, "r")
        start = asyncio.get_running_loop().time()
        lost = await fleet.control.expect(RequestLost, "r")
        assert asyncio.get_running_loop().time() - start == pytest.approx(LEASE_S, abs=0.3)
        assert "lease over" in lost.reason
        fleet.control.prefill("p0", "r", prompt(30), "d0")
        assert "no reservation" in (await fleet.control.expect(PrefillFailed, "r")).reason


@virtual
async def test_a_long_prefill_keeps_its_reservation_alive() -> None:
    tokens = prompt(900)
    async with Fleet("p0", "d0", options=Options(num_blocks=512, token_budget=32, speed=0.03)) as fleet:
        start = asyncio.get_running_loop().time()
        await fleet.control.hand_off("r", tokens, max_tokens=2)
        await fleet.control.text("r", tokens, 2)
        assert (await fleet.control.expect(PrefillDone, "r")).prefill_s > 1.5 * LEASE_S
        assert asyncio.get_running_loop().time() - start > 1.5 * LEASE_S


@virtual
async def test_an_older_generation_is_fenced_everywhere() -> None:
    tokens = prompt(30)
    async with Fleet("p0", "p1", "d0") as fleet:
        control = fleet.control
        control.reserve("d0", "r", tokens, generation=2)
        await control.expect(Reserved, "r")
        control.prefill("p0", "r", tokens, "d0", generation=1)
        assert "generation 1" in (await control.expect(PrefillFailed, "r")).reason
        control.reserve("d0", "r", tokens, generation=1)
        control.prefill("p1", "r", tokens, "d0", generation=2)
        await control.text("r", tokens, 8)
        assert len(control.of(Reserved, "r")) == 1


@virtual
async def test_what_ended_is_remembered_for_a_while_and_not_longer() -> None:
    tokens = prompt(30)
    async with Fleet("p0", "d0") as fleet:
        control, shell = fleet.control, fleet.shell("d0")
        for index in range(20):
            await control.hand_off(f"r{index}", tokens)
            await control.text(f"r{index}", tokens, 8)
        await asyncio.sleep(FENCE_S - 20.0)
        control.reserve("d0", "r0", tokens)
        await asyncio.sleep(5.0)
        assert len(control.of(Reserved, "r0", "d0")) == 1, "it began again"
        assert len(shell.legs.fenced) == 20
        await asyncio.sleep(20.0)
        await control.hand_off("last", tokens)
        await control.text("last", tokens, 8)
        await asyncio.sleep(1.0)
        assert shell.legs.fenced == fleet.shell("p0").legs.fenced == ["last"]


@virtual
async def test_a_new_placement_on_the_same_instances_waits_for_the_old_one_to_let_go() -> None:
    tokens = prompt(150)
    async with Fleet("p0", "d0") as fleet:
        control = fleet.control
        await control.hand_off("r", tokens)
        await asyncio.sleep(0.012)  # prefill is computing
        await control.hand_off("r", tokens, generation=2)
        await control.text("r", tokens, 8)
        items = [item for m in control.of(StepOutput) for item in m.items]
        assert {item.generation for item in items} == {2}
        assert [done.generation for done in control.of(PrefillDone, "r")] == [2]


@virtual
async def test_duplicated_messages_change_nothing() -> None:
    async with Fleet("p0", "d0", faults=Faults(duplicate=1.0, max_delay_s=0.004)) as fleet:
        prompts = {f"r{i}": prompt(20 + i, seed=i) for i in range(12)}
        for name, tokens in prompts.items():
            await fleet.control.hand_off(name, tokens)
        for name, tokens in prompts.items():
            await fleet.control.text(name, tokens, 8)
        await asyncio.sleep(1.0)
        items = [(i.request_id, i.index) for m in fleet.control.of(StepOutput) for i in m.items]
        assert len(items) == 2 * len(set(items)), "every output twice from the network, none twice from the node"


@pytest.mark.parametrize("ms", [1, 8, 14, 20, 30])
@virtual
async def test_a_prefill_that_dies_is_replaced_and_the_text_is_right(ms: int) -> None:
    tokens = prompt(170)
    async with Fleet("p0", "p1", "d0") as fleet:
        control = fleet.control
        await control.hand_off("r", tokens)
        await asyncio.sleep(ms / 1000)
        fleet.crash("p0")
        control.abort("d0", "r")
        await control.hand_off("r", tokens, "p1", generation=2)
        await control.until(lambda: len(control.output.get("r", ())) >= 8, "the answer")
        assert control.output["r"] == continuation(tokens, 8)


@virtual
async def test_a_decode_that_dies_frees_its_prefill_within_a_second() -> None:
    tokens = prompt(170)
    async with Fleet("p0", "d0", "d1") as fleet:
        control = fleet.control
        await control.hand_off("r", tokens)
        await asyncio.sleep(0.010)
        fleet.crash("d0")
        await control.expect(PrefillFailed, "r", within=15.0)
        await control.hand_off("r", tokens, "p0", "d1", generation=2)
        await control.text("r", tokens, 8)
        assert control.of(PrefillDone, "r")[0].cached_tokens > 0


@virtual
async def test_a_resume_continues_the_text() -> None:
    tokens = prompt(33)
    sofar = continuation(tokens, 5)
    async with Fleet("p0", "d0") as fleet:
        control = fleet.control
        control.output["r"] = list(sofar)
        await control.hand_off("r", tokens + sofar, generation=4, max_tokens=12, num_output=5)
        await control.text("r", tokens, 12)


@virtual
async def test_preemption_does_not_change_the_text() -> None:
    async with Fleet("p0", "d0", options=Options(num_blocks=40)) as fleet:
        control = fleet.control
        prompts = {f"r{i}": prompt(5 * BLOCK, seed=i) for i in range(6)}
        for name, tokens in prompts.items():
            await control.hand_off(name, tokens, max_tokens=30)
        for name, tokens in prompts.items():
            await control.text(name, tokens, 30)
        assert fleet.shell("d0").load().num_preemptions > 0, "the test is to force some"


@virtual
async def test_nonsense_on_the_wire_is_refused_with_a_sentence() -> None:
    async with Fleet("p0", "d0") as fleet:
        message = Prefill(
            request_id="r", generation=1, tokens=pack_tokens([1, 2])[:-1], target=fleet.control.peer("d0"),
            have_tokens=0, lease_s=LEASE_S,
        )  # fmt: skip
        fleet.control.send("p0", message)
        assert "multiple of 4" in (await fleet.control.expect(PrefillFailed, "r")).reason
