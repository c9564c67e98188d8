"""Objectives changed while the fleet runs: what is judged by them from then on, refused, told and kept."""

from __future__ import annotations

import pytest
from core_kit import Rig, config, only, those

from controlplane.core.events import (
    Audit,
    ClassesKept,
    ClassesReady,
    ClassesRestored,
    ClassesWanted,
    Effect,
    Finished,
    PlanRefused,
)
from transfer.api import ClassView
from transfer.classes import ClassesRequest
from transfer.terms import Slo

LAX, STRICT = Slo(ttft_s=2.0, tpot_s=0.2), Slo(ttft_s=0.2, tpot_s=0.05)


def change(rig: Rig, version: int | None = None, **classes: Slo | None) -> list[Effect]:
    wanted = ClassesRequest(base_version=rig.core.version if version is None else version, classes=classes, actor="ann")
    return rig.do(ClassesWanted(ask_id="c", change=wanted, at_s=5000.0))


def row(rig: Rig, name: str = "default") -> ClassView:
    return next(one for one in rig.core.state(rig.now).classes if one.name == name)


def finish(rig: Rig, request_id: str, **changes: object) -> Finished:
    rig.decoding(request_id)
    return only(rig.end(request_id, **changes), Finished)


@pytest.fixture
def rig() -> Rig:
    rig = Rig()
    rig.fleet("1P2D")
    return rig


def test_what_ends_from_then_on_is_judged_by_the_new_and_the_old_counts_are_forgotten(rig: Rig) -> None:
    assert finish(rig, "r0", ttft_s=0.5).record.good
    assert (row(rig).slo, row(rig).good, row(rig).recent_good) == (LAX, 1, 1)
    rig.decoding("r1")
    before, throughput = rig.core.version, rig.core.state(rig.now).goodput.throughput_per_s
    effects = change(rig, default=STRICT)
    assert only(effects, ClassesReady).view.version == rig.core.version > before
    found = row(rig)
    assert (found.slo, found.good, found.total, found.recent_good, found.recent_total) == (STRICT, 0, 0, 0, 0)
    state = rig.core.state(rig.now)
    assert (state.attainment, state.goodput.per_s, state.stages_s) == (None, 0.0, {})
    assert state.goodput.throughput_per_s == throughput > 0, "what does not depend on objectives stays"
    assert found.ttft_s.p50 == pytest.approx(0.5, rel=0.02)
    late = only(rig.end("r1", ttft_s=0.5), Finished).record
    assert late.good is False, "it arrived before the change"
    assert finish(rig, "r2", ttft_s=0.1, tpot_s=0.01).record.good
    assert (row(rig).good, row(rig).total, row(rig).attainment) == (1, 2, 0.5)
    rig.wait(70.0)
    assert row(rig).recent_total == 0, "slots that expire take away what was added, no more"


def test_other_classes_keep_their_counts_and_objectives_may_come_and_go(rig: Rig) -> None:
    finish(rig, "r0", ttft_s=0.5)
    change(rig, batch=STRICT)
    assert (row(rig).good, row(rig, "batch").slo) == (1, STRICT)
    assert finish(rig, "b0", ttft_s=0.5).record.good
    change(rig, default=None)
    assert (row(rig).slo, row(rig).attainment, row(rig).total) == (None, None, 0)
    assert finish(rig, "r1").record.good is None


def test_goodput_is_a_rate_since_the_change_until_the_window_is_full_again(rig: Rig) -> None:
    """One good request a second, before and after: the rate goes on, per GPU and per dollar too."""
    number = 0

    def second(**classes: float) -> None:
        nonlocal number
        rig.tick(1.0)
        for traffic_class, ttft_s in classes.items():
            number += 1
            rig.decoding(f"r{number}", traffic_class=traffic_class)
            rig.end(f"r{number}", ttft_s=ttft_s)

    change(rig, batch=LAX)
    for _ in range(100):
        second(default=0.1, batch=0.1)
    full = rig.core.state(rig.now).goodput
    assert full.per_s == pytest.approx(2.0, rel=0.02)
    assert row(rig).judged_for_s is None
    change(rig, default=STRICT)
    assert row(rig).judged_for_s == 0
    for _ in range(20):
        second(default=0.1, batch=0.1)
    state = rig.core.state(rig.now)
    assert (row(rig).judged_for_s, row(rig, "batch").judged_for_s) == (20, 120)
    for name in ("per_s", "per_gpu", "tokens_per_s", "cost_per_good", "throughput_per_s"):
        assert getattr(state.goodput, name) == pytest.approx(getattr(full, name), rel=0.06), name
    assert state.goodput_10s.per_s == pytest.approx(2.0, rel=0.01)
    assert (row(rig).recent_good, row(rig).recent_per_s) == (20, pytest.approx(1.0, rel=0.01))
    found = rig.core.readings(rig.now)
    assert found["class.default.goodput_per_s"] == row(rig).recent_per_s
    assert found["class.batch.goodput_per_s"] == pytest.approx(1.0, rel=0.02)
    for _ in range(60):
        second(default=0.5, batch=0.1)
    assert rig.core.state(rig.now).goodput.per_s == pytest.approx(1.0, rel=0.02)
    assert (row(rig).recent_good, row(rig).judged_for_s) == (0, 80)


def test_one_row_of_the_audit_for_each_class_says_before_and_after(rig: Rig) -> None:
    effects = change(rig, default=STRICT, batch=Slo(10.0, 1.0, 60.0))
    rows = [one.row for one in those(effects, Audit)]
    assert {(one.at_s, one.actor, one.action) for one in rows} == {(5000.0, "ann", "objectives")}
    assert [(one.subject, one.detail) for one in rows] == [
        ("default", "TTFT 2 s, TPOT 0.2 s -> TTFT 0.2 s, TPOT 0.05 s"),
        ("batch", "none -> TTFT 10 s, TPOT 1 s, E2E 60 s"),
    ]


def test_a_stale_version_and_an_unknown_class_change_nothing(rig: Rig) -> None:
    refused = only(change(rig, rig.core.version - 1, default=STRICT), PlanRefused)
    assert (refused.status, "look again" in refused.message) == (409, True)
    refused = only(change(rig, default=STRICT, chat=STRICT), PlanRefused)
    assert (refused.status, "name default, batch" in refused.message) == (404, True)
    for wrong in (Slo(0.0, 0.1), Slo(1.0, -1.0), Slo(1.0, 0.1, 0.0), Slo(1e9, 0.1), Slo(float("nan"), 0.1)):
        refused = only(change(rig, batch=None, default=wrong), PlanRefused)
        assert (refused.status, "above 0 and up to 86400 seconds" in refused.message) == (400, True)
    assert row(rig).slo == LAX


def test_what_is_in_force_already_is_no_change(rig: Rig) -> None:
    change(rig, default=STRICT)
    version = rig.core.version
    effects = change(rig, 0, default=STRICT)
    assert only(effects, ClassesReady).view.version == version
    assert not any(isinstance(one, Audit | ClassesKept) for one in effects)


def test_the_next_life_goes_on_unless_the_settings_of_a_class_changed(rig: Rig) -> None:
    state = only(change(rig, default=STRICT, batch=STRICT), ClassesKept).state
    later = Rig()
    effects = later.do(ClassesRestored(state=state))
    assert (row(later).slo, row(later, "batch").slo, effects) == (STRICT, STRICT, [])
    assert row(later).judged_for_s is None, "nothing was judged by others in this life"
    other = Rig(config(classes={"default": Slo(1.0, 0.1), "batch": None, "chat": LAX}))
    other.do(ClassesRestored(state=state))
    assert [one.slo for one in other.core.classes().classes] == [Slo(1.0, 0.1), STRICT, LAX]
    assert other.core.classes().classes[1].configured is None


def test_what_the_autopilot_judges_by_is_judged_anew(rig: Rig) -> None:
    finish(rig, "r0")
    traffic, slos = rig.core._desk.traffic, {"default": LAX}
    assert traffic.outcome(-1.0, rig.now, "m", slos) == (1, 1)
    tried = rig.core._autopilot._tried
    change(rig, default=STRICT)
    assert traffic.outcome(-1.0, rig.now, "m", slos) == (0, 0)
    assert rig.core._autopilot._tried is not tried


def test_prices_are_the_nodes(rig: Rig) -> None:
    prices = rig.core.classes().prices
    assert [(one.hardware, one.num_instances, one.price_per_hour) for one in prices] == [
        ("H20", 2, 0.7),
        ("H800", 1, 2.0),
    ]


def test_the_median_tpot_is_of_the_last_minute_and_of_the_instance_where_requests_ended(rig: Rig) -> None:
    def medians() -> dict[str, float | None]:
        return {one.id: one.tpot_p50_s for one in rig.core.state(rig.now).instances}

    assert set(medians().values()) == {None}
    where = []
    for number, tpot_s in enumerate((0.01, 0.02, 0.04)):
        where.append(str(finish(rig, f"r{number}", tpot_s=tpot_s).record.decode))
    own = [tpot_s for name, tpot_s in zip(where, (0.01, 0.02, 0.04), strict=True) if name == where[0]]
    assert medians()[where[0]] == pytest.approx(sorted(own)[(len(own) - 1) // 2], rel=0.02)
    assert medians()["p0"] is None
    rig.wait(61.0)
    assert set(medians().values()) == {None}
    assert rig.core._desk.goodput.paces._sums == {}
