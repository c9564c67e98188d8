"""SGLang's cache-aware router (sgl-model-gateway, "cache_aware" policy): the longest match while load is even."""

from __future__ import annotations

from controlplane.core.instance import Instance
from controlplane.core.placement import Candidate
from controlplane.core.policies.pairs import Score, split
from controlplane.core.policies.protocol import Answer, Policy, Situation
from controlplane.core.policies.turns import in_flight
from transfer.said import say

BALANCE_ABS = 64
BALANCE_REL = 1.5
CACHE_THRESHOLD = 0.3


def place(at: Situation) -> Answer:
    """Load is requests in flight. Uneven (max - min > 64 and max > 1.5 min): the shortest queue. Else the longest match
    if it is above .3 of the prompt, else the instance whose prefix tree is smallest. Decode: fewest requests."""
    decode = Score(lambda one: float(one.rows), in_flight)
    prefills = at.estimator.open_prefills() or at.group.mixed or at.group.decodes
    if not prefills:
        return []
    loads = [one.rows for one in prefills]
    if max(loads) - min(loads) > BALANCE_ABS and max(loads) > BALANCE_REL * min(loads):
        prefill = decode
    else:
        held, tokens = at.estimator.held, at.wanted.num_tokens
        if max(held(one) for one in prefills) > CACHE_THRESHOLD * tokens:
            prefill = Score(
                lambda one: -float(held(one)), lambda one: say("score.cached", num=held(one), tokens=tokens)
            )
        else:
            routed = at.memory.routed
            prefill = Score(
                lambda one: routed.get(one.id, 0.0), lambda one: say("score.tree", num=f"{routed.get(one.id, 0.0):.0f}")
            )
    return split(at, prefill, decode, whole=prefill)


def placed(at: Situation, chosen: Candidate) -> None:
    first: Instance = chosen.prefill or chosen.decode
    at.memory.route(first.id, chosen.compute_tokens)


CACHE_AWARE = Policy(place, placed=placed)
