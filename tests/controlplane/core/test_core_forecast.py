"""The closed-form forecast: right limits, right direction, and an interval; silent without traffic."""

from __future__ import annotations

import math

import msgspec
import pytest
from core_kit import H20, H800, SHAPE, Rig, Slo, config

from controlplane.core.forecast import Forecast, Predictor, forecast, predict
from controlplane.core.instance import Instance
from controlplane.core.queues import Queue, keeps_pace
from controlplane.core.traffic import MAX_ARRIVALS, Arrival, Load, Traffic
from transfer.terms import Role

SLOS: dict[str, Slo | None] = {"default": Slo(ttft_s=2.0, tpot_s=0.05)}


def shapes(prompt: int, output: int, num: int = 50) -> list[Arrival]:
    return [Arrival(float(index), "m", "default", prompt, 0, output) for index in range(num)]


def members(shape: str) -> tuple[list[Instance], dict[str, Role]]:
    rig = Rig()
    rig.fleet(shape, num_blocks=30_000)
    group = rig.core._desk.fleet.groups["m"]
    return list(group.members), {one.id: one.role for one in group.members}


def all_finite(value: object) -> bool:
    """Whether no number anywhere in it is NaN or infinite."""
    if isinstance(value, dict):
        return all(all_finite(one) for one in value.values())
    if isinstance(value, list | tuple):
        return all(all_finite(one) for one in value)
    return not isinstance(value, float) or math.isfinite(value)


def recorded(rate: float = 2.0, prompt: int = 1000) -> Traffic:
    """100 s of finished requests."""
    traffic = Traffic(300.0)
    for index in range(int(100 * rate)):
        at_s = index / rate
        traffic.arrived(f"r{index}", at_s, "m", "default", prompt, 1000)
        traffic.began(f"r{index}", "m", at_s, "d0", 200)
        traffic.ended(f"r{index}", "m", ok=True, output_tokens=100, cached_tokens=200, good=True)
        traffic.arrived(f"x{index}", at_s, "another model", "default", 10, 10)
    return traffic


def at_roles(shape: str, role: Role, prompt: int, output: int, rate: float) -> Forecast | None:
    """As `at`, with all instances in one role."""
    instances, roles = members(shape)
    return forecast(instances, dict.fromkeys(roles, role), shapes(prompt, output), rate, SLOS)


def at(shape: str, prompt: int, output: int, rate: float) -> Forecast:
    instances, roles = members(shape)
    found = forecast(instances, roles, shapes(prompt, output), rate, SLOS)
    assert found is not None
    return found


def test_light_load_is_all_good_and_overload_is_not() -> None:
    light, heavy = at("2P2D", 1000, 100, 1.0), at("2P2D", 8000, 100, 60.0)
    assert light.attainment > 0.99
    assert light.prefill_use < 0.2
    assert heavy.prefill_use > 1.0
    assert heavy.attainment == pytest.approx(1 / heavy.prefill_use, rel=0.1), "admission turns the others away"


def test_too_little_kv_room_is_overload_too() -> None:
    rig = Rig()
    rig.fleet("1P1D", num_blocks=40)
    group = rig.core._desk.fleet.groups["m"]
    roles = {one.id: one.role for one in group.members}
    calm, rush = (forecast(group.members, roles, shapes(300, 100), rate, SLOS) for rate in (0.2, 6.0))
    assert calm is not None
    assert rush is not None
    assert calm.attainment > 0.98
    assert rush.decode_use > 1.0
    assert rush.attainment == pytest.approx(1 / rush.decode_use, rel=0.1)


def test_ttft_without_load_is_compute_transfer_and_one_step() -> None:
    found = at("1P1D", 4000, 100, 0.001)
    instances, _ = members("1P1D")
    compute = next(one for one in instances if one.role is Role.PREFILL).profile.prefill_s(4000)
    assert found.ttft_p50_s == pytest.approx(compute + found.tpot_p50_s, rel=0.1)


def test_moving_a_machine_to_the_phase_that_is_short_helps() -> None:
    prompts = {shape: at(shape, 12_000, 50, 3.6).attainment for shape in ("1P3D", "2P2D", "3P1D")}
    assert prompts["1P3D"] < prompts["2P2D"]
    outputs = {shape: at(shape, 500, 1500, 6.0).attainment for shape in ("3P1D", "1P3D")}
    assert outputs["3P1D"] < outputs["1P3D"]


def test_more_load_never_predicts_more_attainment() -> None:
    found = [at("2P2D", 4000, 200, rate).attainment for rate in (0.5, 2.0, 5.0, 10.0, 20.0, 40.0)]
    assert found == sorted(found, reverse=True)


def test_mixed_instances_pay_for_prefill_in_pace() -> None:
    assert at("2M", 4000, 200, 3.0).tpot_p50_s > at("2M", 200, 200, 3.0).tpot_p50_s


def test_on_mixed_instances_some_keep_a_tight_pace_by_chance_and_long_answers_more_surely() -> None:
    """Measured in the simulator: 0.63 and 0.30 were good where the mean pace is 1.04 and 1.6 times the objective."""
    mean_s = at("2M", 4000, 200, 3.0).tpot_p50_s
    instances, roles = members("2M")

    def good(tpot_s: float) -> float:
        slos = {"default": Slo(ttft_s=20.0, tpot_s=tpot_s)}
        found = forecast(instances, roles, shapes(4000, 200), 3.0, slos)
        assert found is not None
        return found.attainment

    shares = [good(factor * mean_s) for factor in (0.4, 0.8, 1.0, 1.2, 2.0)]
    assert shares == sorted(shares)
    assert shares[0] < 0.1
    assert 0.3 < shares[2] < 0.7
    assert shares[4] > 0.95
    assert keeps_pace(1.2, 1.0, 2.0, 20) < keeps_pace(1.2, 1.0, 2.0, 800) < 1.0


def test_without_a_decode_instance_there_is_no_forecast_and_without_prefill_decode_computes() -> None:
    instances, roles = members("2P")
    assert forecast(instances, roles, shapes(1000, 100), 1.0, SLOS) is None
    assert at("2D", 1000, 100, 1.0) == at_roles("2D", Role.MIXED, 1000, 100, 1.0)


def test_no_traffic_is_no_nan() -> None:
    """dynamo#3131, dynamo#7067: nothing on the way out is NaN or infinite when nothing comes in."""
    for shape in ("1P1D", "2P2D", "2M", "1P1D1M"):
        found = at(shape, 1000, 100, 0.0)
        assert all(math.isfinite(getattr(found, name)) for name in Forecast.__slots__), shape
        assert found.attainment == pytest.approx(1.0)
        assert found.prefill_use == found.decode_use == 0.0
    rig = Rig()
    rig.fleet("2P2D")
    group = rig.core._desk.fleet.groups["m"]
    predictor = Predictor(group.members, Load(1, 300.0, tuple(shapes(1, 1, 1))), SLOS)
    assert all(math.isfinite(one) for one in predictor.noise)
    assert all_finite(msgspec.to_builtins([rig.core.state(100.0), rig.core.autopilot(100.0)]))


def test_every_load_and_objective_gives_finite_figures() -> None:
    rig = Rig()
    rig.fleet("2P2D1M", num_blocks=500)
    group = rig.core._desk.fleet.groups["m"]
    roles = {one.id: one.role for one in group.members}
    for slo in (None, Slo(ttft_s=1e-6, tpot_s=1e-6), Slo(ttft_s=1e6, tpot_s=1e6, e2e_s=1e6)):
        for prompt, output, rate in ((1, 1, 1e-9), (100_000, 1, 1e4), (1, 100_000, 1e4), (8, 8, 1e6)):
            found = forecast(group.members, roles, shapes(prompt, output), rate, {"default": slo})
            assert found is not None
            assert all(math.isfinite(getattr(found, name)) for name in Forecast.__slots__), (slo, prompt, output, rate)
            assert 0.0 <= found.attainment <= 1.0


def test_cached_tokens_are_not_computed_and_unknown_ones_are_as_those_known() -> None:
    """A prompt that nobody computed yet has the cached share of the others, not none."""
    instances, roles = members("1P1D")
    cold = forecast(instances, roles, shapes(8000, 50), 2.0, SLOS)
    warm = forecast(instances, roles, [Arrival(0.0, "m", "default", 8000, 6000, 50)], 2.0, SLOS)
    assert cold is not None
    assert warm is not None
    assert warm.prefill_use < 0.5 * cold.prefill_use
    traffic = Traffic(300.0)
    for index in range(20):
        traffic.arrived(f"r{index}", index * 1.0, "m", "default", 1000, 100)
        if index < 10:
            traffic.began(f"r{index}", "m", index + 0.5, "d0", 600)
            traffic.ended(f"r{index}", "m", ok=True, output_tokens=50, cached_tokens=600, good=True)
    assert {one.cached_tokens for one in traffic.load(20.0, "m").shapes} == {600}


def test_offered_load_counts_what_waits_and_what_was_refused() -> None:
    """dynamo#8861: demand measured at the output stays at what is served; here it is what came to the gateway."""
    rig = Rig(config(max_queue=1))
    rig.fleet("1P1D", num_blocks=40)
    for index in range(30):
        rig.arrive(f"r{index}", 500, first=index + 1)
        rig.tick(0.1)
    load = rig.core._desk.traffic.load(rig.now, "m")
    assert rig.core.metrics()["arrivals_total"] == 30
    assert load.num == 30
    assert {one.prompt_tokens for one in load.shapes} == {500}


def test_outputs_of_running_requests_are_expected_from_those_that_got_as_far() -> None:
    traffic = Traffic(300.0)
    for index in range(40):
        traffic.arrived(f"a{index}", 0.0, "m", "default", 100, 10_000)
        traffic.began(f"a{index}", "m", 0.0, "d0", 0)
        tokens = 50 if index % 2 else 400
        traffic.ended(f"a{index}", "m", ok=True, output_tokens=tokens, cached_tokens=0, good=True)
    traffic.arrived("new", 20.0, "m", "default", 100, 10_000)
    traffic.arrived("running", 20.0, "m", "default", 100, 10_000)
    traffic.began("running", "m", 20.0, "d0", 0)
    new, running = traffic.load(21.0, "m", 5.0, {"d0": 0.01}).shapes
    assert new.output_tokens == pytest.approx(225, rel=0.1)
    assert running.output_tokens == 400, "it has 100 tokens: it is not one of the short ones"
    beyond = traffic.load(26.0, "m", 10.0, {"d0": 0.01}).shapes[1]
    assert beyond.output_tokens == 1200, "longer than any that finished: as long again"


def test_kinds_share_load_by_what_they_can() -> None:
    rig = Rig()
    rig.join("p0", Role.PREFILL)
    rig.join("p1", Role.PREFILL, hardware=H20)
    rig.join("d0", Role.DECODE, num_blocks=30_000)
    group = rig.core._desk.fleet.groups["m"]
    roles = {one.id: one.role for one in group.members}
    both = forecast(group.members, roles, shapes(8000, 50), 2.0, SLOS)
    fast = forecast([one for one in group.members if one.id != "p1"], roles, shapes(8000, 50), 2.0, SLOS)
    assert both is not None
    assert fast is not None
    assert 0.8 * fast.prefill_use < both.prefill_use < 0.95 * fast.prefill_use, "an H20 adds its seventh, not a half"


def test_kv_that_takes_long_to_move_shows_in_ttft() -> None:
    slow = msgspec.structs.replace(H800, link_bytes_per_s=1e8)
    rig = Rig()
    rig.join("p0", Role.PREFILL, hardware=slow)
    rig.join("d0", Role.DECODE, num_blocks=30_000)
    group = rig.core._desk.fleet.groups["m"]
    found = forecast(group.members, {one.id: one.role for one in group.members}, shapes(4000, 50), 0.01, SLOS)
    assert found is not None
    assert found.ttft_p50_s > 4000 * SHAPE.kv_token_bytes / 0.8e8, "as many bytes as the model has, not the layout's"


def test_cost_is_told_beside_goodput() -> None:
    rig = Rig()
    rig.fleet("2P2D", num_blocks=30_000)
    group = rig.core._desk.fleet.groups["m"]
    found = predict(config(), group, {one.id: one.role for one in group.members}, recorded(), 100.0)
    assert found.goodput_per_s is not None
    assert found.goodput_per_gpu == pytest.approx(found.goodput_per_s / 4)
    assert found.goodput_per_dollar == pytest.approx(found.goodput_per_s * 3600 / (2 * 2.0 + 2 * 0.7))


def test_the_model_error_widens_the_interval() -> None:
    rig = Rig()
    rig.fleet("1P1D", num_blocks=30_000)
    group = rig.core._desk.fleet.groups["m"]
    roles = {one.id: one.role for one in group.members}
    traffic = recorded(rate=6.0, prompt=8000)
    narrow = predict(config(), group, roles, traffic, 100.0, lambda _: 0.01)
    wide = predict(config(), group, roles, traffic, 100.0, lambda _: 0.4)
    assert narrow.goodput_low is not None
    assert wide.goodput_low is not None
    assert wide.goodput_low < narrow.goodput_low


def test_patience_and_load_move_losses_the_right_way() -> None:
    for servers in (1, 4, 200):
        losses = [Queue(use / 20, servers, 1.0).loss(2.0) for use in range(60)]
        assert losses == sorted(losses)
        assert losses[0] == 0.0
        assert losses[-1] == pytest.approx(1 - 1 / 2.95, abs=0.08)
        patient = [Queue(0.9, servers, 1.0).loss(patience_s) for patience_s in (0.0, 1.0, 5.0, 50.0)]
        assert patient == sorted(patient, reverse=True)
    assert Queue(1.0, 1, 1.0).loss(3.0) == pytest.approx(1 / 5), "M/M/1 with patience: 1 / (2 + patience)"


def test_predict_needs_traffic_and_has_an_interval() -> None:
    rig = Rig()
    rig.fleet("2P2D", num_blocks=30_000)
    group = rig.core._desk.fleet.groups["m"]
    roles = {one.id: one.role for one in group.members}
    assert "no prediction: 0 requests" in predict(config(), group, roles, Traffic(300.0), 100.0).basis
    traffic = recorded()
    found = predict(config(), group, roles, traffic, 100.0)
    assert found.goodput_per_s == pytest.approx(2.0, rel=0.03)
    assert found.goodput_low is not None
    assert found.goodput_high is not None
    assert 0.0 < found.goodput_low < 2.0 < found.goodput_high < 4.0
    assert "200 arrivals in 100 s" in found.basis
    assert "latency preset, error" in found.basis
    declared = rig.instance("d0").profile
    rig.instance("d0").latency = msgspec.structs.replace(declared, provenance="a friend's guess")
    assert "latency preset, of unknown origin, error" in predict(config(), group, roles, traffic, 100.0).basis
    assert predict(config(), None, roles, traffic, 100.0).goodput_per_s is None


def test_recorded_traffic_is_bounded_and_rates_stay_right() -> None:
    traffic = Traffic(300.0)
    num = 2 * MAX_ARRIVALS + 100
    for index in range(num):
        traffic.arrived(f"r{index}", index * 0.001, "m", "default", 10, 10)
        traffic.ended(f"r{index}", "m", ok=False, output_tokens=0, cached_tokens=0, good=False)
    load = traffic.load(num * 0.001, "m")
    assert load.num == MAX_ARRIVALS
    assert load.rate_per_s == pytest.approx(1000.0, rel=0.01)
    assert len(load.shapes) <= 96


def test_a_step_in_the_rate_is_no_burst_and_bursts_are() -> None:
    steady, bursty = Traffic(300.0), Traffic(300.0)
    for index in range(3000):
        at_s = index * 0.1 if index < 2000 else 200.0 + (index - 2000) * 0.01
        steady.arrived(f"r{index}", at_s, "m", "default", 10, 10)
        bursty.arrived(
            f"r{index}", (index // 100) * 10.0 + index % 2 * 5.0 * (index // 100 % 3), "m", "default", 10, 10
        )
    assert steady.load(210.0, "m").burst == 1.0
    assert bursty.load(300.0, "m").burst > 3.0


def test_a_straggler_is_as_slow_in_another_role() -> None:
    """Moving it must not look like healing it."""
    rig = Rig()
    rig.fleet("2P3D", num_blocks=30_000, hardware=H800)
    group = rig.core._desk.fleet.groups["m"]
    for one in group.members:
        one.speed = 3.0 if one.id == "d0" else 1.0
    roles = {one.id: one.role for one in group.members}
    slow, sound = (
        forecast(group.members, roles | {name: Role.PREFILL}, shapes(8000, 50), 4.0, SLOS) for name in ("d0", "d1")
    )
    assert slow is not None
    assert sound is not None
    assert slow.prefill_use == pytest.approx(sound.prefill_use * 3 / (2 + 1 / 3), rel=0.02)


def test_a_running_request_has_the_cached_share_that_its_prefill_told() -> None:
    traffic = Traffic(300.0)
    traffic.arrived("r", 0.0, "m", "default", 1000, 100)
    traffic.began("r", "m", 0.5, "d0", 600)
    assert traffic.load(1.0, "m").shapes[0].cached_tokens == 600
