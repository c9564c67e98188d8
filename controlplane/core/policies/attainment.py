"""Pairs weighed in full by point predictions: fewest missed objectives, or the earliest first token."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from controlplane.core.placement import Candidate, Wanted
from controlplane.core.policies.protocol import Answer, Policy, Situation
from transfer.said import Said, say

Cost = tuple[int, float]
Weigh = Callable[[Candidate, Wanted], Cost]


def by_objectives(at: Situation) -> Answer:
    """Predicted attainment first, then the least slack used up. DistServe's goodput (OSDI'24, section 2) read as a
    placement rule: a decode counts as missed when adding this request slows its whole batch past the objective."""
    return _ranked(at, weighed(at), objectives)


def by_first_token(at: Situation) -> Answer:
    """The earliest first token, whatever it does to others."""
    return _ranked(at, weighed(at), lambda one, wanted: (one.faults + (one.short_blocks > 0), one.ttft_s))


def objectives(one: Candidate, wanted: Wanted) -> Cost:
    """Objectives missed by prediction, and the parts of them that are used up."""
    missed = one.faults + (one.short_blocks > 0)
    slo = wanted.slo
    if slo is None:
        return missed, one.ttft_s + one.tpot_s * wanted.usual_output
    ttft_s = wanted.waited_s + one.ttft_s
    missed += (ttft_s > slo.ttft_s) + (one.tpot_s > slo.tpot_s)
    if slo.e2e_s is not None:
        missed += ttft_s + one.tpot_s * wanted.usual_output > slo.e2e_s
    return missed, one.ttft_s / slo.ttft_s + one.tpot_s / slo.tpot_s


def weighed(at: Situation) -> list[Candidate]:
    """Every pair of the few best of each phase, and one instance alone where the settings allow it."""
    config, group, wanted, estimator = at.config, at.group, at.wanted, at.estimator
    found: list[Candidate] = []
    if group.mixed and (config.colocate != "never" or not (group.prefills and group.decodes)):
        found += [estimator.local(one) for one in estimator.mixed()]
    if not group.decodes or (config.colocate == "always" and group.mixed):
        return found
    decodes = estimator.decodes()
    alone = not group.prefills and config.without_prefill == "serve_on_decode"
    found += [
        estimator.local(one)
        for one in decodes
        if (alone and estimator.takes_work(one)) or estimator.uncached(one) <= config.local_prefill_tokens
    ]
    if wanted.num_tokens > 1 and decodes:
        found += [estimator.pair(option, decode) for option in estimator.prefills() for decode in decodes]
    return found


def _ranked(at: Situation, candidates: Sequence[Candidate], weigh: Weigh) -> list[Candidate]:
    wanted, most = at.wanted, at.config.num_explained
    costs = [(missed, round(cost, 9)) for one in candidates for missed, cost in (weigh(one, wanted),)]
    last = max(sorted(costs)[:most], default=(0, 0.0))
    rows = [(*cost, one.order, one) for cost, one in zip(costs, candidates, strict=True) if cost <= last]
    rows.sort(key=lambda row: row[:3])
    del rows[most:]
    for missed, cost, _, one in rows:
        faults = misses(one, wanted)
        if one is rows[0][-1]:
            one.reason = (say("place.least_bad", faults=faults) if missed else say("place.best"),)
        else:
            one.reason = faults or (_slower(one, rows[0][-1], cost == rows[0][1]),)
    return [row[-1] for row in rows]


def misses(one: Candidate, wanted: Wanted) -> tuple[Said, ...]:
    """What a candidate is predicted to miss; empty when nothing."""
    found = []
    slo, ttft_s = wanted.slo, wanted.waited_s + one.ttft_s
    if slo is not None and ttft_s > slo.ttft_s:
        found.append(say("place.ttft", seconds=f"{ttft_s:.3g}", objective=f"{slo.ttft_s:g}"))
    if slo is not None and one.tpot_s > slo.tpot_s:
        found.append(say("place.tpot", seconds=f"{one.tpot_s:.3g}", objective=f"{slo.tpot_s:g}"))
    if one.short_blocks > 0:
        found.append(say("place.short", num=one.short_blocks))
    if one.faults:
        found.append(say("place.failed"))
    return tuple(found)


def _slower(one: Candidate, best: Candidate, equal: bool) -> Said:
    if one.ttft_s > best.ttft_s:
        return say("place.later", seconds=f"{one.ttft_s - best.ttft_s:.3g}")
    if one.tpot_s > best.tpot_s:
        return say("place.longer", seconds=f"{one.tpot_s - best.tpot_s:.3g}")
    return say("place.turn") if equal else say("place.uses_more")


SLO = Policy(by_objectives)
FASTEST = Policy(by_first_token)
