"""One of several models that share a fleet: what it may get, what that serves as estimated, and as simulated."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from controlplane.planner.divide import Demand, Limits, Option, within
from controlplane.planner.division_report import FrontierPoint
from controlplane.planner.fleets import Fleet, Inventory, shapes
from controlplane.planner.judge import Judge, Judged
from controlplane.planner.prepare import Prepared
from controlplane.planner.search import Candidate, frontier
from controlplane.planner.wants import Want
from nodes.shapes import weights_bytes
from transfer.errors import InvalidValue
from transfer.said import said_of, say

ENOUGH = 4.0
"""Times the wanted rate: what closed forms estimate beyond that is no reason for more GPUs."""


class Asked(NamedTuple):
    """One model. now: the fleet that serves it, None where nobody said."""

    want: Want
    prepared: Prepared
    judge: Judge
    now: Fleet | None


class Side:
    """One model: its fleets (`found`), and what simulation made of some of them (`known`, by their place there).
    Raises InvalidValue where none can serve, or `now` is of other hardware."""

    def __init__(self, asked: Asked) -> None:
        self.asked, self.want, self.workload = asked, asked.want, asked.prepared.workload
        self._classes = [stock.hardware for stock in asked.prepared.inventory.stocks]
        if asked.now is not None and (others := set(gpus_of(asked.now)) - set(self._classes)):
            raise InvalidValue(say("divide.other_class", model=self.want.name, hardware=", ".join(sorted(others))))
        self.found = _frontier(asked)
        self.known: dict[int, Judged] = {}
        self._ratios: dict[bool, float] = {}
        """Simulated over forecast rate, of colocated fleets and of splits."""

    def demand(self, *, simulated: bool = False) -> Demand:
        """Its options, one for each fleet found. simulated: the others serve nothing."""
        return Demand(self.want.rate, [
            Option(self.gpus(one.fleet), one.fleet.price_per_hour, self._rate(place, simulated))
            for place, one in enumerate(self.found)
        ])  # fmt: skip

    def gpus(self, fleet: Fleet) -> tuple[int, ...]:
        used = gpus_of(fleet)
        return tuple(used[hardware] for hardware in self._classes)

    def simulate(self, place: int) -> None:
        one = self.found[place]
        guess = min(self._rate(place, False), self.want.rate) or self.want.rate
        judged = self.known[place] = self.asked.judge.judge(one.fleet, guess)
        if one.forecast:
            kind, ratio = one.fleet.is_colocated, judged.max_rate / one.forecast
            before = self._ratios.get(kind, 1.0)
            if judged.max_rate >= self.want.rate:  # it may serve more
                ratio = max(ratio, before)
            self._ratios[kind] = ratio or before / 2

    def best_within(self, limits: Limits) -> int | None:
        """Of what fits, the better of the best colocated fleet and the best split, simulated both."""
        for kind in (True, False):
            own = self.demand()
            place = within(own._replace(options=[
                option if one.fleet.is_colocated is kind else option._replace(rate=0.0)
                for one, option in zip(self.found, own.options, strict=True)
            ]), limits)  # fmt: skip
            if place is not None:
                self.simulate(place)
        return within(self.demand(simulated=True), limits)

    def judge_now(self) -> int | None:
        """What serves it now becomes one of its fleets; None where nobody said."""
        fleet = self.asked.now
        if fleet is None:
            return None
        places = {str(one.fleet): place for place, one in enumerate(self.found)}
        if str(fleet) not in places:
            self.found.append(Candidate(fleet, 0.0, self.workload.max_rate(fleet)))
        place = places.get(str(fleet), len(self.found) - 1)
        self.simulate(place)
        return place

    def frontier(self) -> tuple[FrontierPoint, ...]:
        return tuple(
            FrontierPoint(dict(gpus_of(one.fleet)), min(self.want.rate, self._rate(place, False)), str(one.fleet),
                          place in self.known)
            for place, one in enumerate(self.found)
        )  # fmt: skip

    def _rate(self, place: int, simulated: bool) -> float:
        if place in self.known:
            return self.known[place].max_rate
        one = self.found[place]
        return 0.0 if simulated else one.forecast * self._ratios.get(one.fleet.is_colocated, 1.0)


def gpus_of(fleet: Fleet) -> Counter[str]:
    """By class."""
    found: Counter[str] = Counter()
    for part in fleet.parts:
        found[part.shape.hardware] += part.count * part.shape.num_gpus
    return found


def _frontier(asked: Asked) -> list[Candidate]:
    want, workload, inventory = asked.want, asked.prepared.workload, asked.prepared.inventory
    hardware = str(inventory)
    if not any(shapes(stock, workload.model, workload.block_size) for stock in inventory.stocks):
        size = f"{weights_bytes(workload.model) / 1e9:.0f}"
        raise InvalidValue(say("divide.no_fit", model=want.name, size=size, hardware=hardware))
    try:
        found = frontier(inventory, workload, ENOUGH * want.rate)
    except InvalidValue as error:
        raise InvalidValue(say("divide.of_model", model=want.name, text=said_of(error))) from None
    if not any(one.forecast > 0 for one in found):
        raise hopeless(want, workload.target, inventory)
    return found


def hopeless(want: Want, target: float, inventory: Inventory) -> InvalidValue:
    """The error that says so."""
    return InvalidValue(
        say("divide.hopeless", hardware=str(inventory), target=f"{target:.0%}", model=want.name)
    )  # fmt: skip
