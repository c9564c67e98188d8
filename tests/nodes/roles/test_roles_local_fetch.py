"""A prompt that is computed where it decodes fetches its front from a pool, as on a prefill instance."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from roles_harness import BLOCK, Fleet, Options, prompt, virtual
from roles_layered import LAYERS, LayeredFleet, record_events
from test_roles_overlap import FETCHED_BYTES, OPTIONS, PREFIX, TAIL, TURN, break_fetches, count, tail_s

from nodes.core.events import Arriving, Fetched, StepUndone
from transfer.wire.messages import PrefillDone, Released, Reserved, ReserveRefused

BLOCKS = len(PREFIX) // BLOCK


def ask(fleet: Fleet, request: str = "r", tokens: list[int] = TURN, on: str = "m0", **more: Any) -> None:
    source: dict[str, Any] = {"source": "k0", "source_blocks": BLOCKS}
    fleet.control.reserve(on, request, tokens, remote=False, **(source | more))


@pytest.mark.parametrize("on", ["m0", "d1"])
@virtual
async def test_the_front_comes_from_the_pool_while_the_rest_is_computed(on: str) -> None:
    async with LayeredFleet("p0", "m0", "d0", "d1", "k0", options=OPTIONS) as fleet:
        await fleet.fill_pool([*PREFIX, 1])
        other = [0 if token else 1 for token in PREFIX] + TAIL
        fleet.kv.bytes_per_s = FETCHED_BYTES / (0.6 * tail_s(fleet, on))
        events = record_events(fleet, on)
        ask(fleet, on=on)
        await fleet.control.text("r", TURN, 8)
        done = await fleet.control.expect(PrefillDone, "r", on)
        assert (done.cached_tokens, done.fetched_tokens, done.computed_tokens) == (0, 256, 513)
        assert (done.transfer_s, done.transfer_bytes, done.exposed_s) == (0.0, 0, 0.0)
        assert 0.0 < done.fetch_exposed_s < done.fetch_s
        assert (count(events, Arriving), count(events, Fetched)) == (1, 1)
        ask(fleet, "without", other, on, source=None)
        await fleet.control.text("without", other, 8)
        assert fleet.control.of(PrefillDone, "without") == [], "the first token says what there is to say"


@virtual
async def test_what_was_computed_is_in_the_pool_before_the_answer_ends() -> None:
    async with Fleet("m0", "m1", "k0", options=Options(pool_blocks=4096, num_blocks=4096)) as fleet:
        control = fleet.control
        ask(fleet, "a", TURN, source=None, max_tokens=2000)
        await control.until(lambda: fleet.pool("k0").load().cached_blocks >= len(TURN) // BLOCK, "write-through")
        assert "a" not in control.finished
        ask(fleet, "b", TURN, "m1", source_blocks=len(TURN) // BLOCK)
        await control.text("b", TURN, 8)
        done = await control.expect(PrefillDone, "b", "m1")
        assert (done.fetched_tokens, done.computed_tokens) == (768, 1)
        control.abort("m0", "a")
        await control.expect(Released, "a", "m0")


@pytest.mark.parametrize("how", ["cut", "late", "corrupt"])
@pytest.mark.parametrize("layer", range(-1, LAYERS))
@virtual
async def test_a_fetch_that_fails_at_any_layer_is_computed_instead(layer: int, how: str) -> None:
    async with LayeredFleet("p0", "d0", "m0", "k0", options=OPTIONS) as fleet:
        await fleet.fill_pool([*PREFIX, 1])
        fleet.kv.bytes_per_s = FETCHED_BYTES / (0.9 * tail_s(fleet, "m0"))
        seen = break_fetches(fleet, "m0", layer, how)
        events = record_events(fleet, "m0")
        ask(fleet)
        await fleet.control.text("r", TURN, 8)
        done = await fleet.control.expect(PrefillDone, "r", "m0")
        complete = layer == LAYERS - 1 or (how == "cut" and LAYERS - 1 in seen)
        assert done.fetched_tokens == (256 if complete else 0)
        assert count(events, StepUndone) == (1 if not complete and count(events, Arriving) else 0)
        await fleet.at_rest()


@virtual
async def test_decodes_do_not_wait_for_a_pool() -> None:
    async with LayeredFleet("p0", "d0", "m0", "k0", options=OPTIONS) as fleet:
        control, busy = fleet.control, prompt(20, seed=3)
        await fleet.fill_pool([*PREFIX, 1])
        control.reserve("m0", "busy", busy, remote=False, max_tokens=100)
        await control.until(lambda: bool(control.output.get("busy")), "the first token")
        fleet.kv.bytes_per_s = FETCHED_BYTES / (0.9 * tail_s(fleet, "m0"))
        events = record_events(fleet, "m0")
        ask(fleet)
        await control.text("r", TURN, 8)
        await control.text("busy", busy, 100)
        assert (count(events, Arriving), count(events, Fetched)) == (0, 1)
        assert (await control.expect(PrefillDone, "r", "m0")).fetched_tokens == 256


@pytest.mark.parametrize("layer", range(-1, LAYERS))
@virtual
async def test_an_abort_while_blocks_arrive_disturbs_nobody_and_leaves_nothing(layer: int) -> None:
    """The same request is placed here again at once: it waits until the old fetch writes no more."""
    async with LayeredFleet("p0", "d0", "m0", "k0", options=OPTIONS) as fleet:
        control, other = fleet.control, prompt(200, seed=9)
        await fleet.fill_pool([*PREFIX, 1])
        fleet.kv.bytes_per_s = FETCHED_BYTES / (0.9 * tail_s(fleet, "m0"))
        events = record_events(fleet, "m0")
        aborted: list[int] = []

        def abort(landed: int) -> None:
            if landed == layer and not aborted:
                aborted.append(landed)
                control.abort("m0", "r")
                ask(fleet, generation=2)

        fleet.on_layers("m0", abort)
        ask(fleet, "other", other, source=None)
        ask(fleet)
        assert (await control.expect(Released, "r", "m0")).generation == 1
        await control.text("r", TURN, 8)
        await control.text("other", other, 8)
        assert aborted == [layer]
        assert count(events, StepUndone) == 0, "nobody waits for what nobody wants"
        await fleet.at_rest()


@virtual
async def test_a_newer_placement_and_a_refusal_are_as_without_a_pool() -> None:
    async with LayeredFleet("p0", "d0", "m0", "k0", options=OPTIONS) as fleet:
        control = fleet.control
        await fleet.fill_pool([*PREFIX, 1])
        fleet.kv.bytes_per_s = FETCHED_BYTES / 5.0  # later than the fetch may take
        ask(fleet)
        await control.expect(Reserved, "r", "m0")
        ask(fleet)
        await control.expect(Reserved, "r", "m0", count=2)
        ask(fleet, generation=2, source=None)
        await control.text("r", TURN, 8)
        assert control.of(PrefillDone, "r") == []
        ask(fleet, "long", TURN * 6)
        assert not (await control.expect(ReserveRefused, "long", "m0")).retry
        await fleet.at_rest()


@virtual
async def test_an_instance_that_stops_does_not_wait_for_its_fetches() -> None:
    async with LayeredFleet("p0", "d0", "m0", "k0", options=OPTIONS) as fleet:
        await fleet.fill_pool([*PREFIX, 1])
        fleet.kv.bytes_per_s = FETCHED_BYTES / 5.0
        ask(fleet)
        await asyncio.sleep(0.1)
        started = asyncio.get_running_loop().time()
        await fleet.stop("m0")
        assert asyncio.get_running_loop().time() - started < 0.1
