"""What splits turned out to do under which load: so that no move is made that did not help the last time.

Whatever the model says of a split, its outcome under about the same load counts more. Bounded; the oldest go first.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

from transfer.terms import Role

MAX_TRIED = 64
MIN_OUTCOME = 30
"""Requests whose outcome must be known."""
ALIKE = 1.25
"""Loads are about the same when neither phase's work differs by more than this factor."""

Counts = tuple[int, int, int]
"""Prefill, decode and mixed instances."""


class Work(NamedTuple):
    """A load, as prompt tokens to compute and output tokens a second."""

    prompt_tokens_per_s: float
    output_tokens_per_s: float

    def about(self, other: Work) -> bool:
        return all(a <= ALIKE * b and b <= ALIKE * a for a, b in zip(self, other, strict=True))


@dataclass(slots=True)
class _Tried:
    model: str
    counts: Counts
    work: Work
    attainment: float


class Tried:
    def __init__(self) -> None:
        self._tried: deque[_Tried] = deque(maxlen=MAX_TRIED)

    def came_out(self, model: str, counts: Counts, work: Work, good: int, counted: int) -> None:
        """How a split does now. A repeated word on the same split and load replaces the earlier one."""
        if counted < MIN_OUTCOME:
            return
        for one in self._tried:
            if one.model == model and one.counts == counts and one.work.about(work):
                self._tried.remove(one)
                break
        self._tried.append(_Tried(model, counts, work, good / counted))

    def attainment(self, model: str, counts: Counts, work: Work) -> float | None:
        """What the split came to under about this load, when it was last tried."""
        for one in reversed(self._tried):
            if one.model == model and one.counts == counts and one.work.about(work):
                return one.attainment
        return None


def counts_of(roles: list[Role]) -> Counts:
    return roles.count(Role.PREFILL), roles.count(Role.DECODE), roles.count(Role.MIXED)
