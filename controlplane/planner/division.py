"""Plans several models on one fleet: what each could serve with every number of GPUs, and who gets which.

The closed forms say which fleets of a model are worth a look; divide.py chooses among them, simulation corrects what it
chose, and it chooses again until all that it chose is simulated. The division reported is the best of simulated fleets.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence

from controlplane.planner.apply import apply_commands, apply_config
from controlplane.planner.divide import EPSILON, Limits, divide
from controlplane.planner.division_report import DivisionPlan, DivisionReport, Kind, ModelReport
from controlplane.planner.fleets import Inventory
from controlplane.planner.judge import MIN_SPAN_S
from controlplane.planner.plan import fleet_report, provenance
from controlplane.planner.report import Input
from controlplane.planner.side import Asked, Side, gpus_of, hopeless
from transfer.errors import InvalidValue
from transfer.said import Said, say

ROUNDS = 4
"""Of dividing and simulating, for each step of --effort."""


def make_division(
    asked: Sequence[Asked], budget: float | None, effort: int, inputs: Sequence[Input], warnings: Sequence[Said]
) -> DivisionPlan:  # fmt: skip
    """Raises InvalidValue, with what to change, when not every model can be served."""
    began = time.perf_counter()
    sides = [Side(one) for one in asked]
    inventory = asked[0].prepared.inventory
    limits = Limits(tuple(stock.num_gpus for stock in inventory.stocks), budget)
    _check_now(asked, inventory)
    if divide([side.demand() for side in sides], limits) is None:
        raise _impossible(sides, limits, inventory)
    equal = [side.best_within(part) for side, part in zip(sides, _equal(limits, len(sides)), strict=True)]
    now = [side.judge_now() for side in sides]
    picks = _search(sides, limits, inventory, ROUNDS * effort)
    chosen = _report("chosen", sides, picks, limits, inventory)
    others = [_report("equal", sides, equal, limits, inventory)] if len(sides) > 1 else []
    if any(one.asked.now is not None for one in sides):
        others.append(_report("now", sides, now, limits, inventory))
    compared = tuple(_compared(one, budget) for one in others)
    verdict = say("divide.but", verdict=_own(chosen), others=compared)
    verdict = verdict if others else _own(chosen)
    said = (*warnings, *_short(sides))
    fleets = [side.found[pick].fleet for side, pick in zip(sides, picks, strict=True)]
    return DivisionPlan(
        inputs=tuple(inputs), warnings=tuple(str(one) for one in said), warnings_said=said, verdict=str(verdict),
        verdict_said=verdict, chosen=chosen, alternatives=tuple(others),
        frontiers={side.want.name: side.frontier() for side in sides},
        provenance=tuple(dict.fromkeys(
            f"{side.want.name}: {text}" for side, pick in zip(sides, picks, strict=True)
            for text in provenance(side.known[pick], side.workload, side.asked.judge)
        )),
        config=apply_config([(one.want, one.prepared.config.core.classes) for one in asked]),
        commands=tuple(apply_commands([(one.want, fleet, one.now) for one, fleet in zip(asked, fleets, strict=True)])),
        num_fleets=sum(len(side.found) for side in sides), num_runs=sum(side.asked.judge.num_runs for side in sides),
        wall_s=time.perf_counter() - began,
    )  # fmt: skip


def _check_now(asked: Sequence[Asked], inventory: Inventory) -> None:
    """What serves the models now is part of what there is. Raises InvalidValue."""
    now: Counter[str] = Counter()
    for one in asked:
        if one.now is not None:
            now.update(gpus_of(one.now))
    for stock in inventory.stocks:
        if (num := now[stock.hardware]) > stock.num_gpus:
            raise InvalidValue(
                say("divide.more_now", num=num, hardware=stock.hardware, there=stock.num_gpus)
            )  # fmt: skip


def _search(sides: Sequence[Side], limits: Limits, inventory: Inventory, rounds: int) -> tuple[int, ...]:
    """What each model gets of fleets that are simulated."""
    for _ in range(rounds):
        picks = divide([side.demand() for side in sides], limits)
        if picks is None:
            break
        fresh = [(side, place) for side, place in zip(sides, picks, strict=True) if place not in side.known]
        for side, place in fresh:
            side.simulate(place)
        if not fresh:
            break
    found = divide([side.demand(simulated=True) for side in sides], limits)
    if found is None:
        raise _impossible(sides, limits, inventory)
    return found


def _impossible(sides: Sequence[Side], limits: Limits, inventory: Inventory) -> InvalidValue:
    needs = []
    for side in sides:
        able = [one for one, option in zip(side.found, side.demand().options, strict=True) if option.rate > 0]
        if not able:
            return hopeless(side.want, side.workload.target, inventory)
        least = min(able, key=lambda one: (one.fleet.price_per_hour, -one.forecast))
        needs.append(say("divide.need", model=side.want.name, fleet=least.fleet))
    if limits.price is not None and divide([side.demand() for side in sides], limits._replace(price=None)) is not None:
        return InvalidValue(say("divide.no_money", budget=f"{limits.price:g}", needs=tuple(needs)))
    return InvalidValue(say("divide.no_room", hardware=str(inventory), needs=tuple(needs)))


def _equal(limits: Limits, num: int) -> list[Limits]:
    """As many GPUs of each class and as much money for each; GPUs that are left over go to the first ones."""
    price = None if limits.price is None else limits.price / num
    return [
        Limits(tuple(count // num + (place < count % num) for count in limits.gpus), price) for place in range(num)
    ]  # fmt: skip


def _report(
    kind: Kind, sides: Sequence[Side], picks: Sequence[int | None], limits: Limits, inventory: Inventory
) -> DivisionReport:  # fmt: skip
    models = tuple(_model(side, pick) for side, pick in zip(sides, picks, strict=True))
    fleets = [one.fleet for one in models if one.fleet is not None]
    used: Counter[str] = Counter()
    for one in models:
        used.update(one.gpus)
    price, good = sum(one.price_per_hour for one in fleets), sum(one.max_rate * one.attainment for one in fleets)
    return DivisionReport(
        kind=kind, least_share=min(one.share for one in models), served=sum(one.max_rate for one in fleets),
        price_per_hour=price, cost_per_good=price / 3600 / good if good else None,
        spare={
            stock.hardware: stock.num_gpus - used[stock.hardware]
            for stock in inventory.stocks if stock.num_gpus > used[stock.hardware]
        },
        models=models,
    )  # fmt: skip


def _model(side: Side, pick: int | None) -> ModelReport:
    want = side.want
    if pick is None:
        return ModelReport(want.name, want.rate, 0.0, 0.0, 0.0, {}, None)
    one = side.found[pick]
    fleet = fleet_report(want.name, side.known[pick], side.workload, one.forecast)
    share, low, high = (min(1.0, rate / want.rate) for rate in (fleet.max_rate, fleet.low, fleet.high))
    return ModelReport(want.name, want.rate, share, low, high, dict(gpus_of(one.fleet)), fleet)


def _own(chosen: DivisionReport) -> Said:
    worst = min(chosen.models, key=lambda one: one.share)
    models = tuple(
        say("divide.model", model=one.model, served=f"{one.fleet.max_rate:.3g}", wanted=f"{one.wanted:.3g}",
            xpyd=one.fleet.xpyd)
        for one in chosen.models if one.fleet is not None
    )  # fmt: skip
    price = f"{chosen.price_per_hour:.2f}"
    if worst.share >= 1.0:
        return say("divide.all", price=price, models=models)
    low = f"{min(one.low for one in chosen.models):.0%}"
    return say(
        "divide.some", share=f"{worst.share:.0%}", low=low, high=f"{worst.high:.0%}", price=price, models=models
    )  # fmt: skip


def _compared(other: DivisionReport, budget: float | None) -> Said:
    worst = min(other.models, key=lambda one: one.share)
    price = f"{other.price_per_hour:.2f}"
    if budget is not None and other.price_per_hour > budget * (1 + EPSILON):
        return say("divide.now_over", share=f"{worst.share:.0%}", model=worst.model, price=price)
    if worst.share >= 1.0:
        return say(f"divide.{other.kind}_all", price=price)
    return say(f"divide.{other.kind}", share=f"{worst.share:.0%}", model=worst.model)


def _short(sides: Sequence[Side]) -> Iterator[Said]:
    for side in sides:
        if side.asked.judge.is_short:
            yield say("divide.short", model=side.want.name, seconds=f"{MIN_SPAN_S:g}")
