"""The state of one instance as a table. Says what may follow; what it takes to get there is the agent's."""

from __future__ import annotations

from enum import StrEnum

from transfer.errors import IllegalTransition


class InstanceState(StrEnum):
    STARTING = "starting"
    """Loads its model; takes no work."""
    READY = "ready"
    DRAINING = "draining"
    """Finishes what it has; takes no new work."""
    SWITCHING = "switching"
    """Changes role; holds no request."""
    STOPPING = "stopping"
    FAILED = "failed"
    """The engine is lost; only replacing the instance helps."""


MOVES: dict[InstanceState, dict[str, InstanceState]] = {
    InstanceState.STARTING: {
        "loaded": InstanceState.READY,
        "fail": InstanceState.FAILED,
        "stop": InstanceState.STOPPING,
    },
    InstanceState.READY: {
        "drain": InstanceState.DRAINING,
        "switch": InstanceState.SWITCHING,
        "fail": InstanceState.FAILED,
        "stop": InstanceState.STOPPING,
    },
    InstanceState.DRAINING: {
        "cancel_drain": InstanceState.READY,
        "switch": InstanceState.SWITCHING,
        "fail": InstanceState.FAILED,
        "stop": InstanceState.STOPPING,
    },
    InstanceState.SWITCHING: {
        "switched": InstanceState.READY,
        "keep_role": InstanceState.READY,
        "fail": InstanceState.FAILED,
        "stop": InstanceState.STOPPING,
    },
    InstanceState.FAILED: {"stop": InstanceState.STOPPING},
    InstanceState.STOPPING: {},
}
"""keep_role: the switch did not work and the old role goes on."""


def move(
    state: InstanceState, event: str, *, instance_id: str = "instance", history: tuple[str, ...] = ()
) -> InstanceState:
    """The state after `event`. Raises IllegalTransition, with the history given, when the table has no such move."""
    to = MOVES[state].get(event)
    if to is None:
        raise IllegalTransition(instance_id, state, event, history)
    return to
