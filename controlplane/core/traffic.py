"""The offered load of the last minutes, measured at the gateway: what forecasts are made from. Bounded.

Every arrival counts, also one that waits or is refused, so that demand is never taken for what was served. What a
request has not shown yet is expected from others: its cached share from theirs, its output from those that got as far.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

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
Pace = Callable[[InstanceId], float]
"""Seconds a token takes on an instance now."""


@dataclass(slots=True, frozen=True)
class Arrival:
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
        self._open: dict[RequestId, _Seen] = {}
        self._outputs: dict[_Sort, deque[int]] = {}
        """The lengths of the last that finished."""
        self._begun: dict[_Sort, deque[_Seen]] = {}

    # --- what happens -----------------------------------------------------------------------------------------

    def arrived(
        self, request_id: RequestId, at_s: float, model: str, traffic_class: str, prompt_tokens: int, limit: int
    ) -> None:
        """A request reached the gateway. limit: output tokens it may have at most."""
        seen = self._open[request_id] = _Seen(at_s, traffic_class, max(1, prompt_tokens), max(1, limit))
        kept = self._seen.setdefault(model, [])
        kept.append(seen)
        if len(kept) >= 2 * MAX_ARRIVALS:
            del kept[:MAX_ARRIVALS]
        elif at_s - kept[0].at_s > CUT_AT * self._keep_s:
            # One that is older stays: it tells that the windows were watched from their beginning.
            del kept[: bisect_left(kept, at_s - self._keep_s, key=_at) - 1]

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

    # --- what it was ------------------------------------------------------------------------------------------

    def load(self, now: float, model: str, window_s: float | None = None, pace: Pace | None = None) -> Load:
        """The last window_s (window_s of this object by default), or the time since the first arrival that is kept
        when that is shorter, at least a second."""
        num, span_s = self.count(now, model, self.window_s if window_s is None else window_s)
        if not num:
            return Load(0, span_s, ())
        kept = self._seen[model]
        sample = kept[len(kept) - num :: -(-num // MAX_SAMPLE)]
        burst = _burst(kept, max(0, len(kept) - MAX_ARRIVALS), now)
        return Load(num, span_s, self._shapes(sample, model, now, pace), burst)

    def count(self, now: float, model: str, window_s: float) -> tuple[int, float]:
        """Arrivals of a window, and the seconds that they span, as `load` says."""
        kept = self._seen.get(model, [])
        since = max(0, len(kept) - MAX_ARRIVALS)
        if since == len(kept):
            return 0, window_s
        first = max(since, bisect_left(kept, now - window_s, key=_at))
        return len(kept) - first, min(window_s, max(1.0, now - kept[since].at_s))

    def slots(self, now: float, model: str, slot_s: float, pace: Pace | None = None) -> list[Load]:
        """The last minutes (window_s of this object) cut into pieces, from old to new; the newest ends now. Before the
        first arrival that is kept there is none."""
        kept = self._seen.get(model, [])
        since = max(0, len(kept) - MAX_ARRIVALS)
        if since == len(kept):
            return []
        span_s = min(self.window_s, now - kept[since].at_s)
        found = []
        for place in range(int(span_s / slot_s), 0, -1):
            first, last = (bisect_left(kept, now - ago * slot_s, lo=since, key=_at) for ago in (place, place - 1))
            last = len(kept) if place == 1 else last
            sample = kept[first : last : max(1, -(-(last - first) // SLOT_SAMPLE))]
            found.append(Load(last - first, slot_s, self._shapes(sample, model, now, pace)))
        return found

    def changing(self, now: float, model: str, window_s: float) -> bool:
        """Whether arrivals, or the tokens of their prompts, in the newest third of the window differ from those before
        by more than chance: then the window is of two loads."""
        kept = self._seen.get(model, [])
        since = max(0, len(kept) - MAX_ARRIVALS)
        if since == len(kept) or now - kept[since].at_s < window_s:
            return False
        first, middle = (bisect_left(kept, now - part * window_s, lo=since, key=_at) for part in (1.0, 1 / 3))
        older, newer = kept[first:middle], kept[middle:]
        burst = _burst(kept, since, now)
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
        for one in kept[bisect_right(kept, since_s, key=_at) :]:
            slo = slos.get(one.traffic_class)
            if slo is None or (one.ended and one.good is None):
                continue
            if one.ended:
                found = one.good is True
            elif one.began_s is None and now - one.at_s <= slo.ttft_s:
                continue
            else:
                found = one.began_s is not None and one.began_s - one.at_s <= slo.ttft_s
                found = found and (pace is None or pace(one.decode) <= ABOUT * slo.tpot_s)
            good, counted = good + found, counted + 1
        return good, counted

    # --- inside -----------------------------------------------------------------------------------------------

    def _shapes(self, sample: list[_Seen], model: str, now: float, pace: Pace | None) -> tuple[Arrival, ...]:
        known = [one for one in sample if one.cached_tokens is not None]
        prompts = sum(one.prompt_tokens for one in known)
        hit = sum(min(one.cached_tokens or 0, one.prompt_tokens) for one in known) / prompts if prompts else 0.0
        past: dict[_Sort, _Lengths] = {}
        found = []
        for one in sample:
            cached = hit * one.prompt_tokens if one.cached_tokens is None else one.cached_tokens
            sort, general = _sorts(model, one)
            sort = sort if len(self._begun.get(sort, ())) >= MIN_ALIKE else general
            if sort not in past:
                past[sort] = self._lengths(sort, now, pace)
            output = _output(one, past[sort], now, pace)
            expected = past[sort].mean if output is None else output
            found.append(
                Arrival(
                    one.at_s, model, one.traffic_class, one.prompt_tokens, min(one.prompt_tokens, round(cached)),
                    max(1, min(one.limit, round(expected))),
                )
            )  # fmt: skip
        return tuple(found)

    def _lengths(self, sort: _Sort, now: float, pace: Pace | None) -> _Lengths:
        """Of one sort of request. Lately: those that began within LATELY_S, and some at least."""
        begun = self._begun.get(sort, ())
        lately: list[tuple[float, bool]] = []
        for one in reversed(begun):
            if one.began_s is None or (len(lately) >= MIN_LATELY and now - one.began_s > LATELY_S):
                break
            if one.output_tokens is not None:
                lately.append((float(one.output_tokens), True))
            elif not one.ended:
                lately.append((_tokens(one, now, pace), False))
        return _Lengths(self._outputs.get(sort, ()), lately)


class _Lengths:
    """How long an output will be that has got to a given length: by the requests that began lately, finished or not
    (Kaplan and Meier, 1958), and beyond what those have shown by the ones that finished before."""

    def __init__(self, finished: Sequence[int], lately: Sequence[tuple[float, bool]]) -> None:
        """lately: (tokens so far, whether that was all)."""
        self._sorted = sorted(finished)
        self._tails = [0] * (len(self._sorted) + 1)
        for index in range(len(self._sorted) - 1, -1, -1):
            self._tails[index] = self._tails[index + 1] + self._sorted[index]
        self._at = [0.0]
        self._alive = [1.0]
        """Share that gets beyond the length at the same place."""
        self._sums = [0.0]
        """Integral of that share up to there."""
        at_risk = len(lately)
        for length, over in sorted(lately, key=lambda one: (one[0], not one[1])):
            self._sums.append(self._sums[-1] + self._alive[-1] * (length - self._at[-1]))
            self._at.append(length)
            self._alive.append(self._alive[-1] * (1.0 - 1.0 / at_risk) if over else self._alive[-1])
            at_risk -= 1
        self._whole = self._sums[-1] + self._alive[-1] * (self._past(self._at[-1]) - self._at[-1])

    @property
    def mean(self) -> float:
        return self._whole

    def beyond(self, tokens: float) -> float:
        """Expected length of an output that has this many and goes on."""
        place = bisect_right(self._at, tokens) - 1
        if place >= len(self._at) - 1 or self._alive[place] <= 0:
            return self._past(tokens)
        here = self._sums[place] + self._alive[place] * (tokens - self._at[place])
        return tokens + (self._whole - here) / self._alive[place]

    def _past(self, tokens: float) -> float:
        """By those that finished and were longer; twice the length where too few were."""
        first = bisect_right(self._sorted, tokens)
        longer = len(self._sorted) - first
        if longer >= MIN_LONGER:
            return self._tails[first] / longer
        return 2.0 * tokens if tokens > 0 else float(DEFAULT_OUTPUT)


def _sorts(model: str, seen: _Seen) -> tuple[_Sort, _Sort]:
    """What it is like: its class and about its prompt's length, within a factor of 4; and its class alone."""
    return (model, seen.traffic_class, seen.prompt_tokens.bit_length() // 2), (model, seen.traffic_class, -1)


def _at(seen: _Seen) -> float:
    return seen.at_s


def _output(one: _Seen, past: _Lengths, now: float, pace: Pace | None) -> float | None:
    """Its output tokens, or those it is expected to have; None while nothing is known of it."""
    if one.output_tokens is not None:
        return float(one.output_tokens)
    return None if one.ended or one.began_s is None else past.beyond(_tokens(one, now, pace))


def _tokens(one: _Seen, now: float, pace: Pace | None) -> float:
    """Output tokens that a running request has about now."""
    step_s = pace(one.decode) if pace is not None else 0.0
    return (now - one.began_s) / step_s if step_s > 0 and one.began_s is not None else 0.0


def _burst(kept: list[_Seen], since: int, now: float) -> float:
    """Index of dispersion of arrivals in slots of SLOT_S: the median over neighbouring slots of what their difference
    is beside that of Poisson arrivals, so that no step in the rate passes for bursts."""
    first_s = max(kept[since].at_s, now - MAX_SLOTS * SLOT_S)
    num_slots = int((now - first_s) / SLOT_S)
    if num_slots < MIN_SLOTS:
        return 1.0
    ends = [bisect_left(kept, now - slot * SLOT_S, lo=since, key=_at) for slot in range(num_slots + 1)]
    counts = [later - earlier for later, earlier in pairwise(ends)]
    ratios = sorted((one - other) ** 2 / (one + other) for one, other in pairwise(counts) if one + other)
    return max(1.0, ratios[len(ratios) // 2] / CHI2_MEDIAN) if ratios else 1.0
