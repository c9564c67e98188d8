"""Penalties of a request that goes on elsewhere: what was drawn before is prompt to the next engine, which OpenAI's
presence and frequency penalties do not count, so it is put on as a bias."""

from __future__ import annotations

from collections import Counter

from transfer.terms import SamplingParams, TokenIds

MAX_BIAS = 100.0
"""What the API takes either way."""


def is_penalized(sampling: SamplingParams) -> bool:
    """Whether its output so far matters to what is drawn next."""
    return bool(sampling.presence_penalty or sampling.frequency_penalty)


def penalty_bias(output: TokenIds, sampling: SamplingParams) -> dict[str, float]:
    """logit_bias, by token id, for the output so far. A token that is drawn again bears presence_penalty twice."""
    return {
        str(token): max(-MAX_BIAS, min(MAX_BIAS, -sampling.presence_penalty - count * sampling.frequency_penalty))
        for token, count in sorted(Counter(output).items())
    }
