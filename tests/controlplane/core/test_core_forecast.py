"""The closed-form forecast: right limits, right direction, and an interval; silent without traffic."""

from __future__ import annotations

import pytest
from core_kit import Rig, Slo, config

from controlplane.core.forecast import Forecast, forecast, predict
from controlplane.core.instance import Instance
from controlplane.core.traffic import MAX_ARRIVALS, Arrival, Traffic
from transfer.terms import Role

SLOS: dict[str, Slo | None] = {"default": Slo(ttft_s=2.0, tpot_s=0.05)}


def shapes(prompt: int, output: int, num: int = 50) -> list[Arrival]:
    return [Arrival(float(index), "m", "default", prompt, 0, output) for index in range(num)]


def members(shape: str) -> tuple[list[Instance], dict[str, Role]]:
    rig = Rig()
    rig.fleet(shape, num_blocks=30_000)
    group = rig.core._desk.fleet.groups["m"]
    return list(group.members), {one.id: one.role for one in group.members}


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
    assert heavy.attainment < 0.2


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
    assert rush.attainment < 0.2


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


def test_a_phase_without_an_instance_has_no_forecast() -> None:
    instances, roles = members("2D")
    assert forecast(instances, roles, shapes(1000, 100), 1.0, SLOS) is None


def test_predict_needs_traffic_and_has_an_interval() -> None:
    rig = Rig()
    rig.fleet("2P2D", num_blocks=30_000)
    group = rig.core._desk.fleet.groups["m"]
    roles = {one.id: one.role for one in group.members}
    traffic = Traffic(300.0)
    assert "no prediction: 0 requests" in predict(config(), group, roles, traffic, 100.0).basis
    for index in range(200):
        traffic.arrived(index * 0.5, "m")
        traffic.finished(Arrival(index * 0.5, "m", "default", 1000, 200, 100))
        traffic.arrived(index * 0.5, "another model")
    found = predict(config(), group, roles, traffic, 100.0)
    assert found.goodput_per_s == pytest.approx(2.0, rel=0.03)
    assert found.goodput_low is not None
    assert found.goodput_high is not None
    assert 0.0 < found.goodput_low < 2.0 < found.goodput_high < 4.0
    assert "200 arrivals in 100 s" in found.basis
    assert predict(config(), None, roles, traffic, 100.0).goodput_per_s is None


def test_recorded_traffic_is_bounded_and_rates_stay_right() -> None:
    traffic = Traffic(300.0)
    for index in range(3 * MAX_ARRIVALS):
        traffic.arrived(index * 0.01, "m")
    num, span_s = traffic.offered(3 * MAX_ARRIVALS * 0.01, "m")
    assert num == MAX_ARRIVALS
    assert num / span_s == pytest.approx(100.0, rel=0.01)
