"""Dynamo's KV router (ai-dynamo, lib/llm kv_router, DefaultWorkerSelector): cost in blocks, temperature 0."""

from __future__ import annotations

from controlplane.core.instance import Instance
from controlplane.core.policies.pairs import Score, split, together
from controlplane.core.policies.protocol import Answer, Policy, Situation
from transfer.said import say

OVERLAP_WEIGHT = 1.0
DISK_WEIGHT = 0.25
SHARED_WEIGHT = 0.5
"""Of blocks that only a shared pool holds; Dynamo leaves it to the operator."""
MAX_LOCAL_TOKENS = 2048
MAX_LOCAL_SHARE = 0.7
"""Conditional disaggregation: fewer uncached tokens than this, and less of the prompt, are computed on decode."""


def place(at: Situation) -> Answer:
    """Prefill: weight x (blocks queued and new - credit) + blocks held. credit: blocks on the device, .25 of those on
    its disk, and of those that a pool holds beyond. Decode: blocks held with this request. Prompts that decode holds
    for the most part stay there."""
    size, tokens = at.group.layout.block_size, at.wanted.num_tokens
    shared = max((at.matches[name].blocks for name in at.group.pools if name in at.matches), default=0)

    def credit(one: Instance) -> float:
        match = at.matches.get(one.id)
        lead, blocks = (match.lead, match.blocks) if match is not None else (0, 0)
        beyond = max(0, shared - blocks) if one.hello.shares_kv else 0
        return lead + DISK_WEIGHT * (blocks - lead) + SHARED_WEIGHT * beyond

    def prefill_cost(one: Instance) -> float:
        waiting = (one.prefill_tokens + tokens) / size
        return OVERLAP_WEIGHT * max(0.0, waiting - credit(one)) + one.blocks

    def decode_cost(one: Instance) -> float:
        return float(one.blocks + at.wanted.keep_blocks)

    def whole_cost(one: Instance) -> float:
        return prefill_cost(one) + decode_cost(one)

    decode = Score(decode_cost, lambda one: say("score.blocks_held", num=f"{decode_cost(one):.0f}"))
    whole = Score(whole_cost, lambda one: say("score.blocks_both", num=f"{whole_cost(one):.0f}"))
    if at.group.prefills and at.group.decodes:
        decodes = at.estimator.open_decodes(at.group.decodes)
        near = [one for one in decodes if _stays(at.estimator.uncached(one), tokens)]
        if near:
            return together(at, whole, near)
    prefill = Score(prefill_cost, lambda one: say("score.blocks_prefill", num=f"{prefill_cost(one):.0f}"))
    return split(at, prefill, decode, whole)


def _stays(uncached: int, num_tokens: int) -> bool:
    return uncached < MAX_LOCAL_TOKENS and uncached < MAX_LOCAL_SHARE * num_tokens


KV_COST = Policy(place)
