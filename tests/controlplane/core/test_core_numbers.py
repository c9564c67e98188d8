"""Buckets, stages and state tables: the small parts whose arithmetic everything else trusts."""

from __future__ import annotations

import random
from collections.abc import Mapping
from enum import StrEnum

import pytest

from controlplane.core.buckets import Buckets, bucket_index
from controlplane.core.instance import INSTANCE_MOVES, InstanceState, instance_diagram
from controlplane.core.lifecycle import REQUEST_MOVES, RequestState, request_diagram
from controlplane.core.machine import Machine
from controlplane.core.stages import ADMISSION, DECODE, PREFILL, QUEUE, TRANSFER, StageClock
from controlplane.core.steps import STEP_MOVES, StepState, step_diagram
from transfer.errors import IllegalTransition


def test_quantiles_are_within_about_one_percent() -> None:
    rng = random.Random(1)
    values = sorted(rng.lognormvariate(-2, 1.5) for _ in range(5000))
    buckets = Buckets()
    for value in values:
        buckets.add(value)
    for q in (0.01, 0.5, 0.9, 0.99, 1.0):
        exact = values[max(0, -(-int(q * 5000) // 1) - 1)]
        found = buckets.quantile(q)
        assert found is not None
        assert abs(found / exact - 1) < 0.012, (q, exact, found)


def test_buckets_merge_and_subtract_exactly() -> None:
    first, second = Buckets(), Buckets()
    for value in (0.0, 0.1, 0.2, 5.0):
        first.add(value)
    for value in (0.0, 0.2, 7.0):
        second.add(value)
    both = first.copy()
    both.merge(second)
    assert (both.count, both.zeros) == (7, 2)
    both.subtract(second)
    assert (both.counts, both.zeros, both.count) == (first.counts, first.zeros, first.count)
    with pytest.raises(ValueError, match="never added"):
        first.subtract(second)


def test_bucket_bounds_are_powers_of_two_at_scale_five() -> None:
    """OpenTelemetry's rule: bucket i holds (base**i, base**(i+1)]."""
    assert bucket_index(1.0) == -1
    assert bucket_index(1.0000001) == 0
    assert bucket_index(2.0) == 31
    buckets = Buckets()
    for value in (0.0, 0.5, 1.0, 2.0, 2.1):
        buckets.add(value)
    assert [buckets.count_le(bound) for bound in (-1.0, 0.0, 0.5, 1.0, 2.0, 4.0)] == [0, 1, 2, 3, 4, 5]


def test_buckets_without_values_and_with_nonsense() -> None:
    assert Buckets().quantile(0.5) is None
    for value in (-1.0, float("nan")):
        with pytest.raises(ValueError, match="at least 0"):
            Buckets().add(value)
    tiny = Buckets()
    tiny.add(1e-300)
    tiny.add(1e300)
    assert tiny.count == 2
    assert len(tiny.counts) == 2


def test_stages_add_up_and_the_last_absorbs_the_difference() -> None:
    """vllm#22454: TTFT is the user's, and the stages add up to it."""
    clock = StageClock(10.0)
    clock.enter(ADMISSION, 10.5)
    clock.enter(QUEUE, 10.6)
    clock.enter(PREFILL, 11.0)
    clock.enter(TRANSFER, 12.0)
    clock.move(PREFILL, TRANSFER, 0.25, 12.0)
    clock.enter(DECODE, 12.1)
    clock.enter(None, 12.2)
    clock.enter(QUEUE, 99.0)  # after the first token nothing counts
    found = clock.summing_to(2.3, 99.0)
    assert found == pytest.approx({QUEUE: 0.9, ADMISSION: 0.1, PREFILL: 0.75, TRANSFER: 0.35, DECODE: 0.2})
    assert sum(found.values()) == pytest.approx(2.3, abs=1e-12)
    short = clock.summing_to(1.0, 99.0)
    assert sum(short.values()) == pytest.approx(1.0, abs=1e-12)
    assert all(seconds > 0 for seconds in short.values())


@pytest.mark.parametrize(
    ("moves", "start", "end"),
    [
        (REQUEST_MOVES, RequestState.QUEUED, RequestState.ENDED),
        (INSTANCE_MOVES, InstanceState.JOINING, InstanceState.LOST),
        (STEP_MOVES, StepState.PENDING, StepState.DONE),
    ],
)
def test_tables_are_closed_and_every_state_can_be_reached(
    moves: Mapping[StrEnum, Mapping[str, StrEnum]], start: StrEnum, end: StrEnum
) -> None:
    seen, todo = [start], [start]
    while todo:
        for to in moves[todo.pop()].values():
            assert to in moves
            if to not in seen:
                seen.append(to)
                todo.append(to)
    assert sorted(seen) == sorted(moves)
    assert end in seen


def test_an_illegal_move_raises_with_the_history() -> None:
    machine = Machine("request r1", REQUEST_MOVES, RequestState.QUEUED)
    machine.fire("place")
    machine.fire("reserved")
    with pytest.raises(
        IllegalTransition, match=r"request r1 in state prefilling cannot take migrate.*place -> reserved"
    ):
        machine.fire("migrate")
    assert machine.state is RequestState.PREFILLING


def test_diagrams_are_drawn_from_the_tables() -> None:
    for text, moves in (
        (request_diagram(), REQUEST_MOVES), (instance_diagram(), INSTANCE_MOVES), (step_diagram(), STEP_MOVES),
    ):  # fmt: skip
        assert text.startswith("stateDiagram-v2\n    [*] --> ")
        for state, events in moves.items():
            for event, to in events.items():
                assert f"    {state} --> {to}: {event}\n" in text
