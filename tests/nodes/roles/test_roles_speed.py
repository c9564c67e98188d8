"""How fast an instance says it is: learned from its steps, not from one that stood still, and forgotten when idle."""

from __future__ import annotations

from typing import cast

import pytest

from nodes.core.batching import BatchCore
from nodes.roles.context import RoleContext
from nodes.roles.steps import ODD_RUN, SPEED_HALF_LIFE_S, Stepper


@pytest.fixture
async def stepper() -> Stepper:
    return Stepper(cast(RoleContext, None), cast(BatchCore, None), lambda *_: None, lambda _: None)


async def test_a_step_that_stood_still_is_not_believed(stepper: Stepper) -> None:
    for now in range(50):
        stepper._measure(0.02, 0.01, now * 0.02)
    learned = stepper.speed(0.98)
    assert 1.8 < learned < 2.0
    stepper._measure(30.0, 0.01, 31.0)  # the process was stopped
    assert stepper.speed(0.98) == pytest.approx(learned)


async def test_many_odd_steps_in_a_row_are_the_truth(stepper: Stepper) -> None:
    for index in range(ODD_RUN - 1):
        stepper._measure(0.2, 0.01, index * 0.2)
    assert stepper.speed(1.0) == 1.0
    for index in range(ODD_RUN, ODD_RUN + 60):
        stepper._measure(0.2, 0.01, index * 0.2)
    assert stepper.speed((ODD_RUN + 59) * 0.2) == pytest.approx(20.0, rel=0.1)


async def test_a_correction_fades_while_nothing_runs(stepper: Stepper) -> None:
    for now in range(100):
        stepper._measure(0.03, 0.01, now * 0.03)
    last = 99 * 0.03
    told = stepper.speed(last)
    assert stepper.speed(last + SPEED_HALF_LIFE_S) == pytest.approx(1 + (told - 1) / 2)
