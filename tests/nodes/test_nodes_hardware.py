"""Hardware classes, the CPU probe and the model shapes that emulation stands on."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from nodes.hardware import PRESETS, preset, probe, with_gpus
from nodes.shapes import SHAPES, kv_blocks, latency_profile, shape, weights_bytes, with_precision
from transfer.errors import InvalidValue


def test_presets_by_any_case_and_unknown_ones_name_the_nearest() -> None:
    assert set(PRESETS) == {
        "H800", "H20", "H100", "H200", "A100", "L40S", "B200", "B300", "GB200", "GB300", "CPU"
    }  # fmt: skip
    assert preset("h20-96") is PRESETS["H20"]
    with pytest.raises(InvalidValue, match="did you mean H800"):
        preset("H8000")


def test_an_h20_decodes_cheaper_and_an_h800_prefills_cheaper() -> None:
    model = shape("llama-3.1-8b")
    h800, h20 = (latency_profile(preset(name), model) for name in ("H800", "H20"))
    assert h800.prefill_s(4096) * h800.hardware.price_per_hour < h20.prefill_s(4096) * h20.hardware.price_per_hour
    assert h20.decode_step_s(16, 32000) * 0.70 < h800.decode_step_s(16, 32000) * 2.0


def test_the_probe_is_short_and_plausible() -> None:
    start = time.perf_counter()
    profile = probe()
    assert time.perf_counter() - start < 1.0
    assert 1e9 < profile.peak_flops < 1e14
    assert 1e9 < profile.memory_bytes_per_s < 1e12
    assert profile.memory_bytes > 1 << 28
    assert profile.price_per_hour > 0


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("llama-3.1-8b", 8.03e9),
        ("llama-3.1-70b", 70.55e9),
        ("qwen3-32b", 32.76e9),
        ("qwen3-30b-a3b", 30.53e9),
        ("qwen3-235b-a22b", 235.1e9),
        ("mixtral-8x7b", 46.7e9),
        ("deepseek-v3", 671e9),
        ("kimi-k2", 1.026e12),
        ("minimax-m2", 228.7e9),
        ("gpt-oss-120b", 116.8e9),
        ("glm-4.5-air", 106.8e9),
    ],
)
def test_shapes_have_as_many_parameters_as_the_models(name: str, params: float) -> None:
    assert shape(name).total_params == pytest.approx(params, rel=0.002)
    assert weights_bytes(with_precision(shape(name), "bf16")) / 2 == pytest.approx(params, rel=0.002)


@pytest.mark.parametrize(
    ("name", "active"), [("qwen3-30b-a3b", 3.0e9), ("deepseek-r1", 37e9), ("kimi-k2", 32e9), ("gpt-oss-120b", 5.1e9)]
)
def test_a_token_multiplies_with_the_active_parameters_only(name: str, active: float) -> None:
    assert shape(name).linear_params == pytest.approx(active, rel=0.02)


def test_precision_is_a_suffix_of_the_name_and_narrows_experts_first() -> None:
    assert shape("llama-3.1-70b-fp8").weight_bytes_per_param == 1.0
    assert shape("llama-3-70b") == shape("LLAMA-3.1-70B")
    narrow = shape("deepseek-v3-fp4")
    assert (narrow.weight_bytes_per_param, narrow.expert_bytes_per_param) == (1.0, 0.5625)
    assert weights_bytes(narrow) == pytest.approx(385e9, rel=0.01)
    assert with_precision(shape("qwen3-8b"), "int4").weight_only
    with pytest.raises(InvalidValue, match="fp2"):
        with_precision(shape("qwen3-8b"), "fp2")
    assert latency_profile(preset("H100"), shape("llama-3.1-8b-fp8")).prefill_s(8192) == pytest.approx(
        latency_profile(preset("H100"), shape("llama-3.1-8b")).prefill_s(8192) / 2, rel=0.2
    )


def test_parallelism_must_fill_the_instance() -> None:
    model, eight = shape("deepseek-v3"), with_gpus(preset("H200"), 8)
    profile = latency_profile(eight, model, dp=8, ep=8)
    assert (profile.tp, profile.num_gpus) == (1, 8)
    assert with_gpus(eight, 4) == with_gpus(preset("H200"), 4), "of however many GPUs it was"
    with pytest.raises(InvalidValue, match="8 GPUs"):
        latency_profile(eight, model, tp=4)
    assert kv_blocks(eight, model, 64, dp=8) > 4 * kv_blocks(eight, model, 64), "latent KV is held by every GPU of a tp"


def test_kv_blocks_fill_what_weights_leave() -> None:
    model = shape("llama-3.1-8b")
    blocks = kv_blocks(preset("H800"), model, 16)
    assert blocks * 16 * model.kv_token_bytes + weights_bytes(model) == pytest.approx(72e9, rel=1e-3)
    big = shape("llama-3.1-70b")
    with pytest.raises(InvalidValue, match="more GPUs with --tp"):
        kv_blocks(preset("H800"), big, 16)
    assert kv_blocks(with_gpus(preset("H800"), 4), big, 16) > 10_000
    with pytest.raises(InvalidValue):
        with_gpus(preset("H800"), 0)


def test_a_shape_is_read_from_config_json_or_refused_naming_the_key(tmp_path: Path) -> None:
    config = {
        "hidden_size": 576, "num_attention_heads": 9, "num_hidden_layers": 30, "num_key_value_heads": 3,
        "intermediate_size": 1536, "vocab_size": 49152,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert shape(str(tmp_path)) == SHAPES["smollm2-135m"]
    (tmp_path / "config.json").write_text(json.dumps(config | {"vocab_size": "many"}))
    with pytest.raises(InvalidValue, match="vocab_size"):
        shape(str(tmp_path))
    with pytest.raises(InvalidValue, match=r"did you mean llama-3\.1-8b"):
        shape("llama-3.1-8c")


def _config(directory: Path, **keys: object) -> None:
    (directory / "config.json").write_text(json.dumps(keys))


def test_experts_latent_attention_and_precision_are_read_from_config_json(tmp_path: Path) -> None:
    _config(
        tmp_path, hidden_size=7168, num_attention_heads=128, num_hidden_layers=61, num_key_value_heads=128,
        intermediate_size=18432, vocab_size=129280, n_routed_experts=256, num_experts_per_tok=8, n_shared_experts=1,
        moe_intermediate_size=2048, first_k_dense_replace=3, kv_lora_rank=512, q_lora_rank=1536, qk_rope_head_dim=64,
        qk_nope_head_dim=128, v_head_dim=128, quantization_config={"quant_method": "fp8"},
    )  # fmt: skip
    assert shape(str(tmp_path)) == SHAPES["deepseek-v3"]
    sizes = {"hidden_size": 2880, "num_attention_heads": 64, "num_hidden_layers": 36, "num_key_value_heads": 8}
    kinds = ["sliding_attention", "full_attention"] * 18
    _config(
        tmp_path, **sizes, head_dim=64, intermediate_size=2880, vocab_size=201088, num_local_experts=128,
        num_experts_per_tok=4, sliding_window=128, layer_types=kinds, quantization_config={"quant_method": "mxfp4"},
    )  # fmt: skip
    assert shape(str(tmp_path)) == SHAPES["gpt-oss-120b"]


def test_old_and_nested_configs_are_read_and_a_wrong_expert_count_is_named(tmp_path: Path) -> None:
    opt = {"hidden_size": 5120, "num_attention_heads": 40, "num_hidden_layers": 40, "ffn_dim": 20480}
    _config(tmp_path, model_type="opt", vocab_size=50272, **opt)
    assert shape(str(tmp_path)) == SHAPES["opt-13b"]
    _config(tmp_path, model_type="bloom", n_layer=70, n_head=112, hidden_size=14336, vocab_size=250880)
    assert shape(str(tmp_path)) == SHAPES["bloom-176b"]
    qwen = {
        "hidden_size": 2048, "num_attention_heads": 32, "num_hidden_layers": 48, "num_key_value_heads": 4,
        "head_dim": 128, "intermediate_size": 6144, "vocab_size": 151936, "moe_intermediate_size": 768,
        "num_experts": 128, "num_experts_per_tok": 8,
    }  # fmt: skip
    _config(tmp_path, model_type="wrapper", text_config=qwen)
    assert shape(str(tmp_path)) == SHAPES["qwen3-30b-a3b"]
    _config(tmp_path, **(qwen | {"num_experts_per_tok": "eight"}))
    with pytest.raises(InvalidValue, match="num_experts_per_tok"):
        shape(str(tmp_path))
