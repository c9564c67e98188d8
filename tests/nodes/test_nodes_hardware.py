"""Hardware classes, the CPU probe and the model shapes that emulation stands on."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from nodes.hardware import PRESETS, preset, probe, with_gpus
from nodes.shapes import SHAPES, kv_blocks, latency_profile, shape, weights_bytes
from transfer.errors import InvalidValue


def test_presets_by_any_case_and_unknown_ones_name_the_nearest() -> None:
    assert set(PRESETS) == {"H800", "H20", "H100", "H200", "A100", "L40S", "CPU"}
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
    ("name", "params"), [("llama-3.1-8b", 8.03e9), ("llama-3.1-70b", 70.55e9), ("qwen3-32b", 32.76e9)]
)
def test_shapes_have_as_many_parameters_as_the_models(name: str, params: float) -> None:
    assert weights_bytes(shape(name)) / 2 == pytest.approx(params, rel=0.002)


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
        shape("llama-3-8b")
