"""Each peer's policy against choices worked out by hand from its own rules."""

from __future__ import annotations

import pytest
from policy_kit import BLOCK, H20, H800, answer, asked, chosen, d, k, m, p, pair

from controlplane.core.admission import Rejection
from controlplane.core.config import CoreConfig, check_config
from controlplane.core.placement import Block, Blocked
from controlplane.core.policies.lightllm import peak_tokens, sampled_needs, worst_need
from controlplane.core.policies.llumnix import moves
from controlplane.core.policies.memory import Memory
from controlplane.core.policies.mooncake import decode_step_s
from controlplane.core.policies.names import DEFAULT_POLICY, POLICY_NAMES
from controlplane.core.policies.narwhal import headroom
from controlplane.core.policies.protocol import Overview, Running
from controlplane.core.policies.registry import POLICIES
from transfer.errors import ConfigError
from transfer.terms import Slo

SPLIT = [name for name in POLICY_NAMES if name != "colocated"]


def test_every_name_has_a_policy_and_the_default_is_ours() -> None:
    assert list(POLICIES) == list(POLICY_NAMES)
    assert CoreConfig().policy == DEFAULT_POLICY
    assert all(POLICY_NAMES.values())


def test_an_unknown_name_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'conductor'"):
        check_config(CoreConfig(policy="conducter"))


@pytest.mark.parametrize("policy", SPLIT)
def test_a_lone_pair_is_taken_and_said_why(policy: str) -> None:
    found = answer(policy, p("p0"), d("d0"))
    assert isinstance(found, list)
    assert pair(found[0]) == ("p0", "d0")
    assert found[0].reason


@pytest.mark.parametrize("policy", list(POLICY_NAMES))
def test_where_there_are_only_mixed_instances_one_does_both(policy: str) -> None:
    assert chosen(policy, m("m0")) == (None, "m0")


@pytest.mark.parametrize("policy", list(POLICY_NAMES))
def test_nobody_is_placed_where_there_is_no_room(policy: str) -> None:
    found = answer(policy, p("p0"), d("d0", free=3), m("m0", free=3))
    assert found == [] or isinstance(found, Blocked)


@pytest.mark.parametrize("policy", SPLIT)
def test_one_that_failed_the_request_is_not_asked_again_while_there_are_others(policy: str) -> None:
    at = asked(p("p0"), p("p1"), d("d0"), d("d1"))
    at.wanted.avoid.update({"p0": 1, "d0": 1})
    found = POLICIES[policy].place(at)
    assert isinstance(found, list)
    assert pair(found[0]) == ("p1", "d1")


def test_as_many_alternatives_are_explained_as_asked_for() -> None:
    fleet = [p(f"p{i}") for i in range(4)] + [d(f"d{i}") for i in range(5)]
    for policy in SPLIT:
        for most in (1, 4, 8):
            found = answer(policy, *fleet, num_explained=most)
            assert isinstance(found, list)
            assert len(found) == most, (policy, most)
            assert all(one.reason for one in found)


# --- blind ones and load --------------------------------------------------------------------------------------


def test_round_robin_takes_who_was_picked_longest_ago_whatever_the_load() -> None:
    prefills = (p("p0", picked=5, queued=0), p("p1", picked=2, queued=90_000))
    assert chosen("round_robin", *prefills, d("d0", picked=3, rows=90), d("d1", picked=4)) == ("p1", "d0")


def test_random_draws_from_its_seed_and_reaches_everybody() -> None:
    fleet = [p(f"p{i}") for i in range(3)] + [d(f"d{i}") for i in range(3)]
    drawn = [chosen("random", *fleet, seed=seed) for seed in range(60)]
    assert drawn == [chosen("random", *fleet, seed=seed) for seed in range(60)]
    assert len(set(drawn)) == 9


def test_least_loaded_counts_requests_not_tokens() -> None:
    prefills = (p("p0", rows=3, queued=100), p("p1", rows=2, queued=90_000))
    assert chosen("least_loaded", *prefills, d("d0", rows=9), d("d1", rows=8, context=80_000)) == ("p1", "d1")


# --- SGLang ---------------------------------------------------------------------------------------------------


def test_cache_aware_follows_a_match_above_its_threshold_only() -> None:
    fleet = (p("p0", rows=40), p("p1", rows=0), d("d0"))
    memory = Memory()
    memory.route("p0", 50)
    memory.route("p1", 900)
    assert chosen("cache_aware", *fleet, held={"p1": 320}, memory=memory)[0] == "p1"  # .32 of 1000 tokens
    assert chosen("cache_aware", *fleet, held={"p1": 288}, memory=memory)[0] == "p0"  # .288: the smallest tree


def test_cache_aware_gives_way_to_the_shortest_queue_when_load_is_uneven() -> None:
    held = {"p0": 800}
    assert chosen("cache_aware", p("p0", rows=65), p("p1", rows=0), d("d0"), held=held)[0] == "p1"
    assert chosen("cache_aware", p("p0", rows=64), p("p1", rows=0), d("d0"), held=held)[0] == "p0"
    assert chosen("cache_aware", p("p0", rows=200), p("p1", rows=134), d("d0"), held=held)[0] == "p0"  # not 1.5 times
    assert chosen("cache_aware", p("p0", rows=200), p("p1", rows=133), d("d0"), held=held)[0] == "p1"


def test_cache_aware_remembers_what_it_sent_where() -> None:
    at = asked(p("p0"), p("p1"), d("d0"))
    policy = POLICIES["cache_aware"]
    found = policy.place(at)
    assert isinstance(found, list)
    assert policy.placed is not None
    policy.placed(at, found[0])
    assert at.memory.routed == {"p0": 999.0}
    assert chosen("cache_aware", p("p0"), p("p1"), d("d0"), memory=at.memory)[0] == "p1"


# --- Dynamo ---------------------------------------------------------------------------------------------------


def test_kv_cost_is_blocks_to_prefill_less_credit() -> None:
    # 4000 tokens are 250 blocks. p0: 250 + 100 queued - 150 held = 200; p1: 250 + 0 = 250; p2: 250 - 40 = 210
    fleet = (p("p0", queued=1600), p("p1"), p("p2"), d("d0", blocks=500), d("d1", blocks=400))
    held = {"p0": 150 * BLOCK, "p2": 40 * BLOCK}
    assert chosen("kv_cost", *fleet, tokens=4000, held=held) == ("p0", "d1")
    held = {"p0": 130 * BLOCK, "p2": 40 * BLOCK}  # p0: 220
    assert chosen("kv_cost", *fleet, tokens=4000, held=held) == ("p2", "d1")


def test_kv_cost_keeps_a_prompt_on_decode_that_holds_most_of_it() -> None:
    fleet = (p("p0"), d("d0"), d("d1"))
    assert chosen("kv_cost", *fleet, tokens=4000, held={"d1": 3008}) == (None, "d1")  # 991 uncached: under .7
    assert chosen("kv_cost", *fleet, tokens=4000, held={"d1": 1600})[0] == "p0"  # 2399 uncached


# --- Mooncake -------------------------------------------------------------------------------------------------


def test_conductor_weighs_queue_against_cache() -> None:
    assert chosen("conductor", p("p0"), p("p1"), d("d0"), tokens=4000, held={"p1": 3200})[0] == "p1"
    busy = p("p1", queued=20_000)  # .8 s against .18 s of computing
    assert chosen("conductor", p("p0"), busy, d("d0"), tokens=4000, held={"p1": 3200})[0] == "p0"


def test_conductor_takes_the_shortest_step() -> None:
    assert chosen("conductor", p("p0"), d("d0", rows=30, context=60_000), d("d1", rows=20, context=20_000))[1] == "d1"


def test_conductor_rejects_what_misses_an_objective() -> None:
    late = answer("conductor", p("p0", queued=60_000), d("d0"))  # 2.4 s of queue
    assert isinstance(late, Rejection)
    assert "2 s this request can wait" in str(late.said)
    slow = answer("conductor", p("p0"), d("d0"), slo=Slo(ttft_s=2.0, tpot_s=0.001))
    assert isinstance(slow, Rejection)
    assert slow.retry_after_s >= 1.0
    assert isinstance(answer("conductor", p("p0", queued=60_000), d("d0"), early_reject="never"), list)
    assert isinstance(answer("conductor", p("p0", queued=60_000), d("d0"), resumed=True), list)


def test_conductor_predicts_the_load_of_decode_when_the_prompt_is_done() -> None:
    memory = Memory()
    for index in range(200):
        memory.prompt_due(1.0 + index * 0.01, 0.0)  # done from 1 s to 3 s
    at = asked(p("p0"), d("d0"), memory=memory, output=100.0)
    alone_s = at.group.decodes[0].step_hint_s()
    assert decode_step_s(at, 0.5) == pytest.approx(alone_s, rel=0.05), "none is there yet"
    stay_s = 100 * alone_s
    crowd = decode_step_s(at, 2.0)
    rows = round(min(stay_s, 1.0) / 0.01)
    profile = at.group.decodes[0].profile
    assert crowd == pytest.approx(profile.decode_step_s(rows + 1, (rows + 1) * 1050), rel=0.05)
    assert decode_step_s(at, 3.0 + 2 * stay_s) == pytest.approx(alone_s, rel=0.05), "all have gone again"


# --- Llumnix --------------------------------------------------------------------------------------------------


def step(rows: int, context: int) -> float:
    return d("x").profile.decode_step_s(rows, context)


def test_bin_packing_takes_the_fullest_that_keeps_its_bound() -> None:
    limit = step(41, 41_000 + 1000) / 0.85  # 41 rows are just within .85 of it
    slo = Slo(ttft_s=2.0, tpot_s=limit * 1.001)
    crowd = d("d2", rows=80, context=90_000)
    fleet = (p("p0"), d("d0", rows=10, context=10_000), d("d1", rows=40, context=41_000), crowd)
    assert chosen("bin_packing", *fleet, slo=slo)[1] == "d1"
    over = Slo(ttft_s=2.0, tpot_s=step(11, 11_000) / 0.86)
    assert chosen("bin_packing", *fleet, slo=over)[1] == "d0", "none is within the bound: the lowest"


def running(one: object) -> list[Running]:
    name, rows = one.id, one.rows  # type: ignore[attr-defined]
    return [Running(f"{name}-r{i}", 1000 + i, 10, 100, True) for i in range(rows)]


def overview(*instances: object, tpot_s: float) -> Overview:
    at = asked(*instances)  # type: ignore[arg-type]
    return Overview(at.group, tpot_s, 0.0, at.memory, running)  # type: ignore[arg-type]


def test_llumnix_migrates_the_smallest_out_of_an_overloaded_decode() -> None:
    hot, cool = d("d0", rows=60, context=60_000), d("d1", rows=20, context=20_000)
    found = moves(overview(hot, cool, d("d2"), tpot_s=step(60, 60_000) / 0.96))
    assert [(one.request_id, one.source.id, one.target.id) for one in found] == [("d0-r0", "d0", "d1")]
    assert not moves(overview(hot, d("d1", rows=50, context=50_000), tpot_s=step(60, 60_000) / 0.94))


def test_llumnix_empties_the_least_used_decode_when_the_others_can_take_it() -> None:
    low, other = d("d0", rows=2, context=2000), d("d1", rows=20, context=20_000)
    found = moves(overview(low, other, tpot_s=step(30, 30_000) / 0.59))
    assert [(one.request_id, one.target.id) for one in found] == [("d0-r0", "d1"), ("d0-r1", "d1")]
    assert not moves(overview(low, d("d1", free=1, rows=20, context=20_000), tpot_s=step(30, 30_000) / 0.59))


# --- Narwhal --------------------------------------------------------------------------------------------------


def test_lexicographic_puts_budgets_first() -> None:
    # p0 runs decodes too and is quicker; p1 has no decodes: the first element decides while both keep TTFT
    assert chosen("lexicographic", p("p0", context=100), p("p1", queued=10_000), d("d0"))[0] == "p1"
    assert chosen("lexicographic", p("p0", context=100), p("p1", queued=60_000), d("d0"))[0] == "p0"
    big, small = d("d0", rows=20, context=20_000, hardware=H20), d("d1", rows=1, context=30_000, hardware=H20)
    assert chosen("lexicographic", p("p0"), big, small)[1] == "d0", "most tokens of headroom"


def test_headroom_is_the_most_context_within_the_pace() -> None:
    one = d("d0", rows=19)
    most = headroom(one, 0.02)
    assert one.profile.decode_step_s(20, most) <= 0.02
    assert one.profile.decode_step_s(20, most + most // 8) > 0.02
    assert headroom(one, 0.001) == 0


# --- LightLLM -------------------------------------------------------------------------------------------------


def test_the_peak_is_what_a_step_by_step_run_uses_at_most() -> None:
    needs = [(100, 7), (20, 40), (50, 3), (10, 12)]
    used = []
    for steps in range(41):
        used.append(sum(now + steps for now, to_come in needs if to_come >= steps))
    assert peak_tokens(needs) == max(used)
    assert peak_tokens([]) == 0
    assert worst_need(Running("r", 100, 10, 50, True)) == (111, 39 + 6)


def test_efficient_router_admits_by_the_worst_that_may_come() -> None:
    held = [Running("a", 700, 0, 50, True)]
    # on 2000 tokens: with (801, 55) of the new one 701 + 55 and 801 + 55 make 1502 + 110 = 1612
    tight = [d("d0", rows=1, num_blocks=126, blocks=44)]
    assert chosen("efficient_router", p("p0"), *tight, tokens=800, max_output=50, running=lambda one: held)[1] == "d0"
    long = [Running("a", 700, 0, 400, True)]
    found = answer("efficient_router", p("p0"), *tight, tokens=800, max_output=400, running=lambda one: long)
    assert isinstance(found, Blocked)
    assert found.block is Block.ROOM


def test_past_future_admits_by_what_came_before() -> None:
    long = [Running("a", 700, 0, 400, True)]
    memory = Memory()
    for _ in range(50):
        memory.finished(20)
    tight = [d("d0", rows=1, num_blocks=126, blocks=44)]
    question = {"tokens": 800, "max_output": 400, "running": lambda one: long}
    assert chosen("past_future", p("p0"), *tight, memory=memory, **question)[1] == "d0"
    for _ in range(200):
        memory.finished(390)
    assert isinstance(answer("past_future", p("p0"), *tight, memory=memory, **question), Blocked)


def test_a_sampled_end_is_later_than_now() -> None:
    at = asked(p("p0"), d("d0"))
    rows = [Running("r", 10, 30, 500, True)] * 50
    for now, left in sampled_needs(rows, [5, 10, 40, 60, 700], at.random):
        assert (now, left in (10, 30, 470)) == (41, True)
    assert sampled_needs([Running("r", 10, 300, 500, True)], [5, 10], at.random) == [(311, 200)], "up to its limit"


# --- baselines ------------------------------------------------------------------------------------------------


def test_distserve_joins_the_shortest_queue_and_never_fetches() -> None:
    fleet = (p("p0", rows=2), p("p1", rows=1, queued=30_000), d("d0", rows=4), d("d1", rows=3), k("k0"))
    found = answer("distserve", *fleet, tokens=4000, held={"k0": 3200})
    assert isinstance(found, list)
    assert pair(found[0]) == ("p1", "d1")
    assert found[0].fetch is None
    fetched = answer("least_loaded", p("p0"), d("d0"), k("k0"), tokens=4000, held={"k0": 3200})
    assert isinstance(fetched, list)
    assert fetched[0].fetch is not None, "others may"


def test_splitwise_overflows_to_the_mixed_pool_and_then_to_token_machines() -> None:
    short, full = p("p0", queued=8192), p("p0", queued=8193)
    assert chosen("splitwise", short, d("d0"), m("m0"))[0] == "p0"
    assert chosen("splitwise", full, d("d0"), m("m0")) == (None, "m0")
    assert chosen("splitwise", full, d("d0"), m("m0", queued=8193)) == (None, "d0")
    assert chosen("splitwise", full, d("d0", queued=9000), m("m0", queued=9000)) == ("p0", "d0")


def test_colocated_weighs_who_waits_four_times_and_never_splits() -> None:
    assert chosen("colocated", m("m0", rows=9), m("m1", rows=4, num_waiting=1)) == (None, "m1")
    assert chosen("colocated", m("m0", rows=7), m("m1", rows=4, num_waiting=1)) == (None, "m0")
    assert chosen("colocated", p("p0"), d("d0")) == (None, "d0")


def test_slo_avoids_a_decode_that_is_too_slow_after_the_first_token() -> None:
    slow = d("slow", hardware=H800, rows=120, context=250_000, host="p0")
    fleet = (p("p0"), slow, d("d1", hardware=H20))
    tight = Slo(ttft_s=2.0, tpot_s=0.012)
    assert chosen("slo", *fleet, slo=tight)[1] == "d1"
