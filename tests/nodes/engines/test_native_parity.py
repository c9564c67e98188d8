"""The real model in float32 generates what transformers generates, whatever the batch, the chunks and the blocks."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from native_helpers import generate, greedy, tokens
from reference.make_reference import greedy as reference_greedy
from reference.make_reference import load_reference, load_reference_model

from nodes.engines.engine import Chunk, Sampling, StepBatch
from nodes.engines.native.engine import NativeEngine
from transfer.models import read_identity

pytestmark = [pytest.mark.weights, pytest.mark.timeout(600)]
NEAR_TIE = 1e-3
"""Below this lead of the best logit over the second, either token is right."""


@pytest.fixture(scope="module")
def engine(smollm2_dir: Path) -> Iterator[NativeEngine]:
    engine = NativeEngine(smollm2_dir, dtype="float32", device="cpu", num_blocks=900, measure=False)
    yield engine
    asyncio.run(engine.close())


def assert_parity(outputs: list[list[int]], names: list[str]) -> None:
    """Every token equal, except where the reference itself nearly tied; after such a fork nothing is compared."""
    entries = {entry["name"]: entry for entry in load_reference()["prompts"]}
    for name, output in zip(names, outputs, strict=True):
        entry = entries[name]
        for index, (ours, theirs) in enumerate(zip(output, entry["output"], strict=False)):
            if ours != theirs:
                assert entry["margins"][index] <= NEAR_TIE, f"{name} differs at output token {index}"
                break


def prompts_of(names: list[str]) -> list[list[int]]:
    entries = {entry["name"]: entry["prompt"] for entry in load_reference()["prompts"]}
    return [entries[name] for name in names]


def test_the_reference_belongs_to_these_weights(smollm2_dir: Path) -> None:
    assert load_reference()["revision"] == read_identity(smollm2_dir).revision


async def test_parity_in_a_batch_with_odd_chunks_and_scattered_blocks(engine: NativeEngine) -> None:
    names = ["english-5", "code-24", "cjk-65", "emoji-100", "chat-300", "shared-600-0", "shared-600-1"]
    outputs = await generate(engine, prompts_of(names), greedy(24), chunk=61, stagger=1, scattered=True)
    assert_parity([tokens(output) for output in outputs], names)


async def test_parity_when_a_long_prefix_is_reused_from_another_request(engine: NativeEngine) -> None:
    """Blocks that hold a common prefix are shared; the rest of the prompt starts in the middle."""
    names = ["shared-600-2", "shared-600-3"]
    first, second = prompts_of(names)
    table = list(range(100, 160))
    await engine.step(StepBatch([Chunk("first", first, 0, table)]))
    shared = 592
    assert first[:shared] == second[:shared]
    own = table[: shared // 16] + list(range(300, 320))
    outputs: list[int] = []
    history, start = list(second), shared
    while len(outputs) < 24:
        step = Chunk("second", history[start:], start, own, Sampling(greedy(24), history, len(outputs)))
        result = await engine.step(StepBatch([step]))
        start = len(history)
        outputs.append(result.sampled["second"].token_id)
        history.append(outputs[-1])
    assert_parity([outputs], ["shared-600-3"])


@pytest.mark.slow
async def test_parity_of_all_forty_prompts_in_one_batch(engine: NativeEngine) -> None:
    names = [entry["name"] for entry in load_reference()["prompts"]]
    assert len(names) == 40
    for half in (names[::2], names[1::2]):
        outputs = await generate(engine, prompts_of(half), greedy(64), chunk=256, stagger=1, scattered=True)
        assert_parity([tokens(output) for output in outputs], half)


@pytest.mark.slow
def test_the_reference_is_what_transformers_generates(smollm2_dir: Path) -> None:
    model = load_reference_model(smollm2_dir)
    for entry in load_reference()["prompts"][:40:9]:
        output, margins = reference_greedy(model, entry["prompt"], 16)
        assert output == entry["output"][:16], entry["name"]
        assert margins == pytest.approx(entry["margins"][:16], abs=2e-3)
