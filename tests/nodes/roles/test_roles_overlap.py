"""A pool fetch beside compute: it takes the longer of both, and whatever goes wrong costs time only."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from roles_harness import BLOCK, Fleet, Options, prompt, virtual
from roles_layered import LAYERS, LayeredFleet, record_events

from nodes.core.events import Arriving, Event, Fetched, StepDone, StepUndone
from nodes.engines.emulated import continuation
from nodes.engines.engine import Chunk
from nodes.roles.context import Bounds
from transfer.errors import KvCorrupt, KvTransferFailed
from transfer.wire.messages import PrefillDone, PrefillFailed, Released, Reserved

PREFIX, TAIL = prompt(256), prompt(513, seed=5)
TURN = PREFIX + TAIL
FETCHED_BYTES = len(PREFIX) * LAYERS * 4
OPTIONS = Options(token_budget=1024, bounds=Bounds(fetch_s=1.0), num_blocks=1024, pool_blocks=1024)


def tail_s(fleet: Fleet, name: str = "p1") -> float:
    return float(fleet.shell(name).beside_fetch_s(Chunk("", TAIL[:-1], len(PREFIX), list(range(200)))))


def first(events: list[tuple[float, Event]], kind: type[Event]) -> float:
    return next((when for when, event in events if isinstance(event, kind)), -1.0)


def count(events: list[tuple[float, Event]], kind: type[Event]) -> int:
    return sum(isinstance(event, kind) for _, event in events)


async def fetch_turn(fleet: LayeredFleet, request: str = "r", tokens: list[int] = TURN, **more: Any) -> None:
    source_blocks = len(PREFIX) // BLOCK
    await fleet.control.hand_off(request, tokens, "p1", "d1", source="k0", source_blocks=source_blocks, **more)


@pytest.mark.parametrize("ratio", [0.2, 0.6, 1.0, 1.6, 4.0])
@virtual
async def test_fetch_and_compute_take_the_longer_of_both(ratio: float) -> None:
    """And besides it one layer of the other: of the fetch before compute can begin, or of compute after the fetch."""
    async with LayeredFleet("p0", "p1", "d0", "d1", "k0", options=OPTIONS) as fleet:
        await fleet.fill_pool([*PREFIX, 1])
        compute_s = tail_s(fleet)
        fleet.kv.bytes_per_s = FETCHED_BYTES / (ratio * compute_s)
        landed: list[float] = []
        fleet.on_layers("p1", lambda layer: landed.append(asyncio.get_running_loop().time()))
        events = record_events(fleet, "p1")
        await fetch_turn(fleet)
        await fleet.control.text("r", TURN, 8)
        done = await fleet.control.expect(PrefillDone, "r")
        assert (done.fetched_tokens, done.computed_tokens) == (256, 512)
        started = first(events, Fetched) - done.fetch_s
        total_s = first(events, StepDone) - started
        best_s = max(landed[1] - started + compute_s, done.fetch_s + compute_s / LAYERS)
        assert best_s - 1e-9 <= total_s <= 1.1 * best_s
        assert total_s < 0.93 * (done.fetch_s + compute_s)
        assert done.fetch_exposed_s == pytest.approx(total_s - compute_s, abs=1e-6)
        assert landed[1] <= first(events, Arriving) < first(events, Fetched)
        assert fleet.shell("p1").load().speed == pytest.approx(1.0, abs=0.01), "waiting is not slowness"


@pytest.mark.parametrize("ratio", [0.5, 2.0])
@virtual
async def test_an_emulated_link_is_overlapped_layer_by_layer_too(ratio: float) -> None:
    """One layer of real KV, the time of 32. A slow link ends the step one layer after its own end."""
    async with Fleet("p0", "p1", "d0", "d1", "k0", options=OPTIONS) as fleet:
        await fleet.control.hand_off("fill", [*PREFIX, 1], max_tokens=1)
        await fleet.control.until(lambda: fleet.pool("k0").load().cached_blocks >= 64, "write-through")
        compute_s = tail_s(fleet)
        fleet.shell("p1").context.engine.handoff_s = lambda num_tokens: ratio * compute_s * num_tokens / 256
        events = record_events(fleet, "p1")
        await fleet.control.hand_off("r", TURN, "p1", "d1", source="k0", source_blocks=64)
        done = await fleet.control.expect(PrefillDone, "r")
        assert done.fetched_tokens == 256
        assert done.fetch_s == pytest.approx(ratio * compute_s, rel=0.01)
        started = first(events, Fetched) - done.fetch_s
        total_s, begun_s = first(events, StepDone) - started, first(events, Arriving) - started
        assert total_s == pytest.approx(max(begun_s + compute_s, (ratio + 1 / 32) * compute_s), rel=0.01)
        assert begun_s == pytest.approx(max(ratio / 32 * compute_s, (ratio - 1) * compute_s), abs=0.0025)
        assert done.fetch_exposed_s == pytest.approx(total_s - compute_s, rel=0.01)


def break_fetches(fleet: LayeredFleet, name: str, layer: int, how: str) -> list[int]:
    """The instance's fetches fail after `layer` (-1: after the promise). Returns the layers that it is told of."""
    seen: list[int] = []
    loop, port, arena = (
        asyncio.get_running_loop(),
        fleet.shell(name).context.port,
        fleet.shell(name).context.engine.arena,
    )

    def react(landed: int) -> None:
        seen.append(landed)
        if landed == layer and how == "cut":
            loop.call_later(1e-4, fleet.kv.cut, "k0")

    fleet.on_layers(name, react)
    if how == "cut":
        return seen
    really = port.fetch

    async def fetch(*args: Any) -> int:
        """Layers up to `layer` come. Garbage is in the others until the end, which is soon, or the deadline."""
        peer, wanted, blocks, timeout_s, on_layer = args
        since = loop.time()
        await really(peer, wanted, blocks, timeout_s, lambda landed, count: landed <= layer and on_layer(landed, count))
        for other in range(layer + 1, LAYERS):
            for block in blocks:
                for view in arena.views(other, block, 1):
                    view[:] = b"x" * len(view)
        if how == "corrupt":
            await asyncio.sleep(0.002)
            raise KvCorrupt("corrupt")
        await asyncio.sleep(since + timeout_s - loop.time())
        raise KvTransferFailed("late")

    port.fetch = fetch
    return seen


@pytest.mark.parametrize("how", ["cut", "late", "corrupt"])
@pytest.mark.parametrize("layer", range(-1, LAYERS))
@virtual
async def test_a_fetch_that_fails_at_any_layer_is_computed_instead(layer: int, how: str) -> None:
    """With the last layer everything is here, and how the connection ends matters no more."""
    async with LayeredFleet("p0", "p1", "d0", "d1", "k0", options=OPTIONS) as fleet:
        control = fleet.control
        await fleet.fill_pool([*PREFIX, 1])
        fleet.kv.bytes_per_s = FETCHED_BYTES / (0.9 * tail_s(fleet))
        seen = break_fetches(fleet, "p1", layer, how)
        events = record_events(fleet, "p1")
        await fetch_turn(fleet)
        done = await control.expect(PrefillDone, "r")
        await control.text("r", TURN, 8)
        complete = layer == LAYERS - 1 or (how == "cut" and LAYERS - 1 in seen)
        assert (done.fetched_tokens, done.computed_tokens) == ((256, 512) if complete else (0, 768))
        assert count(events, StepUndone) == (1 if not complete and count(events, Arriving) else 0)
        if 1 <= layer < LAYERS - 1:
            assert (complete, count(events, Arriving)) == (False, 1)
        if not complete:
            assert done.fetch_exposed_s == done.fetch_s


def retell(fleet: LayeredFleet, tell: Callable[[Callable[[int, int], None]], Awaitable[int]]) -> None:
    """The KV comes at once, but p1 hears of it what `tell` says, and when."""
    port = fleet.shell("p1").context.port
    really = port.fetch

    async def fetch(*args: Any) -> int:
        assert await really(*args[:-1]) == 64
        return await tell(args[-1])

    port.fetch = fetch


@virtual
async def test_fewer_blocks_than_promised_are_none() -> None:
    async with LayeredFleet("p0", "p1", "d0", "d1", "k0", options=OPTIONS) as fleet:
        await fleet.fill_pool([*PREFIX, 1])

        async def tell(on_layer: Callable[[int, int], None]) -> int:
            for layer in range(-1, 2):
                on_layer(layer, 64)
                await asyncio.sleep(0.0001)
            await asyncio.sleep(0.01)
            return 63

        retell(fleet, tell)
        events = record_events(fleet, "p1")
        await fetch_turn(fleet)
        await fleet.control.text("r", TURN, 8)
        assert (count(events, Arriving), count(events, StepUndone)) == (1, 1)
        assert (await fleet.control.expect(PrefillDone, "r")).fetched_tokens == 0


@virtual
async def test_a_gate_that_is_late_gives_the_step_back_and_waits_for_the_fetch_to_end() -> None:
    """A port that forgets its deadline holds a step a second longer; nothing is computed under its hands."""
    async with LayeredFleet("p0", "p1", "d0", "d1", "k0", options=OPTIONS) as fleet:
        await fleet.fill_pool([*PREFIX, 1])

        async def tell(on_layer: Callable[[int, int], None]) -> int:
            for layer in range(-1, 2):
                on_layer(layer, 64)
                await asyncio.sleep(0.0001)
            await asyncio.sleep(4.0)
            for layer in range(2, LAYERS):
                on_layer(layer, 64)
            return 64

        retell(fleet, tell)
        events, loop = record_events(fleet, "p1"), asyncio.get_running_loop()
        started = loop.time()
        await fetch_turn(fleet)
        await asyncio.sleep(0.1)
        await fleet.control.hand_off("other", TAIL, "p1", "d1")
        await fleet.control.text("other", TAIL, 8)
        assert loop.time() - started < 2.5, "2 s of deadline and grace are all it waits"
        assert count(events, Fetched) == 0
        await fleet.control.text("r", TURN, 8)
        assert (count(events, StepUndone), count(events, Fetched)) == (1, 1)
        assert (await fleet.control.expect(PrefillDone, "r")).fetched_tokens == 0


@pytest.mark.parametrize("layer", range(-1, LAYERS))
@virtual
async def test_an_abort_while_blocks_arrive_disturbs_nobody(layer: int) -> None:
    async with LayeredFleet("p0", "p1", "d0", "d1", "k0", options=OPTIONS) as fleet:
        control = fleet.control
        await fleet.fill_pool([*PREFIX, 1])
        fleet.kv.bytes_per_s = FETCHED_BYTES / (0.9 * tail_s(fleet))
        events = record_events(fleet, "p1")
        other = prompt(200, seed=9)
        await control.hand_off("other", other, "p1", "d1")
        fleet.on_layers("p1", lambda landed: control.abort("p1", "r") if landed == layer else None)
        await fetch_turn(fleet)
        released = await control.expect(Released, "r", "p1")
        assert released.generation == 1
        control.abort("d1", "r")
        await control.text("other", other, 8)
        assert count(events, StepUndone) == 0, "nobody waits for what nobody wants"
        await fleet.at_rest()


@virtual
async def test_a_fetch_ends_within_the_lease() -> None:
    async with LayeredFleet("p0", "p1", "d0", "d1", "k0", options=OPTIONS) as fleet:
        control = fleet.control
        await fleet.fill_pool([*PREFIX, 1])
        fleet.kv.bytes_per_s = FETCHED_BYTES / (0.9 * tail_s(fleet))
        break_fetches(fleet, "p1", 2, "late")
        events = record_events(fleet, "p1")
        control.reserve("d1", "r", TURN)
        await control.expect(Reserved, "r")
        control.prefill("p1", "r", TURN, "d1", source="k0", source_blocks=64, lease_s=0.6)
        done = await control.expect(PrefillDone, "r")
        assert (done.fetched_tokens, count(events, StepUndone)) == (0, 1)
        assert done.fetch_s == pytest.approx(0.3, abs=0.001)
        await control.text("r", TURN, 8)


@virtual
async def test_an_instance_that_stops_does_not_wait_for_its_fetches() -> None:
    async with LayeredFleet("p0", "p1", "d0", "d1", "k0", options=OPTIONS) as fleet:
        await fleet.fill_pool([*PREFIX, 1])
        fleet.kv.bytes_per_s = FETCHED_BYTES / (0.9 * tail_s(fleet))
        break_fetches(fleet, "p1", 1, "late")
        events, loop = record_events(fleet, "p1"), asyncio.get_running_loop()
        await fetch_turn(fleet)
        await asyncio.sleep(0.1)
        assert (count(events, Arriving), count(events, StepDone)) == (1, 0)
        started = loop.time()
        await fleet.stop("p1")
        assert loop.time() - started < 0.1
        fleet.control.abort("d1", "r")


@virtual
async def test_decodes_on_a_mixed_instance_do_not_wait_for_a_pool() -> None:
    async with LayeredFleet("p0", "m0", "d0", "d1", "k0", options=OPTIONS) as fleet:
        control = fleet.control
        await fleet.fill_pool([*PREFIX, 1])
        control.reserve("m0", "busy", prompt(20, seed=3), remote=False, max_tokens=100)
        await control.until(lambda: bool(control.output.get("busy")), "the first token")
        fleet.kv.bytes_per_s = FETCHED_BYTES / (0.9 * tail_s(fleet, "m0"))
        events = record_events(fleet, "m0")
        await control.hand_off("r", TURN, "m0", "d1", source="k0", source_blocks=64)
        await control.text("r", TURN, 8)
        await control.text("busy", prompt(20, seed=3), 100)
        assert (count(events, Arriving), count(events, Fetched)) == (0, 1)
        assert (await control.expect(PrefillDone, "r")).fetched_tokens == 256


@pytest.mark.parametrize("seed", range(12))
@virtual
async def test_a_storm_of_fetches_that_are_lost_cut_and_corrupted(seed: int) -> None:
    """Prompts that share prefixes, a pool whose connections break: every request ends right, nothing stays."""
    rng = random.Random(seed)
    options = Options(token_budget=256, bounds=Bounds(fetch_s=0.5), num_blocks=4096, pool_blocks=4096)
    async with LayeredFleet("p0", "p1", "d0", "d1", "k0", options=options, seed=seed) as fleet:
        control = fleet.control
        prefixes = [prompt(257, seed=1000 + index) for index in range(24)]
        await fleet.fill_pool(*prefixes)
        events = record_events(fleet, "p1")
        fleet.kv.bytes_per_s = rng.choice([3e5, 1e6, 3e6])

        def fault(layer: int) -> None:
            if rng.random() < 0.1:
                asyncio.get_running_loop().call_later(rng.random() * 0.003, fleet.kv.cut, "k0")

        fleet.on_layers("p1", fault)

        async def client(index: int) -> None:
            request = f"r{index}"
            tokens = prefixes[index][: rng.randrange(16, 256)] + prompt(rng.randrange(1, 400), seed=100 + index)
            await asyncio.sleep(rng.random() * 0.3)
            for generation in range(1, 8):
                source = {"source": "k0", "source_blocks": rng.randrange(1, 64)}
                await control.hand_off(request, tokens, "p1", "d1", generation=generation, **source)
                if rng.random() < 0.15:
                    await asyncio.sleep(rng.random() * 0.02)
                    for name in ("p1", "d1"):
                        control.abort(name, request, generation)
                    return
                await control.until(
                    lambda g=generation: (
                        request in control.finished
                        or any(failed.generation == g for failed in control.of(PrefillFailed, request))
                    ),
                    "an end",
                )
                if request in control.finished:
                    assert control.output[request] == continuation(tokens, 8)
                    return
                control.abort("d1", request, generation)
            raise AssertionError(f"{request} failed seven times")

        await asyncio.gather(*(client(index) for index in range(24)))
        assert count(events, Fetched) > 12
