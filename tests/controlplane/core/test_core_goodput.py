"""Goodput, attainment and windows by the book (METRICS.md)."""

from __future__ import annotations

import msgspec
import pytest
from core_kit import H20, H800, Rig, Slo, config, only, sends

from controlplane.core.events import Finished, NodeLost
from controlplane.core.goodput import GoodputCore, counts_for_attainment, is_good
from transfer.api import RequestRecord
from transfer.terms import Role
from transfer.wire.messages import Abort

SLO = Slo(ttft_s=2.0, tpot_s=0.2)


def record(name: str = "r", **changes: object) -> RequestRecord:
    base = RequestRecord(
        request_id=name, model="m", traffic_class="default", arrived_at=1.0, outcome="ok", finish_reason="stop",
        prompt_tokens=100, output_tokens=10, cached_tokens=0, ttft_s=1.0, tpot_s=0.1, e2e_s=2.0, max_itl_s=0.2,
        good=None,
    )  # fmt: skip
    made = msgspec.structs.replace(base, **changes)
    return msgspec.structs.replace(made, good=is_good(made, SLO)) if made.traffic_class == "default" else made


@pytest.mark.parametrize(
    ("changes", "good"),
    [
        ({}, True),
        ({"ttft_s": 2.0, "tpot_s": 0.2}, True),
        ({"ttft_s": 2.01}, False),
        ({"tpot_s": 0.21}, False),
        ({"output_tokens": 1, "tpot_s": None}, True),
        ({"output_tokens": 1, "tpot_s": 9.0}, True),
        ({"outcome": "error"}, False),
        ({"outcome": "cancelled"}, False),
        ({"ttft_s": None}, False),
    ],
)
def test_good_means_finished_within_every_objective(changes: dict[str, object], good: bool) -> None:
    assert record(**changes).good is good


def test_each_model_has_its_own_goodput_in_the_same_classes() -> None:
    core = GoodputCore({"default": SLO, "batch": None})
    core.finished(record("a", model="slow", ttft_s=3.0), {}, 1.0)
    core.finished(record("b", model="slow"), {}, 1.0)
    core.finished(record("c", model="fast"), {}, 2.0)
    core.finished(record("d", model="fast", traffic_class="batch"), {}, 2.0)
    assert core.models(["fast"]) == ["fast", "slow"]
    since_start, recent, per_s = core.of_model("slow", 11.0)
    assert (since_start.good, since_start.total, recent.good, recent.total) == (1, 2, 1, 2)
    assert per_s == pytest.approx(1 / 10.0), "over the time since the start"
    assert recent.ttft_s.quantile(0.9) == pytest.approx(3.0, rel=0.02)
    since_start, recent, _ = core.of_model("fast", 61.5)
    assert (since_start.good, since_start.total, since_start.finished) == (1, 1, 2)
    assert recent.finished == 2
    _, recent, per_s = core.of_model("slow", 61.5)
    assert (recent.finished, recent.total, per_s) == (0, 0, 0.0), "its second has left the window"
    core.judge("default", Slo(ttft_s=9.0, tpot_s=9.0), 61.5)
    since_start, recent, per_s = core.of_model("fast", 61.5)
    assert (since_start.total, since_start.finished, recent.good, per_s) == (0, 2, 0, 0.0)
    assert core.of_model("other", 61.5)[0].total == 0


def test_one_model_alone_is_not_told_apart() -> None:
    core = GoodputCore({"default": SLO})
    core.finished(record(), {}, 1.0)
    assert core.models(["m"]) == core.models([]) == []


def test_an_end_to_end_objective_counts_when_set() -> None:
    slo = Slo(ttft_s=2.0, tpot_s=0.2, e2e_s=1.5)
    assert is_good(record(e2e_s=1.5), slo)
    assert not is_good(record(e2e_s=1.6), slo)


def test_attainment_divides_by_everything_but_cancels_in_time() -> None:
    core = GoodputCore({"default": SLO, "batch": None})
    ends = [
        {}, {}, {"ttft_s": 3.0}, {"outcome": "error", "ttft_s": None}, {"outcome": "rejected", "ttft_s": None},
        {"outcome": "timed_out", "ttft_s": None}, {"outcome": "cancelled"},
        {"outcome": "cancelled", "ttft_s": None, "e2e_s": 0.5}, {"outcome": "cancelled", "ttft_s": None, "e2e_s": 2.5},
    ]  # fmt: skip
    for changes in ends:
        core.finished(record(**changes), {}, 1.0)
    assert (core.by_class["default"].good, core.by_class["default"].total) == (2, 7)
    assert core.attainment() == pytest.approx(2 / 7)


def test_classes_without_objectives_are_left_out() -> None:
    """inference-sim#1409."""
    core = GoodputCore({"default": SLO, "batch": None})
    assert core.attainment() is None
    core.finished(record(traffic_class="batch"), {}, 1.0)
    assert core.attainment() is None
    assert core.by_class["batch"].finished == 1
    core.finished(record(ttft_s=5.0), {}, 1.0)
    assert core.attainment() == 0.0


def test_windows_slide_by_completion_time() -> None:
    core = GoodputCore({"default": SLO})
    core.advance(0.0)
    for second in range(120):
        core.finished(record(ttft_s=1.0 if second < 90 else 5.0), {}, float(second))
    assert core.goodput(60, 119.5).per_s == pytest.approx(30 / 60)
    assert core.goodput(10, 119.5).per_s == 0.0
    assert core.goodput(60, 119.5).throughput_per_s == pytest.approx(1.0)
    assert core.goodput(60, 119.5).tokens_per_s == pytest.approx(300 / 60)
    assert core.goodput(60, 400.0).throughput_per_s == 0.0
    assert core.windows[60].everything().ttft_s.count == 0
    assert core.by_class["default"].good == 90


def test_objectives_that_were_missed_are_counted_each_and_slide_out() -> None:
    core = GoodputCore({"default": SLO, "batch": None})
    for missed in ({"tpot": 0.1}, {"tpot": 0.1, "ttft": 1.0}, {}):
        core.finished(record(good=not missed, missed_by_s=missed), {}, 1.0)
    core.finished(record(good=None, traffic_class="batch"), {}, 1.0)
    core.finished(record(good=False, missed_by_s={"ttft": 1.0}, outcome="cancelled", ttft_s=0.1, e2e_s=0.2), {}, 1.0)
    assert core.missed_by(2.0) == {"tpot": 2, "ttft": 1}, "a cancel that does not count is no miss"
    core.judge("default", SLO)
    assert core.missed_by(2.0) == {}
    core.finished(record(good=False, missed_by_s={"e2e": 1.0}), {}, 3.0)
    assert core.missed_by(62.0) == {"e2e": 1}
    assert core.missed_by(63.0) == {}


def test_a_young_window_is_as_long_as_the_uptime() -> None:
    core = GoodputCore({"default": SLO})
    core.advance(100.0)
    for index in range(10):
        core.finished(record(), {}, 100.0 + index / 2)
    assert core.goodput(60, 105.0).per_s == pytest.approx(2.0)
    assert core.goodput(60, 100.0).per_s >= 0.0


def test_per_gpu_and_per_dollar_integrate_the_fleet_as_it_was() -> None:
    core = GoodputCore({"default": SLO})
    core.advance(0.0)
    for second in range(61):
        core.spend(4 if second <= 30 else 2, 3600.0, float(second))
    for _ in range(60):
        core.finished(record(), {}, 60.0)
    found = core.goodput(60, 60.0)
    assert found.per_s == pytest.approx(1.0)
    assert found.per_gpu == pytest.approx(60 / (30 * 4 + 30 * 2), rel=0.03)
    assert found.cost_per_good == pytest.approx(1.0, rel=0.03)
    assert found.per_dollar == pytest.approx(1.0, rel=0.03)


def test_gpu_time_is_exact_from_the_fleets_first_moment_on() -> None:
    """Also between two ticks, at every join and loss, and with the cost beside it."""
    rig = Rig()
    rig.now = 1000.25
    rig.tick()
    rig.join("d0", Role.DECODE, hardware=msgspec.structs.replace(H20, num_gpus=2, price_per_hour=7200.0))
    rig.now += 0.25
    rig.join("p0", Role.PREFILL, hardware=msgspec.structs.replace(H800, num_gpus=4, price_per_hour=3600.0))
    rig.now += 0.125
    rig.decoding("r1")
    rig.end("r1")
    goodput = rig.core.state(rig.now).goodput
    gpu_s, dollars = 0.375 * 2 + 0.125 * 4, 0.375 * 2 + 0.125
    assert goodput.per_s > 0
    assert goodput.per_gpu == pytest.approx(1 / gpu_s)
    assert goodput.per_dollar == pytest.approx(1 / dollars)
    assert goodput.cost_per_good == pytest.approx(dollars)
    rig.do(NodeLost(instance_id="p0"), after=0.5)
    goodput = rig.core.state(rig.now + 2.0).goodput
    assert goodput.per_gpu == pytest.approx(1 / (gpu_s + 0.5 * 6 + 2.0 * 2))
    assert goodput.cost_per_good == pytest.approx(dollars + 0.5 * 3 + 2.0 * 2)


def test_a_window_holds_the_gpu_time_of_its_own_slots_alone() -> None:
    core = GoodputCore({"default": SLO})
    core.spend(4, 0.0, 0.0)
    core.spend(1, 0.0, 95.5)
    core.finished(record(), {}, 96.0)
    assert core.goodput(10, 96.5).per_gpu == pytest.approx(1 / (8.5 * 4 + 1.0))
    core.finished(record(), {}, 300.0)
    assert core.goodput(10, 300.5).per_gpu == pytest.approx(1 / 9.5), "nothing was booked for long"


def test_no_good_request_means_infinite_cost_told_as_none_and_no_nan() -> None:
    """dynamo#3131: no NaN at zero traffic."""
    rig = Rig()
    rig.fleet("1P1D")
    rig.wait(3.0)
    state = rig.core.state(rig.now)
    assert state.goodput.cost_per_good is None
    assert state.goodput.per_dollar == 0.0
    assert state.goodput.per_s == 0.0
    assert state.attainment is None
    assert b"NaN" not in msgspec.json.encode(state)


def test_pools_are_not_gpus_but_cost_money() -> None:
    rig = Rig()
    rig.fleet("1P1D1K")
    for _ in range(100):
        rig.tick()
    rig.decoding("r1")
    rig.end("r1")
    goodput = rig.core.state(rig.now).goodput
    assert goodput.per_gpu == pytest.approx(goodput.per_s / 2, rel=0.15)
    assert [one.num_gpus for one in rig.core.state(rig.now).instances] == [1, 0, 1]


def test_doomed_are_in_flight_and_past_an_objective() -> None:
    rig = Rig(config(classes={"default": Slo(ttft_s=1.0, tpot_s=1.0), "batch": None}))
    rig.fleet("1P1D")
    rig.arrive("late")
    rig.arrive("free", traffic_class="batch")
    assert rig.core.state(rig.now).classes[0].doomed == 0
    assert rig.core.state(rig.now + 1.1).classes[0].doomed == 1
    assert rig.core.state(rig.now + 1.1).classes[1].doomed == 0


def test_the_bottleneck_is_the_stage_with_most_seconds_among_misses() -> None:
    rig = Rig(config(classes={"default": Slo(ttft_s=0.5, tpot_s=1.0)}))
    rig.fleet("1P1D")
    rig.arrive("r1")
    rig.reserved("r1", after=0.1)
    rig.started("r1", after=2.0)
    rig.done("r1", after=0.4)
    rig.received("r1")
    rig.end("r1", ttft_s=2.6)
    rig.decoding("r2")
    rig.end("r2", ttft_s=0.1)
    state = rig.core.state(rig.now)
    assert state.bottleneck == "queue"
    assert next(iter(state.stages_s)) == "queue"
    assert state.stages_s["queue"] == pytest.approx(2.0, abs=0.01)
    assert "most time in queue" in state.verdict
    assert state.missed_by == {"ttft": 1}
    for request_id in ("r3", "r4"):
        rig.decoding(request_id)
        rig.end(request_id, ttft_s=0.1, tpot_s=1.5)
    state = rig.core.state(rig.now)
    assert state.missed_by == {"tpot": 2, "ttft": 1}
    assert "most of those that miss are over TPOT, so decode is too slow" in state.verdict


def test_one_answer_over_tpot_does_not_explain_those_that_got_none() -> None:
    rig = Rig(config(classes={"default": Slo(ttft_s=1.0, tpot_s=1.0)}))
    rig.fleet("1P1D")
    rig.decoding("r0")
    rig.end("r0", ttft_s=0.1, tpot_s=1.5)
    assert "over TPOT" in rig.core.state(rig.now).verdict
    for index in range(1, 4):
        rig.arrive(f"r{index}")
        rig.end(f"r{index}", outcome="timed_out", ttft_s=None)
    state = rig.core.state(rig.now)
    assert (state.missed_by, state.attainment) == ({"tpot": 1}, 0.0)
    assert "over TPOT" not in state.verdict


def test_everybody_behind_a_request_without_room_waits_for_room() -> None:
    rig = Rig()
    rig.fleet("1P1D")
    rig.beat("d0", free_blocks=0)
    for index in range(30):
        rig.arrive(f"r{index}")
    rig.now += 3.0
    rig.beat("d0", free_blocks=1000)
    rig.reserved("r29")
    rig.started("r29")
    rig.done("r29")
    rig.received("r29")
    stages = only(rig.end("r29", ttft_s=3.0), Finished).record.stages_s
    assert stages["decode_admission"] == pytest.approx(3.0, abs=0.01)


def test_an_unlisted_class_counts_as_the_default_one() -> None:
    rig = Rig()
    rig.fleet("1P1D")
    rig.decoding("r1", traffic_class="nobody-knows")
    assert only(rig.end("r1"), Finished).record.traffic_class == "default"


def test_a_cancel_counts_only_after_ttft_was_missed() -> None:
    assert not counts_for_attainment(record(outcome="cancelled"), SLO)
    assert counts_for_attainment(record(outcome="cancelled", ttft_s=2.5), SLO)


def test_the_state_shows_the_fleet_and_moves_its_version_only_with_it() -> None:
    rig = Rig()
    rig.fleet("2P1D1M1K")
    state = rig.core.state(rig.now)
    assert state.xpyd == "2P1D+1M"
    assert state.models == ("m",)
    assert [(one.id, one.role, one.state) for one in state.instances] == [
        ("d0", "decode", "ready"), ("k0", "kv_pool", "ready"), ("m0", "mixed", "ready"), ("p0", "prefill", "ready"),
        ("p1", "prefill", "ready"),
    ]  # fmt: skip
    rig.beat("d0", free_blocks=250)
    rig.tick()
    again = rig.core.state(rig.now)
    assert again.version == state.version
    assert again.instances[0].kv_use == pytest.approx(0.75)
    rig.do(NodeLost(instance_id="d0"))
    assert rig.core.state(rig.now).version > state.version
    assert rig.core.state(rig.now).xpyd == "2P0D+1M"
    assert "ost in the last 60 s: d0" in rig.core.state(rig.now).verdict


def test_instances_are_listed_with_numbers_by_value() -> None:
    rig = Rig()
    for name in ("h20-10", "h20-1", "h800-0", "h20-2", "h20-02", "H20-3", "7"):
        rig.join(name, Role.DECODE)
    listed = [one.id for one in rig.core.state(rig.now).instances]
    assert listed == ["7", "H20-3", "h20-1", "h20-02", "h20-2", "h20-10", "h800-0"]
    for name in ("h20-10", "h20-2"):
        rig.do(NodeLost(instance_id=name))
    assert "h20-2, h20-10" in rig.core.state(rig.now).verdict


def test_silent_instances_are_placed_on_by_charge_and_shown() -> None:
    """llm-d-router#2100: stale metrics halt nothing; a degraded mode, visible."""
    rig = Rig()
    rig.fleet("1P1D")
    rig.now += 10.0
    rig.arrive("r1")
    assert rig.request("r1").decode == "d0"
    assert "o word for 3 s from d0, p0" in rig.core.state(rig.now).verdict


def test_what_the_core_alone_knows_for_the_metrics_page() -> None:
    rig = Rig()
    rig.fleet("1P1D")
    rig.decoding("r1")
    found = rig.core.metrics()
    assert found["arrivals_total"] == 1.0
    assert found["placements_remote_total"] == 1.0
    assert found["handoff_legs"] == 1.0
    assert found["handoff_bytes_total"] == 1000.0
    effects = rig.end("r1")
    assert not sends(effects, Abort)
    assert rig.core.metrics()["handoff_legs"] == 0.0
