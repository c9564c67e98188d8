"""Fetch, compute, or both at once: whichever is done first; what fetches were worth; how fast pools really are."""

from __future__ import annotations

import msgspec
import pytest
from core_kit import BLOCK, H20, H800, LAYOUT, Prefill, Rig, config, hello, profile, sends, sent
from test_core_placement import cache, place

from controlplane.core.directory import Match
from controlplane.core.events import NodeLost
from controlplane.core.fetching import Fetch, Overlap, Path, best_fetch
from controlplane.core.instance import FETCH_FADE_S, Charge, Instance
from controlplane.core.placement import Candidate
from controlplane.core.policies.registry import POLICIES
from transfer.api import KvView
from transfer.terms import Role
from transfer.wire.messages import CacheEvents, Goodbye, PrefillDone, Reserve

COMPUTE = profile(H800)
TOKENS = 4000
POOL_BLOCKS = TOKENS // BLOCK - 1
TOKEN_BYTES = COMPUTE.shape.kv_token_bytes
BLOCK_BYTES = BLOCK * TOKEN_BYTES
WHOLE_BYTES = POOL_BLOCKS * BLOCK_BYTES
COMPUTE_S = COMPUTE.prefill_s(TOKENS - 1)


def path(link: float, *, have: int = 0, ssd: int = 0, lead: int | None = None, latency_s: float = 0.003) -> Path:
    blocks = POOL_BLOCKS
    match = Match(blocks, ssd, blocks - ssd if lead is None else lead)
    pool = Instance(hello("k0", Role.KV_POOL), 0.0)
    settings = config(fetch_latency_s=latency_s, ssd_bytes_per_s=link / 10)
    return Path(settings, pool, match, have, BLOCK, TOKEN_BYTES, link)


def overlap(budget: int = 100_000, latency_s: float = 0.003, queue_s: float = 0.0, **more: bool) -> Overlap:
    return Overlap(COMPUTE.prefill_s, TOKENS - 1, BLOCK, budget, LAYOUT.num_layers, latency_s, queue_s, **more)


@pytest.mark.parametrize("relative", [0.01, 0.3, 0.9, 1.5, 4.0, 30.0, 1000.0])
@pytest.mark.parametrize(("budget", "queue_s", "overlaps"), [
    (512, 0.0, True), (100_000, 0.0, True), (100_000, 0.0, False), (100_000, 0.5 * COMPUTE_S, False),
])  # fmt: skip
@pytest.mark.parametrize(("ssd", "have"), [(0, 0), (120, 0), (249, 0), (60, 100), (200, 100)])
def test_the_split_is_as_good_as_the_best_of_all(
    relative: float, budget: int, queue_s: float, overlaps: bool, ssd: int, have: int
) -> None:
    """relative: fetching all of it / computing all of it."""
    here = path(WHOLE_BYTES / (relative * COMPUTE_S), have=have, ssd=ssd)
    beside = overlap(budget, queue_s=queue_s, beside=overlaps)
    best_s, fetch = best_fetch(here, beside, POOL_BLOCKS)
    none_s = COMPUTE.prefill_s(TOKENS - 1 - have * BLOCK, have * BLOCK)
    everything = [beside.total_s(here.fetch(blocks)) for blocks in range(have + 1, POOL_BLOCKS + 1)]
    assert best_s == beside.total_s(fetch)
    assert min(everything) <= best_s
    assert min(best_s, none_s) <= min(*everything, none_s) * 1.03


def test_fetch_and_compute_hide_each_other_but_for_one_layer() -> None:
    even = path(WHOLE_BYTES / COMPUTE_S, latency_s=1e-9)
    total_s, fetch = best_fetch(even, overlap(latency_s=1e-9), POOL_BLOCKS)
    beside_s = COMPUTE.prefill_s(TOKENS - 1 - fetch.blocks * BLOCK, fetch.blocks * BLOCK)
    assert fetch.fetch_s == pytest.approx(beside_s, rel=0.04)
    assert total_s == pytest.approx(max(fetch.fetch_s, beside_s) + beside_s / LAYOUT.num_layers, rel=0.02)
    assert total_s < 0.8 * COMPUTE_S


def test_a_fetch_hides_behind_the_first_step_only() -> None:
    even = path(WHOLE_BYTES / COMPUTE_S)
    one_step, steps = overlap(), overlap(256)
    fetch = even.fetch(POOL_BLOCKS // 2)
    left = COMPUTE.prefill_s(TOKENS - 1 - fetch.blocks * BLOCK, fetch.blocks * BLOCK)
    assert steps.total_s(fetch) > one_step.total_s(fetch) + 0.2 * left


def test_a_fetch_does_not_hide_behind_a_step_in_which_others_decode() -> None:
    fetch = path(WHOLE_BYTES / COMPUTE_S).fetch(POOL_BLOCKS // 2)
    left_s = COMPUTE.prefill_s(TOKENS - 1 - fetch.blocks * BLOCK, fetch.blocks * BLOCK)
    assert overlap(beside=False).total_s(fetch) == pytest.approx(fetch.fetch_s + left_s)
    assert overlap().total_s(fetch) < overlap(beside=False).total_s(fetch)


def test_a_fetch_hides_behind_the_queue_too() -> None:
    """Where others are computed first, more is fetched: it costs no time and spares compute."""
    slow = path(WHOLE_BYTES / (3 * COMPUTE_S))
    busy = Overlap(COMPUTE.prefill_s, TOKENS - 1, BLOCK, 100_000, LAYOUT.num_layers, 0.003, queue_s=2 * COMPUTE_S)
    total_s, fetch = best_fetch(slow, busy, POOL_BLOCKS)
    idle_s, less = best_fetch(slow, overlap(), POOL_BLOCKS)
    assert fetch.blocks > 1.5 * less.blocks
    assert total_s < idle_s / 1.5
    waits = Overlap(COMPUTE.prefill_s, TOKENS - 1, BLOCK, 100_000, LAYOUT.num_layers, 0.003, queue_s=4 * COMPUTE_S)
    total_s, fetch = best_fetch(slow, waits, POOL_BLOCKS)
    assert fetch.blocks == POOL_BLOCKS
    assert total_s == COMPUTE.prefill_s(TOKENS - 1 - POOL_BLOCKS * BLOCK, POOL_BLOCKS * BLOCK)


def test_a_busy_instance_fetches_more_of_it() -> None:
    rig = fleet(WHOLE_BYTES / (2 * COMPUTE_S), prefill_backlog_s=100.0)
    cache(rig, "k0", TOKENS, POOL_BLOCKS)
    idle = fetch_of(rig, "r1")
    rig.instance("p0").charge(Charge(prefill_tokens=50_000, prefill_us=round(3e6 * COMPUTE_S)))
    rig.beat("p0", queued_prefill_tokens=50_000)
    busy = fetch_of(rig, "r2")
    assert idle.blocks < busy.blocks == POOL_BLOCKS


def test_fetching_is_not_charged_as_compute() -> None:
    rig = fleet(WHOLE_BYTES / (0.3 * COMPUTE_S))
    cache(rig, "k0", TOKENS, POOL_BLOCKS)
    one = chosen(rig, "r1")
    assert one.fetch is not None
    cached = one.fetch.blocks * BLOCK
    compute_s = COMPUTE.prefill_s(TOKENS - 1 - cached, cached)
    assert one.prefill_s > 1.1 * compute_s
    assert one.charge_prefill.prefill_us == round(compute_s * 1e6)
    assert one.charge_prefill.prefill_tokens == TOKENS - 1 - cached


def test_ssd_costs_what_its_own_speed_says_and_only_where_it_is_read() -> None:
    here = path(1e9, ssd=50, latency_s=0.5)
    lead = here.fetch(POOL_BLOCKS - 50)
    assert (lead.ssd_blocks, lead.fetch_s) == (0, pytest.approx(0.5 + (POOL_BLOCKS - 50) * BLOCK_BYTES / 1e9))
    more = here.fetch(POOL_BLOCKS - 40)
    assert (more.ssd_blocks, more.fetch_s) == (10, pytest.approx(lead.fetch_s + 10 * BLOCK_BYTES / 1e8))
    assert path(1e9, ssd=50, have=POOL_BLOCKS - 20).fetch(POOL_BLOCKS).ssd_blocks == 20


# --- in a fleet ---------------------------------------------------------------------------------------------


def fleet(link: float, **changes: object) -> Rig:
    rig = Rig(config(policy="slo", ssd_bytes_per_s=1e12, **changes))  # which places on instances with a queue
    quick = msgspec.structs.replace(H800, link_bytes_per_s=1e15)  # so that the pool's own link counts
    rig.join("p0", Role.PREFILL, num_blocks=20_000, hardware=quick)
    rig.join("d0", Role.DECODE, num_blocks=20_000)
    rig.join("k0", Role.KV_POOL, num_blocks=1000, hardware=msgspec.structs.replace(H20, link_bytes_per_s=link / 0.8))
    return rig


def chosen(rig: Rig, name: str, **options: object) -> Candidate:
    found = place(rig, name, TOKENS, **options).chosen
    assert found is not None
    return found


def fetch_of(rig: Rig, name: str) -> Fetch:
    found = chosen(rig, name).fetch
    assert found is not None
    return found


@pytest.mark.parametrize(("relative", "way"), [(0.01, "fetch"), (1.0, "both"), (1e6, "compute")])
def test_the_why_tells_where_kv_comes_from(relative: float, way: str) -> None:
    rig = fleet(WHOLE_BYTES / (relative * COMPUTE_S))
    cache(rig, "k0", TOKENS, POOL_BLOCKS)
    one = chosen(rig, "r1")
    view = rig.request("r1").why[0]
    assert view.kv_way == one.way == way
    order = sent(rig.reserved("r1"), Prefill)[1]
    if one.fetch is None:
        assert (view.kv_source, view.fetched_blocks, view.fetch_s, order.source) == (None, 0, 0.0, None)
    else:
        assert order.source is not None
        assert (view.kv_source, view.fetched_blocks) == ("k0", order.source.num_blocks)
        assert view.fetch_s == one.fetch.fetch_s > 0
        assert (order.source.num_blocks == POOL_BLOCKS) == (way == "fetch")


def test_the_pool_with_it_in_memory_is_preferred_to_the_one_with_it_on_ssd() -> None:
    rig = Rig(config(ssd_bytes_per_s=1e6))
    rig.fleet("1P1D4K", num_blocks=20_000)
    cache(rig, "k3", TOKENS, POOL_BLOCKS)
    probe = place(rig, "probe", TOKENS)
    hashes = tuple(probe.hashes or ())[:POOL_BLOCKS]
    rig.release(rig.end("probe", outcome="cancelled", by_node=False))
    for name in ("k0", "k1", "k2"):
        rig.node(name, CacheEvents(epoch=1, seq=1, stored_ssd=hashes))
    assert fetch_of(rig, "r1").pool.id == "k3"
    rig.do(NodeLost(instance_id="k3"))
    one = chosen(rig, "r2")
    assert one.fetch is None or one.fetch.new_blocks < 10, "reading it takes longer than computing"


@pytest.mark.parametrize("policy", sorted(POLICIES.keys() - {"colocated", "distserve"}))  # which know no pool
@pytest.mark.parametrize("fleet", ["m0", "d0"])
def test_who_computes_and_decodes_fetches_as_a_prefill_instance_does(policy: str, fleet: str) -> None:
    """Whatever the policy, where there is no other way than one instance for both phases."""
    rig = alone(fleet, policy)
    cache(rig, "k0", TOKENS, POOL_BLOCKS)
    one = chosen(rig, "r1")
    assert not one.remote
    assert one.fetch is not None
    assert (one.fetch.pool.id, one.fetch.blocks, one.cached_tokens) == ("k0", POOL_BLOCKS, POOL_BLOCKS * BLOCK)
    left = TOKENS - one.cached_tokens
    compute_s = COMPUTE.prefill_s(left, one.cached_tokens)
    assert (one.compute_tokens, one.charge_decode.prefill_tokens) == (left, left)
    assert one.charge_decode.prefill_us == round(compute_s * 1e6)
    assert one.ttft_s == one.prefill_s > one.fetch.fetch_s
    reserve = sent(rig.effects, Reserve)[1]
    assert reserve.source is not None
    assert (reserve.source.peer.instance_id, reserve.source.num_blocks) == ("k0", POOL_BLOCKS)
    view = rig.request("r1").why[0]
    assert (view.kv_source, view.kv_way, view.fetched_blocks) == ("k0", "fetch", POOL_BLOCKS)
    assert view.fetch_s == one.fetch.fetch_s


def test_what_it_has_found_and_fetched_is_counted_and_learned_from() -> None:
    rig = alone("m0", "goodput")
    cache(rig, "k0", TOKENS, POOL_BLOCKS)
    cache(rig, "m0", TOKENS, 100)
    before, fetch, fetched = kv_of(rig), fetch_of(rig, "r1"), (POOL_BLOCKS - 100) * BLOCK
    rig.reserved("r1")
    rig.node("m0", PrefillDone(
        request_id="r1", generation=rig.request("r1").generation,
        computed_tokens=TOKENS - POOL_BLOCKS * BLOCK, cached_tokens=100 * BLOCK, fetched_tokens=fetched,
        prefill_s=0.1, transfer_s=0.0, exposed_s=0.0, transfer_bytes=0,
        fetch_s=2.0 * fetch.fetch_s, fetch_exposed_s=0.0,
    ))  # fmt: skip
    assert rig.instance("k0").fetch_scale == pytest.approx(1.2)
    rig.end("r1")
    record = rig.effects[-1].record  # type: ignore[attr-defined]
    assert (record.cached_tokens, record.fetched_tokens) == (POOL_BLOCKS * BLOCK, fetched)
    assert (record.kv_source, record.outcome) == ("k0", "ok")
    after = kv_of(rig)
    assert after.looked_up_tokens - before.looked_up_tokens == TOKENS, "once"
    assert after.device_tokens - before.device_tokens == 100 * BLOCK
    assert after.pool_dram_tokens - before.pool_dram_tokens == fetched
    assert after.useful_tokens - before.useful_tokens == fetched


def test_a_pool_that_went_before_the_reservation_is_repeated_is_not_fetched_from() -> None:
    rig = alone("m0", "goodput")
    cache(rig, "k0", TOKENS, POOL_BLOCKS)
    place(rig, "r1", TOKENS)
    rig.do(NodeLost(instance_id="k0"))
    repeated = [one for _, one in sends(rig.wait(rig.core.config.reserve_retry_s + 1.5), Reserve)]
    assert [one.source for one in repeated] == [None] * len(repeated) != []


def alone(name: str, policy: str) -> Rig:
    """One instance that has to do all, and a pool."""
    rig = Rig(config(policy=policy, ssd_bytes_per_s=1e12, without_prefill="serve_on_decode"))
    quick = msgspec.structs.replace(H800, link_bytes_per_s=1e15)
    rig.join(name, Role.MIXED if name[0] == "m" else Role.DECODE, num_blocks=20_000, hardware=quick)
    link = WHOLE_BYTES / (0.01 * COMPUTE_S) / 0.8
    rig.join("k0", Role.KV_POOL, num_blocks=1000, hardware=msgspec.structs.replace(H20, link_bytes_per_s=link))
    return rig


def test_what_an_instance_has_itself_is_not_fetched() -> None:
    rig = fleet(WHOLE_BYTES / (0.01 * COMPUTE_S))
    cache(rig, "k0", TOKENS, POOL_BLOCKS)
    cache(rig, "p0", TOKENS, 100)
    one = fetch_of(rig, "r1")
    assert (one.blocks, one.new_blocks) == (POOL_BLOCKS, POOL_BLOCKS - 100)


@pytest.mark.parametrize("farewell", [NodeLost(instance_id="k0"), Goodbye(epoch=1, reason="stops"), "not ready"])
def test_a_pool_that_went_before_decode_answered_is_not_fetched_from(farewell: object) -> None:
    rig = fleet(WHOLE_BYTES / (0.01 * COMPUTE_S))
    cache(rig, "k0", TOKENS, POOL_BLOCKS)
    assert fetch_of(rig, "r1").pool.id == "k0"
    if isinstance(farewell, NodeLost):
        rig.do(farewell)
    elif isinstance(farewell, Goodbye):
        rig.node("k0", farewell)
    else:
        rig.beat("k0", state="draining")
    assert sent(rig.reserved("r1"), Prefill)[1].source is None


# --- what it was worth --------------------------------------------------------------------------------------


def report(rig: Rig, name: str, *, cached: int, fetched: int, fetch_s: float, exposed_s: float) -> None:
    one = rig.request(name)
    rig.reserved(name)
    rig.node("p0", PrefillDone(
        request_id=name, generation=one.generation, computed_tokens=TOKENS - 1 - cached - fetched,
        cached_tokens=cached, fetched_tokens=fetched, prefill_s=0.1, transfer_s=0.1, exposed_s=0.0,
        transfer_bytes=1000, fetch_s=fetch_s, fetch_exposed_s=exposed_s,
    ))  # fmt: skip
    rig.received(name)
    rig.end(name, cached_tokens=cached + fetched)


def kv_of(rig: Rig) -> KvView:
    return rig.core.state(rig.now).kv


def test_hits_are_counted_by_tier_and_useful_ones_apart() -> None:
    rig = fleet(WHOLE_BYTES / (0.01 * COMPUTE_S))
    probe = place(rig, "probe", TOKENS)
    hashes = tuple(probe.hashes or ())
    rig.release(rig.end("probe", outcome="cancelled", by_node=False))
    rig.node("k0", CacheEvents(epoch=1, seq=1, stored=hashes[:150], stored_ssd=hashes[150:200]))
    rig.node("p0", CacheEvents(epoch=1, seq=1, stored=hashes[:100]))
    before = kv_of(rig)
    fetch = fetch_of(rig, "r1")
    assert (fetch.blocks, fetch.new_blocks, fetch.ssd_blocks) == (200, 100, 50)
    report(rig, "r1", cached=100 * BLOCK, fetched=100 * BLOCK, fetch_s=0.02, exposed_s=0.001)
    after = kv_of(rig)
    assert after.looked_up_tokens - before.looked_up_tokens == TOKENS
    assert (after.device_tokens, after.pool_dram_tokens, after.pool_ssd_tokens) == (1600, 800, 800)
    assert after.useful_tokens == 1600
    saved_s = COMPUTE.prefill_s(TOKENS - 1 - 1600, 1600) - COMPUTE.prefill_s(TOKENS - 1 - 3200, 3200)
    for number, (exposed_s, useful) in enumerate([(0.99 * saved_s, 1600), (1.01 * saved_s, 0)]):
        place(rig, f"s{number}", TOKENS)
        report(rig, f"s{number}", cached=1600, fetched=1600, fetch_s=0.02, exposed_s=exposed_s)
        assert kv_of(rig).useful_tokens - after.useful_tokens == useful, "slower than computing is not useful"
        after = kv_of(rig)


def test_a_request_that_decode_computed_counts_what_it_found_there() -> None:
    rig = fleet(1e9)
    cache(rig, "d0", TOKENS, POOL_BLOCKS)
    before = kv_of(rig)
    assert not chosen(rig, "r1").remote
    rig.reserved("r1")
    rig.end("r1", cached_tokens=POOL_BLOCKS * BLOCK)
    assert kv_of(rig).device_tokens - before.device_tokens == POOL_BLOCKS * BLOCK
    assert kv_of(rig).looked_up_tokens - before.looked_up_tokens == TOKENS


def test_the_record_tells_how_much_was_fetched() -> None:
    rig = fleet(WHOLE_BYTES / (0.01 * COMPUTE_S))
    cache(rig, "k0", TOKENS, POOL_BLOCKS)
    place(rig, "r1", TOKENS)
    report(rig, "r1", cached=0, fetched=POOL_BLOCKS * BLOCK, fetch_s=0.01, exposed_s=0.0)
    record = rig.effects[-1].record  # type: ignore[attr-defined]
    assert (record.fetched_tokens, record.cached_tokens, record.kv_source) == (POOL_BLOCKS * BLOCK,) * 2 + ("k0",)


# --- learning -----------------------------------------------------------------------------------------------


def test_a_pool_that_is_slower_than_declared_is_used_less_and_tried_again_later() -> None:
    rig = fleet(WHOLE_BYTES / (0.05 * COMPUTE_S))
    cache(rig, "k0", TOKENS, POOL_BLOCKS)
    declared_s = fetch_of(rig, "r0").fetch_s
    report(rig, "r0", cached=0, fetched=POOL_BLOCKS * BLOCK, fetch_s=declared_s * 100, exposed_s=1.0)
    assert rig.instance("k0").fetch_scale == pytest.approx(1 + 0.2 * 99)
    slower = chosen(rig, "r1").fetch
    assert slower is None or slower.new_blocks < POOL_BLOCKS
    rig.end("r1", outcome="cancelled", by_node=False)
    rig.beat("k0", after=FETCH_FADE_S)
    assert rig.instance("k0").fetch_scale == pytest.approx(20.8**0.5)
    rig.beat("k0", after=10 * FETCH_FADE_S)
    assert rig.instance("k0").fetch_scale == pytest.approx(1.0, abs=0.01)


@pytest.mark.parametrize(("fetched", "fetch_s", "expected"), [
    (POOL_BLOCKS * BLOCK, 1e9, 1 + 0.2 * 99),
    (POOL_BLOCKS * BLOCK, 1e-9, 1 - 0.2 * 0.9),
    (0, 1e-9, 1.0),
    (0, 1e9, 1 + 0.2 * 99),
    (POOL_BLOCKS * BLOCK, 0.0, 1.0),
])  # fmt: skip
def test_what_was_measured_is_clamped_and_quick_misses_teach_nothing(
    fetched: int, fetch_s: float, expected: float
) -> None:
    rig = fleet(WHOLE_BYTES / (0.01 * COMPUTE_S))
    cache(rig, "k0", TOKENS, POOL_BLOCKS)
    fetch_of(rig, "r0")
    report(rig, "r0", cached=0, fetched=fetched, fetch_s=fetch_s, exposed_s=0.0)
    assert rig.instance("k0").fetch_scale == pytest.approx(expected)


def test_a_pool_that_does_not_have_what_it_says_does_not_hide_one_that_has() -> None:
    link = WHOLE_BYTES / (0.05 * COMPUTE_S)
    rig = fleet(link)
    rig.join("k1", Role.KV_POOL, num_blocks=1000, hardware=msgspec.structs.replace(H20, link_bytes_per_s=link / 0.8))
    cache(rig, "k0", TOKENS, POOL_BLOCKS)
    cache(rig, "k1", TOKENS, POOL_BLOCKS // 2)
    asked = []
    for number in range(16):
        fetch = fetch_of(rig, f"r{number}")
        asked.append(fetch.pool.id)
        fetched = fetch.new_blocks * BLOCK if fetch.pool.id == "k1" else 0
        report(rig, f"r{number}", cached=0, fetched=fetched, fetch_s=1e-9 if not fetched else fetch.fetch_s,
               exposed_s=0.0)  # fmt: skip
    assert asked[:5] == ["k0"] * 5, "blocks may have been evicted meanwhile"
    assert asked[10:] == ["k1"] * 6, asked
    rig.instance("k0").fetch_scale = 1.0  # faded: it is tried again, and believed again once it brings something
    report(rig, "again", cached=0, fetched=fetch_of(rig, "again").new_blocks * BLOCK, fetch_s=0.01, exposed_s=0.0)
    assert rig.instance("k0").missed == 0
