"""What policies remember between decisions, kept by the desk: output lengths, shares of tenants, work. Bounded."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import OrderedDict, deque
from typing import NamedTuple

from transfer.terms import InstanceId

NUM_OUTPUTS = 200
"""Output lengths kept: Past-Future's window (arXiv 2507.10150)."""
MIN_OUTPUTS = 16
"""Finished requests before their lengths are taken as typical, and between two looks at them."""
QUANTILES = ((0.08, 0.04), (0.20, 0.18), (0.72, 0.60))
"""Share of requests, and the quantile that stands for them."""
MAX_TENANTS = 1024
MAX_INSTANCES = 4096
LATE_SHARE = 0.1
"""Of prefill time, for requests that cannot be good any more while others want it."""
AGED_SHARE = 0.2
"""While one of them has waited very long: who comes late waits, but not for ever."""
MOST_LATE_S = 5.0
MAX_DUE = 65536
STOLEN_HALF_LIFE_S = 5.0
MAX_STOLEN = 0.9
"""Share of its time that is counted at most as taken from an instance's decodes."""
USUAL_HALF_LIFE_S = 10.0
PACE_HALF_LIFE_S = 60.0
MIN_PACES = 30.0
LEAST_ERROR, MOST_ERROR = 0.01, 0.5
NEAR = 0.8
"""Part of an objective from which a pace is near it."""
GROWTH_S = 0.5
"""How long a predicted growth of KV holds."""
LN2 = math.log(2.0)


class Fading:
    """A sum whose parts lose half of their weight every half-life."""

    __slots__ = ("_at_s", "_value", "half_life_s")

    def __init__(self, half_life_s: float) -> None:
        self.half_life_s, self._value, self._at_s = half_life_s, 0.0, 0.0

    def at(self, now: float) -> float:
        if now > self._at_s:
            if self._value:
                self._value *= 0.5 ** ((now - self._at_s) / self.half_life_s)
            self._at_s = now
        return self._value

    def add(self, value: float, now: float) -> None:
        self._value = self.at(now) + value

    def per_s(self, now: float) -> float:
        """The steady rate that would give this sum."""
        return self.at(now) * LN2 / self.half_life_s

    def rate(self, value: float) -> float:
        """By how much per_s grows when `value` is added."""
        return value * LN2 / self.half_life_s


class Crowd(NamedTuple):
    """At at_s a request found no room beside so many decode rows of its model; its pace, its tokens, and in how long it
    would have had its first token."""

    at_s: float
    rows: int
    tpot_s: float
    num_tokens: int
    ready_s: float


class Shares:
    """Prompt tokens served by tenant, as a virtual time: who has had less goes first (VTC, OSDI'24). The credit of one
    that was away is bounded."""

    def __init__(self, most_credit: float = 65536.0) -> None:
        self._most_credit = most_credit
        self._served: OrderedDict[str, float] = OrderedDict()
        self._peak = 0.0

    def __len__(self) -> int:
        return len(self._served)

    def of(self, tenant: str) -> float:
        return max(self._served.get(tenant, 0.0), self._peak - self._most_credit)

    def serve(self, tenant: str, tokens: float) -> None:
        served = self._served[tenant] = self.of(tenant) + tokens
        self._served.move_to_end(tenant)
        self._peak = max(self._peak, served)
        while len(self._served) > MAX_TENANTS:
            self._served.popitem(last=False)


class Memory:
    """One for a scheduler; each policy uses the part it needs."""

    def __init__(self) -> None:
        self.outputs: deque[int] = deque(maxlen=NUM_OUTPUTS)
        self._quantiles: tuple[tuple[float, float, float], ...] | None = None
        self._num_finished = 0
        self.shares = Shares()
        self.routed: OrderedDict[InstanceId, float] = OrderedDict()
        """Prompt tokens that were new to an instance's cache when they were sent there."""
        self.due: list[float] = []
        """When prompts placed will be done, by prediction, ascending."""
        self._stolen: OrderedDict[InstanceId, Fading] = OrderedDict()
        self.spent = Fading(USUAL_HALF_LIFE_S)
        """Parts of their TTFT objectives that requests used by prediction, those turned away all of it."""
        self.sizes = Fading(USUAL_HALF_LIFE_S)
        self.counts = Fading(USUAL_HALF_LIFE_S)
        """Tokens to compute of requests placed, and those requests."""
        self._pace_errors, self._paces = Fading(PACE_HALF_LIFE_S), Fading(PACE_HALF_LIFE_S)
        self.asked = Fading(USUAL_HALF_LIFE_S)
        """All tokens of requests placed, cached ones included."""
        self._growth: OrderedDict[InstanceId, tuple[float, float]] = OrderedDict()
        self.late_s, self._late_at_s = 0.0, 0.0
        """Prefill seconds that requests which can no longer be good may take from others."""
        self.kept_s = -math.inf
        """When an idle prefill instance was last kept from one that is late, for those that can be good."""
        self.crowded: dict[str, Crowd] = {}
        """By model, of which a fleet has few."""
        self.timely_s, self.spare_s = Fading(USUAL_HALF_LIFE_S), Fading(USUAL_HALF_LIFE_S)
        """Prefill seconds of those that could be good, and of late ones in time that was left over."""

    def growth(self, instance: InstanceId, now: float) -> float | None:
        """Blocks by which an instance's KV will grow at most; None when that was not predicted lately."""
        found = self._growth.get(instance)
        return found[1] if found is not None and now - found[0] < GROWTH_S else None

    def grows(self, instance: InstanceId, blocks: float, now: float) -> None:
        self._growth[instance] = (now, blocks)
        while len(self._growth) > MAX_INSTANCES:
            self._growth.popitem(last=False)

    def typical_outputs(self) -> tuple[tuple[float, float, float], ...]:
        """(share of requests, their output length, their share of those that run at a time): a few quantiles of the
        history; empty without one."""
        if self._quantiles is None and len(self.outputs) >= MIN_OUTPUTS:
            ordered = sorted(self.outputs)
            outputs = [(share, float(max(1, ordered[int(at * len(ordered))]))) for share, at in QUANTILES]
            total = sum(share * output for share, output in outputs)
            self._quantiles = tuple((share, output, share * output / total) for share, output in outputs)
        return self._quantiles or ()

    def finished(self, num_output: int) -> None:
        """A request ended normally."""
        self.outputs.append(num_output)
        self._num_finished += 1
        if self._num_finished % MIN_OUTPUTS == 0:
            self._quantiles = None

    def route(self, instance: InstanceId, new_tokens: int) -> None:
        self.routed[instance] = self.routed.pop(instance, 0.0) + new_tokens
        while len(self.routed) > MAX_INSTANCES:
            self.routed.popitem(last=False)

    def allowance_s(self, now: float, num_servers: int, share: float = LATE_SHARE) -> float:
        """late_s, to which a share of the time of so many prefill instances has been added since it was asked last."""
        earned_s = share * num_servers * max(0.0, now - self._late_at_s)
        self._late_at_s = max(now, self._late_at_s)
        self.late_s = min(MOST_LATE_S, self.late_s + earned_s)
        return self.late_s

    def paced(self, predicted_s: float, measured_s: float, limit_s: float, now: float) -> None:
        """What came of a predicted pace. Only those near their limit tell: far below, batches grow and shrink at will,
        which is no error of a prediction."""
        if predicted_s >= NEAR * limit_s:
            self._pace_errors.add(min(1.0, (measured_s / predicted_s - 1.0) ** 2), now)
            self._paces.add(1.0, now)

    def pace_error(self, now: float) -> float | None:
        """Relative error that predicted paces had lately, root mean square; None: too few to tell."""
        paces = self._paces.at(now)
        if paces < MIN_PACES:
            return None
        return min(MOST_ERROR, max(LEAST_ERROR, math.sqrt(self._pace_errors.at(now) / paces)))

    def computed_share(self, now: float) -> float:
        """Part of their tokens that requests lately had to compute."""
        asked = self.asked.at(now)
        return min(1.0, self.sizes.at(now) / asked) if asked >= 1.0 else 1.0

    def prompt_due(self, at_s: float, forget_before_s: float) -> None:
        """One more prompt is done at at_s; those done before forget_before_s are forgotten."""
        del self.due[: max(bisect_left(self.due, forget_before_s), len(self.due) + 1 - MAX_DUE)]
        insort(self.due, at_s)

    def stolen_share(self, instance: InstanceId, now: float) -> float:
        """Share of its time in which an instance computed prompts beside decoding, lately."""
        found = self._stolen.get(instance)
        return found.per_s(now) if found is not None else 0.0

    def stolen_by(self, seconds: float) -> float:
        """What `seconds` more of it add to the share now."""
        return seconds * LN2 / STOLEN_HALF_LIFE_S

    def steal(self, instance: InstanceId, seconds: float, now: float) -> None:
        found = self._stolen.pop(instance, None) or Fading(STOLEN_HALF_LIFE_S)
        self._stolen[instance] = found
        found.add(seconds, now)
        while len(self._stolen) > MAX_INSTANCES:
            self._stolen.popitem(last=False)
