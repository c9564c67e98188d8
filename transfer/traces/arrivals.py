"""When requests arrive: point processes as endless, seeded sequences of times in seconds. Nothing here has a size."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator

NOISE_SLICES = 1440
"""Slices of a diurnal period; the rate is constant within one (a minute of a day)."""


def poisson_times(rate: float, num: int, seed: int) -> list[float]:
    """`num` arrival times of a Poisson process; an infinite rate gives all at once."""
    return list(itertools.islice(renewal_times(rate, 1.0, random.Random(seed)), num))


def renewal_times(rate: float, cv: float, draw: random.Random) -> Iterator[float]:
    """Independent gamma distributed gaps of mean 1/rate whose standard deviation is cv of it; cv 1 is Poisson."""
    if math.isinf(rate):
        yield from itertools.repeat(0.0)
    at_s, shape = 0.0, cv**-2 if cv > 0 else math.inf
    while True:
        if cv == 1:
            at_s += draw.expovariate(rate)
        elif cv == 0:
            at_s += 1 / rate
        else:
            at_s += draw.gammavariate(shape, 1 / (rate * shape))
        yield at_s


def bursty_times(rate: float, burst: float, share: float, period_s: float, draw: random.Random) -> Iterator[float]:
    """A Markov modulated Poisson process of two states, of mean `rate` (Fischer and Meier-Hellstern 1993).

    In the upper state, `share` of the time, requests come `burst` times as fast as in the lower one (infinite: the
    lower is silent). Stays are exponential; an upper and a lower one together take period_s on average.
    """
    low, high = bursty_rates(rate, burst, share)
    is_high = draw.random() < share
    from_s = 0.0
    while True:
        stay_s = draw.expovariate(1 / (period_s * (share if is_high else 1 - share)))
        now = high if is_high else low
        at_s = from_s
        while now > 0 and (at_s := at_s + draw.expovariate(now)) < from_s + stay_s:
            yield at_s
        from_s += stay_s
        is_high = not is_high


def bursty_rates(rate: float, burst: float, share: float) -> tuple[float, float]:
    """Rates of the lower and the upper state."""
    if math.isinf(burst):
        return 0.0, rate / share
    low = rate / (share * burst + 1 - share)
    return low, low * burst


def diurnal_times(rate: float, depth: float, noise: float, period_s: float, draw: random.Random) -> Iterator[float]:
    """Poisson arrivals whose rate is a sine of mean `rate`: it rises first, peaks at (1 + depth) x rate after a quarter
    of period_s. Each slice of it is multiplied by a log-normal factor of mean 1 whose logarithm deviates by `noise`."""
    slice_s = period_s / NOISE_SLICES

    def rate_of(slice_number: int) -> float:
        turn = 2 * math.pi * (slice_number + 0.5) / NOISE_SLICES
        return rate * (1 + depth * math.sin(turn)) * math.exp(draw.gauss(-noise * noise / 2, noise))

    return modulated_times(rate_of, slice_s, draw)


def modulated_times(rate_of: Callable[[int], float], slice_s: float, draw: random.Random) -> Iterator[float]:
    """Poisson arrivals whose rate is rate_of(n) in the n-th slice."""
    work = draw.expovariate(1.0)
    for number in itertools.count():
        rate, within_s = rate_of(number), 0.0
        while work <= rate * (slice_s - within_s):
            within_s += work / rate
            yield number * slice_s + within_s
            work = draw.expovariate(1.0)
        work -= rate * (slice_s - within_s)
