"""State machines as data: a table of moves, an object that walks it, and the diagram drawn from it."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from enum import StrEnum
from typing import Generic, TypeVar

from transfer.errors import IllegalTransition

S = TypeVar("S", bound=StrEnum)

HISTORY = 32
"""Moves an object remembers, for the report of an illegal one."""


class Machine(Generic[S]):
    """Where one object stands in a table. Raises IllegalTransition, with the history, for a move not in it."""

    __slots__ = ("_moves", "_past", "state", "subject")

    def __init__(self, subject: str, moves: Mapping[S, Mapping[str, S]], start: S) -> None:
        self.subject, self.state = subject, start
        self._moves = moves
        self._past: deque[str] = deque(maxlen=HISTORY)

    @property
    def history(self) -> tuple[str, ...]:
        return tuple(self._past)

    def can(self, event: str) -> bool:
        return event in self._moves[self.state]

    def fire(self, event: str) -> S:
        """Take `event`; returns the new state."""
        to = self._moves[self.state].get(event)
        if to is None:
            raise IllegalTransition(self.subject, self.state.value, event, self.history)
        self._past.append(event)
        self.state = to
        return to


def mermaid(moves: Mapping[S, Mapping[str, S]], start: S) -> str:
    """The table as a Mermaid state diagram, one line a move, in the table's order; states without moves are ends."""
    lines = ["stateDiagram-v2", f"    [*] --> {start.value}"]
    for state, events in moves.items():
        lines += [f"    {state.value} --> {to.value}: {event}" for event, to in events.items()]
        if not events:
            lines.append(f"    {state.value} --> [*]")
    return "\n".join(lines) + "\n"
