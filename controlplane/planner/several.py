"""`phaseplane plan` told of several models: reads what is wanted of each, and has the fleet divided among them."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence

from controlplane.core.config import DEFAULT_CLASS
from controlplane.core.policies.names import DEFAULT_POLICY
from controlplane.planner.division import make_division
from controlplane.planner.division_report import DivisionPlan
from controlplane.planner.fleets import Inventory, parse_current
from controlplane.planner.judge import MIN_SPAN_S, OnRun
from controlplane.planner.prepare import TRACE, prepare
from controlplane.planner.report import Input
from controlplane.planner.side import Asked
from controlplane.planner.wants import Want, parse_wants
from transfer.errors import InvalidValue
from transfer.objectives import describe
from transfer.said import Said, say

OF_ONE = {"rate": "rate=3", "current": "now=4xH800@4:mixed", "png": None}
"""Flags of a plan of one model, and what each of several says instead."""


def plan_several(flags: argparse.Namespace, on_run: OnRun | None) -> DivisionPlan:
    """Raises InvalidValue."""
    wants = parse_wants(flags.model)
    _check(flags)
    counts = dict.fromkeys((want.name for want in wants), 0)
    asked = [_asked(flags, want, _counting(want.name, counts, on_run)) for want in wants]
    warnings = list(_warnings(flags, asked))
    return make_division(asked, flags.budget, flags.effort, list(_inputs(flags, asked)), warnings)


def _check(flags: argparse.Namespace) -> None:
    for name, instead in OF_ONE.items():
        if getattr(flags, name) is not None:
            code = "want.of_one" if instead else "want.of_one_only"
            raise InvalidValue(say(code, flag=name, example=instead))
    if ":kv_pool" in flags.fleet:
        raise InvalidValue(say("want.whose_pools", fleet=flags.fleet))


def _asked(flags: argparse.Namespace, want: Want, on_run: OnRun | None) -> Asked:
    fleet = ",".join((flags.fleet, *want.pools))
    slos, source = want.slos or flags.slo, want.trace or flags.trace
    format = want.format if want.trace is not None else flags.format
    prepared = prepare(flags, want.model, fleet, slos, source, format)
    pools = prepared.inventory.pools
    now = None if want.now is None else parse_current(want.now, want.model, flags.block_size, pools)
    return Asked(want, prepared, prepared.judge(on_run, want.rate, enough=True), now)


def _counting(name: str, counts: dict[str, int], on_run: OnRun | None) -> OnRun | None:
    """Of all models' runs."""
    if on_run is None:
        return None

    def count(what: str, num: int) -> None:
        counts[name] = num
        on_run(f"{name} on {what}", sum(counts.values()))

    return count


def _inputs(flags: argparse.Namespace, asked: Sequence[Asked]) -> Iterator[Input]:
    inventory: Inventory = asked[0].prepared.inventory
    yield Input("hardware", flags.fleet, False)
    prices = ", ".join(f"{one.hardware} ${one.price_per_hour:g}" for one in inventory.stocks)
    yield Input("price of a GPU-hour", prices, True)
    for want, prepared, _, now in asked:
        source, slo = want.trace or flags.trace, prepared.config.core.classes[DEFAULT_CLASS]
        yield Input(want.name, f"{want.rate:g} requests a second, {flags.target:.0%} within objectives", False)
        yield Input("  traffic", f"{source or TRACE}, at each rate the first {min(flags.num, len(prepared.trace))} or "
                    f"{MIN_SPAN_S:g} s", source is None)  # fmt: skip
        yield Input("  objectives", "; ".join(want.slos or flags.slo) or describe(slo), not (want.slos or flags.slo))
        yield Input("  now", "unknown" if now is None else str(now), now is None)
    yield Input("budget", "none" if flags.budget is None else f"${flags.budget:g} an hour", flags.budget is None)
    yield Input("policy", flags.policy, flags.policy == DEFAULT_POLICY)


def _warnings(flags: argparse.Namespace, asked: Sequence[Asked]) -> Iterator[Said]:
    some_now = any(one.now is not None for one in asked)
    for want, prepared, _, now in asked:
        for note in prepared.notes:
            yield say("divide.of_model", model=want.name, text=note)
        if (want.trace or flags.trace) is None:
            yield say("divide.traffic", model=want.name, trace=TRACE)
        if some_now and now is None:
            yield say("divide.no_now", model=want.name)
    if not some_now:
        yield say("divide.nothing_now")
    yield say("divide.prices")
