"""LightLLM's admission by memory: the Efficient Router's bound and Past-Future's prediction (arXiv 2507.10150)."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate
from random import Random

from controlplane.core.placement import Block, Blocked
from controlplane.core.policies.pairs import Score, alone, best, pairs, together
from controlplane.core.policies.protocol import Answer, Policy, Running, Situation
from transfer.said import say

SLACK_TOKENS = 6
"""Added to what a request may still make: LightLLM's steps run ahead of its bookkeeping."""
KEPT = 0.95
MAX_SAMPLES = 5
SAMPLED_ROWS = 200


def peak_tokens(needs: Sequence[tuple[int, int]]) -> int:
    """Highest KV use of requests of (tokens now, tokens still to come), all growing by one token a step and leaving at
    their end: those with most to come last longest, so the use just before the i-th of them leaves is
    to_come_i * (i + 1) + what the first i + 1 hold now."""
    ordered = sorted(needs, key=lambda one: -one[1])
    held = accumulate(now for now, _ in ordered)
    uses = (one[1] * (index + 1) + now for index, (one, now) in enumerate(zip(ordered, held, strict=True)))
    return max(uses, default=0)


def worst_need(one: Running) -> tuple[int, int]:
    """Efficient Router: everything up to max_tokens may come."""
    return one.num_tokens + 1, max(0, one.max_output - one.num_output - 1) + SLACK_TOKENS


def sampled_needs(running: Sequence[Running], outputs: Sequence[int], random: Random) -> list[tuple[int, int]]:
    """Past-Future: the end of each is drawn from past output lengths, given that it is longer than now. outputs:
    ascending."""
    found = []
    for one in running:
        first = bisect_right(outputs, one.num_output)
        total = (
            outputs[first + int(random.random() * (len(outputs) - first))] if first < len(outputs) else one.max_output
        )
        found.append((one.num_tokens + 1, max(0, min(total, one.max_output) - one.num_output)))
    return found


def sampled_peak(running: Sequence[Running], history: Sequence[int], random: Random) -> float:
    """Tokens of KV at the peak that Past-Future predicts; without a history, the Efficient Router's bound."""
    if not history or not running:
        return float(peak_tokens([worst_need(one) for one in running]))
    outputs = sorted(history)
    draws = min(MAX_SAMPLES, SAMPLED_ROWS // len(running) + 1)
    return float(max(peak_tokens(sampled_needs(running, outputs, random)) for _ in range(draws)))


def _efficient_peak(at: Situation, running: list[Running]) -> float:
    return float(peak_tokens([worst_need(one) for one in running]))


def _past_future_peak(at: Situation, running: list[Running]) -> float:
    return sampled_peak(running, at.memory.outputs, at.random)


def _place(at: Situation, peak: Callable[[Situation, list[Running]], float], kept: float) -> Answer:
    """Decode: the lowest share of its memory at the peak, among those where the peak fits. Prefill: fewest tokens."""
    group, estimator = at.group, at.estimator
    size = group.layout.block_size
    new = Running("", at.wanted.num_tokens, 0, at.wanted.max_output, False)
    paired = bool(group.prefills and group.decodes) and not (at.config.colocate == "always" and group.mixed)
    open_to = estimator.open_decodes(group.decodes if paired else alone(at))
    shares = {one.id: peak(at, [*at.running(one), new]) / (one.hello.num_blocks * size) for one in open_to}
    admitting = [one for one in open_to if shares[one.id] < kept or not one.rows]
    if open_to and not admitting:
        least = min(shares.values())
        return Blocked(Block.ROOM, say("wait.peak", share=f"{least:.0%}"))
    decode = Score(lambda one: shares[one.id], lambda one: say("score.peak", share=f"{shares[one.id]:.0%}"))
    if not paired:
        return together(at, decode, admitting)
    prefill = Score(lambda one: float(one.prefill_tokens), lambda one: say("score.queued", num=one.prefill_tokens))
    prefills = best(prefill, estimator.open_prefills())
    return pairs(at, prefills, best(decode, admitting), prefill, decode) if prefills and admitting else []


def efficient_router(at: Situation) -> Answer:
    """Admit while the memory that everyone together may ever need fits."""
    return _place(at, _efficient_peak, 1.0)


def past_future(at: Situation) -> Answer:
    """Admit while the predicted peak stays below .95 of the memory."""
    return _place(at, _past_future_peak, KEPT)


EFFICIENT_ROUTER = Policy(efficient_router)
PAST_FUTURE = Policy(past_future)
