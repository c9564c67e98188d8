"""Hot prefixes are copied to another pool: when, from where, where to, and never more than allowed at a time."""

from __future__ import annotations

import pytest
from core_kit import BLOCK, Rig, config, sends, spec

from controlplane.core.events import Arrived, NodeLost
from controlplane.core.recorder import FlightRecorder, effects_digest, replay
from controlplane.core.replication import _depths
from controlplane.core.scheduler import SchedulerCore
from transfer.kv.block import block_hashes
from transfer.terms import Role, pack_tokens, unpack_tokens
from transfer.wire.messages import CacheEvents, Replicate, Replicated

HOT = 4
FRONT = 20
"""Blocks that the prompts of a family share."""


class Copies(Rig):
    """1P1D and pools, no request of which ever finishes on its own."""

    def __init__(self, pools: str = "2K", **changes: object) -> None:
        super().__init__(config(hot_arrivals=HOT, **changes))
        self.fleet("1P1D", num_blocks=50_000)
        self.fleet(pools)
        self.number, self.seqs = 0, dict[str, int]()

    def hashes(self, family: int, num_blocks: int = FRONT) -> tuple[bytes, ...]:
        tokens = unpack_tokens(spec("x", FRONT * BLOCK, first=family).tokens)
        root = self.core._desk.fleet.groups["m"].root("")
        return tuple(block_hashes(tokens, BLOCK, root))[:num_blocks]

    def hold(self, pool: str, hashes: tuple[bytes, ...], **more: object) -> None:
        self.seqs[pool] = self.seqs.get(pool, 0) + 1
        self.node(pool, CacheEvents(epoch=1, seq=self.seqs[pool], stored=hashes, **more))  # type: ignore[arg-type]

    def ask(self, family: int, times: int = 1) -> list[tuple[str, Replicate]]:
        """So many requests with the family's front and a tail of their own; they end at once."""
        found = []
        for _ in range(times):
            self.number += 1
            name = f"r{self.number}"
            front = unpack_tokens(spec("x", FRONT * BLOCK, first=family).tokens)
            tail = [self.number % 900 + 1] * 40
            one = spec(name, now=self.now)
            one = type(one)(**{**{key: getattr(one, key) for key in one.__struct_fields__},
                               "tokens": pack_tokens(front + tail)})  # fmt: skip
            found += sends(self.do(Arrived(request=one)), Replicate)
            self.release(self.end(name, outcome="cancelled", by_node=False))
        return found

    def answer(self, order: tuple[str, Replicate], num_blocks: int | None = None, reason: str = "") -> None:
        name, message = order
        count = len(message.hashes) if num_blocks is None else num_blocks
        self.node(name, Replicated(name=message.name, epoch=message.epoch, num_blocks=count, reason=reason))


def test_a_prefix_that_is_asked_for_often_is_copied_once_to_the_other_pool() -> None:
    rig = Copies()
    rig.hold("k0", rig.hashes(1))
    assert rig.ask(1, HOT - 1) == []
    ((source, order),) = rig.ask(1, 1)
    assert (source, order.target.instance_id, order.epoch) == ("k0", "k1", 1)
    assert order.hashes == rig.hashes(1, 16), "as far as it is hot, by the depths that are counted"
    assert order.fingerprint == rig.core._desk.fleet.groups["m"].root("")
    assert rig.ask(1, 20) == [], "one at a time for a prefix"
    rig.hold("k1", order.hashes)
    rig.answer((source, order))
    assert rig.core.state(rig.now).kv.replicated_blocks == 16
    assert rig.core.metrics()["prefix_copies_ordered_total"] == 1
    assert rig.ask(1, 20) == [], "enough pools hold it"
    rig.wait(70.0, ["p0", "d0", "k0", "k1"])
    assert rig.ask(1, 20) == [], "still"


def test_prefixes_that_are_asked_for_seldom_are_not_copied() -> None:
    rig = Copies()
    for family in range(1, 40):
        rig.hold("k0", rig.hashes(family))
        assert rig.ask(family, HOT - 1) == []


def test_counts_fade() -> None:
    rig = Copies()
    rig.hold("k0", rig.hashes(1))
    for _ in range(6):
        assert rig.ask(1, 2) == []
        rig.wait(65.0, ["p0", "d0", "k0", "k1"])
    assert len(rig.ask(1, HOT)) == 1


@pytest.mark.parametrize("case", ["one pool", "nobody", "both", "no room", "off"])
def test_nothing_is_copied_where_it_cannot_help(case: str) -> None:
    rig = Copies("1K" if case == "one pool" else "2K", replicas=1 if case == "off" else 2)
    if case != "nobody":
        rig.hold("k0", rig.hashes(1))
    if case == "both":
        rig.hold("k1", rig.hashes(1))
    if case == "no room":
        rig.beat("k1", free_blocks=10)
    assert rig.ask(1, 20) == []


def test_only_what_a_pool_holds_is_copied() -> None:
    rig = Copies()
    rig.hold("k0", rig.hashes(1, 7))
    ((_, order),) = rig.ask(1, HOT)
    assert order.hashes == rig.hashes(1, 7)


def test_a_longer_front_of_the_same_prefix_waits_for_the_copy_under_way() -> None:
    rig = Copies()
    rig.hold("k0", rig.hashes(1, 7))
    (order,) = rig.ask(1, HOT)
    rig.hold("k0", rig.hashes(1))
    assert rig.ask(1, 5) == []
    rig.hold("k1", order[1].hashes)
    rig.answer(order)
    ((_, longer),) = rig.ask(1)
    assert longer.hashes == rig.hashes(1, 16)


def test_what_the_other_pool_holds_in_part_is_completed() -> None:
    rig = Copies()
    rig.hold("k0", rig.hashes(1))
    rig.hold("k1", rig.hashes(1, 9))
    ((source, order),) = rig.ask(1, HOT)
    assert (source, order.target.instance_id, len(order.hashes)) == ("k0", "k1", 16)


def test_the_target_is_near_the_load_on_another_host_and_emptiest() -> None:
    rig = Copies("1K")
    rig.join("k1", Role.KV_POOL, host="k0")
    rig.join("k2", Role.KV_POOL)
    rig.join("k3", Role.KV_POOL)
    rig.join("k4", Role.KV_POOL, host="p0")
    rig.beat("k2", cached_blocks=900)
    for family in range(1, 5):
        rig.hold("k0", rig.hashes(family))
    orders = []
    for family, gone in ((1, "k4"), (2, "k3"), (3, "k2")):
        (order,) = rig.ask(family, HOT)
        orders.append(order[1].target.instance_id)
        rig.answer(order, 0)
        rig.do(NodeLost(instance_id=gone))
    assert orders == ["k4", "k3", "k2"]
    assert rig.ask(4, HOT)[0][1].target.instance_id == "k1", "better there than nowhere"


def test_copies_are_bounded_and_their_deadline_frees_the_place() -> None:
    rig = Copies(max_replications=2, replicate_timeout_s=20.0)
    for family in range(1, 6):
        rig.hold("k0", rig.hashes(family))
    assert [len(rig.ask(family, HOT)) for family in range(1, 6)] == [1, 1, 0, 0, 0]
    rig.wait(21.0, ["p0", "d0", "k0", "k1"])
    assert rig.core.metrics()["prefix_copies_failed_total"] == 2
    assert [len(rig.ask(family)) for family in range(1, 6)] == [0, 0, 1, 1, 0], "the first two rest"
    rig.wait(61.0, ["p0", "d0", "k0", "k1"])
    assert len(rig.ask(1, HOT)) == 1


@pytest.mark.parametrize("lost", ["k0", "k1"])
def test_a_lost_pool_ends_the_copy(lost: str) -> None:
    rig = Copies(max_replications=1)
    rig.hold("k0", rig.hashes(1))
    (order,) = rig.ask(1, HOT)
    rig.do(NodeLost(instance_id=lost))
    assert rig.core.metrics()["prefix_copies_failed_total"] == 1
    rig.answer(order)
    assert rig.core.state(rig.now).kv.replicated_blocks == 0, "its word comes too late"
    rig.join(lost, Role.KV_POOL, epoch=2)
    rig.join("k9", Role.KV_POOL)
    other = "k1" if lost == "k0" else "k0"
    rig.seqs[other] = rig.seqs.get(other, 0)
    rig.hold(other, rig.hashes(2))
    assert len(rig.ask(2, HOT)) == 1, "the place is free"


def test_words_of_others_about_a_copy_change_nothing() -> None:
    rig = Copies()
    rig.hold("k0", rig.hashes(1))
    ((_, order),) = rig.ask(1, HOT)
    rig.answer(("k1", order))
    rig.node("k0", Replicated(name=order.name, epoch=9, num_blocks=5))
    rig.node("k0", Replicated(name="copy-other", epoch=1, num_blocks=5))
    assert rig.core.state(rig.now).kv.replicated_blocks == 0
    rig.answer(("k0", order), 1000)
    rig.answer(("k0", order), 1000)
    assert rig.core.state(rig.now).kv.replicated_blocks == 16


def test_copies_replay_and_their_recording_is_read_back() -> None:
    rig, recorder = Copies(), FlightRecorder(config(hot_arrivals=HOT), 7, 0)
    frames, digests = [recorder.header()], []
    fresh = SchedulerCore(config(hot_arrivals=HOT), 7, 0)
    handle = rig.core.handle

    def watched(event: object, now: float) -> object:
        frames.append(recorder.entry(now, event))  # type: ignore[arg-type]
        effects = handle(event, now)  # type: ignore[arg-type]
        digests.append(effects_digest(effects))
        return effects

    rig.core = fresh
    handle, fresh.handle = fresh.handle, watched  # type: ignore[method-assign,assignment]
    rig.fleet("1P1D", num_blocks=50_000)
    rig.fleet("3K")
    for family in range(1, 4):
        rig.hold("k0", rig.hashes(family))
        for order in rig.ask(family, HOT):
            rig.answer(order)
    assert len(sends(rig.all_effects, Replicate)) == 3
    assert [step.digest for step in replay(frames)] == digests


def test_the_depths_counted_grow_by_half_at_most() -> None:
    assert _depths(0) == []
    assert _depths(1) == [1]
    assert _depths(20) == [1, 2, 3, 4, 6, 8, 12, 16]
    deep = _depths(512)
    assert deep[-1] == 512
    assert len(deep) == 18
