"""Reads a ModelShape from a Hugging Face config.json: sizes, experts, latent and windowed attention, precision."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nodes.shape_catalogue import MXFP4_BYTES
from transfer.errors import InvalidValue
from transfer.models import CONFIG_FILE, read_json
from transfer.profile import ModelShape

_LAYERS = ("num_hidden_layers", "n_layer")
_HEADS = ("num_attention_heads", "n_head")
_EXPERTS = ("n_routed_experts", "num_local_experts", "num_experts")
_EXPERTS_PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "experts_per_token")
_SHARED = ("n_shared_experts", "num_shared_experts")
_NO_GATE = ("opt", "bloom")
"""model_type of models whose feed-forward part is two matrices."""
_QUANT_BYTES = {"fp8": 1.0, "fbgemm_fp8": 1.0, "mxfp4": MXFP4_BYTES, "nvfp4": 0.5625, "awq": 0.53125, "gptq": 0.53125}


def shape_from_config(directory: Path) -> ModelShape:
    """The shape in a Hugging Face config.json. Raises InvalidValue naming the wrong key."""
    raw = read_json(directory / CONFIG_FILE)
    text = raw.get("text_config")
    config = _Config(raw | text if isinstance(text, dict) else raw, directory)
    hidden, heads = config.size("hidden_size", "n_embed"), config.size(*_HEADS)
    experts = config.optional(*_EXPERTS)
    fields = _experts(config, experts) | _attention(config) | _window(config) | _precision(config, experts)
    no_gate = config.values.get("model_type") in _NO_GATE
    ffn = config.size("intermediate_size", "ffn_dim", default=4 * hidden if no_gate or experts else None)
    head_dim = config.optional("qk_nope_head_dim") if "kv_lora_rank" in fields else 0
    return ModelShape(
        num_layers=config.size(*_LAYERS),
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=config.size("num_key_value_heads", default=heads),
        head_dim=head_dim or config.size("head_dim", default=hidden // heads),
        ffn_size=ffn,
        vocab_size=config.size("vocab_size"),
        ffn_matrices=2 if no_gate else 3,
        **fields,
    )


class _Config:
    """Checked access to the file's values."""

    def __init__(self, values: dict[str, Any], directory: Path) -> None:
        self.values, self._path = values, directory / CONFIG_FILE

    def size(self, *keys: str, default: int | None = None) -> int:
        """The positive integer under the first of `keys` that is there."""
        key = next((key for key in keys if self.values.get(key) is not None), keys[0])
        value = self.values.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, int) or value < 1:
            raise InvalidValue(f"{key} in {self._path} must be a positive integer, got {value!r}")
        return value

    def optional(self, *keys: str) -> int:
        """As size, and 0 where none is there or it is 0."""
        given = [key for key in keys if self.values.get(key)]
        return self.size(*given) if given else 0


def _experts(config: _Config, experts: int) -> dict[str, Any]:
    if not experts:
        return {}
    size = config.size("moe_intermediate_size", "intermediate_size")
    shared = config.optional(*_SHARED) or round(config.optional("shared_expert_intermediate_size") / size)
    return {
        "num_experts": experts,
        "experts_per_token": config.size(*_EXPERTS_PER_TOKEN),
        "expert_ffn_size": size,
        "shared_experts": shared,
        "num_dense_layers": config.optional("first_k_dense_replace"),
    }


def _attention(config: _Config) -> dict[str, Any]:
    """Of latent attention; nothing for any other."""
    rank = config.optional("kv_lora_rank")
    if not rank:
        return {}
    return {
        "kv_lora_rank": rank,
        "rope_head_dim": config.size("qk_rope_head_dim"),
        "q_lora_rank": config.optional("q_lora_rank"),
        "v_head_dim": config.size("v_head_dim"),
    }


def _window(config: _Config) -> dict[str, Any]:
    """Only for models that say which of their layers have a window; where all have, the KV is that of any model."""
    kinds = config.values.get("layer_types")
    window = config.optional("sliding_window")
    num = kinds.count("sliding_attention") if isinstance(kinds, list) else 0
    return {"num_window_layers": num, "window": window} if window and 0 < num < len(kinds or ()) else {}


def _precision(config: _Config, experts: int) -> dict[str, Any]:
    quant = config.values.get("quantization_config")
    method = quant.get("quant_method") if isinstance(quant, dict) else None
    width = _QUANT_BYTES.get(str(method).lower()) if method else None
    if width is None or width == 1.0:
        return {} if width is None else {"weight_bytes_per_param": 1.0}
    names = ("expert_bytes_per_param",) if experts else ("weight_bytes_per_param",)
    return {name: width for name in names} | {"weight_only": str(method).lower() in ("awq", "gptq")}
