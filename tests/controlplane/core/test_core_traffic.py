"""What of the offered load is kept: as much as the windows ask for, however long the load goes on."""

from __future__ import annotations

import pytest

from controlplane.core.traffic import CUT_AT, Traffic


def offered(traffic: Traffic, first_s: float, num: int, gap_s: float) -> float:
    at_s = first_s
    for index in range(num):
        at_s = first_s + index * gap_s
        traffic.arrived(f"{first_s}-{index}", at_s, "m", "default", 100, 64)
        traffic.ended(f"{first_s}-{index}", "m", ok=True, output_tokens=8, cached_tokens=0, good=True)
    return at_s


def test_arrivals_are_kept_no_longer_than_windows_look_back() -> None:
    traffic = Traffic(300.0)
    now = offered(traffic, 0.0, 40_000, 0.05)
    assert len(traffic._seen["m"]) <= CUT_AT * 300.0 / 0.05 + 2
    assert traffic.count(now, "m", 300.0) == (6001, 300.0)
    assert traffic.load(now, "m").rate_per_s == pytest.approx(20.0, rel=0.001)


def test_a_pause_does_not_make_the_window_shorter() -> None:
    traffic = Traffic(300.0)
    offered(traffic, 0.0, 100, 1.0)
    now = offered(traffic, 5000.0, 10, 1.0)
    assert traffic.count(now, "m", 300.0) == (10, 300.0)
