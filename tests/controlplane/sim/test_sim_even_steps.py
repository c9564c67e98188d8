"""Runs of equal steps taken together give what the same steps give one by one, whatever happens in between."""

from __future__ import annotations

import pytest
from sim_kit import anything, config, fleet, request, run

from controlplane.sim.spec import Fault
from transfer.api import RequestRecord

EQUAL = (
    "outcome", "finish_reason", "prefill", "decode", "output_tokens", "cached_tokens", "fetched_tokens", "kv_source",
    "num_resumes", "num_migrations", "good",
)  # fmt: skip
TIMES = ("ttft_s", "tpot_s", "e2e_s", "max_itl_s")


def check_same(one: RequestRecord, other: RequestRecord) -> None:
    for name in EQUAL:
        assert getattr(one, name) == getattr(other, name), (one.request_id, name)
    for name in TIMES:
        mine, theirs = getattr(one, name), getattr(other, name)
        same = mine is theirs if theirs is None else mine == pytest.approx(theirs, rel=1e-9, abs=1e-12)
        assert same, (one.request_id, name, mine, theirs)


def both_ways(seed: int) -> None:
    together, alone = (run(*anything(seed, stepwise=stepwise))[1] for stepwise in (False, True))
    others = {record.request_id: record for record in alone.records}
    for record in together.records:
        check_same(record, others[record.request_id])
    assert (together.num_moves, together.num_preemptions) == (alone.num_moves, alone.num_preemptions)
    assert [(one.request_id, one.prefill, one.decode) for one in together.decisions] == [
        (one.request_id, one.prefill, one.decode) for one in alone.decisions
    ]


@pytest.mark.parametrize("seed", range(6))
def test_any_fleet_serves_the_same_step_by_step(seed: int) -> None:
    both_ways(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6, 80))
def test_many_fleets_serve_the_same_step_by_step(seed: int) -> None:
    both_ways(seed)


def test_a_long_answer_takes_few_events() -> None:
    simulation, result = run(fleet("p0 d0"), [request(prompt=50, output=1000)], config())
    assert result.records[0].output_tokens == 1000
    assert simulation.world.heap._num < 400  # 63 blocks grow; step by step it is 1000 and more
    _, alone = run(fleet("p0 d0"), [request(prompt=50, output=1000)], config(stepwise=True))
    check_same(result.records[0], alone.records[0])


def test_a_straggler_that_begins_later_tells_the_same_speed_step_by_step() -> None:
    trace = [request(0.1 * i, prompt=50, output=200) for i in range(10)]
    faults = (Fault(at_s=1.0, kind="slow", instance="d0", duration_s=8.0, factor=8.0),)
    both = [run(fleet("p0 d0"), trace, config(faults=faults, stepwise=stepwise))[0] for stepwise in (False, True)]
    told = [[simulation.world.nodes[name].load() for name in ("p0", "d0")] for simulation in both]
    assert [one.speed for one in told[0]] == pytest.approx([one.speed for one in told[1]], rel=1e-9)
    assert [one.step_s for one in told[0]] == pytest.approx([one.step_s for one in told[1]], rel=1e-9)
    assert told[0][0].speed == 1.0
    assert 1.01 < told[0][1].speed < 1.1, "nearly forgotten"


def test_tokens_that_a_killed_instance_had_delivered_are_not_made_again() -> None:
    fault = Fault(at_s=2.0, kind="kill", instance="d0")
    _, result = run(fleet("p0 d0 d1"), [request(prompt=50, output=600)], config(faults=(fault,)))
    record = result.records[0]
    assert (record.outcome, record.output_tokens, record.num_resumes, record.decode) == ("ok", 600, 1, "d1")
    _, calm = run(fleet("p0 d0 d1"), [request(prompt=50, output=600)], config())
    lost_s = record.e2e_s - calm.records[0].e2e_s
    assert 3.0 < lost_s < 3.5  # liveness, and the prompt and what was delivered are computed again
