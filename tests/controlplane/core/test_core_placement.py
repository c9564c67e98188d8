"""Placement: who gets a request and why, on load, cache, pool, room, objectives and policy."""

from __future__ import annotations

import msgspec
import pytest
from core_kit import BLOCK, GREEDY, H20, H800, LAYOUT, Rig, Slo, config, hello, only, profile, sends, sent, those

from controlplane.core.config import CoreConfig, check_config
from controlplane.core.events import Fail, NodeLost
from controlplane.core.instance import Charge
from controlplane.core.lifecycle import Request
from transfer.errors import ConfigError
from transfer.kv.block import block_hashes
from transfer.profile import StepRange
from transfer.terms import Role, unpack_tokens
from transfer.wire.messages import CacheEvents, Prefill, Reserve

LONG = msgspec.structs.replace(GREEDY, max_tokens=400)


def place(rig: Rig, name: str, num_tokens: int = 100, **options: object) -> Request:
    rig.arrive(name, num_tokens, **options)
    return rig.request(name)


def cache(rig: Rig, holder: str, num_tokens: int, num_blocks: int, first: int = 1) -> None:
    """Let an instance say that it holds the leading blocks of a prompt."""
    probe = place(rig, f"probe-{holder}", num_tokens, first=first)
    root = rig.core._desk.fleet.groups["m"].root("")
    hashes = block_hashes(unpack_tokens(probe.tokens), BLOCK, root)[:num_blocks]
    rig.release(rig.end(probe.request_id, outcome="cancelled", by_node=False))
    rig.node(holder, CacheEvents(epoch=1, seq=1, stored=tuple(hashes)))


def test_equal_instances_take_turns() -> None:
    rig = Rig()
    rig.fleet("3P3D")
    placed = []
    for index in range(6):
        one = place(rig, f"r{index}")
        placed.append((one.prefill, one.decode))
        rig.release(rig.end(one.request_id, outcome="cancelled", by_node=False))
    assert placed == [("p0", "d0"), ("p1", "d1"), ("p2", "d2")] * 2


def test_load_is_charged_at_dispatch_so_that_a_burst_spreads() -> None:
    """llm-d-router#2066: no overshoot between two reports."""
    rig = Rig()
    rig.fleet("4P4D")
    burst = [place(rig, f"r{index}", 2000) for index in range(8)]
    assert sorted(str(one.prefill) for one in burst) == ["p0", "p0", "p1", "p1", "p2", "p2", "p3", "p3"]
    assert sorted(str(one.decode) for one in burst) == ["d0", "d0", "d1", "d1", "d2", "d2", "d3", "d3"]


def test_the_faster_instance_gets_more() -> None:
    """Load counts in seconds, so that unequal hardware is balanced by nature."""
    rig = Rig(config(policy="slo", prefill_backlog_s=100.0))  # which queues at instances; goodput binds late
    rig.join("h800", Role.PREFILL, hardware=H800)
    rig.join("h20", Role.PREFILL, hardware=H20)
    rig.fleet("1D", num_blocks=50_000)
    burst = [place(rig, f"r{index}", 2000) for index in range(20)]
    fast = sum(one.prefill == "h800" for one in burst)
    assert 16 <= fast <= 19, fast


def test_a_measured_slowdown_moves_work_away() -> None:
    rig = Rig()
    rig.fleet("2P1D")
    rig.beat("p0", speed=4.0)
    assert {place(rig, f"r{index}", 1000).prefill for index in range(2)} == {"p1"}


def test_the_prefill_that_holds_the_prefix_wins_until_its_queue_is_longer_than_computing() -> None:
    rig = Rig(config(policy="slo", prefill_backlog_s=100.0))
    rig.fleet("2P1D", num_blocks=20_000)
    cache(rig, "p1", 4000, 200)
    first = place(rig, "r0", 4000)
    assert (first.prefill, first.chosen.cached_tokens if first.chosen else 0) == ("p1", 3200)
    for index in range(12):
        place(rig, f"f{index}", 4000, first=50 + index)
    charged = {name: rig.instance(name).queue_s() for name in ("p0", "p1")}
    busy = place(rig, "x", 4000, first=99)
    assert busy.prefill == min(charged, key=lambda name: charged[name])
    rig.instance("p1").charge(Charge(prefill_tokens=1000, prefill_us=30_000_000), rig.now)  # far behind
    assert place(rig, "r2", 4000).prefill == "p0"


def test_a_prefix_is_fetched_from_the_pool_when_that_is_faster_than_computing() -> None:
    rig = Rig()
    rig.fleet("1P1D1K", num_blocks=20_000)
    cache(rig, "k0", 4000, 240)
    one = place(rig, "r1", 4000)
    assert one.chosen is not None
    assert one.chosen.pool is not None
    assert 3600 <= one.chosen.cached_tokens <= 3840, "most of it; the end is computed meanwhile"
    assert one.why[0].kv_source == "k0"
    prefill = sent(rig.reserved("r1"), Prefill)[1]
    assert prefill.source is not None
    assert (prefill.source.peer.instance_id, prefill.source.num_blocks * BLOCK) == ("k0", one.chosen.cached_tokens)


def test_a_slow_pool_is_not_used() -> None:
    rig = Rig()
    rig.fleet("1P1D", num_blocks=20_000)
    rig.join("k0", Role.KV_POOL, num_blocks=1000, hardware=msgspec.structs.replace(H20, link_bytes_per_s=1e4))
    cache(rig, "k0", 4000, 240)
    one = place(rig, "r1", 4000)
    assert one.chosen is not None
    assert one.chosen.pool is None


def test_a_restarted_instance_is_not_credited_for_what_it_held() -> None:
    """llm-d-router#2853."""
    rig = Rig()
    rig.fleet("2P1D")
    cache(rig, "p1", 1000, 60)
    rig.do(NodeLost(instance_id="p1"))
    rig.join("p1", Role.PREFILL, epoch=2)
    one = place(rig, "r1", 1000)
    assert one.chosen is not None
    assert one.chosen.cached_tokens == 0


def test_tenants_with_another_salt_share_no_prefix() -> None:
    """CVE-2025-46570."""
    rig = Rig()
    rig.fleet("2P1D")
    cache(rig, "p1", 1000, 60)
    one = place(rig, "r1", 1000, salt="other")
    assert one.chosen is not None
    assert one.chosen.cached_tokens == 0


def test_decode_is_chosen_by_room_and_by_pace() -> None:
    rig = Rig()
    rig.fleet("1P2D")
    rig.beat("d0", free_blocks=3)
    assert place(rig, "r1", 200).decode == "d1"
    rig.beat("d0", free_blocks=1000)
    rig.instance("d1").charge(Charge(rows=40, context_tokens=40_000))
    assert place(rig, "r2", 200).decode == "d0"


def test_a_decode_that_would_miss_the_tpot_objective_loses_although_it_answers_sooner() -> None:
    rig = Rig(config(classes={"default": Slo(ttft_s=5.0, tpot_s=0.012)}))
    rig.fleet("1P1D")
    rig.join("slow", Role.DECODE, hardware=msgspec.structs.replace(H20, memory_bytes_per_s=1e12))
    assert place(rig, "r1", 100, sampling=LONG).decode == "d0"
    view = next(view for view in rig.request("r1").why if view.decode == "slow")
    assert "TPOT" in view.reason
    assert not view.chosen


def test_every_decision_leaves_its_reasons() -> None:
    rig = Rig()
    rig.fleet("4P4D")
    why = place(rig, "r1", 100).why
    assert len(why) == 8
    assert [view.chosen for view in why] == [True] + [False] * 7
    assert all(view.reason for view in why)
    assert why[0].ttft_s == pytest.approx(why[1].ttft_s)
    assert "turn" in why[1].reason


def test_each_way_says_what_its_step_times_are_worth() -> None:
    rig = Rig()
    rig.fleet("1P2D")
    known = StepRange(num_new_tokens=2048, context_tokens=3000, batch=64, attention_pairs=3_000_000)
    fitted = {"provenance": "fitted", "fitted_to": known}
    for name, error in (("p0", 0.02), ("d0", 0.05), ("d1", None)):
        one = rig.instance(name)
        one.latency = msgspec.structs.replace(one.profile, error=error, **fitted)
    assert {view.decode: (view.provenance, view.error) for view in place(rig, "r1", 1000).why} == {
        "d0": ("fitted", 0.05), "d1": ("fitted", None),
    }  # fmt: skip
    assert {view.provenance for view in place(rig, "r2", 3001).why} == {"extrapolated"}
    rig.instance("d0").latency = profile(H20)
    assert {view.provenance for view in place(rig, "r3", 1000).why if view.decode == "d0"} == {"preset"}


def test_prompts_that_decode_holds_already_are_not_sent_around() -> None:
    rig = Rig()
    rig.fleet("1P1D")
    cache(rig, "d0", 1000, 62)
    rig.arrive("r1", 1000)
    reserve = sent(rig.effects, Reserve)[1]
    assert reserve.remote is False
    assert rig.request("r1").why[0].cached_tokens == 992


@pytest.mark.parametrize(("colocate", "expected"), [("never", {"d0"}), ("always", {"m0"}), ("auto", {"d0", "m0"})])
def test_colocation_follows_the_policy(colocate: str, expected: set[str]) -> None:
    rig = Rig(config(colocate=colocate, prefill_backlog_s=1000.0))
    rig.fleet("1P1D1M", num_blocks=50_000)
    assert {place(rig, f"r{index}", 3000).decode for index in range(12)} - {None} == expected


def test_mixed_serves_when_there_is_no_pair_even_under_never() -> None:
    rig = Rig(config(colocate="never"))
    rig.fleet("1P1M")
    assert place(rig, "r1").decode == "m0"


def test_without_prefill_decode_serves_and_the_verdict_says_so() -> None:
    """llm-d-router#2427: an explicit policy, visible."""
    rig = Rig()
    rig.fleet("1P1D")
    rig.do(NodeLost(instance_id="p0"))
    rig.arrive("r1", 1000)
    assert sent(rig.effects, Reserve)[1].remote is False
    assert "so decode computes prompts (serve_on_decode)" in rig.core.state(rig.now).verdict


def test_without_prefill_refuse_is_an_answer_after_a_grace() -> None:
    rig = Rig(config(without_prefill="refuse", rejoin_grace_s=3.0))
    rig.fleet("1P1D")
    rig.do(NodeLost(instance_id="p0"))
    rig.arrive("r1")
    assert not sends(rig.effects, Reserve)
    assert "no prefill instance of m is ready" in rig.core.state(rig.now).verdict.lower()
    fail = only(rig.wait(5.5, ["d0"]), Fail)
    assert (fail.status, fail.kind, fail.retry_after_s) == (503, "unavailable", 3.0)


def test_requests_wait_for_nodes_that_rejoin_within_the_grace() -> None:
    rig = Rig(config(rejoin_grace_s=5.0))
    rig.fleet("1P1D")
    rig.do(NodeLost(instance_id="d0"))
    rig.arrive("r1")
    assert not those(rig.wait(3.0, ["p0"]), Fail)
    rig.join("d0", Role.DECODE, epoch=2)
    assert sends(rig.all_effects[-5:], Reserve)


def test_an_unknown_model_is_unavailable_after_the_grace() -> None:
    rig = Rig(config(rejoin_grace_s=2.0))
    rig.arrive("r1", model="nobody-has-it")
    fail = only(rig.wait(4.0), Fail)
    assert fail.status == 503
    assert "nobody-has-it" in fail.message


def test_the_backlog_stays_here_where_it_can_still_be_placed_elsewhere() -> None:
    rig = Rig(config(prefill_backlog_s=0.2, colocate="never"))
    rig.fleet("1P1D", num_blocks=100_000)
    for index in range(10):
        place(rig, f"r{index}", 4000, first=index + 1)
    waiting = [index for index in range(10) if rig.request(f"r{index}").prefill is None]
    assert waiting == [2, 3, 4, 5, 6, 7, 8, 9]
    rig.join("p1", Role.PREFILL, num_blocks=100_000)
    assert rig.request("r2").prefill == "p1"


def test_a_request_without_objectives_minimises_its_whole_time() -> None:
    rig = Rig()
    rig.fleet("1P1D")
    rig.join("slow", Role.DECODE, hardware=msgspec.structs.replace(H20, memory_bytes_per_s=1e12))
    one = place(rig, "r1", 100, traffic_class="batch", sampling=LONG)
    assert one.slo is None
    assert one.decode == "d0"


def test_round_robin_is_blind_and_fastest_sees_ttft_only() -> None:
    blind = Rig(config(policy="round_robin"))
    blind.fleet("2P1D")
    blind.beat("p0", speed=50.0)
    assert {place(blind, f"r{index}").prefill for index in range(2)} == {"p0", "p1"}
    fastest = Rig(config(policy="fastest"))
    fastest.fleet("2P1D")
    fastest.beat("p0", speed=50.0)
    assert {place(fastest, f"r{index}").prefill for index in range(2)} == {"p1"}


def test_kv_of_another_layout_is_never_pooled_for_this_model() -> None:
    rig = Rig()
    rig.node("k9", hello("k9", Role.KV_POOL, layout=msgspec.structs.replace(LAYOUT, block_size=8)))
    rig.beat("k9")
    rig.fleet("1P1D")
    assert rig.core._desk.fleet.groups["m"].pools == {}


@pytest.mark.parametrize(
    "changes", [{"lease_s": 1.0}, {"max_queue": 0}, {"default_class": "nope"}, {"measure_s": -1.0}]
)
def test_settings_that_cannot_work_are_refused(changes: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        check_config(msgspec.structs.replace(CoreConfig(), **changes))


def test_the_link_between_two_instances_counts() -> None:
    rig = Rig()
    slow = msgspec.structs.replace(H20, link_bytes_per_s=1e6)
    rig.join("p0", Role.PREFILL, host="here")
    rig.join("d0", Role.DECODE, host="far", hardware=slow)
    rig.join("d1", Role.DECODE, host="here", hardware=slow)
    for index in range(4):
        one = place(rig, f"r{index}", 1000)
        assert one.decode == "d1", "shared memory on one host needs no link"
        assert one.chosen is not None
        assert one.chosen.transfer_s < 0.02
    assert next(view for view in rig.request("r0").why if view.decode == "d0" and view.prefill).transfer_s > 0.1


def test_missing_an_objective_weighs_more_than_any_slack() -> None:
    """A far decode within both objectives beats a near one that is quick to start and too slow after."""
    rig = Rig(config(classes={"default": Slo(ttft_s=5.0, tpot_s=0.012)}))
    rig.join("p0", Role.PREFILL, host="here")
    rig.join("near", Role.DECODE, host="here", hardware=msgspec.structs.replace(H20, memory_bytes_per_s=2.0e12))
    rig.join("far", Role.DECODE, host="far", hardware=msgspec.structs.replace(H20, link_bytes_per_s=64e6))
    one = place(rig, "r1", 1000, sampling=LONG)
    assert one.decode == "far"
    by_name = {view.decode: view for view in one.why if view.prefill}
    assert by_name["near"].ttft_s + 2.0 < by_name["far"].ttft_s < 5.0
    assert 0.012 < by_name["near"].tpot_s < 0.014
