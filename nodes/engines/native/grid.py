"""Steps of every kind timed on a native engine, for a fit of its latency: decodes, prompts, and both in one step.

Configurations take turns, so that a machine that is slow for a while slows all of them, short ones more often than
long ones; the median of each counts. Writes KV all over the arena: for an engine that serves nobody.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Sequence
from statistics import median

import numpy as np

from nodes.engines.engine import Chunk, Sampling, StepBatch
from nodes.engines.native.engine import NativeEngine
from nodes.engines.prediction import step_arguments
from nodes.fitting import OnTimed, StepSample, Timed, spread
from transfer.errors import InvalidValue
from transfer.terms import SamplingParams

DECODES = tuple((batch, context) for batch in (1, 2, 4, 8, 16, 32) for context in (16, 256, 1024, 2000))
"""(sequences, tokens of KV of each)."""
PROMPTS = (
    *((count, start) for count in (16, 64, 128, 256, 512) for start in (0, 512, 1536)),
    (1024, 0), (1024, 3072), (2048, 0),
)  # fmt: skip
"""(prompt tokens of the step, tokens before them)."""
MIXES = ((1, 256, 256), (4, 512, 256), (8, 512, 1024), (16, 256, 512))
"""(decodes, prompt tokens, context of each decode)."""
MIN_TIMES, MAX_TIMES = 3, 25
"""How often a step is timed."""
_GREEDY = Sampling(params=SamplingParams(max_tokens=1, temperature=0.0), history=(), num_output=0)


def steps_within(num_blocks: int, block_size: int, max_context: int) -> list[StepBatch]:
    """Every configuration of the grid that fits."""
    room = min(num_blocks * block_size, max_context)
    arena = _Arena(num_blocks, block_size)
    steps = [arena.decodes(batch, context) for batch, context in DECODES if context < room]
    steps += [[arena.prompt(count, start)] for count, start in PROMPTS if start + count <= room]
    steps += [
        [*arena.decodes(batch, context), arena.prompt(count, 0)]
        for batch, count, context in MIXES
        if max(count, context + 1) <= room
    ]
    return [StepBatch(chunks) for chunks in steps]


async def time_steps(engine: NativeEngine, seconds: float, on_timed: OnTimed | None = None) -> Timed:
    """Takes about `seconds`, or what MIN_TIMES of each take. Raises InvalidValue when the engine has no room."""
    layout = engine.layout
    steps = steps_within(engine.num_blocks, layout.block_size, engine.model.max_context)
    if len(steps) < len(DECODES):
        raise InvalidValue(
            f"{engine.num_blocks} KV blocks of {layout.block_size} tokens hold only {len(steps)} of the steps to time; "
            "give it more memory with --kv-gib"
        )
    _touch(engine)
    warm = [await _seconds(engine, step) for step in steps]  # memory is touched, kernels are chosen
    num_times = [max(MIN_TIMES, min(MAX_TIMES, int(seconds / len(steps) / max(1e-9, took)))) for took in warm]
    taken: list[list[float]] = [[] for _ in steps]
    for num_timed, index in enumerate(spread_evenly(num_times), 1):
        taken[index].append(await _seconds(engine, steps[index]))
        if on_timed is not None:
            on_timed(num_timed, num_timed / sum(num_times))
    samples = [
        StepSample(engine.latency, *step_arguments(step.chunks), seconds=median(times))
        for step, times in zip(steps, taken, strict=True)
    ]
    return Timed(samples, sum(num_times), median(spread(times) for times in taken))


async def _seconds(engine: NativeEngine, step: StepBatch) -> float:
    """Of one step, with what it takes to hand it to the engine's thread."""
    since = time.perf_counter()
    await engine.step(step)
    return time.perf_counter() - since


def spread_evenly(counts: Sequence[int]) -> list[int]:
    """Every index as often as its count says, each over the whole length: [3, 1] -> [0, 0, 1, 0]."""
    places = [((time + 0.5) / count, index) for index, count in enumerate(counts) for time in range(count)]
    return [index for _, index in sorted(places)]


def _touch(engine: NativeEngine) -> None:
    """Memory that was never written is one page of zeros, which stays in a cache."""
    if engine.device.type == "cpu":
        for layer in range(engine.layout.num_layers):
            for view in engine.arena.views(layer, 0, engine.num_blocks):
                np.frombuffer(view, np.uint8)[:: mmap.PAGESIZE] = 0


class _Arena:
    """Gives sequences blocks that follow one another, each others than the one before as long as there are any: KV that
    several share would be in a cache when the second reads it, as it is not in serving."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._num_blocks, self._block_size = num_blocks, block_size
        self._next = 0

    def decodes(self, batch: int, context: int) -> list[Chunk]:
        return [
            Chunk(str(row), tokens=[0], start=context, block_table=self._take(context + 1), sampling=_GREEDY)
            for row in range(batch)
        ]

    def prompt(self, count: int, start: int) -> Chunk:
        """It draws a token, as the last step of a prompt does where the decoding goes on: the usual one, but on an
        instance that only prefills."""
        return Chunk("prompt", tokens=[0] * count, start=start, block_table=self._take(start + count), sampling=_GREEDY)

    def _take(self, num_tokens: int) -> list[int]:
        count = -(-num_tokens // self._block_size)
        first = self._next if self._next + count <= self._num_blocks else 0
        self._next = first + count
        return list(range(first, first + count))
