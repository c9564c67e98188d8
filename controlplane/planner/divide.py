"""Divides GPUs among models: the smallest share of a wanted rate that is served becomes as large as possible.

Exact over the options it is given. It knows no fleets and measures nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from controlplane.planner.program import Floats, Ints

EPSILON = 1e-9


class Option(NamedTuple):
    """What one model may get. gpus: of each class; price: an hour of all of it; rate: requests a second it serves."""

    gpus: tuple[int, ...]
    price: float
    rate: float


class Demand(NamedTuple):
    """One model. wanted: requests a second; more than that is worth nothing."""

    wanted: float
    options: Sequence[Option]

    def share(self, option: Option) -> float:
        return min(1.0, option.rate / self.wanted)


class Limits(NamedTuple):
    """gpus: of each class. price: an hour at most; None: any."""

    gpus: tuple[int, ...]
    price: float | None = None

    def hold(self, gpus: Sequence[int], price: float) -> bool:
        fits = all(one <= most for one, most in zip(gpus, self.gpus, strict=True))
        return fits and (self.price is None or price <= self.price * (1 + EPSILON))


class _Step(NamedTuple):
    """One model gets another option. worth: good requests a second more for a dollar an hour; gain: in all."""

    worth: float
    gain: float
    model: int
    place: int


def divide(demands: Sequence[Demand], limits: Limits) -> tuple[int, ...] | None:
    """Which option each model gets; None where not every model can get one that serves. Of the divisions with the
    largest smallest share the cheapest; what that leaves goes, where some want more, one option after another to the
    model to which a better one adds most good requests for its price."""
    shares = {demand.share(option) for demand in demands for option in demand.options}
    levels = sorted(share for share in shares if share > EPSILON)
    found: tuple[int, ...] | None = None
    low, high = 0, len(levels)
    while low < high:
        middle = (low + high) // 2
        picks = _cheapest(demands, limits, levels[middle])
        if picks is None:
            high = middle
        else:
            found, low = picks, middle + 1
    return None if found is None else _filled(demands, limits, found)


def within(demand: Demand, limits: Limits) -> int | None:
    """The best option that one model can have by itself, and the cheapest of equal ones; None where none fits."""
    able = [place for place, one in enumerate(demand.options) if one.rate > 0 and limits.hold(one.gpus, one.price)]
    key = lambda place: (-demand.share(demand.options[place]), demand.options[place].price)  # noqa: E731
    return min(able, key=key, default=None)


def _cheapest(demands: Sequence[Demand], limits: Limits, level: float) -> tuple[int, ...] | None:
    """With at least this share for every model. gpus: [states, classes], picks: [states, models so far]."""
    gpus, price, picks = np.zeros((1, len(limits.gpus)), dtype=int), np.zeros(1), np.zeros((1, 0), dtype=int)
    for demand in demands:
        able = [place for place, option in enumerate(demand.options) if demand.share(option) >= level - EPSILON]
        if not able or not len(price):
            return None
        own = np.array([demand.options[place].gpus for place in able], dtype=int)
        cost = np.array([demand.options[place].price for place in able])
        few = _undominated(own, cost)
        gpus = (gpus[:, None] + own[few][None]).reshape(-1, len(limits.gpus))
        price = (price[:, None] + cost[few][None]).ravel()
        picks = np.hstack([np.repeat(picks, len(few), axis=0), np.tile(np.array(able)[few], len(picks))[:, None]])
        fits = (gpus <= limits.gpus).all(axis=1)
        if limits.price is not None:
            fits &= price <= limits.price * (1 + EPSILON)
        gpus, price, picks = gpus[fits], price[fits], picks[fits]
        few = _undominated(gpus, price)
        gpus, price, picks = gpus[few], price[few], picks[few]
    return tuple(int(place) for place in picks[0]) if len(price) else None


def _undominated(gpus: Ints, price: Floats) -> Ints:
    """Places of those that take fewer GPUs of some class, or cost less, than each other; the cheapest first, and of
    equal ones the first."""
    left = np.lexsort((gpus.sum(axis=1), price))
    kept = []
    while len(left):
        kept.append(left[0])
        left = left[(gpus[left] < gpus[left[0]]).any(axis=1)]
    return np.array(kept, dtype=int)


def _filled(demands: Sequence[Demand], limits: Limits, picks: tuple[int, ...]) -> tuple[int, ...]:
    while True:
        step = max(_steps(demands, limits, picks), key=lambda one: (one.worth, one.gain), default=None)
        if step is None:
            return picks
        picks = (*picks[: step.model], step.place, *picks[step.model + 1 :])


def _steps(demands: Sequence[Demand], limits: Limits, picks: Sequence[int]) -> Iterator[_Step]:
    """Each better option of a model for which there is room."""
    chosen = [demand.options[place] for demand, place in zip(demands, picks, strict=True)]
    used = [sum(column) for column in zip(*(one.gpus for one in chosen), strict=True)]
    price = sum(one.price for one in chosen)
    for model, (demand, own) in enumerate(zip(demands, chosen, strict=True)):
        for place, option in enumerate(demand.options):
            gain = (demand.share(option) - demand.share(own)) * demand.wanted
            gpus = [total - before + after for total, before, after in zip(used, own.gpus, option.gpus, strict=True)]
            if gain > EPSILON and limits.hold(gpus, price - own.price + option.price):
                yield _Step(gain / max(EPSILON, option.price - own.price), gain, model, place)
