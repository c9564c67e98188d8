"""Mooncake's conductor (FAST'25, algorithm 1 in section 6.1, early rejection by predicted load in section 7)."""

from __future__ import annotations

from bisect import bisect_right

from controlplane.core.admission import Rejection, late_rejection, retry_after_s
from controlplane.core.estimate import kv_token_bytes
from controlplane.core.instance import Instance
from controlplane.core.placement import Candidate
from controlplane.core.policies.pairs import Score, split
from controlplane.core.policies.protocol import Answer, Policy, Situation
from transfer.said import say

BALANCING_THRESHOLD = 4.0
"""A cache this many times shorter than the best is not good enough: the best one is fetched."""


def place(at: Situation) -> Answer:
    """Prefill: the earliest first token, from its own cache or, where the best is much longer, from a pool's. Decode:
    the shortest predicted step. Rejects when the first token, a step, or the load by then is over the objective."""
    estimator, tokens = at.estimator, at.wanted.num_tokens - 1
    prefills = estimator.open_prefills()
    pooled = max((estimator.held(pool) for pool in at.group.pools.values()), default=0)
    longest = max([pooled, *(estimator.held(one) for one in prefills)], default=0)
    link_s = {one.id: kv_token_bytes(one, at.group.layout) / _link(one) for one in prefills} if pooled else {}

    def ttft_s(one: Instance) -> float:
        held = estimator.held(one)
        if pooled > held and one.hello.shares_kv and longest >= BALANCING_THRESHOLD * max(1, held):
            fetch_s = (pooled - held) * link_s[one.id] if one.id in link_s else 0.0
            return fetch_s + estimator.queue_s(one) + estimator.compute_s(one, tokens - pooled, pooled)
        return estimator.queue_s(one) + estimator.compute_s(one, tokens - held, held)

    prefill = Score(ttft_s, lambda one: say("score.first_token", seconds=f"{ttft_s(one):.3g}"))
    decode = Score(estimator.step_s, lambda one: say("score.step", seconds=f"{estimator.step_s(one):.3g}"))
    whole = Score(lambda one: (ttft_s(one), estimator.step_s(one)), prefill.say)
    found = split(at, prefill, decode, whole)
    if not found:
        return []
    return _rejected(at, found[0], ttft_s(found[0].prefill or found[0].decode)) or found


def _rejected(at: Situation, best: Candidate, ttft_s: float) -> Rejection | None:
    """Early rejection; a request that was placed before keeps its right to be served."""
    slo, config = at.wanted.slo, at.config
    if slo is None or config.early_reject == "never" or at.wanted.resumed:
        return None
    ttft_s += at.wanted.waited_s
    if ttft_s > slo.ttft_s:
        return late_rejection(config, ttft_s, slo.ttft_s, at.random)
    step_s = at.estimator.step_s(best.decode)
    load = max(step_s, decode_step_s(at, at.now + ttft_s)) / slo.tpot_s
    if load <= 1.0:
        return None
    return Rejection(
        say("ended.decode_load", share=f"{load:.0%}", objective=f"{slo.tpot_s:g}"),
        retry_after_s(config, at.wanted.usual_output * step_s, at.random),
    )


def decode_step_s(at: Situation, then_s: float) -> float:
    """Predicted mean decode step at a later time: prompts done by then have come in, those done longer ago than a usual
    stay have gone, and they are spread evenly."""
    decodes = at.group.decodes or at.group.mixed
    now_s = sum(one.step_hint_s() for one in decodes) / len(decodes)
    stay_s = at.wanted.usual_output * now_s
    due = at.memory.due
    rows = (bisect_right(due, then_s) - bisect_right(due, then_s - stay_s) + 1) / len(decodes)
    batch, context = max(1, round(rows)), round(rows * (at.wanted.num_tokens + at.wanted.usual_output / 2))
    declared = {one.taste: one.profile for one in decodes}
    steps_s = {taste: profile.decode_step_s(batch, context) for taste, profile in declared.items()}
    return sum([steps_s[one.taste] * one.speed for one in decodes]) / len(decodes)


def placed(at: Situation, chosen: Candidate) -> None:
    stay_s = at.wanted.usual_output * chosen.tpot_s
    at.memory.prompt_due(at.now + chosen.ttft_s, at.now - 4.0 * stay_s)


def _link(one: Instance) -> float:
    return one.hello.hardware.link_bytes_per_s * one.profile.link_efficiency


CONDUCTOR = Policy(place, placed=placed)
