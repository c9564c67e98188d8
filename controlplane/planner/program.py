"""How much of work with windows of time fits, from above: a linear program solved by cuts. Knows nothing of requests.

Each item needs one option of every side (a place to be prefilled, one to decode); an option is work on resources. A
resource of capacity c does the work whose window lies in [s, t] for at most c (t - s) seconds (Hall's condition, exact
for work that may be divided and interrupted at will). There are too many intervals to write down, so those that a
solution breaks are added until none is. The prices of the intervals found then give the value: by weak duality any
prices do, so items may be put together to find them, and stopping early leaves a larger value, never a smaller.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Mask = NDArray[np.bool_]

MAX_GRID, MAX_ROUNDS, CUTS_A_ROUND = 768, 40, 12
MAX_GROUPS, MAX_COLUMNS = 2000, 40_000
"""Of the program that finds the intervals; of the one that then finds their prices."""
TOLERANCE = 2e-4
"""Of an interval's capacity, by which it may be broken."""
CELL = 4
"""Items put together are neighbours in time: of so many times as many the most alike."""
ROUGH_GAIN, GAIN = 1e-3, 3e-5
"""Rounds end when the last few lowered the value by less than this share."""
LAST_ROUNDS, LOOK_BACK = 2, 3
MANY_CUTS, MAX_IDLE = 100, 3
"""Beyond so many, cuts without a price for so many rounds are dropped."""


class Load(NamedTuple):
    """Work of each item on a resource, in seconds, and its window."""

    resource: int
    work: Floats
    start_s: Floats
    end_s: Floats


class Option(NamedTuple):
    """able: the items that can take it."""

    able: Mask
    loads: Sequence[Load]


class Program(NamedTuple):
    """Maximise how many items are served. capacities: seconds of work a second, by resource."""

    num_items: int
    sides: Sequence[Sequence[Option]]
    capacities: Sequence[float]


class Solution(NamedTuple):
    """prices: by resource, what one more second a second of it would be worth, in items."""

    value: float
    prices: list[float]
    num_cuts: int
    num_rounds: int
    num_columns: int
    is_tight: bool


@dataclass(frozen=True, slots=True)
class _Cut:
    resource: int
    start_s: float
    end_s: float

    def holds(self, load: Load) -> Mask:
        return np.asarray((load.start_s >= self.start_s) & (load.end_s <= self.end_s))


def solve(program: Program) -> Solution:
    """At most a little more than the true value: the tolerance, and what too few rounds leave."""
    num_resources = len(program.capacities)
    grids = [_Grid(program, resource) for resource in range(num_resources)]
    contended = np.zeros(program.num_items, dtype=bool)
    for grid in grids:
        contended |= grid.contended(program)
    free = program.num_items - int(contended.sum())
    exact = _taken(program, contended)
    search = _Search(exact, grids)
    if not exact.num_items:
        return Solution(float(free), [0.0] * num_resources, 0, 0, 0, True)
    each = 1 + sum(len(options) for options in exact.sides if len(options) > 1)
    is_rough = exact.num_items > MAX_GROUPS
    if is_rough:
        search.run(_merged(exact, MAX_GROUPS), MAX_ROUNDS, ROUGH_GAIN)
    is_tight = search.run(_merged(exact, MAX_COLUMNS // each), LAST_ROUNDS if is_rough else MAX_ROUNDS, GAIN)
    worth = [0.0] * num_resources
    for cut, price in search.best_prices:
        worth[cut.resource] += price * (cut.end_s - cut.start_s)
    return Solution(free + search.best, worth, len(search.best_prices), search.num_rounds, search.num_columns, is_tight)


class _Search:
    """Rounds of cuts and prices. best: the lowest value any prices gave."""

    def __init__(self, exact: Program, grids: Sequence[_Grid]) -> None:
        self._exact, self._grids = exact, grids
        self._idle: dict[_Cut, int] = {}
        """Cuts in use, and for how many rounds each had no price."""
        self.best, self.num_rounds, self.num_columns = float(exact.num_items), 0, 0
        self.best_prices: list[tuple[_Cut, float]] = []

    def run(self, master: _Master, num_rounds: int, gain: float) -> bool:
        """Until no interval is broken (True), or rounds gain less than that share of the value."""
        grids = [_Grid(master.program, grid.resource, grid.points) for grid in self._grids]
        self.num_columns = max(self.num_columns, master.num_columns)
        shares = self._priced(master) if self._idle else master.everything()
        values = [self.best]
        for _ in range(num_rounds):
            fresh = [cut for grid in grids for cut in grid.broken(master, shares)]
            if not fresh:
                return True
            self._idle |= dict.fromkeys(fresh, 0)
            shares = self._priced(master)
            values.append(self.best)
            if len(values) > LOOK_BACK and values[-1 - LOOK_BACK] - values[-1] <= gain * values[-1]:
                return False
        return False

    def _priced(self, master: _Master) -> Floats:
        """The optimum under the cuts, whose prices then give a value of the exact program."""
        cuts = list(self._idle)
        self.num_rounds += 1
        shares, prices = master.optimum(cuts)
        priced = [(cut, float(price)) for cut, price in zip(cuts, prices, strict=True) if price > 0]
        value = _dual(self._exact, priced)
        if value < self.best or not self.best_prices:
            self.best, self.best_prices = min(value, self.best), priced
        for cut, price in zip(cuts, prices, strict=True):
            self._idle[cut] = 0 if price > 0 else self._idle[cut] + 1
            if self._idle[cut] >= MAX_IDLE and len(cuts) > MANY_CUTS:
                del self._idle[cut]
        return shares


class _Grid:
    """The loads of one resource over intervals between grid points, to which windows are widened."""

    def __init__(self, program: Program, resource: int, points: Floats | None = None) -> None:
        self.resource = resource
        self._loads = [
            (side, place, load) for side, options in enumerate(program.sides) for place, option in enumerate(options)
            for load in option.loads if load.resource == resource
        ]  # fmt: skip
        ables = [program.sides[side][place].able & (load.work > 0) for side, place, load in self._loads]
        self._items = [np.flatnonzero(able) for able in ables]
        starts = [load.start_s[items] for (_, _, load), items in zip(self._loads, self._items, strict=True)]
        ends = [load.end_s[items] for (_, _, load), items in zip(self._loads, self._items, strict=True)]
        self.points = _points(np.concatenate([*starts, *ends, np.zeros(0)])) if points is None else points
        size = len(self.points)
        self._flat = [
            (np.searchsorted(self.points, start, side="right") - 1).clip(0) * size
            + np.searchsorted(self.points, end, side="left").clip(None, size - 1)
            for start, end in zip(starts, ends, strict=True)
        ]  # fmt: skip
        room = program.capacities[resource] * (self.points[None, :] - self.points[:, None])
        self._room = np.where(room > 0.0, room * (1.0 + TOLERANCE) + 1e-9, np.inf)

    def contended(self, program: Program) -> Mask:
        """Items whose window lies in an interval that would be too full if all took every option."""
        found = np.zeros(program.num_items, dtype=bool)
        size = len(self.points)
        if not size:
            return found
        over = self._over([load.work[items] for (_, _, load), items in zip(self._loads, self._items, strict=True)]) > 0
        near = np.maximum.accumulate(np.maximum.accumulate(over, axis=0)[:, ::-1], axis=1)[:, ::-1].ravel()
        for items, flat in zip(self._items, self._flat, strict=True):
            found[items[near[flat]]] = True
        return found

    def broken(self, master: _Master, shares: Floats) -> list[_Cut]:
        """The intervals broken most, those apart from each other and those of different length beside each other."""
        if not len(self.points):
            return []
        over = self._over([
            load.work[items] * shares[master.columns[side][place][items]]
            for (side, place, load), items in zip(self._loads, self._items, strict=True)
        ])  # fmt: skip
        found: list[_Cut] = []
        for _ in range(CUTS_A_ROUND):
            start, end = divmod(int(over.argmax()), len(self.points))
            if over[start, end] <= 0:
                break
            found.append(_Cut(self.resource, float(self.points[start]), float(self.points[end])))
            alike = over[: end + 1, start:]
            alike[self._alike(start, end)] = -1.0
        return found

    def _over(self, works: Sequence[Floats]) -> Floats:
        """By how much the work inside each interval exceeds what there is room for."""
        size = len(self.points)
        inside = np.zeros(size * size)
        for flat, work in zip(self._flat, works, strict=True):
            inside += np.bincount(flat, weights=work, minlength=size * size)
        table = inside.reshape(size, size)
        return np.asarray(table[::-1].cumsum(axis=0)[::-1].cumsum(axis=1) - self._room)

    def _alike(self, start: int, end: int) -> Mask:
        """Intervals [i, j], i <= end, j >= start, that share most of their length with [start, end]."""
        points = self.points
        low = np.maximum(points[: end + 1], points[start])[:, None]
        high = np.minimum(points[start:], points[end])[None, :]
        longest = np.maximum(points[None, start:] - points[: end + 1, None], points[end] - points[start])
        return np.asarray((high - low) > 0.5 * longest)


class _Master:
    """The program of groups of items, whose optimum under some cuts HiGHS finds. columns: by side and option, of each
    group, the variable that says how many of it take the option; -1: it cannot."""

    def __init__(self, program: Program, sizes: Floats) -> None:
        """sizes: how many of each item there are."""
        self.program, self._sizes = program, sizes
        self._rows: dict[_Cut, Any] = {}
        num = self.program.num_items
        self.num_columns = num
        self.columns: list[list[Ints]] = []
        self._ties: list[tuple[Ints, Ints]] = []
        for options in self.program.sides:
            if len(options) == 1:
                self.columns.append([np.arange(num)])
                continue
            found, items = [], [np.flatnonzero(option.able) for option in options]
            for one in items:
                columns = np.full(num, -1)
                columns[one] = np.arange(self.num_columns, self.num_columns + len(one))
                self.num_columns += len(one)
                found.append(columns)
            self.columns.append(found)
            parts = np.concatenate([columns[one] for columns, one in zip(found, items, strict=True)])
            self._ties.append((parts, np.concatenate(items)))

    def everything(self) -> Floats:
        """All served, by each option in equal shares."""
        x = np.zeros(self.num_columns)
        x[: self.program.num_items] = self._sizes
        for parts, wholes in self._ties:
            x[parts] = self._sizes[wholes] / np.bincount(wholes)[wholes]
        return x

    def optimum(self, cuts: Sequence[_Cut]) -> tuple[Floats, Floats]:
        """How many take what, and the price of a second of each cut."""
        from scipy.optimize import linprog
        from scipy.sparse import csr_array, vstack

        limits = np.array([self.program.capacities[cut.resource] * (cut.end_s - cut.start_s) for cut in cuts])
        for cut in cuts:
            if cut not in self._rows:
                self._rows[cut] = csr_array(self._row(cut)[None, :])
        rows = vstack([self._rows[cut] / limit for cut, limit in zip(cuts, limits, strict=True)])
        objective = np.zeros(self.num_columns)
        objective[: self.program.num_items] = -1.0
        ties = [_tied(parts, wholes, self.num_columns) for parts, wholes in self._ties]
        bounds = np.full((self.num_columns, 2), (0.0, np.inf))
        bounds[: self.program.num_items, 1] = self._sizes
        found = linprog(
            objective, A_ub=rows, b_ub=np.ones(len(cuts)), bounds=bounds, method="highs",
            A_eq=vstack(ties) if ties else None, b_eq=np.zeros(sum(one.shape[0] for one in ties)) if ties else None,
        )  # fmt: skip
        if found.x is None:
            raise ArithmeticError(f"a linear program of {self.num_columns} variables was not solved: {found.message}")
        return np.asarray(found.x, dtype=np.float64), np.maximum(0.0, -found.ineqlin.marginals) / limits

    def _row(self, cut: _Cut) -> Floats:
        row = np.zeros(self.num_columns)
        for columns, options in zip(self.columns, self.program.sides, strict=True):
            for column, option in zip(columns, options, strict=True):
                for load in option.loads:
                    if load.resource == cut.resource:
                        inside = cut.holds(load) & option.able
                        row[column[inside]] += load.work[inside]
        return row


def _dual(program: Program, prices: Sequence[tuple[_Cut, float]]) -> float:
    """What the prices of a second of each interval say: the value of the intervals, and of each item what it is worth
    (1) beyond its cheapest options. Not below the optimum, whatever the prices."""
    total, left = 0.0, np.ones(program.num_items)
    for cut, price in prices:
        total += price * program.capacities[cut.resource] * (cut.end_s - cut.start_s)
    for options in program.sides:
        cheapest = np.full(program.num_items, np.inf)
        for option in options:
            cost = np.zeros(program.num_items)
            for load in option.loads:
                for cut, price in prices:
                    if cut.resource == load.resource:
                        cost += price * np.where(cut.holds(load), load.work, 0.0)
            cheapest = np.where(option.able, np.minimum(cheapest, cost), cheapest)
        left -= cheapest
    return total + float(np.maximum(0.0, left).sum())


def _points(times: Floats) -> Floats:
    """Every time a window begins or ends, or so many even ones that it matters little."""
    each = np.unique(times)
    return each if len(each) <= MAX_GRID else np.linspace(each[0], each[-1], MAX_GRID)


def _taken(program: Program, kept: Mask) -> Program:
    """Of these items alone."""
    sides = [
        [
            Option(one.able[kept], [Load(load.resource, *(values[kept] for values in load[1:])) for load in one.loads])
            for one in options
        ]
        for options in program.sides
    ]
    return Program(int(kept.sum()), sides, program.capacities)


def _groups(program: Program, most: int) -> Ints:
    """A number for each item: alike in what they are able to do, near in time and then alike in work; each by itself
    where there are few."""
    num = program.num_items
    size = -(-num // most)
    if size <= 1:
        return np.arange(num)
    options = [option for options in program.sides for option in options]
    able = np.zeros(num, dtype=np.int64)
    for option in options:
        able = 2 * able + option.able
    start_s = options[0].loads[0].start_s
    loads = [load.work for one in options for load in one.loads if load.work.any()]
    work = np.sum([values / values.mean() for values in loads], axis=0)
    order = np.lexsort((start_s, able))
    cells = np.empty(num, dtype=np.int64)
    cells[order] = np.arange(num) // (CELL * size)
    order = np.lexsort((work, cells, able))
    found = np.empty(num, dtype=np.int64)
    changes = np.diff(able[order], prepend=able[order[0]]) != 0
    starts = np.maximum.accumulate(np.where(changes, np.arange(num), 0))
    found[order] = (np.arange(num) - starts) // size + starts
    return np.asarray(np.unique(found, return_inverse=True)[1], dtype=np.int64)


def _merged(program: Program, most: int) -> _Master:
    """At most about so many groups, each an item of the mean work and window."""
    groups = _groups(program, most)
    sizes = np.bincount(groups).astype(np.float64)
    if len(sizes) == program.num_items:
        return _Master(program, sizes)

    def mean(values: Floats) -> Floats:
        return np.asarray(np.bincount(groups, weights=values) / sizes)

    sides = [
        [
            Option(
                np.bincount(groups, weights=one.able) > 0,
                [Load(load.resource, *(mean(values) for values in load[1:])) for load in one.loads],
            )
            for one in options
        ]
        for options in program.sides
    ]
    return _Master(Program(len(sizes), sides, program.capacities), sizes)


def _tied(parts: Ints, wholes: Ints, num_columns: int) -> Any:
    """A row for each whole: its parts less it."""
    from scipy.sparse import csr_array

    each, rows = np.unique(wholes, return_inverse=True)
    signs = np.concatenate([np.ones(len(parts)), -np.ones(len(each))])
    places = (np.concatenate([rows, np.arange(len(each))]), np.concatenate([parts, each]))
    return csr_array((signs, places), shape=(len(each), num_columns))
