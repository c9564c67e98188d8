"""Blind policies: everybody in turn, or anybody. The baselines that others are compared with."""

from __future__ import annotations

from controlplane.core.instance import Instance
from controlplane.core.policies.pairs import Score, split
from controlplane.core.policies.protocol import Answer, Policy, Situation
from transfer.said import Said, say


def in_turn(at: Situation) -> Answer:
    """Whoever was picked longest ago: with a steady fleet, each in turn."""
    score = Score(lambda one: 0.0, lambda one: say("score.turn", num=one.picked))
    return split(at, score, score)


def drawn(at: Situation) -> Answer:
    """Anybody with room, drawn from the scheduler's seed."""
    draw = at.random.random
    score = Score(lambda one: draw(), lambda one: say("score.drawn"))
    return split(at, score, score)


def fewest_requests(at: Situation) -> Answer:
    """The fewest requests in flight on each side (llm-d's and vLLM's least-request routing)."""
    score = Score(lambda one: float(one.rows), in_flight)
    return split(at, score, score)


def in_flight(one: Instance) -> Said:
    return say("score.in_flight", num=one.rows)


ROUND_ROBIN = Policy(in_turn)
RANDOM = Policy(drawn)
LEAST_LOADED = Policy(fewest_requests)
