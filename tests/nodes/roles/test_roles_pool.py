"""The KV pool: filled in the background, fetched from when told to, never a reason to fail; the directory's feed."""

from __future__ import annotations

import asyncio

from roles_harness import BLOCK, Fleet, Options, prompt, virtual

from nodes.engines.emulated import emulated_identity, emulated_layout
from nodes.roles.context import Bounds
from transfer.kv.block import block_hashes
from transfer.kv.port import KvKind, KvOffer
from transfer.terms import kv_fingerprint
from transfer.wire.messages import (
    CacheEvents,
    CacheSnapshotWanted,
    PrefillDone,
    PrefillFailed,
    Released,
)

ROOT = kv_fingerprint(emulated_identity("llama-3.1-8b"), emulated_layout(BLOCK))


def directory(fleet: Fleet, instance: str) -> set[bytes]:
    """What the control plane believes the instance has, from its CacheEvents alone."""
    known: set[bytes] = set()
    events = fleet.control.of(CacheEvents, instance=instance)
    assert [event.seq for event in events] == list(range(1, len(events) + 1))
    for event in events:
        known = set(event.stored) if event.snapshot else (known | set(event.stored)) - set(event.removed)
    return known


@virtual
async def test_finished_blocks_reach_the_pool_and_another_prefill_fetches_them() -> None:
    tokens = prompt(101)
    async with Fleet("p0", "p1", "d0", "d1", "k0") as fleet:
        control = fleet.control
        await control.hand_off("a", tokens, "p0", "d0", max_tokens=20)
        await control.text("a", tokens, 20)
        turn = tokens + control.output["a"] + prompt(30, seed=3)
        hashes = block_hashes(turn[:120], BLOCK, ROOT)
        await control.until(lambda: set(hashes[:30]) <= directory(fleet, "k0"), "write-through of prompt and answer")
        await control.hand_off("b", turn, "p1", "d1", source="k0", source_blocks=30)
        await control.text("b", turn, 8)
        done = await control.expect(PrefillDone, "b")
        assert (done.fetched_tokens, done.cached_tokens, done.computed_tokens) == (120, 0, len(turn) - 121)


@virtual
async def test_only_what_is_missing_in_the_prefix_cache_is_fetched() -> None:
    tokens = prompt(81)
    async with Fleet("p0", "p1", "d0", "k0") as fleet:
        control = fleet.control
        await control.hand_off("a", tokens)
        await control.hand_off("b", tokens[:41], "p1")
        await control.until(lambda: len(directory(fleet, "k0")) >= 20, "write-through")
        await control.text("b", tokens[:41], 8)
        await control.hand_off("c", tokens, "p1", source="k0", source_blocks=20)
        await control.text("c", tokens, 8)
        done = await control.expect(PrefillDone, "c")
        assert (done.cached_tokens, done.fetched_tokens, done.computed_tokens) == (40, 40, 0)


@virtual
async def test_a_pool_that_is_dead_restarted_or_empty_costs_time_only() -> None:
    tokens = prompt(81)
    async with Fleet("p0", "d0", "k0", "k1", options=Options(bounds=Bounds(fetch_s=1.0))) as fleet:
        control = fleet.control
        await control.hand_off("empty", tokens, source="k1", source_blocks=20)
        await control.text("empty", tokens, 8)
        fleet.crash("k0")
        other = prompt(81, seed=4)
        await control.hand_off("dead", other, source="k0", source_blocks=20)
        await control.text("dead", other, 8)
        assert [d.fetched_tokens for d in control.of(PrefillDone)] == [0, 0]
        assert not control.of(PrefillFailed)


@virtual
async def test_what_one_request_puts_is_one_use_and_another_requests_put_is_the_second() -> None:
    """Prefill and decode put the same prompt; then other engines, which fetch nothing, compute it and put it again."""
    tokens = prompt(81)
    hashes = block_hashes(tokens[:80], BLOCK, ROOT)
    async with Fleet("p0", "p1", "d0", "d1", "k0", options=Options(pool_blocks=6400)) as fleet:
        control, policy = fleet.control, fleet.pool("k0").store._policy

        async def serve(request: str, prefill: str, decode: str) -> None:
            writers = [fleet.shell(name).writer for name in (prefill, decode)]
            await control.hand_off(request, tokens, prefill, decode)
            await control.text(request, tokens, 8)
            await control.until(lambda: all(one.num_stored_blocks for one in writers), "write-through")
            await control.until(lambda: not any(fleet.shell(name).load().unsettled for name in fleet.names[:4]), "rest")

        await serve("a", "p0", "d0")
        assert set(hashes) <= set(fleet.pool("k0").store.hashes())
        assert not any(map(policy.wanted, hashes))
        await serve("b", "p1", "d1")
        assert all(map(policy.wanted, hashes))


@virtual
async def test_a_small_pool_evicts_and_its_feed_stays_true() -> None:
    async with Fleet("p0", "d0", "k0", options=Options(pool_blocks=24)) as fleet:
        control = fleet.control
        for i in range(12):
            tokens = prompt(40, seed=i)
            await control.hand_off(f"r{i}", tokens, max_tokens=1)
            await control.text(f"r{i}", tokens, 1)
        await asyncio.sleep(2.0)
        store = fleet.pool("k0").store
        assert store.num_evicted > 0
        arena = fleet.actors["k0"]._arena
        assert arena is not None
        assert sum(map(arena.generation, range(24))) == store.num_evicted + store.cached_blocks
        assert directory(fleet, "k0") == set(store.hashes())
        for name in ("p0", "d0"):
            assert directory(fleet, name) == set(fleet.shell(name).core.cached_hashes())


@virtual
async def test_a_gap_is_healed_by_a_snapshot() -> None:
    async with Fleet("p0", "d0", "k0") as fleet:
        control = fleet.control
        await control.hand_off("r", prompt(50))
        await control.text("r", prompt(50), 8)
        await asyncio.sleep(1.0)
        for name in ("p0", "k0"):
            before = len(control.of(CacheEvents, instance=name))
            control.send(name, CacheSnapshotWanted(epoch=control.hellos[name].epoch))
            snapshot = await control.expect(CacheEvents, instance=name, count=before + 1)
            assert snapshot.snapshot
            assert len(snapshot.stored) >= 12
            assert set(snapshot.stored) == directory(fleet, name)


@virtual
async def test_write_through_gives_way_when_blocks_are_short() -> None:
    """A full arena and a slow pool: requests are admitted all the same, stores are dropped and counted."""
    async with Fleet("p0", "d0", "k0", options=Options(num_blocks=32, bounds=Bounds(store_queue=2))) as fleet:
        control = fleet.control
        prompts = {f"r{i}": prompt(100, seed=i) for i in range(10)}
        for name, tokens in prompts.items():
            await control.hand_off(name, tokens, max_tokens=2)
            await control.text(name, tokens, 2)
        writer = fleet.shell("p0").writer
        await asyncio.sleep(30.0)
        assert writer.num_stored_blocks > 0
        assert fleet.shell("p0").load().free_blocks == 32


@virtual
async def test_work_refused_while_a_store_gives_way_already_costs_nothing_more() -> None:
    """The second refusal comes after the store's deadline was moved up and before its task has ended."""
    tokens = prompt(100)
    async with Fleet("p0", "d0", "k0") as fleet:
        fleet.kv.bytes_per_s = 500.0
        control, writer = fleet.control, fleet.shell("p0").writer
        await control.hand_off("r", tokens, max_tokens=2)
        await control.text("r", tokens, 2)
        await control.until(lambda: writer._sender is not None, "a store in progress")
        writer.give_way()
        while not writer._timeout.expired():  # noqa: ASYNC110  (a turn of the loop is what is waited for)
            await asyncio.sleep(0)
        writer.give_way()
        await asyncio.sleep(1.0)
        assert writer._timeout is None
        assert (writer.num_dropped, writer.num_failed) == (1, 1)


@virtual
async def test_a_write_that_stops_half_way_leaves_nothing_visible() -> None:
    hashes = tuple(block_hashes(prompt(40), BLOCK, ROOT))
    async with Fleet("p0", "k0") as fleet:
        offer = KvOffer(
            kind=KvKind.STORE, request_id="w", generation=0, source="p0", source_epoch=1,
            target_epoch=fleet.control.hellos["k0"].epoch, fingerprint=ROOT, first_block=0, num_blocks=10,
            hashes=hashes,
        )  # fmt: skip
        port = fleet.shell("p0").context.port
        sender = await port.open(fleet.control.peer("k0"), offer, list(range(10)), 5.0)
        sender.push(0, 0, 4)
        await asyncio.sleep(0.1)
        store = fleet.pool("k0").store
        assert (store.writing_blocks, store.cached_blocks) == (10, 0)
        sender.abort("the test gives up")
        await asyncio.sleep(0.1)
        assert (store.writing_blocks, store.cached_blocks, store.free_blocks) == (0, 0, 128)
        fleet.control.abort("k0", "w", 0)
        await fleet.control.expect(Released, "w", "k0")
