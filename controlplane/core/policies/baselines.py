"""Placement of systems that fix their phases or have none: DistServe, Splitwise, and vLLM's colocated instances."""

from __future__ import annotations

from controlplane.core.policies.pairs import Score, alone, split, together
from controlplane.core.policies.protocol import Answer, Policy, Situation
from controlplane.core.policies.turns import in_flight
from transfer.said import say

PENDING_TOKENS = 8192
"""Splitwise: more tokens than this queued at the shortest prompt queue, and a mixed machine takes the request."""
WAITING_WEIGHT = 4
"""vLLM: how much more a waiting request weighs than a running one."""


def distserve(at: Situation) -> Answer:
    """First come first served to the prefill instance with the shortest queue, then the least loaded decode (OSDI'24,
    section 4.3). No pool, no migration, no admission."""
    at.estimator.fetches = False
    return split(at, Score(lambda one: float(one.rows), in_flight), Score(lambda one: float(one.rows), in_flight))


def splitwise(at: Situation) -> Answer:
    """Join the shortest queue by pending tokens in the prompt and in the token pool; beyond a threshold the mixed pool
    takes the whole request, and where that is empty a token machine becomes mixed (ISCA'24, section IV-A)."""
    prefill = Score(lambda one: float(one.prefill_tokens), lambda one: say("score.pending", num=one.prefill_tokens))
    decode = Score(lambda one: float(one.context_tokens), lambda one: say("score.held", num=one.context_tokens))
    both = Score(
        lambda one: float(one.prefill_tokens + one.context_tokens),
        lambda one: say("score.both", num=one.prefill_tokens + one.context_tokens),
    )
    prompts = at.estimator.open_prefills()
    if prompts and min(one.prefill_tokens for one in prompts) > PENDING_TOKENS:
        for pool in (at.group.mixed, at.group.decodes):
            overflow = [one for one in pool if one.prefill_tokens <= PENDING_TOKENS]
            if found := together(at, both, overflow):
                return found
    return split(at, prefill, decode, both)


def colocated(at: Situation) -> Answer:
    """Every instance runs whole requests, prompts in chunks beside decodes (Sarathi-Serve, OSDI'24). The least of
    4 x waiting + running, as vLLM's data-parallel balancer weighs them. Fleets without mixed instances: decode ones."""
    score = Score(
        lambda one: float(WAITING_WEIGHT * one.load.num_waiting + one.rows),
        lambda one: say("score.waiting", waiting=one.load.num_waiting, num=one.rows),
    )
    at.estimator.fetches = False
    return together(at, score, at.group.mixed or at.group.decodes or alone(at))


DISTSERVE = Policy(distserve)
SPLITWISE = Policy(splitwise)
COLOCATED = Policy(colocated)
