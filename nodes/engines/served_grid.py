"""Whole requests timed on an engine that batches by itself, as samples of the steps they are made of.

A prompt's time to its first token is one step of all of it; the gaps of requests that decode side by side are steps of
one token each. For an engine that serves nobody.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping
from contextlib import aclosing
from dataclasses import dataclass
from statistics import median
from time import perf_counter

from msgspec.structs import replace

from nodes.engines.prediction import StepArguments
from nodes.engines.served import Job, ServedEngine
from nodes.fitting import OnTimed, StepSample, Timed, spread
from transfer.errors import InvalidValue
from transfer.profile import LatencyProfile
from transfer.terms import SamplingParams, TokenIds

PROMPTS = ((16, 0), (64, 0), (128, 0), (256, 0), (512, 0), (1024, 0), (1536, 0), (64, 512), (256, 1024), (512, 512))
"""(prompt tokens of the step, tokens before them that the engine has cached)."""
DECODES = (*((batch, context) for batch in (1, 2, 4, 8) for context in (32, 512)), (1, 1536), (2, 1536), (4, 1024))
"""(requests side by side, prompt tokens of each)."""
DRAWN = 16
"""Output tokens of each request that decodes."""
MIN_ROUNDS = 2
_SEED = 1


@dataclass(frozen=True, slots=True)
class _Kind:
    """One configuration: decodes where `batch` is given, else a prompt."""

    num_tokens: int
    start: int = 0
    batch: int = 0


async def time_requests(engine: ServedEngine, seconds: float, on_timed: OnTimed | None = None) -> Timed:
    """Takes about `seconds`, or what MIN_ROUNDS of each take. Raises InvalidValue when the engine has no room,
    JobFailed or EngineFailed as `run` does."""
    limit = min(engine.max_length, engine.capacity_blocks * engine.layout.block_size) - DRAWN
    kinds = [_Kind(count, start) for count, start in PROMPTS if start + count <= limit]
    kinds += [_Kind(context, batch=batch) for batch, context in DECODES if batch * context <= limit]
    if len(kinds) < len(PROMPTS):
        raise InvalidValue(
            f"an engine for {limit} tokens has room for {len(kinds)} of the kinds of requests to time; give it more KV "
            "memory or a longer context"
        )
    timer = _Timer(engine)
    for kind in kinds:
        await timer.time(kind)  # kernels are chosen, memory is touched
    begun, rounds, num_timed = perf_counter(), 0, 0
    taken: dict[StepArguments, list[float]] = {}
    # Another round while it, taking as long as those before, ends in time.
    while rounds < MIN_ROUNDS or perf_counter() - begun < seconds * (1.0 - 1.0 / (rounds + 1)):
        for kind in kinds:
            step, times = await timer.time(kind)
            taken.setdefault(step, []).append(times)
            num_timed += 1
            if on_timed is not None:
                on_timed(num_timed, min(1.0, (perf_counter() - begun) / seconds))
        rounds += 1
    middles = {step: median(times) for step, times in taken.items()}
    profile = _as_fast_as_seen(engine.latency, middles)
    samples = [StepSample(profile, *step, seconds=seconds) for step, seconds in middles.items()]
    return Timed(samples, num_timed, median(spread(times) for times in taken.values()))


def _as_fast_as_seen(profile: LatencyProfile, steps: Mapping[StepArguments, float]) -> LatencyProfile:
    """Hardware is measured without the engine's own kernels, which may be much faster: no fit could say so in shares of
    it."""
    seen = max(2.0 * profile.shape.linear_params * step.num_new_tokens / seconds for step, seconds in steps.items())
    hardware = profile.hardware
    return replace(profile, hardware=replace(hardware, peak_flops=max(hardware.peak_flops, seen)))


class _Timer:
    """Runs the requests of one configuration. Prompts are of random tokens, so that nobody has them cached but where
    that is wanted."""

    def __init__(self, engine: ServedEngine) -> None:
        self._engine, self._random, self._num, self._next_block = engine, random.Random(_SEED), 0, 0

    async def time(self, kind: _Kind) -> tuple[StepArguments, float]:
        if kind.batch:
            return await self._decodes(kind.batch, kind.num_tokens)
        return await self._prompt(kind.num_tokens, kind.start)

    async def _prompt(self, count: int, start: int) -> tuple[StepArguments, float]:
        before = self._tokens(start)
        if before:
            await self._run([*before, *self._tokens(1)], 1, [])
        stamps: list[float] = [perf_counter()]
        cached = await self._run([*before, *self._tokens(count)], 1, stamps)
        total = start + count
        pairs = (total * (total + 1) - cached * (cached + 1)) // 2
        return StepArguments(total - cached, total, 1, pairs), stamps[1] - stamps[0]

    async def _decodes(self, batch: int, context: int) -> tuple[StepArguments, float]:
        stamps: list[list[float]] = [[] for _ in range(batch)]
        async with asyncio.TaskGroup() as group:
            for row in stamps:
                group.create_task(self._run(self._tokens(context), DRAWN, row))
        begin, end = max(row[0] for row in stamps), min(row[-1] for row in stamps)
        beside = [[at for at in row if begin <= at <= end] for row in stamps]
        gaps = [(row[-1] - row[0]) / (len(row) - 1) for row in beside if len(row) > 1]
        if not gaps:  # they were never all there at once: the last to begin decodes with whoever is left
            last = max(stamps, key=lambda row: row[0])
            gaps = [(last[-1] - last[0]) / max(1, len(last) - 1)]
        context_tokens = batch * (context + DRAWN // 2)
        return StepArguments(batch, context_tokens, batch, context_tokens), median(gaps)

    async def _run(self, tokens: TokenIds, num_output: int, stamps: list[float]) -> int:
        """Appends when each output came. Returns the prompt tokens that were cached."""
        self._num += 1
        greedy = SamplingParams(max_tokens=num_output, temperature=0.0, ignore_eos=True)
        job = Job(f"calibrate-{self._num}", 1, tokens, 0, greedy, self._blocks(len(tokens)), num_loaded=0, save_from=0)
        cached = 0
        async with aclosing(self._engine.run(job, _nothing, _nothing)) as outputs:
            async for output in outputs:
                stamps.extend([perf_counter()] * len(output.token_ids))
                cached = output.cached_tokens or cached
        return cached

    def _blocks(self, num_tokens: int) -> list[int]:
        """Where KV of its prompt is saved, as in serving; each other blocks than the one before."""
        engine = self._engine
        count = engine.layout.num_blocks(num_tokens - 1) if engine.shares_kv else 0
        first = self._next_block if self._next_block + count <= engine.num_blocks else 0
        self._next_block = first + count
        return list(range(first, first + count))

    def _tokens(self, count: int) -> TokenIds:
        most = self._engine.model.vocab_size
        return [self._random.randrange(most) for _ in range(count)]


def _nothing(*_: object) -> None:
    pass
