"""What operators watch: links between instances, hot prefixes by hash, evictions, failures, readings of a second."""

from __future__ import annotations

import msgspec
import pytest
from core_kit import BLOCK, LAYOUT, MODEL, Rig, config, spec

from controlplane.core.kvwatch import MAX_LINKS, MAX_PREFIXES, KvWatch
from transfer.kv.block import block_hashes
from transfer.terms import Slo, kv_fingerprint, unpack_tokens
from transfer.wire.messages import CacheEvents, PrefillDone, PrefillFailed


def hashes_of(num_tokens: int, first: int) -> list[bytes]:
    tokens = unpack_tokens(spec("x", num_tokens, first=first).tokens)[:-1]
    return block_hashes(tokens, BLOCK, kv_fingerprint(MODEL, LAYOUT, ""))


def test_links_count_what_was_handed_off_and_forget_it_after_a_minute() -> None:
    rig = Rig()
    rig.fleet("1P2D")
    for index in range(4):
        rig.arrive(f"r{index}")
        rig.reserved(f"r{index}")
        rig.done(f"r{index}", after=1.0)
        rig.received(f"r{index}")
    links = rig.core.kv(rig.now).links
    assert [(one.prefill, one.decode, one.num_transfers, one.num_bytes) for one in links] == [
        ("p0", "d0", 2, 2000), ("p0", "d1", 2, 2000),
    ]  # fmt: skip
    assert links[0].busy_s == pytest.approx(0.2)
    span_s = rig.now - 1.0
    assert links[0].bytes_per_s == pytest.approx(2000 / span_s, rel=1e-3)
    assert links[0].utilisation == pytest.approx(2000 / span_s / 50e9, rel=1e-3)
    rig.wait(70.0, ["p0", "d0", "d1"])
    late = rig.core.kv(rig.now).links[0]
    assert (late.num_bytes, late.bytes_per_s, late.utilisation, late.window_s) == (2000, 0.0, 0.0, 60.0)
    assert rig.core.kv(rig.now).handoff_bytes == 4000


def test_hot_prefixes_are_named_by_hash_with_their_holders_and_hits() -> None:
    rig = Rig()
    rig.fleet("1P1D1K")
    known = hashes_of(100, first=5)
    rig.node("p0", CacheEvents(epoch=1, seq=1, stored=tuple(known[:6])))
    rig.node("k0", CacheEvents(epoch=1, seq=1, stored=tuple(known[:4])))
    for index in range(3):
        rig.arrive(f"r{index}", 100, first=5)
    rig.arrive("cold", 100, first=6)
    (prefix,) = rig.core.kv(rig.now).prefixes
    assert (prefix.num_tokens, prefix.num_blocks, prefix.num_hits, prefix.holders) == (96, 6, 3, ("p0",))
    assert known[5].hex().startswith(prefix.name)
    assert len(prefix.name) == 12
    rig.node("p0", CacheEvents(epoch=1, seq=2, removed=tuple(known[4:6])))
    detail = rig.core.kv(rig.now)
    assert detail.prefixes[0].holders == ()
    assert {one.id: one.num_evicted for one in detail.caches} == {"p0": 2, "d0": 0, "k0": 0}


def test_nothing_of_a_prompt_is_told() -> None:
    rig = Rig()
    rig.fleet("1P1D")
    rig.node("p0", CacheEvents(epoch=1, seq=1, stored=tuple(hashes_of(100, first=5))))
    rig.arrive("secret-name", 100, first=5)
    told = msgspec.json.encode(rig.core.kv(rig.now))
    assert b"secret-name" not in told
    assert b'tokens":[' not in told
    assert hashes_of(100, first=5)[5].hex().encode() not in told, "a beginning of the hash, not all of it"


def test_failures_are_counted_by_kind() -> None:
    rig = Rig()
    rig.fleet("2P1D")
    rig.arrive("r0")
    rig.reserved("r0")
    one = rig.request("r0")
    rig.node(str(one.prefill), PrefillFailed(request_id="r0", generation=1, reason="the link broke"))
    failures = rig.core.kv(rig.now).failures
    assert failures == {
        "reservations_refused": 0, "prefills_failed": 1, "decodes_failed": 0, "migrations_failed": 0,
        "fetches_missed": 0, "copies_failed": 0,
    }  # fmt: skip


def test_the_least_frequent_prefix_gives_way_and_memory_is_bounded() -> None:
    watch = KvWatch()
    rig = Rig()
    rig.fleet("1P1D")
    for index in range(MAX_PREFIXES):
        for _ in range(2 if index else 1):
            watch.asked([bytes([index % 256, index // 256])], 1, BLOCK, 1.0)
    watch.asked([b"new"], 1, BLOCK, 2.0)
    names = {one.name for one in watch.prefixes(rig.core._desk.directory, 3.0)}
    assert len(watch._prefixes) == MAX_PREFIXES
    assert bytes([0, 0]).hex() not in names
    assert b"new" in watch._prefixes
    assert watch._prefixes[b"new"].num_hits == 1, "hits of whom it replaced are not its own"
    message = PrefillDone(
        request_id="r", generation=1, computed_tokens=1, cached_tokens=0, fetched_tokens=0, prefill_s=0.1,
        transfer_s=0.1, exposed_s=0.0, transfer_bytes=10,
    )  # fmt: skip
    one, other = rig.instance("p0"), rig.instance("d0")
    for index in range(MAX_LINKS + 5):
        one.id = f"p{index}"
        watch.handed_off(one, other, message, 1.0)
    assert len(watch.links(2.0)) == MAX_LINKS


def test_readings_are_those_of_the_fleet_state() -> None:
    rig = Rig(config(classes={"default": Slo(ttft_s=1.0, tpot_s=0.05), "bulk": None}))
    rig.fleet("1P2D1K")
    rig.core.readings(rig.now)
    for index in range(10):
        rig.decoding(f"r{index}", traffic_class="bulk" if index == 9 else "default")
        rig.end(f"r{index}", ttft_s=2.0 if index < 3 else 0.5)
        rig.tick(0.2)
        rig.core.readings(rig.now)
    rig.beat("d0", num_running=3, num_waiting=2, free_blocks=750, step_s=0.03, speed=1.5)
    rig.arrive("waits")
    state, found = rig.core.state(rig.now), rig.core.readings(rig.now)
    (default, bulk) = state.classes
    assert found["goodput_per_s"] == state.goodput.per_s > 0
    assert found["goodput_10s_per_s"] == state.goodput_10s.per_s
    assert found["goodput_per_gpu"] == state.goodput.per_gpu
    assert found["cost_per_good"] == state.goodput.cost_per_good
    assert found["attainment"] == state.recent_attainment == 6 / 9
    assert found["class.default.attainment"] == default.recent_good / default.recent_total == 6 / 9
    assert found["class.default.goodput_per_s"] == default.recent_per_s == state.goodput.per_s
    assert found["class.default.ttft_p50_s"] == default.ttft_s.p50
    assert found["class.default.tpot_p90_s"] == default.tpot_s.p90
    assert "class.bulk.attainment" not in found
    assert bulk.recent_total == 0
    assert (found["in_flight"], found["queue_depth"]) == (state.in_flight, state.queue_depth) == (1, 0)
    assert found["offered_per_s"] == pytest.approx(11 / rig.now)
    assert (found["num_prefill"], found["num_decode"]) == (1, 2)
    assert {key.rpartition(".")[2]: value for key, value in found.items() if key.startswith("instance.d0.")} == {
        "num_running": 3, "num_waiting": 2, "kv_use": 0.25, "step_s": 0.03, "speed": 1.5,
        "tpot_p50_s": next(one.tpot_p50_s for one in state.instances if one.id == "d0"),
    }  # fmt: skip
    assert "instance.p0.tpot_p50_s" not in found, "nothing ended there"
    assert found["kv_use"] == pytest.approx(250 / 3000)
    assert found["pool_use"] == 0.0
    assert sum(found[f"stage.{name}_s"] for name in ("queue", "prefill", "transfer", "decode_admission", "decode")) == (
        pytest.approx(sum(state.stages_s.values()))
    )


def test_hit_rates_are_those_of_the_last_minute_and_arrivals_of_ten_seconds() -> None:
    rig = Rig()
    rig.fleet("1P1D")
    rig.core.readings(rig.now)
    for name, cached in (("r0", 0), ("r1", 48)):
        rig.arrive(name, 97)
        rig.reserved(name)
        rig.done(name, cached=cached)
    rig.tick(1.0)
    assert rig.core.readings(rig.now)["hit_device"] == pytest.approx(48 / 194)
    offered = []
    for _ in range(62):
        rig.tick(1.0)
        found = rig.core.readings(rig.now)
        offered.append(found["offered_per_s"])
    assert offered[5] == pytest.approx(2 / 7)
    assert set(offered[11:]) == {0.0}, "arrivals a second are those of the last 10 s"
    assert "hit_device" not in found, "no prompt was looked up in the last minute"
