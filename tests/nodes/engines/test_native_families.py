"""The native decoder computes what transformers computes, for every family, in float32, on tiny random models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from native_helpers import (
    VOCAB_SIZE,
    generate,
    greedy,
    reference_greedy,
    reference_logprobs,
    save_tiny_model,
    tokens,
)

from nodes.engines.native.engine import NativeEngine
from transfer.errors import InvalidValue
from transfer.models import weight_files

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
FAMILIES = {
    "llama": (transformers.LlamaConfig, {}),
    "llama-tied-biased": (
        transformers.LlamaConfig,
        {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4},
    ),
    "llama-rope-llama3": (transformers.LlamaConfig, {"rope_parameters": LLAMA3}),
    "llama-rope-linear": (
        transformers.LlamaConfig,
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 3.0}},
    ),
    "qwen2": (transformers.Qwen2Config, {"tie_word_embeddings": True}),
    "qwen3": (transformers.Qwen3Config, {"head_dim": 24, "num_key_value_heads": 1}),
}
PROMPT = [3 + (5 * index * index + 11 * index) % 150 for index in range(211)]


def make_engine(directory: Path, **options: Any) -> NativeEngine:
    options = {"dtype": "float32", "device": "cpu", "num_blocks": 64, "num_threads": 1, "measure": False} | options
    return NativeEngine(directory, **options)


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    directory = tmp_path_factory.mktemp(request.param)
    config_class, changes = FAMILIES[request.param]
    return directory, save_tiny_model(directory, config_class, **changes)


async def test_logits_equal_the_reference(family: tuple[Path, Any]) -> None:
    directory, model = family
    engine = make_engine(directory)
    try:
        [[sampled]] = await generate(engine, [PROMPT], greedy(1, logprobs=VOCAB_SIZE))
    finally:
        await engine.close()
    expected = reference_logprobs(model, PROMPT)[-1]
    assert sampled.logprob is not None
    ours = torch.empty(VOCAB_SIZE)
    ours[list(sampled.logprob.top_ids)] = torch.tensor(sampled.logprob.top_logprobs)
    torch.testing.assert_close(ours, expected, atol=2e-4, rtol=0.0)
    assert expected.std() > 0.5, "the model is too flat to tell right from wrong"


async def test_greedy_text_does_not_depend_on_batch_chunks_or_blocks(family: tuple[Path, Any]) -> None:
    directory, model = family
    prompts = [PROMPT[:1], PROMPT[:37], PROMPT[20:180], PROMPT[:16], PROMPT[5:70]]
    expected = [reference_greedy(model, prompt, 12) for prompt in prompts]
    engine = make_engine(directory)
    try:
        for options in (
            {},
            {"chunk": 7, "stagger": 2, "scattered": True},
            {"chunk": 33, "stagger": 1},
            {"chunk": 1, "scattered": True},
        ):
            outputs = await generate(engine, prompts, greedy(12), **options)  # type: ignore[arg-type]
            assert [tokens(output) for output in outputs] == expected, options
    finally:
        await engine.close()


def test_another_family_is_refused_with_a_sentence(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, transformers.GPTNeoXConfig)
    with pytest.raises(InvalidValue, match=r"family 'gpt_neox'.*llama, qwen2, qwen3"):
        make_engine(tmp_path)


def test_tensors_of_another_shape_or_name_are_refused(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, transformers.LlamaConfig)
    config = tmp_path / "config.json"
    text = config.read_text(encoding="utf-8")
    config.write_text(text.replace('"intermediate_size": 96', '"intermediate_size": 80'), encoding="utf-8")
    with pytest.raises(InvalidValue, match=r"mlp\.gate_proj\.weight .*shape \(96, 64\), the config says \(80, 64\)"):
        make_engine(tmp_path)
    config.write_text(text.replace('"num_hidden_layers": 3', '"num_hidden_layers": 4'), encoding="utf-8")
    with pytest.raises(InvalidValue, match=r"lacks the tensor model\.layers\.3"):
        make_engine(tmp_path)
    config.write_text(text.replace('"num_hidden_layers": 3', '"num_hidden_layers": 2'), encoding="utf-8")
    with pytest.raises(InvalidValue, match=r"holds a tensor model\.layers\.2"):
        make_engine(tmp_path)


async def test_weights_in_several_files_load(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path, transformers.LlamaConfig)
    (tmp_path / "model.safetensors").unlink()
    model.save_pretrained(tmp_path, max_shard_size="60KB")
    assert len(weight_files(tmp_path)) > 2
    engine = make_engine(tmp_path)
    try:
        [output] = await generate(engine, [PROMPT[:40]], greedy(5))
    finally:
        await engine.close()
    assert tokens(output) == reference_greedy(model, PROMPT[:40], 5)


def test_a_truncated_weight_file_is_refused(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, transformers.LlamaConfig)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    with pytest.raises(InvalidValue, match="safetensors"):
        make_engine(tmp_path)


async def test_bfloat16_stays_close_to_float32(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path, transformers.LlamaConfig)
    engine = make_engine(tmp_path, dtype="bfloat16")
    try:
        [[sampled]] = await generate(engine, [PROMPT], greedy(1, logprobs=VOCAB_SIZE), chunk=50, scattered=True)
    finally:
        await engine.close()
    assert sampled.logprob is not None
    expected = reference_logprobs(model, PROMPT)[-1][list(sampled.logprob.top_ids)]
    assert (torch.tensor(sampled.logprob.top_logprobs) - expected).abs().mean() < 0.1
