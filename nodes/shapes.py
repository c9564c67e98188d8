"""The sizes of known models, how fast they run on a hardware class and how much KV fits beside their weights.

For emulation, placement and planning; reads at most a config.json, never weights.
"""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

from transfer.errors import InvalidValue
from transfer.models import CONFIG_FILE, model_dir, read_json
from transfer.profile import HardwareProfile, LatencyProfile, ModelShape

MEMORY_FOR_WEIGHTS_AND_KV = 0.9
"""The rest is activations, the runtime and fragmentation."""
MBU_BY_TP = {1: 0.73, 2: 0.61, 4: 0.46, 8: 0.29}
"""Decode bandwidth use seen on H200 with tensor parallelism (TensorRT-LLM)."""


def _shape(layers: int, hidden: int, heads: int, kv_heads: int, head_dim: int, ffn: int, vocab: int) -> ModelShape:
    return ModelShape(
        num_layers=layers,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        ffn_size=ffn,
        vocab_size=vocab,
    )


SHAPES: dict[str, ModelShape] = {
    "smollm2-135m": _shape(30, 576, 9, 3, 64, 1536, 49152),
    "qwen2.5-0.5b": _shape(24, 896, 14, 2, 64, 4864, 151936),
    "llama-3.2-1b": _shape(16, 2048, 32, 8, 64, 8192, 128256),
    "qwen2.5-7b": _shape(28, 3584, 28, 4, 128, 18944, 152064),
    "mistral-7b": _shape(32, 4096, 32, 8, 128, 14336, 32768),
    "llama-3.1-8b": _shape(32, 4096, 32, 8, 128, 14336, 128256),
    "qwen3-8b": _shape(36, 4096, 32, 8, 128, 12288, 151936),
    "qwen3-32b": _shape(64, 5120, 64, 8, 128, 25600, 151936),
    "llama-3.1-70b": _shape(80, 8192, 64, 8, 128, 28672, 128256),
}


def shape(name_or_dir: str) -> ModelShape:
    """The shape of a catalogued model, or of a directory with a config.json.

    Raises InvalidValue naming the nearest catalogued model, or what is wrong with the directory.
    """
    if found := SHAPES.get(name_or_dir.lower()):
        return found
    if "/" in name_or_dir or (Path(name_or_dir) / CONFIG_FILE).is_file():
        return shape_from_config(model_dir(name_or_dir))
    nearest = difflib.get_close_matches(name_or_dir.lower(), SHAPES, n=1, cutoff=0.0)[0]
    raise InvalidValue(
        f"the shape of model {name_or_dir!r} is not known; did you mean {nearest}? Or give a directory with config.json"
    )


def shape_from_config(directory: Path) -> ModelShape:
    """The shape in a Hugging Face config.json. Raises InvalidValue naming the wrong key."""
    config = read_json(directory / CONFIG_FILE)
    hidden, heads = _size(config, "hidden_size", directory), _size(config, "num_attention_heads", directory)
    return _shape(
        _size(config, "num_hidden_layers", directory),
        hidden,
        heads,
        _size(config, "num_key_value_heads", directory, heads),
        _size(config, "head_dim", directory, hidden // heads),
        _size(config, "intermediate_size", directory),
        _size(config, "vocab_size", directory),
    )


def latency_profile(hardware: HardwareProfile, model: ModelShape) -> LatencyProfile:
    """The preset prediction for `model` on one instance of `hardware`, tensor-parallel over its GPUs."""
    tp = hardware.num_gpus
    mbu = MBU_BY_TP.get(tp) or MBU_BY_TP[max(known for known in MBU_BY_TP if known < tp)]
    return LatencyProfile(hardware=hardware, shape=model, tp=tp, mbu=mbu)


def weights_bytes(model: ModelShape) -> float:
    """Bytes of all weights: what every token multiplies with, and the input embedding."""
    return (model.linear_params + model.hidden_size * model.vocab_size) * model.weight_bytes_per_param


def kv_blocks(hardware: HardwareProfile, model: ModelShape, block_size: int) -> int:
    """KV blocks of `block_size` tokens that fit beside the weights. Raises InvalidValue when not even one does."""
    room = hardware.num_gpus * hardware.memory_bytes * MEMORY_FOR_WEIGHTS_AND_KV - weights_bytes(model)
    blocks = int(room // (model.kv_token_bytes * block_size))
    if blocks < 1:
        raise InvalidValue(
            f"{weights_bytes(model) / 1e9:.0f} GB of weights leave no room for KV in {hardware.num_gpus} x "
            f"{hardware.name} ({hardware.memory_bytes / 1e9:.0f} GB each); give the instance more GPUs with --tp"
        )
    return blocks


def _size(config: dict[str, Any], key: str, directory: Path, default: int | None = None) -> int:
    value = config.get(key)
    if value is None and default is not None:
        return default
    if not isinstance(value, int) or value < 1:
        raise InvalidValue(f"{key} in {directory / CONFIG_FILE} must be a positive integer, got {value!r}")
    return value
