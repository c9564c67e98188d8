"""What a LatencyProfile says of a step's chunks: the one place that turns chunks into its arguments."""

from __future__ import annotations

from collections.abc import Iterable

from nodes.engines.engine import Chunk
from transfer.profile import LatencyProfile


def predicted_step_s(latency: LatencyProfile, chunks: Iterable[Chunk]) -> float:
    """Seconds the profile predicts for one step over `chunks`."""
    tokens = context = pairs = batch = 0
    for chunk in chunks:
        start, count = chunk.start, len(chunk.tokens)
        total = start + count
        tokens += count
        context += total
        pairs += (total * (total + 1) - start * (start + 1)) // 2
        batch += 1
    return latency.step_s(tokens, context, batch, pairs)
