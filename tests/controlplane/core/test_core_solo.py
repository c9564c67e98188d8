"""Engines that keep KV to themselves, or cannot move what runs: who may join, what they get, how they are left."""

from __future__ import annotations

import msgspec
import pytest
from core_kit import BLOCK, LAYOUT, MODEL, Rig, config, hello, only, sends, sent, spec, those
from core_plans import apply, drain, plan, refused

from controlplane.core.events import Finished, NeedTokens, Resume
from controlplane.core.lifecycle import RequestState
from controlplane.core.policies.registry import POLICIES
from transfer.kv.block import block_hashes
from transfer.terms import Role, kv_fingerprint, pack_tokens, unpack_tokens
from transfer.wire.messages import (
    Abort,
    CacheEvents,
    Migrate,
    NotWelcome,
    PoolMap,
    Prefill,
    Released,
    Reserve,
    RoleOrder,
    Welcome,
)

OTHER_LAYOUT = msgspec.structs.replace(LAYOUT, dtype="bfloat16", rope="opaque")
OTHER_WEIGHTS = msgspec.structs.replace(MODEL, revision="as served by http://127.0.0.1:1")
SOLO: dict[str, object] = {
    "engine": "openai", "shares_kv": False, "moves": False, "layout": OTHER_LAYOUT, "model": OTHER_WEIGHTS,
}  # fmt: skip
VLLM: dict[str, object] = {"engine": "vllm", "engine_version": "0.32.0", "moves": False}


def refusal(rig: Rig, name: str, role: Role, **options: object) -> str:
    said = hello(name, role, **options)  # type: ignore[arg-type]
    return sent(rig.node(name, said), NotWelcome)[1].reason


def welcome(rig: Rig, name: str, role: Role, **options: object) -> None:
    assert sent(rig.node(name, hello(name, role, **options)), Welcome)  # type: ignore[arg-type]
    rig.beat(name)


# --- who may join -----------------------------------------------------------------------------------------------


def test_the_layout_of_a_group_is_that_of_those_who_share_whoever_came_first() -> None:
    rig = Rig()
    welcome(rig, "a", Role.MIXED, **SOLO)
    assert not rig.core._desk.fleet.groups["m"].shares
    welcome(rig, "b", Role.MIXED)
    welcome(rig, "c", Role.MIXED, **{**SOLO, "layout": msgspec.structs.replace(OTHER_LAYOUT, num_layers=7)})
    group = rig.core._desk.fleet.groups["m"]
    assert (group.shares, group.layout, group.model) == (True, LAYOUT, MODEL)
    assert [one.id for one in group.mixed] == ["a", "b", "c"]
    assert "num_layers differs" in refusal(
        rig, "d", Role.MIXED, layout=msgspec.structs.replace(LAYOUT, num_layers=7)
    ), "one that shares must still agree with those that do"


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"role": Role.DECODE}, "can only serve whole requests, so start it as mixed"),
        ({"layout": msgspec.structs.replace(OTHER_LAYOUT, block_size=32)}, "start it with --block-size 16"),
        ({"model": msgspec.structs.replace(OTHER_WEIGHTS, tokenizer="t2")}, "its tokenizer differs"),
        ({"model": msgspec.structs.replace(OTHER_WEIGHTS, vocab_size=7)}, "its vocab_size differs"),
    ],
)
def test_what_requests_are_made_of_must_agree_all_the_same(changes: dict[str, object], sentence: str) -> None:
    rig = Rig()
    rig.fleet("1P1D")
    options = {"role": Role.MIXED, **SOLO, **changes}
    assert sentence in refusal(rig, "s", **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("version", ["0.33.1", ""])
def test_versions_of_one_engine_do_not_mix_where_kv_moves(version: str) -> None:
    rig = Rig()
    welcome(rig, "p", Role.PREFILL, **VLLM)
    said = refusal(rig, "d", Role.DECODE, **{**VLLM, "engine_version": version})
    assert said.startswith(f"d runs vllm {version or 'of no known version'} and p runs 0.32.0; ")
    assert said.endswith("so run the same version on both")


def test_another_engine_or_one_that_shares_nothing_may_have_any_version() -> None:
    rig = Rig()
    welcome(rig, "p", Role.PREFILL, **VLLM)
    welcome(rig, "native", Role.DECODE)
    welcome(rig, "s", Role.MIXED, **{**SOLO, "engine": "vllm", "engine_version": "0.9"})
    rig.node("p", hello("p", Role.PREFILL, epoch=2, **{**VLLM, "engine_version": "0.33.1"}))
    assert rig.instance("p").hello.engine_version == "0.33.1", "alone of its engine, it may come back as another"


def test_a_pool_is_held_to_the_layouts_of_those_who_share() -> None:
    rig = Rig()
    welcome(rig, "s", Role.MIXED, **SOLO)
    welcome(rig, "k", Role.KV_POOL)
    assert not rig.core._desk.fleet.groups["m"].pools, "nobody there could use it"
    assert not sends(rig.all_effects, PoolMap)
    welcome(rig, "m", Role.MIXED)
    assert {name for name, _ in sends(rig.all_effects, PoolMap)} == {"m"}


# --- what they are given ----------------------------------------------------------------------------------------


def test_nothing_is_fetched_for_one_that_cannot_read_it() -> None:
    sources = {}
    for name, options in (("native", {}), ("solo", SOLO)):
        rig = Rig()
        welcome(rig, "m", Role.MIXED, num_blocks=20_000, **options)
        welcome(rig, "k", Role.KV_POOL, num_blocks=20_000)
        welcome(rig, "p", Role.PREFILL)  # a group that shares, so that the pool is its own
        tokens = unpack_tokens(spec("again", 4000).tokens)[:-1]
        hashes = tuple(block_hashes(tokens, BLOCK, kv_fingerprint(MODEL, LAYOUT)))
        rig.node("k", CacheEvents(epoch=1, seq=1, stored=hashes))
        rig.arrive("again", 4000)
        reserve = [message for _, message in sends(rig.effects, Reserve) if message.request_id == "again"]
        assert len(reserve) == 1
        assert not reserve[0].remote
        sources[name] = reserve[0].source
    assert sources["native"] is not None
    assert sources["solo"] is None


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("shape", ["1M", "1P1D", ""])
def test_every_policy_gives_it_whole_requests_only(policy: str, shape: str) -> None:
    rig = Rig(config(policy=policy, colocate="always" if shape == "1P1D" else "auto"))
    rig.fleet(shape, num_blocks=4000)
    for name in ("s0", "s1"):
        welcome(rig, name, Role.MIXED, num_blocks=4000, **SOLO)
    for index in range(12):
        rig.decoding(f"r{index}", 200, first=index)
    for name, message in sends(rig.all_effects, Reserve):
        assert not (name.startswith("s") and (message.remote or message.source)), policy
    assert not [name for name, _ in sends(rig.all_effects, Prefill) if name.startswith("s")]
    assert not sends(rig.all_effects, Migrate)
    used = {name for name, _ in sends(rig.all_effects, Reserve)}
    if policy != "bin_packing":  # that one fills an instance before it wakes another
        assert used >= {"s0", "s1"}


def test_it_weighs_by_its_measured_speed() -> None:
    shares = {}
    for speed in (1.0, 8.0):
        rig = Rig()
        rig.join("m", Role.MIXED, num_blocks=9000)
        welcome(rig, "s", Role.MIXED, num_blocks=9000, **SOLO)
        rig.beat("s", speed=speed)
        for index in range(20):
            rig.decoding(f"r{index}", 300, first=index)
        shares[speed] = sum(rig.request(f"r{index}").decode == "s" for index in range(20))
    assert 5 <= shares[1.0] <= 15
    assert shares[8.0] < shares[1.0] / 2


# --- how they are left ------------------------------------------------------------------------------------------


def test_a_drain_places_anew_what_cannot_move_a_few_at_a_time() -> None:
    rig = Rig(config(max_migrations=2))
    rig.fleet("1P2D", **VLLM)
    drain(rig, 8)
    here = [f"r{one}" for one in range(8) if rig.request(f"r{one}").decode == "d0"]
    told = [message.request_id for name, message in sends(rig.all_effects, Abort) if name == "d0"]
    assert len(here) == 4
    assert told == here[:2], "as many at a time as would migrate"
    assert [one.request_id for one in those(rig.all_effects, NeedTokens)] == here[:2]
    for name in here:
        one = rig.request(name)
        assert one.state is RequestState.RESUMING
        tokens = [*unpack_tokens(one.spec.tokens), 5, 6]
        rig.do(Resume(request_id=name, tokens=pack_tokens(tokens), num_output=2))
        assert (one.decode, one.num_replaced, one.num_resumes) == ("d1", 1, 0)
        rig.reserved(name)
        rig.started(name)
        rig.done(name)
        rig.received(name)
        assert one.state is RequestState.DECODING
        rig.node("d0", Released(request_id=name, generation=1, num_blocks=0))
        rig.tick()
    assert not sends(rig.all_effects, Migrate)
    assert sent(rig.all_effects, RoleOrder)[0] == "d0"
    assert rig.core.plans()[0].steps[0].num_migrated == 4
    record = only(rig.end(here[0]), Finished).record
    assert (record.num_replaced, record.num_resumes, record.num_migrations) == (1, 0, 0)


def test_without_another_place_what_runs_there_runs_on() -> None:
    rig = Rig()
    rig.fleet("1P2D", **VLLM)
    rig.beat("d1", free_blocks=0)
    drain(rig, 1)
    rig.tick()
    assert rig.request("r0").state is RequestState.DECODING
    rig.beat("d1")
    assert rig.request("r0").state is RequestState.RESUMING
    assert rig.request("r0").num_replaced == 1


def test_what_runs_elsewhere_does_not_migrate_to_one_that_cannot_take_it() -> None:
    rig = Rig()
    rig.fleet("1P1D")
    rig.decoding("r0")
    welcome(rig, "s", Role.MIXED, **SOLO)
    made = plan(rig, moves={"d0": "mixed"})
    apply(rig, made.plan_id)
    rig.wait(1.0)
    assert not sends(rig.all_effects, Migrate)
    assert rig.request("r0").state is RequestState.DECODING, "it ends where it is"


def test_plans_leave_its_role_alone() -> None:
    rig = Rig()
    rig.fleet("2M")
    welcome(rig, "s", Role.MIXED, **SOLO)
    assert "can only serve whole requests (mixed)" in refused(rig, moves={"s": "decode"}).message
    steps = plan(rig, "1P1D+1M").steps
    assert [one.instance_id for one in steps] == ["m0", "m1"]
    assert "keep KV to themselves and stay mixed" in refused(rig, "2P1D").message


@pytest.mark.parametrize("changed", ["engine", "host_id", "id"])
def test_a_name_that_would_steer_a_terminal_may_not_join(changed: str) -> None:
    rig, name = Rig(), "a\x1b[2J" if changed == "id" else "a"
    options = {} if changed == "id" else {changed: "x\x1b]0;gone\x07"}
    said = refusal(rig, name, Role.MIXED, **options)
    assert said.isprintable(), "nor by the sentence that refuses it"
    assert "has signs that no screen can show" in said
    welcome(rig, "b", Role.MIXED)
