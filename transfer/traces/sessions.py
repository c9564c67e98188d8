"""Sessions of several turns: a system prompt that applications share, a history that grows, blocks that tell so.

Every turn's prompt is the whole conversation so far and something new, as agents and chats send it.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from transfer.traces.mixes import Mix
from transfer.traces.request import TraceRequest

BLOCK_TOKENS = 512
GOLDEN = 0.618034
"""Steps of this, modulo 1, fall evenly however many there are."""
WARM_UP_SESSIONS = 12
"""Sessions start so many mean session lengths before time 0, so that the load is even from there on."""


class SessionShape(NamedTuple):
    """rate: turns a second over all sessions. turns: mean of a session, geometric.

    apps: how many system prompts there are, the n-th used in proportion to 1/n; system_tokens: their mean length.
    gap_s: median pause between an answer's arrival and the next turn (tools at work, people reading), log-normal with
    gap_sigma. token_s: how long an output token is taken to need. max_tokens: a session ends before its prompt and
    answer would be longer.
    """

    rate: float
    turns: float
    apps: int
    system_tokens: float
    gap_s: float
    gap_sigma: float = 1.0
    token_s: float = 0.03
    max_tokens: int = 126_000


@dataclass(slots=True)
class _Session:
    """tokens: of the history. chain: ids of its whole blocks."""

    tokens: int
    left: int
    chain: list[int] = field(default_factory=list)


def session_requests(shape: SessionShape, mix: Mix, draw: random.Random) -> Iterator[TraceRequest]:
    """Turns of all sessions in order of time, without end. A mix's prompt lengths are what a turn adds."""
    ids = itertools.count()
    systems = [_system(shape, number, ids) for number in range(shape.apps)]
    weights = [1 / number for number in range(1, shape.apps + 1)]
    pause_s = shape.gap_s * math.exp(shape.gap_sigma**2 / 2)
    begin_s = -WARM_UP_SESSIONS * shape.turns * (pause_s + 1)
    serial = itertools.count()
    waiting: list[tuple[float, int, _Session]] = []
    next_s = begin_s
    while True:
        while not waiting or next_s <= waiting[0][0]:
            tokens, chain = draw.choices(systems, weights)[0]
            session = _Session(tokens, _geometric(shape.turns, draw), list(chain))
            heapq.heappush(waiting, (next_s, next(serial), session))
            next_s += draw.expovariate(shape.rate / shape.turns)
        at_s, _, session = heapq.heappop(waiting)
        new, output = mix.draw(draw)
        prompt = session.tokens + new
        if prompt + output > shape.max_tokens:
            continue
        whole, rest = divmod(prompt, BLOCK_TOKENS)
        session.chain.extend(next(ids) for _ in range(whole - len(session.chain)))
        if at_s >= 0:
            blocks = (*session.chain, next(ids)) if rest else tuple(session.chain)
            yield TraceRequest(
                at_s=at_s, prompt_tokens=prompt, output_tokens=output, blocks=blocks, block_tokens=BLOCK_TOKENS
            )
        session.tokens, session.left = prompt + output, session.left - 1
        if session.left > 0:
            gap_s = draw.lognormvariate(math.log(shape.gap_s), shape.gap_sigma)
            heapq.heappush(waiting, (at_s + output * shape.token_s + gap_s, next(serial), session))


def _system(shape: SessionShape, number: int, ids: Iterator[int]) -> tuple[int, list[int]]:
    """Length of a system prompt, evenly spread from half to one and a half of the mean, and its whole blocks."""
    share = (0.5 + number * GOLDEN) % 1
    tokens = max(1, round((0.5 + share) * shape.system_tokens))
    return tokens, [next(ids) for _ in range(tokens // BLOCK_TOKENS)]


def _geometric(mean: float, draw: random.Random) -> int:
    """At least 1."""
    if mean <= 1:
        return 1
    return 1 + math.floor(math.log(1 - draw.random()) / math.log(1 - 1 / mean))
