"""Our policy: place for the most good requests, over prefill, source of KV and decode, or one instance for both.

value = chance that this request is good - good requests others lose by it - what the hardware's time is worth.
Goodput as in DistServe (OSDI'24, section 2); prefill is bound late, so that who waits can still be ordered: earliest
deadline first, tenants by share, and those that cannot be good any more behind those that can.
"""

from __future__ import annotations

from collections.abc import Sequence

from controlplane.core.admission import late_rejection
from controlplane.core.instance import Instance
from controlplane.core.lifecycle import UNHURRIED_S
from controlplane.core.placement import Block, Blocked, Candidate
from controlplane.core.policies.attainment import misses
from controlplane.core.policies.line import AGED_S, HORIZON_S, free, num_rows, order, takes
from controlplane.core.policies.memory import AGED_SHARE, LATE_SHARE, Crowd
from controlplane.core.policies.odds import BAR, FLOOR_S, relative_error
from controlplane.core.policies.phases import (
    EASY,
    LOCAL,
    SLACK,
    THEFT,
    DecodePart,
    PrefillPart,
    Prices,
    by_cost,
    decode_part,
    delayed,
    displaced,
    first_by_s,
    holds,
    local_work_s,
    misses_first,
    prefill_part,
    prices,
)
from controlplane.core.policies.protocol import Answer, Policy, Situation
from transfer.said import say
from transfer.terms import Slo

UNHURRIED = Slo(ttft_s=UNHURRIED_S, tpot_s=1.0)
"""What a request without objectives is placed for."""
PATIENCE = 0.05
"""A better place that is not free yet is waited for when it is worth this much more."""
UNLIKELY = 0.5
"""With a higher chance to miss its first token, a request goes behind those that can be good."""
HARMLESS = 0.1
"""Others may lose this much by one that is late."""
PEAK = 2.5
"""Prefill time kept for those that can be good, over what they take on average."""
NOBODY = 0.02
"""Share of prefill time taken by those that can be good, below which there are none to keep it for."""
NONE: tuple[object, ...] = (float("inf"),)
REST = 0.2
"""Who waits for an instance, or is late, is tried again when so much of its TTFT objective has passed."""
ALIKE = 0.5
"""Part of the tokens of one that found no room beside the decodes from which another finds none either."""
CROWDED = say("wait.crowded")
NUM_LOCAL = 2
"""Decode instances that are weighed for computing the prompt, too."""


class Way:
    """One way to serve the request. prefill None: decode does both. limit_s: its first token must come by then."""

    __slots__ = ("accepts", "cost", "decode", "limit_s", "misses", "prefill", "ready_s")

    def __init__(
        self, cost: float, prefill: PrefillPart | None, decode: DecodePart, misses: float, ready_s: float,
        limit_s: float, accepts: bool,
    ) -> None:  # fmt: skip
        self.cost, self.prefill, self.decode, self.misses = cost, prefill, decode, misses
        self.ready_s, self.limit_s, self.accepts = ready_s, limit_s, accepts


def place(at: Situation) -> Answer:
    """The way of highest value; or waiting, where a better one comes free in time."""
    slo = at.wanted.slo or UNHURRIED
    late = at.wanted.waited_s >= slo.ttft_s
    if _still_crowded(at, slo, late) and (not late or _patient(at)):
        return _waits_late(at, slo) if late else Blocked(Block.ROOM, CROWDED)
    price = prices(at)
    if late and not _refused(at) and not _late_may(at, price):
        return _waits_late(at, slo)
    ways = _ways(at, slo, price)
    if not ways:
        if any(at.estimator.open_decodes(group) for group in (at.group.decodes, at.group.mixed)):
            return Blocked(Block.ROOM, say("wait.no_memory"))
        return []
    best = ways[0]
    error_s = _error_s(best)
    hopeless = late or at.wanted.waited_s + best.ready_s - error_s > best.limit_s
    late = hopeless or best.misses > UNLIKELY or best.misses + displacement(at, best, price) > 1.0
    if hopeless and _refused(at):
        return late_rejection(at.config, at.wanted.waited_s + best.ready_s, best.limit_s, at.random, error_s)
    at.late = late
    if late:
        ways = _unhurried(at, ways)
        best = ways[0]
        if not _late_may(at, price) or best.decode.harm > _late_harm(at, best.decode.instance):
            return _waits_late(at, slo)
        spare = price.want <= 0.0 and _spare(at, slo, best)
        at.spare = spare and _idle(best)
        if not at.spare and not _has_turn(at):
            if best.prefill is not None and _idle(best):
                at.memory.kept_s = at.now
            return _waits_late(at, slo)
    elif best.decode.harm > (1.0 - best.misses) * best.decode.keeps_pace:
        rows = num_rows(at.group)
        at.memory.crowded[at.group.model.name] = Crowd(at.now, rows, slo.tpot_s, at.wanted.num_tokens, best.ready_s)
        return Blocked(Block.ROOM, say("wait.slows", num=f"{best.decode.harm:.1f}"))
    taken = next((way for way in ways if way.accepts), None)
    if taken is None:
        return Blocked(Block.BACKLOG, say("wait.has_work", model=at.group.model.name))
    if best is not taken and best.cost + PATIENCE < taken.cost:
        one = best.prefill.option.instance if best.prefill is not None else best.decode.instance
        why = say("wait.better", id=one.id, gain=f"{taken.cost - best.cost:.2f}")
        return Blocked(Block.BETTER_LATER, why, at.now + REST * slo.ttft_s, one)
    return _candidates(at, slo, ways, taken)


def _still_crowded(at: Situation, slo: Slo, late: bool) -> bool:
    """Whether one like it found no room beside the decodes just now, and nobody has left since. Who gets late now is
    looked at in full."""
    crowd = at.memory.crowded.get(at.group.model.name)
    return (
        crowd is not None and crowd.at_s == at.now and crowd.tpot_s == slo.tpot_s
        and at.wanted.num_tokens >= ALIKE * crowd.num_tokens and num_rows(at.group) >= crowd.rows
        and (late or at.wanted.waited_s + crowd.ready_s <= slo.ttft_s)
    )  # fmt: skip


def _refused(at: Situation) -> bool:
    """Whether it is turned away once it cannot be good."""
    return at.config.early_reject == "objective" and at.wanted.slo is not None and not at.wanted.resumed


def _patient(at: Situation) -> bool:
    """Of one that is late: it is neither turned away nor its turn for having waited very long."""
    return not _refused(at) and not _aged(at)


def _ways(at: Situation, slo: Slo, price: Prices) -> list[Way]:
    """The few best ways, by cost; at least one that could start now, if there is any."""
    group, config, estimator = at.group, at.config, at.estimator
    has_pairs = bool(group.prefills and group.decodes)
    decodes: list[DecodePart] = []
    if group.decodes and not (config.colocate == "always" and group.mixed):
        best = estimator.decodes()[: config.num_considered + 1]
        decodes = [decode_part(at, one, slo, price) for one in best if holds(at, one)]
        decodes.sort(key=by_cost)
    found = _pairs(at, slo, price, decodes) if decodes and group.prefills and at.wanted.num_tokens > 1 else []
    if not (found and price.want == 0.0 and _surely(min(found, key=_cost))):
        alone = [part.instance for part in decodes if _may_compute(at, part.instance, has_pairs)]
        found += [_local(at, one, slo, price) for one in alone[:NUM_LOCAL]]
    elif short := [
        part.instance for part in decodes if estimator.uncached(part.instance) <= config.local_prefill_tokens
    ]:
        found.append(_local(at, short[0], slo, price))
    if group.mixed and (config.colocate != "never" or not has_pairs):
        found += [_local(at, one, slo, price) for one in estimator.decodes(group.mixed) if holds(at, one)]
    found.sort(key=_cost)
    return found


def displacement(at: Situation, way: Way, price: Prices) -> float:
    """Good requests that others could have been in the time this one takes of busy prefill instances."""
    if way.prefill is None or not price.want:
        return 0.0
    option = way.prefill.option
    return price.want * displaced(option.instance, option.compute_us * option.instance.speed / 1e6, price)


def _surely(way: Way) -> bool:
    """A pair that is free and as good as certain: computing on decode cannot be better."""
    return way.accepts and way.misses < 0.01 and way.decode.harm < 0.01


def _pairs(at: Situation, slo: Slo, price: Prices, decodes: list[DecodePart]) -> list[Way]:
    """Each prefill instance beside the decode that is best for it; cheaper bounds rule most pairs out. An instance is
    left out where even beside the best decode it ranks behind another that accepts, and is idle if this one is."""
    parts = [
        prefill_part(at, option, slo, price, _accepts(at, option.instance, option.queue_s))
        for option in at.estimator.prefills(every=True)
    ]
    parts.sort(key=by_cost)
    waited_s, most = at.wanted.waited_s, at.config.num_explained
    best_free = best_idle = NONE
    found: list[Way] = []
    for part in parts:
        one = part.option.instance
        least = (round(part.cost + decodes[0].cost, 9), not part.accepts, part.picked, part.name)
        if least > (best_free if one.rows else best_idle) and len(found) >= most:
            continue
        floor = part.cost + misses_first(slo.ttft_s, part.ready_s, waited_s, relative_error(one))
        best = _pair(at, slo, part, decodes[0])
        for decode in decodes[1:]:
            if floor + decode.cost >= best.cost:
                break
            way = _pair(at, slo, part, decode)
            if way.cost < best.cost:
                best = way
        found.append(best)
        if best.accepts:
            rank = _cost(best)
            best_free = min(best_free, rank)
            if not one.rows:
                best_idle = min(best_idle, rank)
    return found


def _pair(at: Situation, slo: Slo, part: PrefillPart, decode: DecodePart) -> Way:
    one, estimator = part.option.instance, at.estimator
    transfer_s = estimator.transfer_s(one, decode.instance)
    ready_s = part.ready_s + estimator.exposed_s(one, transfer_s, part.option.prefill_s) + decode.step_s
    limit_s = first_by_s(slo, at.wanted.usual_output * decode.tpot_s)
    chance = misses_first(limit_s, ready_s, at.wanted.waited_s, relative_error(one))
    return Way(part.cost + decode.cost + chance, part, decode, chance, ready_s, limit_s, part.accepts)


def _local(at: Situation, one: Instance, slo: Slo, price: Prices) -> Way:
    """One instance computes the prompt beside its decodes, and goes on."""
    estimator = at.estimator
    option = estimator.option(one, alone=True)
    work_s, fetching_s = local_work_s(option), option.prefill_s - option.compute_s
    part = decode_part(at, one, slo, price, work_s)
    ready_s = option.queue_s + fetching_s + work_s + (part.step_s if one.rows else 0.0)
    limit_s = first_by_s(slo, at.wanted.usual_output * part.tpot_s)
    chance = misses_first(limit_s, ready_s, at.wanted.waited_s, relative_error(one))
    cost = part.cost + chance + SLACK * ready_s / slo.ttft_s
    if at.group.prefills and estimator.uncached(one) > at.config.local_prefill_tokens:
        cost += delayed(at, one, part.step_s, work_s)
        served = max(1.0, len(at.group.prefills) / max(1, len(at.group.decodes)))
        stolen = min(1.0, at.memory.stolen_share(one.id, at.now) + at.memory.stolen_by(work_s))
        cost += LOCAL + THEFT * served**2 * stolen
    return Way(cost, None, part, chance, ready_s, limit_s, _accepts_local(at, one, option.queue_s))


def _may_compute(at: Situation, one: Instance, has_pairs: bool) -> bool:
    """Whether a decode instance may compute this prompt itself."""
    if not has_pairs:
        return at.config.without_prefill == "serve_on_decode"
    return at.config.colocate != "never" or at.estimator.uncached(one) <= at.config.local_prefill_tokens


def _accepts(at: Situation, one: Instance, queue_s: float) -> bool:
    return (one.rows <= 1 or queue_s <= HORIZON_S) and queue_s <= at.config.prefill_backlog_s


def _accepts_local(at: Situation, one: Instance, queue_s: float) -> bool:
    return queue_s <= min(HORIZON_S, at.config.prefill_backlog_s)


def _error_s(way: Way) -> float:
    one = way.prefill.option.instance if way.prefill is not None else way.decode.instance
    return BAR * (relative_error(one) * way.ready_s + FLOOR_S)


def _idle(way: Way) -> bool:
    if way.prefill is not None:
        return not way.prefill.option.instance.rows
    return not way.decode.instance.prefill_tokens


def _unhurried(at: Situation, ways: list[Way]) -> list[Way]:
    """Where one that is late hurts least: on an idle prefill instance; beside decodes only where there is none."""
    if at.group.prefills:
        ways = [way for way in ways if way.prefill is not None] or ways
    return [way for way in ways if _idle(way)] or ways


def _late_may(at: Situation, price: Prices) -> bool:
    """Whether a request that cannot be good any more may be served now: its turn has come, or nobody wants the time of
    an idle instance."""
    idle = any(not one.rows for one in at.group.prefills)
    if (price.want <= 0.0 and (idle or not at.group.prefills)) or _has_turn(at):
        return True
    if idle:
        at.memory.kept_s = at.now
    return False


def _has_turn(at: Situation) -> bool:
    """Whether the share of those that are late has time left. Who is turned away at last has none in it."""
    share = AGED_SHARE if _aged(at) else LATE_SHARE
    return not _refused(at) and at.memory.allowance_s(at.now, _num_servers(at), share) > 0.0


def _aged(at: Situation) -> bool:
    return at.wanted.waited_s - (at.wanted.slo or UNHURRIED).ttft_s > AGED_S


def _num_servers(at: Situation) -> int:
    return len(at.group.prefills or at.group.mixed or at.group.decodes)


def _spare(at: Situation, slo: Slo, way: Way) -> bool:
    """Whether the prefill time it takes is left over: it is short, or so many instances are free of late ones that
    those which can be good, and come in bursts, still find PEAK times what they took lately."""
    option = way.prefill.option if way.prefill is not None else None
    work_s = option.compute_us * option.instance.speed / 1e6 if option is not None else way.ready_s
    if work_s <= EASY * slo.ttft_s:
        return True
    most, wanted = _num_servers(at), at.memory.timely_s.per_s(at.now)
    late = at.memory.spare_s.per_s(at.now) + at.memory.spare_s.rate(work_s)
    return wanted < NOBODY * most or PEAK * wanted + late < most


def _late_harm(at: Situation, one: Instance) -> float:
    """What others may lose by one that is late. Who has waited very long goes like one that can be good, as long as
    few of the rows there are late ones."""
    return 0.99 if _aged(at) and one.rows - sum(one.paces.values()) <= LATE_SHARE * one.rows else HARMLESS


def _waits_late(at: Situation, slo: Slo) -> Blocked:
    return Blocked(Block.BETTER_LATER, say("wait.others_first", seconds=f"{slo.ttft_s:g}"), at.now + REST * slo.ttft_s)


def _candidates(at: Situation, slo: Slo, ways: Sequence[Way], taken: Way) -> list[Candidate]:
    """The way taken and a few others, each with its figures."""
    found, most = [], at.config.num_explained
    told = [taken, *(way for way in ways if way is not taken)]
    if taken.prefill is not None and len(told) < most:
        price = prices(at)
        others = [one for one in at.estimator.decodes() if one is not taken.decode.instance][: most - len(told)]
        told += [_pair(at, slo, taken.prefill, decode_part(at, one, slo, price)) for one in others]
        if _may_compute(at, taken.decode.instance, True) and all(way.prefill is not None for way in ways):
            told.append(_local(at, taken.decode.instance, slo, price))
    for way in told[:most]:
        if way.prefill is None:
            one = at.estimator.local(way.decode.instance)
        else:
            one = at.estimator.pair(way.prefill.option, way.decode.instance)
        good = (1.0 - way.misses) * way.decode.keeps_pace
        one.reason = (say("place.good", share=f"{good:.0%}"), *(misses(one, at.wanted) if good < 0.5 else ()))
        if way.decode.harm > 0.005:
            one.reason += (say("place.harm", num=f"{way.decode.harm:.2f}"),)
        if not way.accepts:
            one.reason += (say("place.not_free"),)
        elif way is not taken and way.cost == taken.cost:
            one.reason += (say("place.turn"),)
        elif way.cost > taken.cost and way.misses <= taken.misses and way.decode.harm <= taken.decode.harm:
            one.reason += (say("place.dearer"),)
        one.error_s, one.tpot_s = _error_s(way), way.decode.tpot_s
        if at.late:  # nobody has to be kept from slowing it down
            one.charge_decode = one.charge_decode._replace(tpot_us=0)
        found.append(one)
    return found


def _cost(way: Way) -> tuple[float, bool, int, str, int, str]:
    first = way.prefill or way.decode
    return (round(way.cost, 9), not way.accepts, first.picked, first.name, way.decode.picked, way.decode.name)


def placed(at: Situation, chosen: Candidate) -> None:
    """Book what the request takes: compute, a tenant's share, time stolen from decodes, the allowance of the late."""
    memory, now = at.memory, at.now
    work = chosen.charge_prefill if chosen.remote else chosen.charge_decode
    first = chosen.prefill or chosen.decode
    work_s = work.prefill_us / 1e6 * first.speed
    slo = at.wanted.slo or UNHURRIED
    if not at.late:
        memory.spent.add(min(1.0, (at.wanted.waited_s + chosen.ttft_s) / slo.ttft_s), now)
    memory.sizes.add(chosen.compute_tokens, now)
    memory.counts.add(1.0, now)
    memory.asked.add(at.wanted.num_tokens, now)
    memory.shares.serve(at.wanted.tenant, chosen.compute_tokens)
    if not chosen.remote:
        memory.steal(first.id, work_s, now)
    if at.spare:
        memory.spare_s.add(work_s, now)
    elif at.late:
        memory.late_s -= work_s
    else:
        memory.timely_s.add(work_s, now)


GOODPUT = Policy(place, placed=placed, order=order, free=free, takes=takes, on_decode=True)
