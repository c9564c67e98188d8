"""The offered load of the last minutes, measured at the gateway: what forecasts are made from. Bounded.

Every arrival counts, also one that waits or is refused, so that demand is never taken for what was served. What a
request has not shown yet is expected from others: its cached share from theirs, its output from those that got as far.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

from transfer.terms import InstanceId, RequestId, Slo

MAX_ARRIVALS = 32768
"""Kept of each model."""
MAX_SAMPLE, SLOT_SAMPLE = 96, 24
"""Arrivals of a window, of a slot, that are looked at one by one."""
MAX_OUTPUTS = 512
MIN_LATELY, MAX_LATELY, LATELY_S = 32, 256, 15.0
"""Requests that tell how long outputs are now: those that began in this time."""
DEFAULT_OUTPUT = 128
MIN_LONGER = 3
"""Finished requests that got as far, before their mean is trusted."""
ABOUT = 1.1
"""A pace that is over the objective by less may still come out within it."""
SLOT_S = 5.0
CHANGED = 4.0
"""Standard deviations."""
CHI2_MEDIAN = 0.455
MIN_SLOTS, MAX_SLOTS = 6, 60
"""Slots in which arrivals are counted to see how bursty they are."""

CUT_AT = 1.25
"""Old arrivals go, many at a time, when the oldest is this many times as old as one can be that counts."""
MIN_ALIKE = 8
"""Requests of a class with about as long a prompt, before they are looked at apart."""

_Sort = tuple[str, str, int]
Pace = Mapping[InstanceId, float]
"""Seconds a token takes on an instance now; 0 or absent: nobody knows."""


class Arrival(NamedTuple):
    """What one request asks of the fleet. output_tokens: what came out, or what is expected to."""

    at_s: float
    model: str
    traffic_class: str
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int | None


@dataclass(slots=True, frozen=True)
class Load:
    """A window of traffic: `num` arrivals in `span_s` seconds, `shapes` a sample of them.

    burst: variance of arrivals in a short time over what Poisson arrivals would have; at least 1.
    """

    num: int
    span_s: float
    shapes: tuple[Arrival, ...]
    burst: float = 1.0

    @property
    def rate_per_s(self) -> float:
        return self.num / self.span_s if self.span_s > 0 else 0.0


@dataclass(slots=True)
class _Seen:
    """One request as far as it is known. began_s: its first token; output_tokens: what it had when it ended."""

    at_s: float
    traffic_class: str
    prompt_tokens: int
    limit: int
    began_s: float | None = None
    decode: InstanceId = ""
    cached_tokens: int | None = None
    output_tokens: int | None = None
    ended: bool = False
    good: bool | None = None


class Traffic:
    def __init__(self, window_s: float) -> None:
        self.window_s = window_s
        self._keep_s = max(window_s, MAX_SLOTS * SLOT_S)
        """As far as anything here looks back."""
        self._seen: dict[str, list[_Seen]] = {}
        self._times: dict[str, list[float]] = {}
        """When those arrived."""
        self._open: dict[RequestId, _Seen] = {}
        self._outputs: dict[_Sort, deque[int]] = {}
        """The lengths of the last that finished."""
        self._begun: dict[_Sort, deque[_Seen]] = {}
        self._known: dict[_Sort, _Lengths] = {}
        self._known_s = -math.inf
        """What was found out about lengths at this time, by one look, for all its windows."""

    # --- what happens -----------------------------------------------------------------------------------------

    def arrived(
        self, request_id: RequestId, at_s: float, model: str, traffic_class: str, prompt_tokens: int, limit: int
    ) -> None:
        """A request reached the gateway. limit: output tokens it may have at most."""
        seen = self._open[request_id] = _Seen(at_s, traffic_class, max(1, prompt_tokens), max(1, limit))
        kept, times = self._seen.setdefault(model, []), self._times.setdefault(model, [])
        kept.append(seen)
        times.append(at_s)
        old = 0
        if len(kept) >= 2 * MAX_ARRIVALS:
            old = MAX_ARRIVALS
        elif at_s - times[0] > CUT_AT * self._keep_s:
            # One that is older stays: it tells that the windows were watched from their beginning.
            old = bisect_left(times, at_s - self._keep_s) - 1
        if old:
            del kept[:old], times[:old]

    def began(
        self, request_id: RequestId, model: str, now: float, decode: InstanceId, cached_tokens: int | None
    ) -> None:
        """Its first token was delivered; a resumed one keeps its first beginning."""
        seen = self._open.get(request_id)
        if seen is not None:
            if seen.began_s is None:
                seen.began_s = now
                for sort in _sorts(model, seen):
                    self._begun.setdefault(sort, deque(maxlen=MAX_LATELY)).append(seen)
            seen.decode = decode
            seen.cached_tokens = cached_tokens if cached_tokens is not None else seen.cached_tokens

    def ended(
        self, request_id: RequestId, model: str, *, ok: bool, output_tokens: int, cached_tokens: int, good: bool | None
    ) -> None:
        """It is over. Not ok: what it would have asked for stays unknown. good None: it does not count."""
        seen = self._open.pop(request_id, None)
        if seen is None:
            return
        seen.ended, seen.good = True, good
        if seen.began_s is not None or ok:
            seen.cached_tokens = cached_tokens
        if ok:
            seen.output_tokens = max(1, output_tokens)
            for sort in _sorts(model, seen):
                self._outputs.setdefault(sort, deque(maxlen=MAX_OUTPUTS)).append(seen.output_tokens)

    def unjudge(self, traffic_class: str) -> None:
        """Its objectives changed: whether those that have ended were good does not count any more."""
        for kept in self._seen.values():
            for seen in kept:
                if seen.traffic_class == traffic_class:
                    seen.good = None

    # --- what it was ------------------------------------------------------------------------------------------

    def load(self, now: float, model: str, window_s: float | None = None, pace: Pace | None = None) -> Load:
        """The last window_s (window_s of this object by default), or the time since the first arrival that is kept
        when that is shorter, at least a second."""
        num, span_s = self.count(now, model, self.window_s if window_s is None else window_s)
        if not num:
            return Load(0, span_s, ())
        kept = self._seen[model]
        sample = kept[len(kept) - num :: -(-num // MAX_SAMPLE)]
        burst = _burst(self._times[model], max(0, len(kept) - MAX_ARRIVALS), now)
        return Load(num, span_s, self._shapes(sample, model, now, pace), burst)

    def count(self, now: float, model: str, window_s: float) -> tuple[int, float]:
        """Arrivals of a window, and the seconds that they span, as `load` says."""
        times = self._times.get(model, [])
        since = max(0, len(times) - MAX_ARRIVALS)
        if since == len(times):
            return 0, window_s
        first = max(since, bisect_left(times, now - window_s))
        return len(times) - first, min(window_s, max(1.0, now - times[since]))

    def volume(self, now: float, model: str, window_s: float) -> tuple[int, int]:
        """Arrivals of a window, and the tokens of their prompts."""
        num, _ = self.count(now, model, window_s)
        return num, sum(one.prompt_tokens for one in self._seen[model][-num:]) if num else 0

    def slots(self, now: float, model: str, slot_s: float, pace: Pace | None = None) -> list[Load]:
        """The last minutes (window_s of this object) cut into pieces, from old to new; the newest ends now. Before the
        first arrival that is kept there is none."""
        kept, times = self._seen.get(model, []), self._times.get(model, [])
        since = max(0, len(kept) - MAX_ARRIVALS)
        if since == len(kept):
            return []
        span_s = min(self.window_s, now - times[since])
        found = []
        for place in range(int(span_s / slot_s), 0, -1):
            first, last = (bisect_left(times, now - ago * slot_s, lo=since) for ago in (place, place - 1))
            last = len(kept) if place == 1 else last
            sample = kept[first : last : max(1, -(-(last - first) // SLOT_SAMPLE))]
            found.append(Load(last - first, slot_s, self._shapes(sample, model, now, pace)))
        return found

    def changing(self, now: float, model: str, window_s: float) -> bool:
        """Whether arrivals, or the tokens of their prompts, in the newest third of the window differ from those before
        by more than chance: then the window is of two loads."""
        kept, times = self._seen.get(model, []), self._times.get(model, [])
        since = max(0, len(kept) - MAX_ARRIVALS)
        if since == len(kept) or now - times[since] < window_s:
            return False
        first, middle = (bisect_left(times, now - part * window_s, lo=since) for part in (1.0, 1 / 3))
        older, newer = kept[first:middle], kept[middle:]
        burst = _burst(times, since, now)
        sums = [[sum(one.prompt_tokens**power for one in part) for power in range(3)] for part in (older, newer)]
        for value, square in ((0, 0), (1, 2)):
            spread = math.sqrt(burst * (sums[1][square] + sums[0][square] / 4))
            if abs(sums[1][value] - sums[0][value] / 2) > CHANGED * max(1.0, spread):
                return True
        return False

    def outcome(
        self, since_s: float, now: float, model: str, slos: Mapping[str, Slo | None], pace: Pace | None = None
    ) -> tuple[int, int]:
        """(good, counted) of the requests with objectives that arrived after since_s, as far as it is known: one that
        still runs is good if its first token was in time and its instance keeps the pace, one that still waits counts
        as soon as it is late. So those that are refused at once weigh no more than those that take their time."""
        kept = self._seen.get(model, [])
        good = counted = 0
        for one in kept[bisect_right(self._times.get(model, []), since_s) :]:
            slo = slos.get(one.traffic_class)
            if slo is None or (one.ended and one.good is None):
                continue
            if one.ended:
                found = one.good is True
            elif one.began_s is None and now - one.at_s <= slo.ttft_s:
                continue
            else:
                found = one.began_s is not None and one.began_s - one.at_s <= slo.ttft_s
                found = found and (pace is None or pace.get(one.decode, 0.0) <= ABOUT * slo.tpot_s)
            good, counted = good + found, counted + 1
        return good, counted

    # --- inside -----------------------------------------------------------------------------------------------

    def _shapes(self, sample: list[_Seen], model: str, now: float, pace: Pace | None) -> tuple[Arrival, ...]:
        known = [one for one in sample if one.cached_tokens is not None]
        prompts = sum(one.prompt_tokens for one in known)
        hit = sum(min(one.cached_tokens or 0, one.prompt_tokens) for one in known) / prompts if prompts else 0.0
        if now != self._known_s:
            self._known_s, self._known = now, {}
        found = []
        for one in sample:
            cached = hit * one.prompt_tokens if one.cached_tokens is None else one.cached_tokens
            expected: float | None = one.output_tokens
            if expected is None:
                past = self._past(_sorts(model, one), now, pace)
                still = not one.ended and one.began_s is not None
                expected = past.beyond(_tokens(one, now, pace)) if still else past.mean
            found.append(
                Arrival(
                    one.at_s, model, one.traffic_class, one.prompt_tokens, min(one.prompt_tokens, round(cached)),
                    max(1, min(one.limit, round(expected))),
                )
            )  # fmt: skip
        return tuple(found)

    def _past(self, sorts: tuple[_Sort, _Sort], now: float, pace: Pace | None) -> _Lengths:
        """Of the first sort where there were some, else of the second. Lately: those that began within LATELY_S, and
        some at least."""
        sort = sorts[0] if len(self._begun.get(sorts[0], ())) >= MIN_ALIKE else sorts[1]
        if sort in self._known:
            return self._known[sort]
        begun = self._begun.get(sort, ())
        lately: list[tuple[float, bool]] = []
        for one in reversed(begun):
            if one.began_s is None or (len(lately) >= MIN_LATELY and now - one.began_s > LATELY_S):
                break
            if one.output_tokens is not None:
                lately.append((one.output_tokens, False))
            elif not one.ended:
                lately.append((_tokens(one, now, pace), True))
        found = self._known[sort] = _Lengths(self._outputs.get(sort, ()), lately)
        return found


class _Lengths:
    """How long an output will be that has got to a given length: by the requests that began lately, finished or not
    (Kaplan and Meier, 1958), and beyond what those have shown by the ones that finished before."""

    def __init__(self, finished: Sequence[int], lately: Sequence[tuple[float, bool]]) -> None:
        """lately: (tokens so far, whether it goes on)."""
        self._sorted = sorted(finished)
        self._heads = list(accumulate(self._sorted, initial=0))
        self._at = [0.0]
        self._alive = [1.0]
        """Share that gets beyond the length at the same place; only where it changes."""
        self._sums = [0.0]
        """Integral of that share up to there."""
        at = total = 0.0
        alive, at_risk = 1.0, len(lately)
        for length, goes_on in sorted(lately):
            if not goes_on:
                total += alive * (length - at)
                at = length
                alive *= 1.0 - 1.0 / at_risk
                self._at.append(at)
                self._alive.append(alive)
                self._sums.append(total)
            at_risk -= 1
        self._shown = max((length for length, _ in lately), default=0.0)
        """Beyond this length none of the lately begun has got."""
        self._whole = total + alive * (self._past(self._shown) - at)

    @property
    def mean(self) -> float:
        return self._whole

    def beyond(self, tokens: float) -> float:
        """Expected length of an output that has this many and goes on."""
        place = bisect_right(self._at, tokens) - 1
        if tokens >= self._shown or self._alive[place] <= 0:
            return self._past(tokens)
        here = self._sums[place] + self._alive[place] * (tokens - self._at[place])
        return tokens + (self._whole - here) / self._alive[place]

    def _past(self, tokens: float) -> float:
        """By those that finished and were longer; twice the length where too few were."""
        first = bisect_right(self._sorted, tokens)
        longer = len(self._sorted) - first
        if longer >= MIN_LONGER:
            return (self._heads[-1] - self._heads[first]) / longer
        return 2.0 * tokens if tokens > 0 else float(DEFAULT_OUTPUT)


def _sorts(model: str, seen: _Seen) -> tuple[_Sort, _Sort]:
    """What it is like: its class and about its prompt's length, within a factor of 4; and its class alone."""
    return (model, seen.traffic_class, seen.prompt_tokens.bit_length() // 2), (model, seen.traffic_class, -1)


def _tokens(one: _Seen, now: float, pace: Pace | None) -> float:
    """Output tokens that a running request has about now."""
    step_s = pace.get(one.decode, 0.0) if pace is not None else 0.0
    return (now - one.began_s) / step_s if step_s > 0 and one.began_s is not None else 0.0


def _burst(times: list[float], since: int, now: float) -> float:
    """Index of dispersion of arrivals in slots of SLOT_S: the median over neighbouring slots of what their difference
    is beside that of Poisson arrivals, so that no step in the rate passes for bursts."""
    first_s = max(times[since], now - MAX_SLOTS * SLOT_S)
    num_slots = int((now - first_s) / SLOT_S)
    if num_slots < MIN_SLOTS:
        return 1.0
    ends = [bisect_left(times, now - slot * SLOT_S, lo=since) for slot in range(num_slots + 1)]
    counts = [later - earlier for later, earlier in pairwise(ends)]
    ratios = sorted((one - other) ** 2 / (one + other) for one, other in pairwise(counts) if one + other)
    return max(1.0, ratios[len(ratios) // 2] / CHI2_MEDIAN) if ratios else 1.0
