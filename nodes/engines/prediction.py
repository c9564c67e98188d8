"""What a LatencyProfile says of a step's chunks: the one place that turns chunks into its arguments."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from nodes.engines.engine import Chunk
from transfer.profile import LatencyProfile, StepRange


class StepArguments(NamedTuple):
    """As LatencyProfile.step_s takes them."""

    num_new_tokens: int
    context_tokens: int
    batch: int
    attention_pairs: int


def step_arguments(chunks: Iterable[Chunk]) -> StepArguments:
    """Sums over the chunks of one step."""
    tokens = context = pairs = batch = 0
    for chunk in chunks:
        start, count = chunk.start, len(chunk.tokens)
        total = start + count
        tokens += count
        context += total
        pairs += (total * (total + 1) - start * (start + 1)) // 2
        batch += 1
    return StepArguments(tokens, context, batch, pairs)


def largest_steps(steps: Iterable[StepArguments]) -> StepRange:
    """What a profile found from these steps is known up to; at least one step."""
    return StepRange(*[max(column) for column in zip(*steps, strict=True)])


def predicted_step_s(latency: LatencyProfile, chunks: Iterable[Chunk]) -> float:
    """Seconds the profile predicts for one step over `chunks`."""
    return latency.step_s(*step_arguments(chunks))
