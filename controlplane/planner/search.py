"""Which fleets of an inventory are worth simulating: all splits by closed forms, the best few of each kind.

Of each class of hardware all GPUs may prefill and decode in any split, or be mixed, or be left out; of the shapes that
instances can take the best few of each role count. The estimate adds up what instances can do with full batches; the
forecast of the online planner (queues with patience) then ranks what is left.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from controlplane.planner.capacity import Rates, Workload
from controlplane.planner.charges import Floats
from controlplane.planner.fleets import Fleet, Inventory, Part, Shape, Stock, shapes
from transfer.errors import InvalidValue
from transfer.said import say
from transfer.terms import Role

MAX_COMBINATIONS = 2_000_000
MAX_CELLS = 256
"""Numbers of GPUs of each class at which `frontier` looks for the best fleet."""
SHAPES_A_ROLE = 2
NUM_PRICES = 12
"""Budgets at which the best fleet is kept, for the frontier."""
BEST = 8


class Candidate(NamedTuple):
    """estimate, forecast: requests a second at the target attainment by the closed forms."""

    fleet: Fleet
    estimate: float
    forecast: float

    @property
    def per_gpu(self) -> float:
        return self.forecast / max(1, self.fleet.num_gpus)

    @property
    def per_dollar(self) -> float:
        return self.forecast / max(1e-9, self.fleet.price_per_hour)


class _Choice(NamedTuple):
    """What becomes of the GPUs of one class."""

    parts: tuple[Part, ...]
    hardware: str
    gpus: int
    price: float
    prefill: float
    decode: float
    mixed: float


class _Combinations:
    """Every choice of each class with every one of the others, flat. rate: what such a fleet does with full batches;
    alone: the same where all its instances do both phases, else 0. Raises InvalidValue when none can serve."""

    def __init__(self, inventory: Inventory, workload: Workload) -> None:
        self._inventory, self._workload = inventory, workload
        columns = [_choices(stock, workload) for stock in inventory.stocks]
        while np.prod([float(len(column)) for column in columns]) > MAX_COMBINATIONS:
            longest = max(range(len(columns)), key=lambda index: len(columns[index]))
            columns[longest] = _thinned(columns[longest])
        self._columns = columns
        prefill, decode = self.sums(lambda choice: choice.prefill), self.sums(lambda choice: choice.decode)
        rate = self.sums(lambda choice: choice.mixed) + np.minimum(prefill, decode)
        self.rate = np.where((prefill > 0) == (decode > 0), rate, 0.0)  # a phase alone serves nothing
        if self.rate.max() <= 0:
            raise InvalidValue(say("planner.none_serves", target=f"{workload.target:.0%}"))
        self.alone = np.where((prefill == 0) & (decode == 0), self.rate, 0.0)

    def sums(self, value: Callable[[_Choice], float]) -> Floats:
        """Of each combination, the values of its choices added up."""
        total = np.zeros(1)
        for column in self._columns:
            total = (total[:, None] + np.array([value(choice) for choice in column], dtype=float)[None, :]).ravel()
        return total

    def gpus(self, hardware: str) -> Floats:
        return self.sums(lambda choice: choice.gpus if choice.hardware == hardware else 0)

    def candidate(self, place: int) -> Candidate:
        chosen = np.unravel_index(place, tuple(len(column) for column in self._columns))
        parts = [part for column, index in zip(self._columns, chosen, strict=True) for part in column[int(index)].parts]
        fleet = Fleet(tuple(sorted(parts, key=lambda part: list(Role).index(part.role))), self._inventory.pools)
        return Candidate(fleet, float(self.rate[place]), self._workload.max_rate(fleet))


def candidates(inventory: Inventory, workload: Workload) -> list[Candidate]:
    """Fleets worth a closer look, the highest forecast first. Raises InvalidValue when there is none."""
    every = _Combinations(inventory, workload)
    rate, alone, price = every.rate, every.alone, every.sums(lambda choice: choice.price)
    kept: set[int] = set()
    for value, score in ((rate, rate), (alone, alone), (rate, rate / np.maximum(1e-9, price))):
        kept |= {int(place) for place in np.argsort(-score, kind="stable")[: 3 * BEST] if value[place] > 0}
    for most in np.linspace(0, price.max(), NUM_PRICES + 1)[1:]:
        inside = np.where(price <= most * (1 + 1e-9), rate, -1.0)
        kept |= {int(place) for place in np.argsort(-inside, kind="stable")[:2] if inside[place] > 0}
    return sorted((every.candidate(place) for place in sorted(kept)), key=lambda one: -one.forecast)


def frontier(inventory: Inventory, workload: Workload, enough: float) -> list[Candidate]:
    """The best colocated fleet and the best split of each number of GPUs of each class (in steps where there are many),
    where no fewer GPUs are estimated to do as well, colocated ones first. enough: requests a second beyond which no
    estimate is better than another. Raises InvalidValue when there is none."""
    every = _Combinations(inventory, workload)
    levels = max(2, int(MAX_CELLS ** (1 / len(inventory.stocks))))
    steps = [math.ceil(stock.num_gpus / levels) for stock in inventory.stocks]
    shape = tuple(math.ceil(stock.num_gpus / step) + 1 for stock, step in zip(inventory.stocks, steps, strict=True))
    cells = np.stack([
        np.ceil(every.gpus(stock.hardware) / step) for stock, step in zip(inventory.stocks, steps, strict=True)
    ]).astype(int)  # fmt: skip
    price = every.sums(lambda choice: choice.price)
    kept: list[int] = []
    for rate in (every.alone, every.rate - every.alone):
        most = np.minimum(rate, enough)
        best = np.full(shape, -1)
        order = np.lexsort((-price, most))
        best[tuple(cells[:, order])] = order  # where a cell repeats, the last stays: the best, and the cheapest of such
        for cell in np.ndindex(shape):
            place = int(best[cell])
            fewer = best[tuple(slice(0, end + 1) for end in cell)].ravel()
            if place >= 0 and most[place] > 0 and (most[fewer[(fewer >= 0) & (fewer != place)]] < most[place]).all():
                kept.append(place)
    return [every.candidate(place) for place in kept]


def best_shapes(stock: Stock, workload: Workload, rate: Callable[[Rates], float], count: int) -> list[Shape]:
    """Of one role, by its rate a GPU; none that cannot do it."""
    able = [one for one in shapes(stock, workload.model, workload.block_size) if rate(workload.rates(one)) > 0]
    return sorted(able, key=lambda one: (-rate(workload.rates(one)) / one.num_gpus, one.num_gpus))[:count]


def _choices(stock: Stock, workload: Workload) -> list[_Choice]:
    """Left out; mixed; or prefill and decode in any split, alone of a role too, for another class may do the other."""
    prefills = best_shapes(stock, workload, lambda rates: rates.prefill, SHAPES_A_ROLE)
    decodes = best_shapes(stock, workload, lambda rates: rates.decode, SHAPES_A_ROLE)
    mixed = best_shapes(stock, workload, lambda rates: rates.mixed, SHAPES_A_ROLE)
    found: dict[tuple[Part, ...], _Choice] = {(): _choice((), stock, workload)}
    for shape in mixed:
        for count in range(1, stock.num_gpus // shape.num_gpus + 1):
            alone = (Part(shape, Role.MIXED, count),)
            found[alone] = _choice(alone, stock, workload)
    firsts: list[Shape | None] = [*prefills] or [None]
    seconds: list[Shape | None] = [*decodes] or [None]
    for first in firsts:
        for second in seconds:
            for parts in _splits(stock, first, second):
                found[parts] = _choice(parts, stock, workload)
    return list(found.values())


def _splits(stock: Stock, first: Shape | None, second: Shape | None) -> Sequence[tuple[Part, ...]]:
    found = []
    for num_first in range(stock.num_gpus // first.num_gpus + 1 if first else 1):
        left = stock.num_gpus - (num_first * first.num_gpus if first else 0)
        for num_second in range(left // second.num_gpus + 1 if second else 1):
            parts = []
            if first and num_first:
                parts.append(Part(first, Role.PREFILL, num_first))
            if second and num_second:
                parts.append(Part(second, Role.DECODE, num_second))
            if parts:
                found.append(tuple(parts))
    return found


def _choice(parts: tuple[Part, ...], stock: Stock, workload: Workload) -> _Choice:
    rates = {role: 0.0 for role in (Role.PREFILL, Role.DECODE, Role.MIXED)}
    for part in parts:
        rates[part.role] += part.count * getattr(workload.rates(part.shape), part.role.value)
    gpus = sum(part.count * part.shape.num_gpus for part in parts)
    return _Choice(
        parts, stock.hardware, gpus, gpus * stock.price_per_hour, rates[Role.PREFILL], rates[Role.DECODE],
        rates[Role.MIXED],
    )  # fmt: skip


def _thinned(column: list[_Choice]) -> list[_Choice]:
    """Without what another choice of the class does as well for no more money; else every other one."""
    values = np.array([[one.price, -one.prefill, -one.decode, -one.mixed] for one in column])
    worse = np.zeros(len(column), dtype=bool)
    for index, own in enumerate(values):
        better = (values <= own + 1e-12).all(axis=1) & (values < own - 1e-12).any(axis=1)
        worse[index] = better.any()
    left = [one for one, is_worse in zip(column, worse, strict=True) if not is_worse]
    return left if len(left) < len(column) else [column[0], *column[1::2]]
