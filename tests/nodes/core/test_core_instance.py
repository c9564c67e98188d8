"""The instance's state table."""

from __future__ import annotations

import pytest

from nodes.core.instance import MOVES, InstanceState, move
from transfer.errors import IllegalTransition


def test_a_life_with_a_role_switch() -> None:
    state = InstanceState.STARTING
    seen = []
    for event in ("loaded", "drain", "cancel_drain", "drain", "switch", "switched", "stop"):
        state = move(state, event)
        seen.append(state.value)
    assert seen == ["ready", "draining", "ready", "draining", "switching", "ready", "stopping"]


@pytest.mark.parametrize(
    ("state", "event"),
    [("starting", "switch"), ("switching", "drain"), ("failed", "loaded"), ("stopping", "loaded"), ("ready", "boil")],
)
def test_an_illegal_move_raises_with_the_history(state: str, event: str) -> None:
    with pytest.raises(IllegalTransition, match=rf"d0 in state {state} cannot take {event}.*loaded -> drain"):
        move(InstanceState(state), event, instance_id="d0", history=("loaded", "drain"))


def test_every_state_is_in_the_table_and_every_life_can_be_stopped() -> None:
    assert set(MOVES) == set(InstanceState)
    for state in InstanceState:
        assert state is InstanceState.STOPPING or move(state, "stop") is InstanceState.STOPPING
