"""Finds the fleet: closed forms order candidates, simulation judges the best, the bound says what is possible."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from controlplane.core.forecast import DEFAULT_ERROR
from controlplane.core.intervals import Z80
from controlplane.planner.bound import Bound, upper_bound
from controlplane.planner.capacity import Workload, highest
from controlplane.planner.commands import commands
from controlplane.planner.distserve import POLICY, algorithm_1, algorithm_2
from controlplane.planner.fleets import Fleet, Inventory, build
from controlplane.planner.judge import MIN_SPAN_S, Judge, Judged
from controlplane.planner.report import FleetReport, Input, PlanReport, Point
from controlplane.planner.search import Candidate, candidates
from controlplane.planner.why import bottleneck, phases
from controlplane.sim.spec import NodeSpec
from transfer.errors import InvalidValue
from transfer.terms import Struct
from transfer.traces.cutting import cut

ENOUGH = 0.05
"""Disaggregating must bring so much more than the best colocated fleet."""
BOUND_PRECISION, BOUND_SPAN_S, MAX_BOUNDED = 0.02, 180.0, 5000
"""Of the search for the rate that is possible: seconds of traffic, so that what may be late at its end matters little,
and requests at most."""
MAX_TRIES = 6
NOTHING = "doing nothing is every instance in both phases"


class Wish(Struct, frozen=True):
    """rate: requests a second that must be served, as cheaply as possible; None: as many as possible. budget: dollars
    an hour at most. effort: how many splits are simulated. current: the fleet there is now."""

    target: float = 0.9
    rate: float | None = None
    budget: float | None = None
    effort: int = 2
    baselines: bool = True
    current: Fleet | None = None


class _Entry(NamedTuple):
    label: str
    judged: Judged
    forecast: float | None
    note: str = ""


def make_plan(
    inventory: Inventory, workload: Workload, judge: Judge, wish: Wish, inputs: Sequence[Input], warnings: Sequence[str]
) -> PlanReport:  # fmt: skip
    """Raises InvalidValue, with what to change, when no fleet of the inventory meets the wish."""
    began = time.perf_counter()
    found = [one for one in candidates(inventory, workload) if _affordable(one.fleet, wish)]
    if not found:
        raise InvalidValue(f"no fleet that can serve costs at most ${wish.budget:g} an hour; raise --budget")
    planner = _Planner(inventory, workload, judge, wish, found)
    entries = planner.judged()
    chosen = planner.choose(entries)
    if chosen is None:
        raise InvalidValue(_hopeless(entries, wish))
    return planner.report(chosen, entries, inputs, warnings, began)


class _Planner:
    def __init__(
        self, inventory: Inventory, workload: Workload, judge: Judge, wish: Wish, found: Sequence[Candidate]
    ) -> None:  # fmt: skip
        self._inventory, self._workload, self._judge, self._wish, self._found = inventory, workload, judge, wish, found
        self._ratios: dict[bool, float] = {}
        """Simulated over forecast rate, of colocated fleets and of others: where the next bisection begins."""

    # --- which are simulated ------------------------------------------------------------------------------------

    def judged(self) -> list[_Entry]:
        wish, found = self._wish, self._found
        split = [one for one in found if not one.fleet.is_colocated]
        together = [one for one in found if one.fleet.is_colocated]
        entries = [self._simulate(f"split {place + 1}", one) for place, one in enumerate(split[: wish.effort])]
        entries += [self._simulate("colocated", one) for one in together[:1]]
        if wish.current is not None:
            judged = self._judge.judge(wish.current, self._guess(wish.current, self._workload.max_rate(wish.current)))
            entries.append(_Entry("doing nothing", judged, None))
        elif together:
            entries.append(entries[-1]._replace(label="doing nothing", note=NOTHING))
        for label, key in (("estimated best per dollar", _dollar), ("estimated best per GPU", _gpu)):
            entries.append(self._simulate(label, max(found, key=key)))
        if wish.rate is not None:
            entries += self._cheapest(wish.rate)
        if wish.baselines:
            entries += self._baselines()
        return _merged(entries)

    def _simulate(self, label: str, one: Candidate) -> _Entry:
        judged = self._judge.judge(one.fleet, self._guess(one.fleet, one.forecast))
        if judged.max_rate and one.forecast:
            self._ratios[one.fleet.is_colocated] = judged.max_rate / one.forecast
        return _Entry(label, judged, one.forecast)

    def _guess(self, fleet: Fleet, forecast: float) -> float:
        return max(1e-3, forecast * self._ratios.get(fleet.is_colocated, 1.0))

    def _cheapest(self, rate: float) -> list[_Entry]:
        """From the cheapest that might on, until one serves the rate."""
        entries = []
        able = [one for one in self._found if self._guess(one.fleet, one.forecast) >= 0.9 * rate]
        for one in sorted(able, key=lambda one: (one.fleet.price_per_hour, -one.forecast))[:MAX_TRIES]:
            entries.append(self._simulate(f"for {rate:g}/s", one))
            if entries[-1].judged.max_rate >= rate:
                break
        return entries

    def _baselines(self) -> list[_Entry]:
        entries = []
        for algorithm in (algorithm_1, algorithm_2):
            placement = algorithm(self._inventory, self._workload, self._judge, self._wish.rate)
            if placement is not None:
                judged = self._judge.judge(placement.fleet, placement.rate, POLICY)
                over = "" if _affordable(placement.fleet, self._wish) else "; over the budget, which it does not know"
                note = f"it expects {placement.rate:.3g}/s of itself; static policy{over}"
                entries.append(_Entry(placement.algorithm, judged, None, note))
        return entries

    # --- which is best ------------------------------------------------------------------------------------------

    def choose(self, entries: Sequence[_Entry]) -> _Entry | None:
        """A colocated fleet unless another is better by enough: it has fewer parts that may fail."""
        ours = [one for one in entries if one.judged.policy != POLICY and _affordable(one.judged.fleet, self._wish)]
        rate = self._wish.rate
        able = [one for one in ours if one.judged.max_rate >= (rate or 1e-9)]
        if not able:
            return None
        best = max(able, key=self._worth)
        together = max((one for one in able if one.judged.fleet.is_colocated), key=self._worth, default=None)
        if together is not None and self._worth(best) <= self._worth(together) * (1.0 + ENOUGH):
            return together
        return best

    def _worth(self, entry: _Entry) -> float:
        return entry.judged.max_rate if self._wish.rate is None else 1.0 / entry.judged.fleet.price_per_hour

    # --- the report ---------------------------------------------------------------------------------------------

    def report(
        self, chosen: _Entry, entries: Sequence[_Entry], inputs: Sequence[Input], warnings: Sequence[str], began: float
    ) -> PlanReport:  # fmt: skip
        ours = [one for one in entries if one.judged.policy != POLICY]
        split = not chosen.judged.fleet.is_colocated
        able = [one for one in ours if one.judged.max_rate >= (self._wish.rate or 1e-9)]
        other = max((one for one in able if one.judged.fleet.is_colocated == split), key=self._worth, default=None)
        margin = self._worth(chosen) / self._worth(other) - 1.0 if other is not None else None
        possible, bound = self._possible(chosen.judged)
        rows = phases(chosen.judged, self._workload)
        reported = {id(one): self._fleet_report(one) for one in entries}
        own = reported[id(chosen)]
        return PlanReport(
            inputs=tuple(inputs), warnings=(*warnings, *self._shortness()),
            verdict=_verdict(own, margin, split, self._wish), disaggregate=split, margin=margin, chosen=own,
            frontier=self._frontier(entries), phases=rows,
            bottleneck=bottleneck(chosen.judged, bound.limits, rows), possible_rate=possible,
            of_possible=chosen.judged.max_rate / possible if possible else None,
            best_per_gpu=reported[id(max(ours, key=lambda one: one.judged.per_gpu))],
            best_per_dollar=reported[id(max(ours, key=lambda one: one.judged.per_dollar))],
            alternatives=tuple(reported[id(one)] for one in sorted(entries, key=_rate) if one is not chosen),
            provenance=self._provenance(chosen.judged),
            commands=commands(chosen.judged.fleet, self._wish.current, self._judge.config.model),
            num_fleets=len(self._found), num_runs=self._judge.num_runs, wall_s=time.perf_counter() - began,
        )  # fmt: skip

    def _shortness(self) -> Iterator[str]:
        if self._judge.is_short:
            yield (
                f"the trace has too few requests for {MIN_SPAN_S:g} s at the rates simulated, so they come out high; "
                "give a longer one"
            )

    def _possible(self, judged: Judged) -> tuple[float, Bound]:
        """The highest rate at which even the bound is at the target, with roles as they are."""
        nodes = build(judged.fleet, self._workload.model, self._workload.block_size)
        core, last = self._judge.config.core, list[Bound]()

        def reaches(rate: float) -> bool:
            num = min(MAX_BOUNDED, max(len(self._judge.offered(rate)), math.ceil(rate * BOUND_SPAN_S)))
            trace = cut(self._judge.trace, num=num, rate=rate)
            last.append(
                upper_bound(nodes, trace, core.classes, core.default_class, "fixed", self._workload.block_size)
            )  # fmt: skip
            return last[-1].attainment >= self._wish.target

        _, high = highest(reaches, judged.max_rate * 1.5, BOUND_PRECISION)
        return high, next((one for one in reversed(last) if one.limits), last[-1])

    def _frontier(self, entries: Sequence[_Entry]) -> tuple[Point, ...]:
        """Simulated where they were, else the forecast corrected by what simulation made of others of its kind."""
        known = {str(one.judged.fleet): one.judged.max_rate for one in entries if one.judged.policy != POLICY}
        points = [
            Point(
                one.fleet.price_per_hour, known.get(str(one.fleet), self._guess(one.fleet, one.forecast)),
                str(one.fleet), str(one.fleet) in known,
            )
            for one in self._found
        ]  # fmt: skip
        best: list[Point] = []
        for point in sorted(points, key=lambda one: (one.price_per_hour, -one.max_rate)):
            if not best or point.max_rate > best[-1].max_rate:
                best.append(point)
        return tuple(best)

    def _fleet_report(self, entry: _Entry) -> FleetReport:
        judged = entry.judged
        fleet, result = judged.fleet, judged.result
        errors = [
            DEFAULT_ERROR if node.latency.error is None else node.latency.error
            for node in build(fleet, self._workload.model, self._workload.block_size) if node.latency is not None
        ]  # fmt: skip
        gap = math.log(judged.next_rate / judged.max_rate) if judged.max_rate and judged.next_rate else 0.0
        spread = math.hypot(Z80 * max(errors), gap)
        attainment = result.attainment if result is not None else 0.0
        good_per_s = judged.max_rate * attainment
        return FleetReport(
            label=entry.label, fleet=str(fleet), xpyd=fleet.xpyd, num_gpus=fleet.num_gpus,
            price_per_hour=fleet.price_per_hour, max_rate=judged.max_rate, low=judged.max_rate / (1.0 + spread),
            high=judged.max_rate * (1.0 + spread), per_gpu=judged.per_gpu, per_dollar=judged.per_dollar,
            cost_per_good=fleet.price_per_hour / 3600 / good_per_s if good_per_s else None, attainment=attainment,
            policy=judged.policy, forecast=entry.forecast, note=entry.note,
        )  # fmt: skip

    def _provenance(self, judged: Judged) -> tuple[str, ...]:
        found: dict[str, None] = {}
        for part, node in zip(judged.fleet.parts, _firsts(judged.fleet, self._workload), strict=True):
            profile = node.latency
            assert profile is not None
            known = f"median error {profile.error:.1%}" if profile.error is not None else "error not measured"
            taken = f"taken as {DEFAULT_ERROR:.0%}" if profile.error is None else ""
            found[f"{part.shape}: {profile.provenance} latency profile, {known}{', ' if taken else ''}{taken}"] = None
        num = len(self._judge.offered(judged.max_rate))
        chance = Z80 * math.sqrt(self._wish.target * (1 - self._wish.target) / num)
        found[f"{num} requests were simulated at each rate: attainment is known to {chance:.1%}"] = None
        return tuple(found)


def _merged(entries: Sequence[_Entry]) -> list[_Entry]:
    """Each fleet once, under all it stands for."""
    found: dict[tuple[str, str], _Entry] = {}
    for one in entries:
        key = (str(one.judged.fleet), one.judged.policy)
        before = found.setdefault(key, one)
        if before is not one:
            label = f"{before.label}, {one.label}"
            note = "; ".join(filter(None, dict.fromkeys((before.note, one.note))))
            found[key] = before._replace(label=label, note=note, forecast=before.forecast or one.forecast)
    return list(found.values())


def _firsts(fleet: Fleet, workload: Workload) -> list[NodeSpec]:
    return [build(Fleet((part,)), workload.model, workload.block_size)[0] for part in fleet.parts]


def _verdict(own: FleetReport, margin: float | None, split: bool, wish: Wish) -> str:
    does = f"{own.xpyd} ({own.fleet})"
    serves = (
        f"serves {own.max_rate:.3g} requests a second ({own.low:.3g} to {own.high:.3g}) with {wish.target:.0%} within "
        f"objectives, {own.per_gpu:.3g} a GPU, for ${own.price_per_hour:.2f} an hour"
    )
    more = "more than" if wish.rate is None else "cheaper than"
    other = "the best colocated fleet" if split else "the best split"
    if margin is None:
        gain = f"{other} does not meet the wish"
    elif split:
        gain = f"{margin:.0%} {more} {other}"
    else:
        gain = f"{other} is {'better by only' if margin <= 0 else 'worse by'} {abs(margin):.0%}"
    return f"{'Disaggregate' if split else 'Do not disaggregate'}: {does} {serves}; {gain}"


def _hopeless(entries: Sequence[_Entry], wish: Wish) -> str:
    best = max((one.judged for one in entries), key=lambda one: one.max_rate)
    if wish.rate is not None and best.max_rate > 0:
        return (
            f"no fleet of this inventory that was simulated serves {wish.rate:g} requests a second; the best, "
            f"{best.fleet}, serves {best.max_rate:.3g}; lower --rate, raise --budget or add to --fleet"
        )
    return f"no fleet reaches {wish.target:.0%} attainment at any rate; loosen --slo or lower --target"


def _affordable(fleet: Fleet, wish: Wish) -> bool:
    return wish.budget is None or fleet.price_per_hour <= wish.budget * (1 + 1e-9)


_dollar: Callable[[Candidate], float] = lambda one: one.per_dollar  # noqa: E731
_rate: Callable[[_Entry], float] = lambda one: -one.judged.max_rate  # noqa: E731
_gpu: Callable[[Candidate], float] = lambda one: one.per_gpu  # noqa: E731
