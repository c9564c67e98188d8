"""What each instance would make of a request's prefill, of its decode, or of both, in the currency of goodput.py.

One unit is one good request: the chance that this one misses, the good requests others lose by it, and what the time of
the hardware is worth.
"""

from __future__ import annotations

from math import ceil, erf, sqrt
from typing import NamedTuple

from controlplane.core.estimate import PrefillOption
from controlplane.core.instance import Instance
from controlplane.core.policies.lightllm import sampled_peak
from controlplane.core.policies.memory import MAX_STOLEN
from controlplane.core.policies.odds import FLOOR_S, SQRT2, relative_error, within
from controlplane.core.policies.protocol import Situation
from transfer.terms import Slo

SLACK = 0.02
"""What using up a whole objective costs: among ways that keep it, the one that leaves more of it."""
DEAR = 0.01
"""What the dearest class of hardware costs more than a free one: cheap hardware that keeps the objective goes first."""
LOCAL = 0.03
"""What computing a prompt beside decodes costs where a prefill instance could: interference that nobody predicts."""
THEFT = 0.1
"""What computing prompts all the time beside decodes costs, besides what it does to their pace. Where prefill instances
outnumber decodes it counts by the square of that: a decode keeps several from handing off, and the rest get crowded."""
HARM = 0.5
"""Part of a pace that still lies before the average request of a batch when it changes."""
SHORT = 0.5
"""What overcommitted KV memory costs: somebody is preempted and computed anew."""
TIGHT = 0.2
"""Share of KV blocks left below which a decode's coming peak is predicted."""
SAFE = 4.0
EASY, SCARCE = 0.3, 0.7
"""Part of TTFT objectives that requests lately used up to which compute is worth nothing, and from which it is worth
most: queues that objectives have room for are no scarcity."""
ROOMY, FULL = 0.75, 0.95
"""Use of KV memory up to which decode time is worth nothing, and from which it is worth most."""
EARLY = 0.5
"""Part of the usual output that a request which is quickly upset has."""
MIXED_STEP = 0.3
"""Part of a decode step by which each chunk beside it takes longer."""


class Prices(NamedTuple):
    """What compute is worth now. want: 0 while requests are served well before they are due, 1 when only just. outputs:
    (share of requests, output length, share of those that run). pace_error: learned lately; None: too little of it."""

    want: float
    usual_tokens: float
    dearest: float
    outputs: tuple[tuple[float, float, float], ...]
    pace_error: float | None


class PrefillPart:
    """cost: without the chance to miss TTFT, which the pair decides. accepts: it would be started soon."""

    __slots__ = ("accepts", "cost", "name", "option", "picked", "ready_s")

    def __init__(self, cost: float, option: PrefillOption, accepts: bool) -> None:
        self.cost, self.option, self.accepts = cost, option, accepts
        self.picked, self.name, self.ready_s = option.instance.picked, option.instance.id, option.done_s


class DecodePart:
    """cost: with the chance to miss the pace and the harm to others. step_s: until a token once its KV is there."""

    __slots__ = ("cost", "harm", "instance", "keeps_pace", "name", "picked", "step_s", "tpot_s")

    def __init__(
        self, cost: float, instance: Instance, step_s: float, tpot_s: float, keeps_pace: float, harm: float
    ) -> None:
        self.cost, self.instance, self.step_s, self.tpot_s = cost, instance, step_s, tpot_s
        self.keeps_pace, self.harm, self.picked, self.name = keeps_pace, harm, instance.picked, instance.id


def prices(at: Situation) -> Prices:
    memory = at.memory
    counts = memory.counts.at(at.now)
    usual = memory.sizes.at(at.now) / counts if counts >= 1.0 else float(at.wanted.num_tokens)
    spent = memory.spent.at(at.now) / (counts + 1.0)
    dearest = max((one.hello.hardware.price_per_hour for one in at.group.members), default=0.0)
    outputs = memory.typical_outputs() or ((1.0, max(1.0, EARLY * at.wanted.usual_output), 1.0),)
    want = min(1.0, max(0.0, (spent - EASY) / (SCARCE - EASY)))
    return Prices(want, max(1.0, usual), dearest, outputs, memory.pace_error(at.now))


def prefill_part(at: Situation, option: PrefillOption, slo: Slo, price: Prices, accepts: bool) -> PrefillPart:
    one = option.instance
    cost = SLACK * option.done_s / slo.ttft_s + dear(one, price)
    if price.want:
        cost += price.want * displaced(one, option.compute_us * one.speed / 1e6, price)
    return PrefillPart(cost, option, accepts)


def displaced(one: Instance, work_s: float, price: Prices) -> float:
    """How many usual requests could be computed in the same time: lost ones, as far as compute is wanted."""
    return work_s * one.rate_tokens_per_s / price.usual_tokens


def dear(one: Instance, price: Prices) -> float:
    return DEAR * one.hello.hardware.price_per_hour / price.dearest if price.dearest else 0.0


def decode_part(at: Situation, one: Instance, slo: Slo, price: Prices, work_s: float = 0.0) -> DecodePart:
    """work_s: of a prompt that is computed there, beside the others' decodes."""
    wanted = at.wanted
    step_s = at.estimator.step_s(one)
    before = min(MAX_STOLEN, at.memory.stolen_share(one.id, at.now))
    after = min(MAX_STOLEN, before + at.memory.stolen_by(work_s)) if work_s else before
    pace = Pace(one, price, work_s)
    tpot_s = step_s / (1.0 - after)
    tightest_s = min(one.paces) / 1e6 if one.paces else slo.tpot_s
    keeps, harm = 1.0, 0.0
    if not pace.surely(min(tightest_s, slo.tpot_s), tpot_s, after, work_s):
        keeps = pace.kept(slo.tpot_s, tpot_s, after)
        harm = max(_harm(one, pace, step_s, before, work_s), _prolongs(one, slo, tpot_s, wanted.num_tokens))
    cost = 1.0 - keeps + harm + SLACK * tpot_s / slo.tpot_s + dear(one, price)
    if one.room < wanted.keep_blocks:
        cost += SHORT
    return DecodePart(cost, one, step_s + _behind_s(one, before), tpot_s, keeps, harm)


def by_cost(part: PrefillPart | DecodePart) -> tuple[float, int, str]:
    return (part.cost, part.picked, part.name)


def holds(at: Situation, one: Instance) -> bool:
    """Past-Future's question (arXiv 2507.10150), asked only where memory gets tight."""
    wanted, total = at.wanted, one.hello.num_blocks
    left = one.room - wanted.need_blocks
    if not one.rows or left > TIGHT * total:
        return True
    growth = at.memory.growth(one.id, at.now)
    if growth is None:
        size = at.group.layout.block_size
        running = at.running(one)
        peak = sampled_peak(running, at.memory.outputs, at.random)
        growth = max(0.0, peak - sum(row.num_tokens for row in running)) / size
        at.memory.grows(one.id, growth, at.now)
    return left - growth - 0.5 * (wanted.keep_blocks - wanted.need_blocks) >= int(at.config.room_watermark * total)


def _behind_s(one: Instance, stolen: float) -> float:
    """A first token waits for the chunk that is computed when its KV arrives, and is drawn beside the next."""
    return 1.5 * stolen * one.hello.token_budget / one.rate_tokens_per_s if stolen else 0.0


def local_work_s(option: PrefillOption) -> float:
    """Seconds of computing a prompt beside the decodes that run there."""
    one, work_s = option.instance, option.compute_s
    if one.rows:
        chunks = ceil(option.compute_tokens / (one.hello.token_budget or option.compute_tokens))
        work_s += MIXED_STEP * chunks * one.step_hint_s()
    return work_s


def delayed(at: Situation, one: Instance, step_s: float, work_s: float) -> float:
    """Requests that could have run there instead, where KV memory is what others wait for: whoever runs holds it for
    work_s longer."""
    used = 1.0 - one.room / one.hello.num_blocks
    scarce = min(1.0, max(0.0, (used - ROOMY) / (FULL - ROOMY)))
    return scarce * work_s * one.rows / max(step_s, at.wanted.usual_output * step_s)


def first_by_s(slo: Slo, rest_s: float) -> float:
    """How soon after its arrival a request must have its first token, when its others take rest_s."""
    return slo.ttft_s if slo.e2e_s is None else min(slo.ttft_s, slo.e2e_s - rest_s)


def misses_first(limit_s: float, ttft_s: float, waited_s: float, error: float) -> float:
    """Chance that the first token comes too late."""
    return 1.0 - within(limit_s, waited_s + ttft_s, error * ttft_s + FLOOR_S)


class Pace:
    """How likely a pace is kept where prompts come in between: each adds its seconds to all that decode there, and the
    shorter an output, the more of them one may bring (compound Poisson over the stay)."""

    __slots__ = ("_bump_s", "_error", "_outputs")

    def __init__(self, one: Instance, price: Prices, work_s: float) -> None:
        self._error = relative_error(one) if price.pace_error is None else price.pace_error
        self._bump_s = max(work_s, price.usual_tokens / one.rate_tokens_per_s)
        self._outputs = price.outputs

    def surely(self, limit_s: float, tpot_s: float, stolen: float, bump_s: float) -> bool:
        """Whether nothing is to be feared, also for short outputs."""
        output = self._outputs[0][1]
        spread_s = sqrt((self._error * tpot_s) ** 2 + stolen * self._bump_s * tpot_s / output)
        return tpot_s + bump_s / output + SAFE * spread_s <= limit_s

    def kept(self, limit_s: float, tpot_s: float, stolen: float) -> float:
        """Probability for one that comes, over outputs of all lengths."""
        if not stolen:
            return within(limit_s, tpot_s, self._error * tpot_s)
        own, bumps = (self._error * tpot_s) ** 2, stolen * self._bump_s * tpot_s
        gap_s, kept = limit_s - tpot_s, 0.0
        for share, output, _ in self._outputs:
            z = gap_s / sqrt(own + bumps / output)
            kept += share if z > SAFE else share * (0.5 + 0.5 * erf(z / SQRT2)) if z > -SAFE else 0.0
        return kept

    def kept_by_running(self, limit_s: float, tpot_s: float, stolen: float, bump_s: float) -> float:
        """Probability for one that runs, and now gets bump_s of somebody's prompt in between: long outputs are met more
        often among those that run."""
        if not stolen and not bump_s:
            return within(limit_s, tpot_s, self._error * tpot_s)
        own, bumps = (self._error * tpot_s) ** 2, stolen * self._bump_s * tpot_s
        gap_s, kept = limit_s - tpot_s, 0.0
        for _, output, share in self._outputs:
            z = (gap_s - bump_s / output) / sqrt(own + bumps / output)
            kept += share if z > SAFE else share * (0.5 + 0.5 * erf(z / SQRT2)) if z > -SAFE else 0.0
        return kept


def _prolongs(one: Instance, slo: Slo, tpot_s: float, num_tokens: int) -> float:
    """Share of the rows there that are behind their pace while this one runs, too. They may be lost, but the longer the
    batch stays so large, the more of those that come are lost as well: who joins it costs one of them. Rows without a
    pace count by this one's, and a pace that not even a lone row would keep does not count."""
    alone_s = one.profile.decode_step_s(1, num_tokens) * one.speed
    behind, others = 0, one.rows
    for tpot_us, rows in one.paces.items():
        others -= rows
        if alone_s < tpot_us / 1e6 < tpot_s:
            behind += rows
    if alone_s < slo.tpot_s < tpot_s:
        behind += max(0, others)
    return behind / one.rows if one.rows else 0.0


def _harm(one: Instance, pace: Pace, step_s: float, stolen: float, work_s: float) -> float:
    """Good requests that those which decode there lose by this one: by its row, and by its prompt in between."""
    if not one.paces:
        return 0.0
    slower = 1.0 / (1.0 - stolen)
    now_s = one.profile.decode_step_s(one.rows, one.context_tokens) * one.speed * slower
    lost = 0.0
    for tpot_us, rows in one.paces.items():
        limit_s = tpot_us / 1e6
        before = pace.kept_by_running(limit_s, now_s, stolen, 0.0)
        lost += HARM * rows * max(0.0, before - pace.kept_by_running(limit_s, step_s * slower, stolen, 0.0))
        if work_s:
            lost += rows * max(0.0, before - pace.kept_by_running(limit_s, now_s, stolen, work_s))
    return lost
