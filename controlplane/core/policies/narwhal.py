"""Lexicographic placement (Arrow, arXiv 2505.11916, section 5.3, in Narwhal): budgets first, then the cheapest leg."""

from __future__ import annotations

from controlplane.core.instance import Instance
from controlplane.core.policies.pairs import Score, split
from controlplane.core.policies.protocol import Answer, Policy, Situation
from transfer.said import say

MAX_TOKENS = 1 << 26


def place(at: Situation) -> Answer:
    """Prefill: those that keep TTFT first, then (decode tokens there, resident prefill and this one's seconds). Decode:
    those with headroom first, then (prefill tokens there, tokens beyond what its pace objective allows)."""
    estimator, wanted = at.estimator, at.wanted
    tokens, slo = wanted.num_tokens - 1, wanted.slo

    def price_s(one: Instance) -> float:
        held = estimator.held(one)
        return estimator.queue_s(one) + estimator.compute_s(one, tokens - held, held)

    def prefill_cost(one: Instance) -> tuple[float, float, float]:
        seconds = price_s(one)
        return (float(slo is not None and seconds > slo.ttft_s), float(one.context_tokens), seconds)

    beyond: dict[str, float] = {}

    def decode_price(one: Instance) -> float:
        if one.id not in beyond:
            most = headroom(one, slo.tpot_s) if slo is not None else 0
            beyond[one.id] = float(one.context_tokens + wanted.num_tokens - most)
        return beyond[one.id]

    def decode_cost(one: Instance) -> tuple[float, float, float]:
        price = decode_price(one)
        return (float(slo is not None and price > 0), float(one.prefill_tokens), price)

    prefill = Score(prefill_cost, lambda one: say("score.prefill_s", seconds=f"{price_s(one):.3g}"))
    decode = Score(decode_cost, lambda one: say("score.headroom", num=f"{-decode_price(one):.0f}"))
    return split(at, prefill, decode, Score(lambda one: (*decode_cost(one), *prefill_cost(one)), decode.say))


def headroom(one: Instance, tpot_s: float) -> int:
    """Most context tokens that one more request's batch may hold within the pace; 0 when even none is too slow."""
    profile, rows = one.profile, one.rows + 1
    least_s, most_s = profile.decode_step_s(rows, 0) * one.speed, profile.decode_step_s(rows, MAX_TOKENS) * one.speed
    if tpot_s <= least_s:
        return 0
    if tpot_s >= most_s:
        return MAX_TOKENS
    guess = int(MAX_TOKENS * (tpot_s - least_s) / (most_s - least_s))  # exact where a step grows evenly with context
    while guess > 0 and profile.decode_step_s(rows, guess) * one.speed > tpot_s:
        guess = guess * 15 // 16
    return guess


LEXICOGRAPHIC = Policy(place)
