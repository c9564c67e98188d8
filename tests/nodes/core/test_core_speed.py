"""How fast an instance says it is: learned from its steps, not from one that stood still, and forgotten when idle."""

from __future__ import annotations

import pytest

from nodes.core.speed import ODD_RUN, SPEED_HALF_LIFE_S, SpeedMeter


def test_a_step_that_stood_still_is_not_believed() -> None:
    meter = SpeedMeter()
    for now in range(50):
        meter.measured(0.02, 0.01, now * 0.02)
    learned = meter.speed(0.98)
    assert 1.8 < learned < 2.0
    meter.measured(30.0, 0.01, 31.0)  # the process was stopped
    assert meter.speed(0.98) == pytest.approx(learned)


def test_many_odd_steps_in_a_row_are_the_truth() -> None:
    meter = SpeedMeter()
    for index in range(ODD_RUN - 1):
        meter.measured(0.2, 0.01, index * 0.2)
    assert meter.speed(1.0) == 1.0
    for index in range(ODD_RUN, ODD_RUN + 60):
        meter.measured(0.2, 0.01, index * 0.2)
    assert meter.speed((ODD_RUN + 59) * 0.2) == pytest.approx(20.0, rel=0.1)


def test_a_correction_fades_while_nothing_runs() -> None:
    meter = SpeedMeter()
    for now in range(100):
        meter.measured(0.03, 0.01, now * 0.03)
    last = 99 * 0.03
    told = meter.speed(last)
    assert meter.speed(last + SPEED_HALF_LIFE_S) == pytest.approx(1 + (told - 1) / 2)


def test_who_is_usually_faster_than_its_profile_stays_so_while_nothing_runs() -> None:
    meter = SpeedMeter()
    for now in range(20):
        meter.measured(0.1, 0.8, now * 0.1)
    later = 1.9 + 20 * SPEED_HALF_LIFE_S
    assert meter.speed(later) == pytest.approx(0.125, abs=0.06)
    meter.restart()
    assert meter.speed(later) == 1.0


def test_the_first_steps_tell_most() -> None:
    meter = SpeedMeter()
    for now in range(3):
        meter.measured(0.004, 0.01, now * 0.004)
    assert meter.speed(0.008) == pytest.approx((1.0 + 3 * 0.4) / 4, abs=0.01)
