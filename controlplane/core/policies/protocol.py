"""What a placement policy sees and answers. A policy is a pure function of one Situation and its bounded memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import NamedTuple

from controlplane.core.admission import Rejection
from controlplane.core.config import CoreConfig
from controlplane.core.estimate import Estimator, Matches
from controlplane.core.fleet import Group
from controlplane.core.instance import Instance
from controlplane.core.lifecycle import Request
from controlplane.core.placement import Blocked, Candidate, Wanted
from controlplane.core.policies.memory import Memory
from transfer.terms import RequestId


class Running(NamedTuple):
    """One request that an instance decodes or will decode. num_output is what it must have by now, by prediction."""

    request_id: RequestId
    num_prompt: int
    num_output: int
    max_output: int
    decoding: bool
    """It runs now, so that it can migrate."""

    @property
    def num_tokens(self) -> int:
        return self.num_prompt + self.num_output


RunningOn = Callable[[Instance], list[Running]]


@dataclass(slots=True)
class Situation:
    """One request that wants a place now. group: the instances open to it. random: seeded, the scheduler's own."""

    config: CoreConfig
    group: Group
    wanted: Wanted
    matches: Matches
    estimator: Estimator
    now: float
    memory: Memory
    random: Random
    running: RunningOn
    late: bool = False
    """What the policy found: the request cannot be good any more."""
    spare: bool = False
    """And it takes prefill time that others do not need."""


Answer = list[Candidate] | Blocked | Rejection
"""Ranked, best first, each with its reason; empty: nothing is open to it now, and decide.py says why."""


class Move(NamedTuple):
    """A running request should go to another instance."""

    request_id: RequestId
    source: Instance
    target: Instance


@dataclass(slots=True)
class Overview:
    """A model's instances at a tick. tpot_s: the tightest pace objective of any class; None without objectives."""

    group: Group
    tpot_s: float | None
    now: float
    memory: Memory
    running: RunningOn


@dataclass(frozen=True, slots=True)
class Policy:
    """place decides one request. placed is told of each placement that was made. order sorts those who wait; without
    it they are served by priority, then arrival. moves is asked every tick (0.1 s) for migrations, most urgent first.
    free: whether a place that requests wait for may be free. While it is not, those that found none are asked for
    again a little later only. takes: the same of an instance that a request awaits. on_decode: whether decode
    instances compute prompts of any length when prefill cannot in time.
    """

    place: Callable[[Situation], Answer]
    placed: Callable[[Situation, Candidate], None] | None = None
    order: Callable[[Sequence[Request], float, Memory], list[Request]] | None = None
    moves: Callable[[Overview], list[Move]] | None = None
    free: Callable[[Group, float, Memory], bool] | None = None
    takes: Callable[[Instance, float], bool] | None = None
    on_decode: bool = False
