"""How fast a server is: a short and a longer prompt of random tokens at start, so that placement does not begin blind.

Only a beginning: what requests take later corrects it, as with every engine.
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable
from statistics import median
from time import perf_counter

import msgspec

from transfer.profile import LatencyProfile
from transfer.terms import TokenIds

PROMPTS = (32, 256)
OUTPUT = 8
ROUNDS = 4
LEAST_S = 1e-5
FURTHEST = 1e4
"""Times that a share of the hardware's speed is changed at most in a round."""

Run = Callable[[TokenIds, int], AsyncIterator[int]]
"""(prompt, output tokens): yields the number of tokens that came, as they come."""


async def measured(declared: LatencyProfile, run: Run, vocab_size: int, max_context: int) -> LatencyProfile:
    """The profile with its shares of compute and bandwidth set so that it predicts what was seen."""
    prefill_s: dict[int, float] = {}
    gaps_s: list[float] = []
    for num_tokens in PROMPTS:
        num = max(1, min(num_tokens, max_context - OUTPUT))
        prompt = [random.randrange(vocab_size) for _ in range(num)]  # nobody has cached it
        last_s = perf_counter()
        async for count in run(prompt, OUTPUT):
            now_s = perf_counter()
            if num not in prefill_s:
                prefill_s[num] = now_s - last_s
            else:
                gaps_s.append((now_s - last_s) / max(1, count))
            last_s = now_s
    if not prefill_s or not gaps_s:
        return declared
    longest = max(prefill_s)
    return fitted(declared, longest, prefill_s[longest], median(gaps_s))


def fitted(profile: LatencyProfile, num_tokens: int, prefill_s: float, step_s: float) -> LatencyProfile:
    """prefill_s: of a prompt of num_tokens; step_s: of decoding one sequence after it. What a step takes beyond compute
    and memory cannot be told from two figures, and counts as memory."""
    profile = msgspec.structs.replace(profile, alpha_s=0.0, beta_s=0.0, provenance="measured")
    for _ in range(ROUNDS):
        slower = _factor(step_s, profile.decode_step_s(1, num_tokens))
        profile = msgspec.structs.replace(profile, mbu=profile.mbu / slower, mbu_kv=profile.mbu_kv / slower)
        slower = _factor(prefill_s, profile.prefill_s(num_tokens))
        profile = msgspec.structs.replace(
            profile, mfu=profile.mfu / slower, mfu_attention=profile.mfu_attention / slower
        )
    return profile


def _factor(seen_s: float, said_s: float) -> float:
    return min(FURTHEST, max(1 / FURTHEST, max(LEAST_S, seen_s) / max(LEAST_S, said_s)))
