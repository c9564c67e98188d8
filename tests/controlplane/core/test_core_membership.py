"""Who may join, how loss and return are told, and what a heartbeat may and may not change."""

from __future__ import annotations

import math

import msgspec
import pytest
from core_kit import LAYOUT, MODEL, Rig, config, hello, profile, sends, sent, those

from controlplane.core.events import NeedTokens, NodeLost, Note
from controlplane.core.instance import Charge, InstanceState
from transfer.errors import IllegalTransition
from transfer.terms import Role
from transfer.wire.messages import (
    Abort,
    CacheEvents,
    CacheSnapshotWanted,
    Goodbye,
    Heartbeat,
    Hello,
    Holding,
    LoadReport,
    NotWelcome,
    PoolMap,
    Welcome,
)


def test_hello_is_answered_with_welcome_and_the_first_ready_beat_makes_it_ready() -> None:
    rig = Rig()
    effects = rig.node("p0", hello("p0", Role.PREFILL))
    name, welcome = sent(effects, Welcome)
    assert (name, welcome.control_epoch, welcome.role) == ("p0", 7, Role.PREFILL)
    assert rig.instance("p0").state is InstanceState.JOINING
    rig.beat("p0", state="starting")
    assert rig.instance("p0").state is InstanceState.JOINING
    rig.beat("p0")
    assert rig.instance("p0").state is InstanceState.READY
    assert rig.core.state(0.0).xpyd == "1P0D"


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (hello("x", Role.DECODE, protocol=99), "speaks protocol 99"),
        (hello("x", Role.DECODE, model=msgspec.structs.replace(MODEL, revision="r2")), "revision differs"),
        (hello("x", Role.DECODE, model=msgspec.structs.replace(MODEL, tokenizer="t2")), "tokenizer differs"),
        (hello("x", Role.DECODE, layout=msgspec.structs.replace(LAYOUT, block_size=32)), "block_size differs"),
        (hello("x", Role.DECODE, layout=msgspec.structs.replace(LAYOUT, dtype="float16")), "dtype differs"),
        (hello("x", Role.KV_POOL, layout=msgspec.structs.replace(LAYOUT, num_layers=9)), "num_layers differs"),
        (hello("x", Role.DECODE, num_blocks=0), "0 KV blocks"),
        (msgspec.structs.replace(hello("x", Role.DECODE), model=None), "names no model"),
        (msgspec.structs.replace(hello("y", Role.DECODE)), "introduced itself as y"),
    ],
)
def test_what_cannot_join_is_refused_with_a_sentence(said: Hello, words: str) -> None:
    """vllm#14952, #42895: unequal layouts are refused at the handshake."""
    rig = Rig()
    rig.fleet("1P1D")
    name, refusal = sent(rig.node("x", said), NotWelcome)
    assert name == "x"
    assert words in refusal.reason
    assert rig.core.instance("x") is None
    assert rig.core.state(0.0).xpyd == "1P1D"


FAST = hello("x", Role.DECODE)
NO_LINK = msgspec.structs.replace(FAST.hardware, link_bytes_per_s=0.0)
LATENCY = profile(FAST.hardware)


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (msgspec.structs.replace(FAST, hardware=NO_LINK), "link_bytes_per_s 0.0"),
        (msgspec.structs.replace(FAST, latency=profile(NO_LINK)), "link_bytes_per_s 0.0"),
        (msgspec.structs.replace(FAST, latency=msgspec.structs.replace(LATENCY, tp=0)), "tp 0"),
        (msgspec.structs.replace(FAST, latency=msgspec.structs.replace(LATENCY, pp=0)), "pp 0"),
        (msgspec.structs.replace(FAST, latency=msgspec.structs.replace(LATENCY, error=-0.1)), "error -0.1"),
        (msgspec.structs.replace(FAST, latency=msgspec.structs.replace(LATENCY, mbu=math.nan)), "mbu nan"),
        (msgspec.structs.replace(FAST, latency=msgspec.structs.replace(LATENCY, alpha_s=-9.0)), "a step of one token"),
        (msgspec.structs.replace(FAST, latency=msgspec.structs.replace(LATENCY, beta_s=math.inf)), "takes inf s"),
        (msgspec.structs.replace(FAST, token_budget=-1), "token_budget -1"),
        (hello("x", Role.DECODE, layout=msgspec.structs.replace(LAYOUT, block_size=0)), "block_size 0"),
        (msgspec.structs.replace(hello("x", Role.KV_POOL), hardware=NO_LINK), "link_bytes_per_s 0.0"),
    ],
)
def test_numbers_that_cannot_be_true_are_refused_not_computed_with(said: Hello, words: str) -> None:
    rig = Rig()
    _, refusal = sent(rig.node("x", said), NotWelcome)
    assert words in refusal.reason
    assert rig.core.instance("x") is None


def test_a_heartbeat_with_impossible_numbers_is_brought_into_range() -> None:
    rig = Rig()
    rig.fleet("1P1D")
    rig.node("d0", Heartbeat(
        epoch=1, state="ready", holdings=(Holding("r", 1, -5),),
        load=LoadReport(free_blocks=-9, num_blocks=1 << 62, step_s=math.nan, speed=math.inf, leaked_blocks=-3),
    ))  # fmt: skip
    state = rig.core.state(rig.now)
    view = next(one for one in state.instances if one.id == "d0")
    assert state.orphaned_kv_blocks == 0
    assert (view.free_blocks, view.step_s) == (0, 0.0)
    assert rig.instance("d0").speed == 1.0


def test_a_pool_never_becomes_an_engine_nor_an_engine_a_pool() -> None:
    rig = Rig()
    rig.fleet("1P1D")
    rig.join("k0", Role.KV_POOL)
    rig.beat("k0", role=Role.DECODE)
    rig.beat("d0", role=Role.KV_POOL)
    assert (rig.instance("k0").role, rig.instance("d0").role) == (Role.KV_POOL, Role.DECODE)


def test_another_model_under_another_name_is_welcome() -> None:
    rig = Rig()
    rig.fleet("1P1D")
    rig.join("q0", Role.MIXED, model=msgspec.structs.replace(MODEL, name="n", revision="r2"))
    assert rig.core.models == ("m", "n")


def test_a_model_may_be_replaced_when_its_last_instance_is_gone() -> None:
    rig = Rig()
    rig.fleet("1D")
    rig.do(NodeLost(instance_id="d0"))
    rig.join("d1", Role.DECODE, model=msgspec.structs.replace(MODEL, revision="r2"))
    assert rig.instance("d1").ready


def test_another_epoch_is_a_restart_and_the_older_life_is_lost() -> None:
    """smg#2491: a restarted prefill is another one; its request is placed again."""
    rig = Rig()
    rig.fleet("2P1D")
    rig.arrive("r1")
    rig.reserved("r1")
    prefill = str(rig.request("r1").prefill)
    effects = rig.node(prefill, hello(prefill, Role.PREFILL, epoch=2))
    assert sent(effects, Abort)[0] == "d0"
    assert those(effects, NeedTokens)[0].request_id == "r1"
    assert rig.instance(prefill).epoch == 2
    late = rig.node(prefill, hello(prefill, Role.PREFILL, epoch=1))
    assert not sends(late, Welcome)
    assert rig.instance(prefill).epoch == 2


def test_the_same_life_may_say_hello_again_and_loses_nothing() -> None:
    rig = Rig()
    rig.fleet("1P1D")
    rig.decoding("r1")
    before = rig.instance("d0").charges
    effects = rig.node("d0", hello("d0", Role.DECODE, holdings=(Holding(request_id="r1", generation=1, num_blocks=7),)))
    assert sends(effects, Welcome)
    assert not sends(effects, Abort)
    assert rig.instance("d0").charges == before


def test_a_rejoining_instance_has_what_nobody_knows_aborted_at_once() -> None:
    """The control plane was restarted: abandoned work stops."""
    rig = Rig()
    held = (Holding(request_id="old", generation=3, num_blocks=9),)
    name, abort = sent(rig.node("d0", hello("d0", Role.DECODE, holdings=held)), Abort)
    assert (name, abort.request_id, abort.generation) == ("d0", "old", 3)


def test_a_lost_instance_that_beats_again_in_the_same_life_rejoins() -> None:
    rig = Rig()
    rig.fleet("1P1D")
    rig.decoding("r1")
    rig.do(NodeLost(instance_id="d0"))
    assert rig.instance("d0").state is InstanceState.LOST
    assert rig.core.state(rig.now).xpyd == "1P0D"
    effects = rig.beat("d0", holdings=(Holding(request_id="r1", generation=1, num_blocks=7),))
    assert rig.instance("d0").ready
    assert sent(effects, Abort)[1].generation == 1
    assert sends(effects, CacheSnapshotWanted)


def test_an_earlier_life_is_ignored_while_a_later_one_lives_and_returns_when_that_is_lost() -> None:
    """Two agents under one name: when the one that was started by mistake ends, the other serves again at once."""
    rig = Rig()
    rig.join("d0", Role.DECODE, epoch=1)
    rig.join("d0", Role.DECODE, epoch=2)
    assert not sends(rig.node("d0", hello("d0", Role.DECODE, epoch=1)), Welcome)
    assert rig.instance("d0").epoch == 2
    rig.do(NodeLost(instance_id="d0"))
    sent(rig.node("d0", hello("d0", Role.DECODE, epoch=1)), Welcome)
    rig.beat("d0")
    sent(rig.node("d0", hello("d0", Role.DECODE, epoch=1)), Welcome)  # its own word again: not superseded
    assert (rig.instance("d0").epoch, rig.instance("d0").state) == (1, InstanceState.READY)
    assert not sends(rig.node("d0", hello("d0", Role.DECODE, epoch=3)), NotWelcome)
    assert not sends(rig.node("d0", hello("d0", Role.DECODE, epoch=1)), Welcome)


def test_beats_and_goodbyes_of_another_life_are_ignored() -> None:
    rig = Rig()
    rig.fleet("1P1D")
    version = rig.core.version
    rig.node("d0", Goodbye(epoch=999, reason="late"))
    assert rig.instance("d0").ready
    assert rig.core.version == version
    rig.node("d0", Goodbye(epoch=1, reason="done"))
    assert rig.instance("d0").state is InstanceState.LOST
    assert rig.core.version > version
    rig.do(NodeLost(instance_id="d0"))
    rig.do(NodeLost(instance_id="unknown"))


def test_a_lost_instance_is_forgotten_after_a_while() -> None:
    rig = Rig(config(forget_s=5.0))
    rig.fleet("1P1D")
    rig.do(NodeLost(instance_id="d0"))
    assert [one.state for one in rig.core.state(rig.now).instances] == ["lost", "ready"]
    rig.wait(7.0)
    assert [one.id for one in rig.core.state(rig.now).instances] == ["p0"]


def test_every_engine_learns_of_pools_when_they_come_and_go() -> None:
    rig = Rig()
    rig.fleet("1P1D")
    rig.node("k1", hello("k1", Role.KV_POOL))
    effects = rig.beat("k1")
    assert [(name, [one.instance_id for one in message.pools]) for name, message in sends(effects, PoolMap)] == [
        ("d0", ["k1"]), ("p0", ["k1"]),
    ]  # fmt: skip
    rig.node("k0", hello("k0", Role.KV_POOL))
    effects = rig.beat("k0")
    assert [one.instance_id for one in sends(effects, PoolMap)[0][1].pools] == ["k0", "k1"]
    assert not sends(rig.beat("k0"), PoolMap), "told once"
    effects = rig.do(NodeLost(instance_id="k1"))
    assert [[one.instance_id for one in message.pools] for _, message in sends(effects, PoolMap)] == [["k0"], ["k0"]]
    effects = rig.node("p1", hello("p1", Role.PREFILL))
    assert [one.instance_id for one in sent(effects, PoolMap)[1].pools] == ["k0"]


def test_a_heartbeat_never_touches_what_was_charged() -> None:
    """vllm-router#197: a health check zeroes load elsewhere; llm-d-router#2066: load is charged at dispatch."""
    rig = Rig()
    rig.fleet("1P1D")
    rig.arrive("r1", 1000)
    prefill, decode = rig.instance("p0"), rig.instance("d0")
    assert prefill.prefill_tokens == 999
    assert decode.rows == 1
    rig.beat("p0")
    rig.beat("d0")
    assert (prefill.prefill_tokens, decode.rows) == (999, 1)


def test_giving_back_more_than_was_charged_raises() -> None:
    """vllm-ascend#16517: a double release must not go unseen."""
    rig = Rig()
    rig.fleet("1P1D")
    one = rig.instance("d0")
    one.charge(Charge(rows=1, blocks=3))
    one.discharge(Charge(rows=1, blocks=3))
    with pytest.raises(IllegalTransition, match="instance d0"):
        one.discharge(Charge(rows=1, blocks=3))


def test_cache_events_with_a_gap_ask_for_a_snapshot() -> None:
    """dynamo#1056: the index is rebuilt from the nodes."""
    rig = Rig()
    rig.fleet("1P1D")
    effects = rig.node("p0", CacheEvents(epoch=1, seq=500, stored=(b"x" * 32,)))
    assert sent(effects, CacheSnapshotWanted) == ("p0", CacheSnapshotWanted(epoch=1))
    rig.node("p0", CacheEvents(epoch=1, seq=501, stored=(b"x" * 32,), snapshot=True))
    assert rig.core.metrics()["directory_blocks"] == 1.0


def test_membership_is_told_in_the_log() -> None:
    rig = Rig()
    rig.fleet("1P")
    rig.do(NodeLost(instance_id="p0"))
    assert any("p0 is lost" in note.text for note in those(rig.effects, Note))
