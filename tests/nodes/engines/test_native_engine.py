"""NativeEngine keeps the Engine protocol: layer order, refusals before any write, isolation, memory, closing."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from native_helpers import generate, greedy, save_tiny_model, tokens

from nodes.engines.engine import Chunk, Sampling, StepBatch
from nodes.engines.native.engine import NativeEngine
from transfer.errors import EngineFailed, InvalidValue
from transfer.kv.arena import SHM_DIR, MappedArena

PROMPT = [3 + (7 * index) % 140 for index in range(40)]


@pytest.fixture(scope="module")
def tiny_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny")
    save_tiny_model(directory, transformers.LlamaConfig)
    return directory


def make_engine(directory: Path, **options: Any) -> NativeEngine:
    options = {"dtype": "float32", "device": "cpu", "num_blocks": 32, "num_threads": 1, "measure": False} | options
    return NativeEngine(directory, **options)


@pytest.fixture
async def engine(tiny_dir: Path) -> AsyncIterator[NativeEngine]:
    engine = make_engine(tiny_dir)
    yield engine
    await engine.close()


def chunk(**changes: Any) -> Chunk:
    fields = {"request_id": "a", "tokens": PROMPT, "start": 0, "block_table": [0, 1, 2], "sampling": None} | changes
    return Chunk(**fields)


def kv_bytes(engine: NativeEngine, layer: int, blocks: int = 3) -> bytes:
    keys, values = engine.arena.views(layer, 0, blocks)
    return bytes(keys) + bytes(values)


async def test_each_layer_is_announced_once_in_order_after_its_kv_is_there(engine: NativeEngine) -> None:
    seen: list[tuple[int, bool, bool]] = []

    def on_layer(layer: int) -> None:
        later = kv_bytes(engine, layer + 1) if layer + 1 < engine.layout.num_layers else b"\0"
        seen.append((layer, any(kv_bytes(engine, layer)), any(later)))

    result = await engine.step(StepBatch([chunk()]), on_layer)
    assert seen == [(0, True, False), (1, True, False), (2, True, False)]
    assert result.sampled == {}
    assert result.duration_s > 0


async def test_kv_is_the_same_with_and_without_sampling_and_when_repeated(engine: NativeEngine) -> None:
    await engine.step(StepBatch([chunk()]))
    without = [kv_bytes(engine, layer) for layer in range(3)]
    await engine.step(StepBatch([chunk(sampling=Sampling(greedy(1), PROMPT, 0))]))
    assert [kv_bytes(engine, layer) for layer in range(3)] == without


async def test_one_step_reads_the_kv_that_another_engine_computed(engine: NativeEngine, tiny_dir: Path) -> None:
    """What a handoff does: all but the last token's KV is copied, the other engine draws the first token."""
    other = make_engine(tiny_dir)
    try:
        await engine.step(StepBatch([chunk(tokens=PROMPT[:-1])]))
        for layer in range(engine.layout.num_layers):
            for source, target in zip(engine.arena.views(layer, 0, 3), other.arena.views(layer, 5, 3), strict=True):
                target[:] = source
        last = chunk(tokens=PROMPT[-1:], start=39, block_table=[5, 6, 7], sampling=Sampling(greedy(1), PROMPT, 0))
        handed = await other.step(StepBatch([last]))
        [[whole]] = await generate(engine, [PROMPT], greedy(1))
    finally:
        await other.close()
    assert handed.sampled["a"] == whole


async def test_one_request_never_sees_another_ones_stale_blocks(engine: NativeEngine) -> None:
    """Blocks come with old content, here NaN; padding between sequences of unequal length must not leak it."""
    prompts = [PROMPT[:3], PROMPT[:30], PROMPT[5:26]]
    expected = [tokens(output) for output in await generate(engine, prompts, greedy(6))]
    for layer in range(engine.layout.num_layers):
        for view in engine.arena.views(layer, 0, engine.num_blocks):
            torch.frombuffer(view, dtype=torch.float32).fill_(math.nan)
    assert [tokens(output) for output in await generate(engine, prompts, greedy(6))] == expected
    for layer in range(engine.layout.num_layers):
        for view in engine.arena.views(layer, 0, engine.num_blocks):
            torch.frombuffer(view, dtype=torch.float32).fill_(math.nan)
    outputs = await generate(engine, prompts, greedy(6), chunk=5, stagger=1, scattered=True)
    assert [tokens(output) for output in outputs] == expected


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"tokens": []}, "holds no tokens"),
        ({"tokens": [160]}, r"outside 0\.\.159"),
        ({"tokens": [-1]}, r"outside 0\.\.159"),
        ({"block_table": [0, 1]}, "does not fit in its 2 blocks"),
        ({"block_table": [0, 1, 32]}, r"outside 0\.\.31"),
        ({"start": 500}, "exceeds the context of 512"),
    ],
)
async def test_a_chunk_outside_the_arena_is_refused_before_any_write(
    engine: NativeEngine, changes: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(InvalidValue, match=sentence):
        await engine.step(StepBatch([chunk(request_id="good"), chunk(**changes)]))
    assert not any(kv_bytes(engine, 0, 32))
    await engine.step(StepBatch([chunk()]))  # it still works


async def test_nan_in_a_requests_own_kv_fails_the_step_rather_than_drawing_a_token(engine: NativeEngine) -> None:
    await engine.step(StepBatch([chunk(tokens=PROMPT[:-1])]))
    keys, _ = engine.arena.views(1, 0, 1)
    torch.frombuffer(keys, dtype=torch.float32).fill_(math.nan)
    last = chunk(tokens=PROMPT[-1:], start=39, sampling=Sampling(greedy(1), PROMPT, 0))
    with pytest.raises(EngineFailed, match="not numbers"):
        await engine.step(StepBatch([last]))


async def test_shared_kv_is_mapped_by_its_handle_and_unlinked_on_close(tiny_dir: Path) -> None:
    engine = make_engine(tiny_dir, shared=True)
    handle = engine.arena.handle
    assert handle is not None
    assert (SHM_DIR / handle.name).exists()
    mapped = MappedArena(handle)
    await engine.step(StepBatch([chunk()]))
    assert bytes(mapped.views(2, 0, 3)[0]) == bytes(engine.arena.views(2, 0, 3)[0])
    assert any(mapped.views(2, 0, 3)[0])
    mapped.close()
    await engine.close()
    await engine.close()
    assert not (SHM_DIR / handle.name).exists()
    with pytest.raises(EngineFailed, match="closed"):
        await engine.step(StepBatch([chunk()]))


async def test_kv_memory_can_be_given_in_bytes_and_bounds_the_context(tiny_dir: Path) -> None:
    engine = make_engine(tiny_dir, num_blocks=None, kv_bytes=100_000, block_size=8)
    try:
        assert engine.layout.block_bytes == 2 * 3 * 8 * 2 * 16 * 4
        assert engine.num_blocks == 100_000 // engine.layout.block_bytes == 16
        with pytest.raises(InvalidValue, match="context of 128"):
            await engine.step(StepBatch([chunk(start=100, block_table=list(range(16)) * 2)]))
    finally:
        await engine.close()


def test_settings_that_cannot_work_are_refused_with_a_sentence(tiny_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidValue, match=r"at least one block.*raise the KV memory"):
        make_engine(tiny_dir, num_blocks=None, kv_bytes=10)
    with pytest.raises(InvalidValue, match="float32, bfloat16, float16 or auto"):
        make_engine(tiny_dir, dtype="int8")
    with pytest.raises(InvalidValue, match="cpu, cuda or auto"):
        make_engine(tiny_dir, device="tpu")
    with pytest.raises(InvalidValue, match=r"config\.json"):
        make_engine(tmp_path)


async def test_measured_latency_predicts_the_steps_it_was_fitted_to(tiny_dir: Path) -> None:
    engine = make_engine(tiny_dir, measure=True)
    try:
        assert engine.latency.provenance == "measured"
        assert engine.latency.hardware is engine.hardware
        assert 0 < engine.latency.decode_step_s(1, 1) < engine.latency.decode_step_s(8, 8) + 1e-9 < 1.0
        assert 0 < engine.latency.prefill_s(64) < engine.latency.prefill_s(512)
        assert engine.handoff_s(1000) == 0.0
    finally:
        await engine.close()
