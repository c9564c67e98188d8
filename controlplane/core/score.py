"""What came of applied moves: predicted attainment beside the attainment of requests that arrived afterwards.

A load that changed meanwhile is no fault of the model, so its error is measured against what it says of the load that
came. That error corrects the one that latency profiles declare, and with it every later interval.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from transfer.autopilot import ScoredMove, ScoreView

MAX_SCORED = 32
PRIOR = 4
"""Moves that the declared error weighs as much as."""
MIN_SCORED = 10
"""Requests that must have ended before a move is scored."""
LEAST_ERROR = 0.03
LEAST_ATTAINMENT = 0.1


class Outcome(NamedTuple):
    """Of a model's requests that arrived after a time. expected: attainment by the model for this load."""

    good: int
    counted: int
    expected: float | None


Look = Callable[[float, str], Outcome]


@dataclass(frozen=True, slots=True)
class Applied:
    """A move that is done and not yet scored. done_s: loop time."""

    plan_id: str
    actor: str
    change: str
    model: str
    predicted: float
    gain: float | None
    done_s: float


class Scores:
    def __init__(self) -> None:
        self._waiting: Applied | None = None
        self._scored: deque[ScoredMove] = deque(maxlen=MAX_SCORED)

    def applied(self, move: Applied, look: Look) -> ScoredMove | None:
        """A move is done. What ran since the one before is scored now; the score, if there was enough."""
        found = self._score(look)
        self._waiting = move
        return found

    def due(self, now: float, window_s: float, look: Look) -> ScoredMove | None:
        """Score the last move when its window is over."""
        if self._waiting is None or now - self._waiting.done_s < window_s:
            return None
        return self._score(look)

    def interrupt(self, look: Look) -> ScoredMove | None:
        """Roles are about to change again: score the last move by what there is."""
        return self._score(look)

    def error(self, declared: float) -> float:
        """Relative error of predictions: the declared one, corrected by what came of moves."""
        squares = sum(_off(one) ** 2 for one in self._scored)
        return max(LEAST_ERROR, math.sqrt((PRIOR * declared**2 + squares) / (PRIOR + len(self._scored))))

    def view(self, declared: float) -> ScoreView:
        num = len(self._scored)
        return ScoreView(
            num=num, bias=sum(one.measured - one.expected for one in self._scored) / num if num else None,
            error=self.error(declared), moves=tuple(reversed(self._scored)),
        )  # fmt: skip

    def _score(self, look: Look) -> ScoredMove | None:
        move, self._waiting = self._waiting, None
        if move is None:
            return None
        outcome = look(move.done_s, move.model)
        if outcome.counted < MIN_SCORED or outcome.expected is None:
            return None
        scored = ScoredMove(
            plan_id=move.plan_id, actor=move.actor, change=move.change, predicted=move.predicted,
            expected=outcome.expected, measured=outcome.good / outcome.counted, num_requests=outcome.counted,
            gain=move.gain,
        )  # fmt: skip
        self._scored.append(scored)
        return scored


def _off(one: ScoredMove) -> float:
    return (one.measured - one.expected) / max(one.expected, LEAST_ATTAINMENT)
