"""How long an instance's prefill queue is thought to be between two of its reports."""

from __future__ import annotations

import pytest
from core_kit import hello

from controlplane.core.instance import US, Charge, Instance
from transfer.terms import Role
from transfer.wire.messages import Heartbeat, LoadReport

TOKEN_US = 1000
"""1000 tokens are one second of work."""


def work(num_tokens: int) -> Charge:
    return Charge(prefill_tokens=num_tokens, prefill_us=num_tokens * TOKEN_US)


def report(one: Instance, queued: int, now: float, speed: float = 1.0) -> None:
    load = LoadReport(num_blocks=1000, free_blocks=1000, queued_prefill_tokens=queued, speed=speed)
    one.heard(Heartbeat(epoch=1, state="ready", load=load), now)


@pytest.fixture
def prefill() -> Instance:
    """4000 tokens charged at 0 s; at 1 s it says that 3000 of them are left; another report at 1 s forgets the first
    interval's charges."""
    one = Instance(hello("p0", Role.PREFILL), 0.0)
    one.charge(work(4000), 0.0)
    report(one, 3000, 1.0)
    report(one, 3000, 1.0)
    return one


def test_a_report_is_aged_by_the_work_since(prefill: Instance) -> None:
    assert [prefill.queue_s(at) for at in (1.0, 1.5, 3.0, 3.9)] == pytest.approx([3.0, 2.5, 1.0, 0.1])
    assert prefill.queue_s(60.0) == 0.0
    assert prefill.queue_s() == pytest.approx(3.0)


def test_what_was_charged_since_the_report_is_not_taken_as_done(prefill: Instance) -> None:
    prefill.charge(work(500), 2.0)
    assert prefill.queue_s(2.0) == pytest.approx(2.5)
    assert [prefill.queue_s(at) for at in (3.9, 60.0)] == pytest.approx([0.6, 0.5])
    report(prefill, 300, 61.0)
    assert [prefill.queue_s(at) for at in (61.0, 61.5)] == pytest.approx([0.8, 0.3])  # perhaps not counted in its 300
    report(prefill, 300, 62.0)
    assert prefill.queue_s(62.1) == pytest.approx(0.2)


def test_work_that_is_told_done_is_not_aged_away_twice(prefill: Instance) -> None:
    prefill.discharge(work(2000), 3.0)
    assert [prefill.queue_s(at) for at in (1.0, 3.0, 3.5)] == pytest.approx([2.0, 1.0, 0.5])


def test_a_slow_instance_works_its_report_off_slowly(prefill: Instance) -> None:
    report(prefill, 2000, 2.0, speed=2.0)
    assert [prefill.queue_s(at) for at in (2.0, 3.0, 5.0)] == pytest.approx([4.0, 3.0, 1.0])


def test_other_words_than_reports_do_not_make_it_newer(prefill: Instance) -> None:
    prefill.last_seen_s = 2.5
    assert prefill.queue_s(3.0) == pytest.approx(1.0)


def test_a_backlog_is_never_more_than_what_is_left_of_the_prediction() -> None:
    one = Instance(hello("p0", Role.PREFILL), 0.0)
    one.charge(work(1000), 0.0)
    assert [one.backlog_s(at) for at in (0.0, 0.4, 0.9)] == pytest.approx([1.0, 0.6, 0.1])
    assert one.backlog_s(1.5) == pytest.approx(0.25)  # half a second late
    assert one.prefill_us == US
