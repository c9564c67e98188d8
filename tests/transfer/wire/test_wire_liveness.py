"""Silence is judged by what this process could have heard."""

from __future__ import annotations

import pytest

from transfer.errors import ConfigError
from transfer.wire.endpoint import Timing
from transfer.wire.liveness import Liveness


def test_a_silent_peer_is_overdue_and_a_talking_one_is_not() -> None:
    liveness = Liveness(0.5, 3.0, 0.0)
    liveness.heard("silent", 0.0)
    overdue = {}
    for step in range(1, 20):
        now = step * 0.5
        liveness.heard("talking", now)
        overdue[now] = liveness.overdue(now)
    assert overdue[3.0] == ()
    assert overdue[3.5] == ("silent",)
    liveness.forget("silent")
    assert liveness.overdue(10.0) == ()


def test_time_asleep_is_nobodys_silence() -> None:
    liveness = Liveness(0.5, 3.0, 0.0)
    liveness.heard("alive", 0.0)
    liveness.heard("dead", 0.0)
    assert liveness.overdue(0.5) == ()
    assert liveness.overdue(10.0) == ()  # this process slept 9 s
    liveness.heard("alive", 10.1)
    overdue = {step: liveness.overdue(10.0 + step * 0.5) for step in range(1, 7)}
    assert [step for step, peers in overdue.items() if "dead" in peers] == [5, 6]  # 3 s of listening in all
    assert not any("alive" in peers for peers in overdue.values())


def test_one_long_sleep_after_another_does_not_hide_a_death_for_ever() -> None:
    liveness = Liveness(0.5, 3.0, 0.0)
    liveness.heard("dead", 0.0)
    checks = [number for number in range(1, 20) if liveness.overdue(number * 5.0)]
    assert checks[0] == 7  # each check proves half a second of listening


def test_what_was_heard_after_waking_gets_no_credit_for_the_sleep() -> None:
    liveness = Liveness(0.5, 3.0, 0.0)
    liveness.heard("peer", 9.9)
    assert liveness.overdue(10.0) == ()
    assert next(step for step in range(1, 10) if liveness.overdue(10.0 + step * 0.5)) == 7


def test_a_liveness_below_two_heartbeats_is_refused() -> None:
    with pytest.raises(ConfigError, match="twice"):
        Timing(heartbeat_s=1.0, liveness_s=1.9)
    with pytest.raises(ConfigError):
        Timing(heartbeat_s=0.0, liveness_s=1.0)
