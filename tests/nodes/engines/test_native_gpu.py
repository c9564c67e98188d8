"""The same engine on CUDA: greedy text as transformers, and KV that crosses through the staging arena."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from native_helpers import generate, greedy, reference_greedy, save_tiny_model, tokens

from nodes.engines.engine import Chunk, Sampling, StepBatch
from nodes.engines.native.engine import NativeEngine

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is visible to torch"),
]
PROMPT = [3 + (7 * index) % 140 for index in range(60)]


async def test_greedy_text_on_cuda_equals_the_reference(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path, transformers.LlamaConfig)
    prompts = [PROMPT, PROMPT[:17], PROMPT[3:50]]
    engine = NativeEngine(tmp_path, dtype="float32", device="cuda", num_blocks=64, measure=False)
    try:
        outputs = await generate(engine, prompts, greedy(10), chunk=9, stagger=1, scattered=True)
    finally:
        await engine.close()
    assert [tokens(output) for output in outputs] == [reference_greedy(model, prompt, 10) for prompt in prompts]


async def test_kv_moves_between_device_and_host(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, transformers.LlamaConfig)
    on_device = NativeEngine(tmp_path, dtype="float32", device="cuda", num_blocks=16, measure=False)
    on_host = NativeEngine(tmp_path, dtype="float32", device="cpu", num_blocks=16, measure=False)
    blocks = [0, 1, 2, 3]
    last = Chunk("a", PROMPT[-1:], 59, blocks, Sampling(greedy(1), PROMPT, 0))
    try:
        await on_device.step(StepBatch([Chunk("a", PROMPT[:-1], 0, blocks)]))
        for layer in range(3):
            on_device.arena.prepare_read(layer, blocks)
            for source, target in zip(
                on_device.arena.views(layer, 0, 4), on_host.arena.views(layer, 0, 4), strict=True
            ):
                target[:] = source
        there = await on_host.step(StepBatch([last]))
        for layer in range(3):
            on_device.arena.commit_write(layer, blocks)
        back = await on_device.step(StepBatch([last]))
    finally:
        await on_device.close()
        await on_host.close()
    assert there.sampled["a"].token_id == back.sampled["a"].token_id
