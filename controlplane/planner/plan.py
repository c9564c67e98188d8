"""Finds the fleet: closed forms order candidates, simulation judges the best, the bound says what is possible."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from msgspec.structs import replace

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
from transfer.said import Said, joined, say
from transfer.terms import Struct
from transfer.traces.cutting import cut

ENOUGH = 0.05
"""Disaggregating must bring so much more than the best colocated fleet."""
BOUND_PRECISION, BOUND_SPAN_S, MAX_BOUNDED = 0.02, 180.0, 5000
"""Of the search for the rate that is possible: seconds of traffic, so that what may be late at its end matters little,
and requests at most."""
MAX_TRIES = 6
NOTHING = say("planner.is_mixed")


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
    labels: tuple[Said, ...]
    judged: Judged
    forecast: float | None
    notes: tuple[Said, ...] = ()


def make_plan(
    inventory: Inventory, workload: Workload, judge: Judge, wish: Wish, inputs: Sequence[Input],
    warnings: Sequence[Said],
) -> PlanReport:  # fmt: skip
    """Raises InvalidValue, with what to change, when no fleet of the inventory meets the wish."""
    began = time.perf_counter()
    found = [one for one in candidates(inventory, workload) if _affordable(one.fleet, wish)]
    if not found:
        raise InvalidValue(say("planner.no_money", budget=f"{wish.budget:g}"))
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
        best_split = enumerate(split[: wish.effort])
        entries = [self._simulate(say("planner.split", num=place + 1), one) for place, one in best_split]
        entries += [self._simulate(say("planner.colocated"), one) for one in together[:1]]
        if wish.current is not None:
            judged = self._judge.judge(wish.current, self._guess(wish.current, self._workload.max_rate(wish.current)))
            entries.append(_Entry((say("planner.nothing"),), judged, None))
        elif together:
            entries.append(entries[-1]._replace(labels=(say("planner.nothing"),), notes=(NOTHING,)))
        for code, key in (("planner.best_per_dollar", _dollar), ("planner.best_per_gpu", _gpu)):
            entries.append(self._simulate(say(code), max(found, key=key)))
        if wish.rate is not None:
            entries += self._cheapest(wish.rate)
        if wish.baselines:
            entries += self._baselines()
        return _merged(entries)

    def _simulate(self, label: Said, one: Candidate) -> _Entry:
        judged = self._judge.judge(one.fleet, self._guess(one.fleet, one.forecast))
        if judged.max_rate and one.forecast:
            self._ratios[one.fleet.is_colocated] = judged.max_rate / one.forecast
        return _Entry((label,), judged, one.forecast)

    def _guess(self, fleet: Fleet, forecast: float) -> float:
        return max(1e-3, forecast * self._ratios.get(fleet.is_colocated, 1.0))

    def _cheapest(self, rate: float) -> list[_Entry]:
        """From the cheapest that might on, until one serves the rate."""
        entries = []
        able = [one for one in self._found if self._guess(one.fleet, one.forecast) >= 0.9 * rate]
        for one in sorted(able, key=lambda one: (one.fleet.price_per_hour, -one.forecast))[:MAX_TRIES]:
            entries.append(self._simulate(say("planner.for_rate", rate=f"{rate:g}"), one))
            if entries[-1].judged.max_rate >= rate:
                break
        return entries

    def _baselines(self) -> list[_Entry]:
        entries = []
        for algorithm in (algorithm_1, algorithm_2):
            placement = algorithm(self._inventory, self._workload, self._judge, self._wish.rate)
            if placement is not None:
                judged = self._judge.judge(placement.fleet, placement.rate, POLICY)
                notes = [say("planner.expects", rate=f"{placement.rate:.3g}")]
                notes += [] if _affordable(placement.fleet, self._wish) else [say("planner.over")]
                label = say("planner.algorithm", name=placement.algorithm)
                entries.append(_Entry((label,), judged, None, tuple(notes)))
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
        self, chosen: _Entry, entries: Sequence[_Entry], inputs: Sequence[Input], warnings: Sequence[Said], began: float
    ) -> PlanReport:  # fmt: skip
        ours = [one for one in entries if one.judged.policy != POLICY]
        split = not chosen.judged.fleet.is_colocated
        able = [one for one in ours if one.judged.max_rate >= (self._wish.rate or 1e-9)]
        other = max((one for one in able if one.judged.fleet.is_colocated == split), key=self._worth, default=None)
        margin = self._worth(chosen) / self._worth(other) - 1.0 if other is not None else None
        possible, bound = self._possible(chosen.judged)
        rows = phases(chosen.judged, self._workload)
        reported = {id(one): self._reported(one) for one in entries}
        own = reported[id(chosen)]
        beware = (*warnings, *self._shortness())
        verdict, why = _verdict(own, margin, split, self._wish), bottleneck(chosen.judged, bound.limits, rows)
        return PlanReport(
            inputs=tuple(inputs), warnings=tuple(map(str, beware)), warnings_said=beware, verdict=str(verdict),
            verdict_said=verdict, disaggregate=split, margin=margin, chosen=own, frontier=self._frontier(entries),
            phases=rows, bottleneck=str(why), bottleneck_said=why, possible_rate=possible,
            of_possible=chosen.judged.max_rate / possible if possible else None,
            best_per_gpu=reported[id(max(ours, key=lambda one: one.judged.per_gpu))],
            best_per_dollar=reported[id(max(ours, key=lambda one: one.judged.per_dollar))],
            alternatives=tuple(reported[id(one)] for one in sorted(entries, key=_rate) if one is not chosen),
            provenance=provenance(chosen.judged, self._workload, self._judge),
            commands=commands(chosen.judged.fleet, self._wish.current, self._judge.config.model),
            num_fleets=len(self._found), num_runs=self._judge.num_runs, wall_s=time.perf_counter() - began,
        )  # fmt: skip

    def _reported(self, entry: _Entry) -> FleetReport:
        label = ", ".join(map(str, entry.labels))
        note = joined(entry.notes) if entry.notes else None
        found = fleet_report(label, entry.judged, self._workload, entry.forecast)
        return replace(found, label_said=entry.labels, note_said=note, note="" if note is None else str(note))

    def _shortness(self) -> Iterator[Said]:
        if self._judge.is_short:
            yield say("planner.short", seconds=f"{MIN_SPAN_S:g}")

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


def fleet_report(label: str, judged: Judged, workload: Workload, forecast: float | None) -> FleetReport:
    """One fleet as judged, with its 80 % interval."""
    fleet, result = judged.fleet, judged.result
    errors = [
        DEFAULT_ERROR if node.latency.error is None else node.latency.error
        for node in build(fleet, workload.model, workload.block_size) if node.latency is not None
    ]  # fmt: skip
    gap = math.log(judged.next_rate / judged.max_rate) if judged.max_rate and judged.next_rate else 0.0
    spread = math.hypot(Z80 * max(errors), gap)
    attainment = result.attainment if result is not None else 0.0
    good_per_s = judged.max_rate * attainment
    return FleetReport(
        label=label, fleet=str(fleet), xpyd=fleet.xpyd, num_gpus=fleet.num_gpus,
        price_per_hour=fleet.price_per_hour, max_rate=judged.max_rate, low=judged.max_rate / (1.0 + spread),
        high=judged.max_rate * (1.0 + spread), per_gpu=judged.per_gpu, per_dollar=judged.per_dollar,
        cost_per_good=fleet.price_per_hour / 3600 / good_per_s if good_per_s else None, attainment=attainment,
        policy=judged.policy, forecast=forecast,
    )  # fmt: skip


def provenance(judged: Judged, workload: Workload, judge: Judge) -> tuple[str, ...]:
    """Where the figures of a fleet come from, and how sure they are."""
    found: dict[str, None] = {}
    for part, node in zip(judged.fleet.parts, _firsts(judged.fleet, workload), strict=True):
        profile = node.latency
        assert profile is not None
        known = f"median error {profile.error:.1%}" if profile.error is not None else "error not measured"
        taken = f"taken as {DEFAULT_ERROR:.0%}" if profile.error is None else ""
        found[f"{part.shape}: {profile.provenance} latency profile, {known}{', ' if taken else ''}{taken}"] = None
    num = len(judge.offered(judged.max_rate))
    chance = Z80 * math.sqrt(workload.target * (1 - workload.target) / num)
    found[f"{num} requests were simulated at each rate: attainment is known to {chance:.1%}"] = None
    return tuple(found)


def _merged(entries: Sequence[_Entry]) -> list[_Entry]:
    """Each fleet once, under all it stands for."""
    found: dict[tuple[str, str], _Entry] = {}
    for one in entries:
        key = (str(one.judged.fleet), one.judged.policy)
        before = found.setdefault(key, one)
        if before is not one:
            notes = (*before.notes, *(note for note in one.notes if note not in before.notes))
            found[key] = before._replace(
                labels=(*before.labels, *one.labels), notes=notes, forecast=before.forecast or one.forecast
            )
    return list(found.values())


def _firsts(fleet: Fleet, workload: Workload) -> list[NodeSpec]:
    return [build(Fleet((part,)), workload.model, workload.block_size)[0] for part in fleet.parts]


def _verdict(own: FleetReport, margin: float | None, split: bool, wish: Wish) -> Said:
    serves = say(
        "planner.serves", rate=f"{own.max_rate:.3g}", low=f"{own.low:.3g}", high=f"{own.high:.3g}",
        target=f"{wish.target:.0%}", per_gpu=f"{own.per_gpu:.3g}", price=f"{own.price_per_hour:.2f}",
    )  # fmt: skip
    other = say("planner.other_colocated" if split else "planner.other_split")
    by = f"{abs(margin):.0%}" if margin is not None else ""
    if margin is None:
        gain = say("planner.other_fails", other=other)
    elif split:
        gain = say("planner.more" if wish.rate is None else "planner.cheaper", margin=by, other=other)
    else:
        gain = say("planner.better" if margin <= 0 else "planner.worse", margin=by, other=other)
    code = "planner.disaggregate" if split else "planner.colocate"
    return say(code, xpyd=own.xpyd, fleet=own.fleet, serves=serves, gain=gain)


def _hopeless(entries: Sequence[_Entry], wish: Wish) -> Said:
    best = max((one.judged for one in entries), key=lambda one: one.max_rate)
    if wish.rate is not None and best.max_rate > 0:
        serves = f"{best.max_rate:.3g}"
        return say("planner.too_much", rate=f"{wish.rate:g}", fleet=best.fleet, serves=serves)
    return say("planner.hopeless", target=f"{wish.target:.0%}")


def _affordable(fleet: Fleet, wish: Wish) -> bool:
    return wish.budget is None or fleet.price_per_hour <= wish.budget * (1 + 1e-9)


_dollar: Callable[[Candidate], float] = lambda one: one.per_dollar  # noqa: E731
_rate: Callable[[_Entry], float] = lambda one: -one.judged.max_rate  # noqa: E731
_gpu: Callable[[Candidate], float] = lambda one: one.per_gpu  # noqa: E731
