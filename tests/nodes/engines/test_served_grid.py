"""Requests timed on an engine that batches by itself: a fit of them finds the step times the engine has."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
from msgspec.structs import replace

from nodes.engines import served_grid
from nodes.engines.served import Job, OnSaved, OnStarted, Output
from nodes.fitting import fit
from nodes.hardware import preset
from nodes.shapes import latency_profile, shape
from transfer.errors import InvalidValue
from transfer.terms import FinishReason, KvLayout

DECLARED = latency_profile(preset("CPU"), shape("llama-3.1-8b"))
TRUE = replace(
    DECLARED, hardware=replace(DECLARED.hardware, peak_flops=3 * DECLARED.hardware.peak_flops), mfu=0.9,
    mfu_attention=0.4, mbu=0.5, mbu_kv=0.3, alpha_s=0.002, beta_s=0.0003,
)  # fmt: skip
LAYOUT = KvLayout(num_layers=1, num_kv_heads=1, head_dim=8, block_size=32, dtype="float32", rope="none")


@dataclass
class Seat:
    job: Job
    answers: asyncio.Queue[Output] = field(default_factory=asyncio.Queue)
    num_drawn: int = 0


class Stepping:
    """Batches as such engines do: all prompts that have come in one step, beside those that decode. Its clock is its
    own and moves by what TRUE says."""

    model, max_length = SimpleNamespace(vocab_size=1000), 4096
    layout, shares_kv, latency = LAYOUT, True, DECLARED

    def __init__(self, capacity_blocks: int = 512) -> None:
        self.capacity_blocks = self.num_blocks = capacity_blocks
        self.now = 0.0
        self._seats: list[Seat] = []
        self._seen: list[list[int]] = []
        self._task: asyncio.Task[None] | None = None

    async def run(self, job: Job, on_started: OnStarted, on_saved: OnSaved) -> AsyncGenerator[Output, None]:
        seat = Seat(job)
        self._seats.append(seat)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._steps())
        while True:
            output = await seat.answers.get()
            yield output
            if output.finish is not None:
                return

    async def _steps(self) -> None:
        while self._seats:
            for _ in range(4):
                await asyncio.sleep(0)  # whoever comes at the same time is in the same step
            new_tokens = context = pairs = 0
            cached = {id(seat): self._cached(seat.job.tokens) if seat.num_drawn == 0 else 0 for seat in self._seats}
            for seat in self._seats:
                total = len(seat.job.tokens) + seat.num_drawn
                start = cached[id(seat)] if seat.num_drawn == 0 else total - 1
                new_tokens += total - start
                context += total
                pairs += (total * (total + 1) - start * (start + 1)) // 2
            self.now += TRUE.step_s(new_tokens, context, len(self._seats), pairs)
            for seat in list(self._seats):
                seat.num_drawn += 1
                assert seat.job.sampling is not None
                is_last = seat.num_drawn == seat.job.sampling.max_tokens
                if seat.num_drawn == 1:
                    self._seen.append(seat.job.tokens)
                if is_last:
                    self._seats.remove(seat)
                seat.answers.put_nowait(
                    Output((1,), finish=FinishReason.LENGTH if is_last else None, cached_tokens=cached[id(seat)])
                )

    def _cached(self, tokens: list[int]) -> int:
        longest = 0
        for seen in self._seen:
            count = next((at for at, (a, b) in enumerate(zip(seen, tokens, strict=False)) if a != b), len(tokens) - 1)
            longest = max(longest, count // LAYOUT.block_size * LAYOUT.block_size)
        return longest


def test_a_fit_of_whole_requests_finds_the_steps_they_are_made_of(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Stepping()
    monkeypatch.setattr(served_grid, "perf_counter", lambda: engine.now)
    timed = asyncio.run(served_grid.time_requests(engine, seconds=1.0))  # type: ignore[arg-type]
    found = fit(timed.samples)
    assert found.error < 0.02
    fitted = found.profile(timed.samples[0].profile)
    for batch, context in ((1, 300), (8, 500)):
        assert fitted.decode_step_s(batch, batch * context) == pytest.approx(
            TRUE.decode_step_s(batch, batch * context), rel=0.05
        )
    assert fitted.prefill_s(700) == pytest.approx(TRUE.prefill_s(700), rel=0.05)
    assert timed.spread < 0.01


def test_an_engine_without_room_is_told_so() -> None:
    with pytest.raises(InvalidValue, match="more KV memory"):
        asyncio.run(served_grid.time_requests(Stepping(capacity_blocks=4), seconds=1.0))  # type: ignore[arg-type]
