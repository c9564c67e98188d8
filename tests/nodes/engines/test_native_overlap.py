"""The native engine beside a fetch: it reads no layer before that has come; what it wrote before a failure is right."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import torch
import transformers
from native_helpers import generate, greedy, save_tiny_model, tokens

from nodes.engines.engine import Chunk, Sampling, StepBatch
from nodes.engines.native.engine import NativeEngine
from nodes.roles.gate import FetchGate, StepGate
from transfer.errors import StepAbandoned

PROMPT = [3 + (7 * index) % 140 for index in range(40)]
OTHER = [3 + (11 * index) % 130 for index in range(24)]
TABLE, OTHER_TABLE, SOURCE = [5, 9, 6], [1, 2], [0, 1, 2]
NUM_LAYERS, NUM_FETCHED = 3, 2
START = NUM_FETCHED * 16
FIRST = Sampling(greedy(1), PROMPT, 0)


@pytest.fixture(scope="module")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny")
    save_tiny_model(directory, transformers.LlamaConfig, num_hidden_layers=NUM_LAYERS)
    return directory


@pytest.fixture
async def engines(tiny_dir: Path) -> AsyncIterator[tuple[NativeEngine, NativeEngine]]:
    """One whose blocks SOURCE hold PROMPT's KV, and one whose arena is full of NaN."""
    made = [
        NativeEngine(tiny_dir, dtype="float32", device="cpu", num_blocks=32, num_threads=1, measure=False)
        for _ in range(2)
    ]
    await made[0].step(StepBatch([Chunk("a", PROMPT, 0, SOURCE)]))
    for layer in range(NUM_LAYERS):
        for view in made[1].arena.views(layer, 0, 32):
            torch.frombuffer(view, dtype=torch.float32).fill_(math.nan)
    yield made[0], made[1]
    for engine in made:
        await engine.close()


def land(source: NativeEngine, target: NativeEngine, layer: int) -> None:
    for block in range(NUM_FETCHED):
        views = zip(
            source.arena.views(layer, SOURCE[block], 1), target.arena.views(layer, TABLE[block], 1), strict=True
        )
        for theirs, ours in views:
            ours[:] = theirs


def rows(engine: NativeEngine, layer: int, table: list[int], first: int, end: int) -> torch.Tensor:
    """K and V of positions first..end, [2, end - first, row]."""
    halves = [
        torch.cat([torch.frombuffer(engine.arena.views(layer, b, 1)[half], dtype=torch.float32) for b in table])
        for half in range(2)
    ]
    return torch.stack([half.view(len(table) * 16, -1)[first:end] for half in halves])


def batch(sampling: Sampling | None = None) -> StepBatch:
    """The rest of a prompt whose leading blocks are on their way, beside another prompt."""
    rest = Chunk("a", PROMPT[START:], START, TABLE, sampling)
    return StepBatch([rest, Chunk("b", OTHER, 0, OTHER_TABLE)])


async def test_greedy_text_is_the_same_with_an_overlapped_fetch(engines: tuple[NativeEngine, NativeEngine]) -> None:
    source, engine = engines
    [expected] = await generate(source, [PROMPT], greedy(12))
    gate, announced = FetchGate("a", NUM_LAYERS, 10.0), list[int]()
    step = asyncio.create_task(engine.step(batch(FIRST), announced.append, StepGate([gate])))
    for layer in range(NUM_LAYERS):
        await asyncio.sleep(0.03)
        assert announced == list(range(layer)), "a layer was passed on before it had come"
        land(source, engine, layer)
        gate.landed(layer + 1)
    result = await step
    assert announced == list(range(NUM_LAYERS))
    assert 0.06 < result.waited_s < result.duration_s
    history = [*PROMPT, result.sampled["a"].token_id]
    while len(history) < len(PROMPT) + 12:
        sampling = Sampling(greedy(12), history, len(history) - len(PROMPT))
        more = await engine.step(StepBatch([Chunk("a", history[-1:], len(history) - 1, [*TABLE, 20], sampling)]))
        history.append(more.sampled["a"].token_id)
    assert history[len(PROMPT) :] == tokens(expected)


@pytest.mark.parametrize("failing", range(NUM_LAYERS))
async def test_an_abandoned_step_has_announced_right_kv_only(
    engines: tuple[NativeEngine, NativeEngine], failing: int
) -> None:
    source, engine = engines
    [[expected]] = await generate(source, [PROMPT], greedy(1))
    await source.step(StepBatch([Chunk("a", PROMPT, 0, SOURCE), Chunk("b", OTHER, 0, [20, 21])]))
    gate, announced = FetchGate("a", NUM_LAYERS, 10.0), list[int]()
    for layer in range(failing):
        land(source, engine, layer)
    gate.landed(failing)
    asyncio.get_running_loop().call_later(0.02, gate.fail, "the pool was lost")
    with pytest.raises(StepAbandoned, match=f"layer {failing} .* the pool was lost"):
        await engine.step(batch(), announced.append, StepGate([gate]))
    assert announced == list(range(failing))
    for layer in announced:
        torch.testing.assert_close(rows(engine, layer, TABLE, 0, 40), rows(source, layer, SOURCE, 0, 40))
        torch.testing.assert_close(rows(engine, layer, OTHER_TABLE, 0, 24), rows(source, layer, [20, 21], 0, 24))
    again = StepBatch([Chunk("a", PROMPT, 0, TABLE, FIRST), Chunk("b", OTHER, 0, OTHER_TABLE)])
    assert (await engine.step(again)).sampled["a"].token_id == expected.token_id
    for layer in range(NUM_LAYERS):
        torch.testing.assert_close(rows(engine, layer, OTHER_TABLE, 0, 24), rows(source, layer, [20, 21], 0, 24))


async def test_what_nobody_wants_disturbs_nobody(engines: tuple[NativeEngine, NativeEngine]) -> None:
    """An aborted sequence's blocks stay NaN (prefill work draws no token of them); the prompt beside it is right."""
    source, engine = engines
    await source.step(StepBatch([Chunk("b", OTHER, 0, [20, 21])]))
    gate = FetchGate("a", NUM_LAYERS, 10.0)
    step = asyncio.create_task(engine.step(batch(), None, StepGate([gate])))
    await asyncio.sleep(0.02)
    assert not step.done()
    gate.let_go()
    await step
    for layer in range(NUM_LAYERS):
        torch.testing.assert_close(rows(engine, layer, OTHER_TABLE, 0, 24), rows(source, layer, [20, 21], 0, 24))
