"""Closed forms for waiting with patience and for the pace of decode. Numbers in, numbers out."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

MAX_EXPONENT = 700.0
MAX_ROWS = 4096
_SIZES = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, MAX_ROWS)


class Queue:
    """use: load over capacity; above 1 it is overloaded. scatter: (variability of arrivals + of service) / 2, which is
    1 for Poisson arrivals and exponential service."""

    __slots__ = ("_empties", "_power", "_starts", "scatter", "servers", "service_s", "use")

    def __init__(self, use: float, servers: float, service_s: float, scatter: float = 1.0) -> None:
        self.use, self.servers, self.service_s, self.scatter = use, servers, service_s, scatter
        self._empties = self._starts = self._power = 0.0
        if use > 0 and service_s > 0 and servers > 0:
            self._empties = servers / (max(1e-12, scatter) * service_s)
            self._power = math.sqrt(2 * (servers + 1)) - 1
            self._starts = self._power * math.log(use) if use < math.inf else math.inf

    def scaled(self, factor: float) -> Queue:
        """The same under so much of the load."""
        return Queue(self.use * factor, self.servers, self.service_s, self.scatter)

    def loss(self, patience_s: float) -> float:
        """Share of arrivals that do not get a server within patience_s, when those are turned away at once and take
        nothing: M/M/k with deterministic patience (Barrer, 1957), the wait scaled as Kingman's and the chance of one
        by Sakasegawa's approximation (1977). Grows with use, falls with patience, 1 - 1/use without end of patience."""
        if patience_s < 0 or self.servers <= 0:
            return 1.0
        if self.use <= 0 or self.service_s <= 0:
            return 0.0
        left = 1.0 - self.use
        if abs(left) < 1e-6:
            return 1.0 / (1.0 + self._power + patience_s * self._empties)
        exponent = self._starts - left * patience_s * self._empties
        if exponent > MAX_EXPONENT:
            return max(0.0, -left / self.use)
        waits = math.exp(max(-MAX_EXPONENT, exponent))
        return min(1.0, max(0.0, left * waits / (1.0 - self.use * waits)))

    def median_wait_s(self, patience_s: float) -> float:
        """Of those that are not turned away: 0 where fewer than half wait at all."""
        if self.use <= 0 or self.servers <= 0:
            return 0.0
        load = min(0.98, self.use)
        waits = load ** (math.sqrt(2 * (self.servers + 1)) - 1)
        mean_s = self.scatter * self.service_s / (self.servers * (1.0 - load))
        return min(max(0.0, patience_s), mean_s * math.log(2 * waits)) if waits > 0.5 else 0.0


class Steps:
    """Decode step over the number of requests in it: sampled once, then linear between the samples."""

    def __init__(self, step_s: Callable[[int], float], most: float) -> None:
        """most: requests that an instance has room for, at least 1."""
        self.most = max(1.0, min(float(MAX_ROWS), most))
        sizes = [size for size in _SIZES if size < self.most] + [math.ceil(self.most)]
        self._rows = [float(size) for size in sizes]
        self._step_s: list[float] = []
        for size in sizes:  # never faster with more, whatever the profile says
            self._step_s.append(max(step_s(size), self._step_s[-1] if self._step_s else 1e-9))

    def at(self, rows: float) -> float:
        """Seconds of a step of that many requests."""
        return _between(self._rows, self._step_s, min(max(1.0, rows), self.most))

    def within(self, step_s: float) -> float:
        """Most requests whose step takes at most step_s; 0 when not even one's does."""
        if step_s < self._step_s[0]:
            return 0.0
        return min(self.most, _between(self._step_s, self._rows, step_s))


class Server(NamedTuple):
    """`num` decode instances of one kind. stretch: of every step. slowed: what prefill on the same instances leaves of
    the tokens, where it is a matter of chance how much it adds to the pace of one request (`keeps_pace`)."""

    num: int
    steps: Steps
    stretch: float = 1.0
    slowed: float = 1.0

    def tokens_per_s(self, rows: float) -> float:
        """Of all of them, with `rows` each."""
        return self.num * rows / (self.steps.at(rows) * self.stretch * self.slowed)


class Pace(NamedTuple):
    """What decode does under a demand: step_s is the usual pace, rows all running requests, use that demand over what
    is possible at any pace."""

    step_s: float
    rows: float
    use: float


def keeps_pace(tpot_s: float, mean_s: float, bumps: float, output_tokens: float) -> float:
    """Chance that a request keeps within tpot_s where prompts come between its steps, which take mean_s on average.
    bumps: variance of the seconds that they add, per second (compound Poisson); the longer an output, the more even."""
    spread_s = math.sqrt(bumps * mean_s / max(1.0, output_tokens))
    return 0.5 * math.erfc((mean_s - tpot_s) / (math.sqrt(2) * spread_s)) if spread_s > 0 else float(mean_s <= tpot_s)


def capacity(servers: Sequence[Server], tpot_s: float) -> tuple[float, float]:
    """(tokens per second, running requests) of all servers when no step may take longer than tpot_s."""
    tokens = rows = 0.0
    for one in servers:
        each = one.steps.within(tpot_s / one.stretch)
        if each > 0:
            tokens += one.tokens_per_s(each)
            rows += one.num * each
    return tokens, rows


def pace(servers: Sequence[Server], tokens_per_s: float) -> Pace:
    """The common pace at which the servers together make so many tokens: placement evens out their steps, so that a
    faster one runs more requests."""
    slowest = max(one.steps.at(one.steps.most) * one.stretch for one in servers)
    fastest = min(one.steps.at(1.0) * one.stretch for one in servers)
    most, _ = capacity(servers, slowest)
    use = tokens_per_s / most if most > 0 else math.inf
    if use >= 1.0:
        return Pace(slowest, capacity(servers, slowest)[1], use)
    if capacity(servers, fastest)[0] >= tokens_per_s:
        return Pace(fastest, tokens_per_s * fastest, use)
    low, high = fastest, slowest
    for _ in range(16):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if capacity(servers, middle)[0] >= tokens_per_s else (middle, high)
    return Pace(high, capacity(servers, high)[1], use)


def _between(xs: Sequence[float], ys: Sequence[float], x: float) -> float:
    """Linear between rising samples; the last value beyond them."""
    if x >= xs[-1]:
        return ys[-1]
    low, high = 0, len(xs) - 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if xs[middle] <= x else (low, middle)
    span = xs[high] - xs[low]
    return ys[low] + (ys[high] - ys[low]) * (x - xs[low]) / span if span > 0 else ys[high]
