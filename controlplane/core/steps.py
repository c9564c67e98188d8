"""One step of a plan, a role switch, as a table: what may follow what. planrun.py walks it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from controlplane.core.machine import Machine, mermaid
from transfer.api import PlanStep
from transfer.said import Said
from transfer.terms import InstanceId, Role


class StepState(StrEnum):
    PENDING = "pending"
    DRAINING = "draining"
    """Nothing new is placed; what runs migrates or finishes."""
    SWITCHING = "switching"
    """The node was told to take the role."""
    VERIFYING = "verifying"
    """The node says it did; its next heartbeat must show it ready."""
    DONE = "done"
    FAILED = "failed"
    ROLLED_BACK = "rolled_back"
    """The old role serves again."""


STEP_MOVES: dict[StepState, dict[str, StepState]] = {
    StepState.PENDING: {"drain": StepState.DRAINING, "fail": StepState.FAILED},
    StepState.DRAINING: {"switch": StepState.SWITCHING, "fail": StepState.FAILED},
    StepState.SWITCHING: {"reported": StepState.VERIFYING, "fail": StepState.FAILED},
    StepState.VERIFYING: {"verified": StepState.DONE, "fail": StepState.FAILED},
    StepState.DONE: {},
    StepState.FAILED: {"roll_back": StepState.ROLLED_BACK},
    StepState.ROLLED_BACK: {},
}


@dataclass(slots=True)
class StepRun:
    """A step in progress. Times are loop time."""

    instance_id: InstanceId
    from_role: Role
    to_role: Role
    machine: Machine[StepState]
    since_s: float = 0.0
    num_migrated: int = 0
    num_orders: int = 0
    ordered_s: float = 0.0
    said: Said | None = None

    def fire(self, event: str, now: float) -> None:
        self.machine.fire(event)
        self.since_s = now

    def view(self) -> PlanStep:
        state = self.machine.state
        return PlanStep(
            instance_id=self.instance_id, from_role=self.from_role.value, to_role=self.to_role.value,
            status=state.value, num_migrated=self.num_migrated, said=self.said,
            detail="" if self.said is None else str(self.said),
        )  # fmt: skip


def step_diagram() -> str:
    """The steps' states as a Mermaid diagram."""
    return mermaid(STEP_MOVES, StepState.PENDING)
