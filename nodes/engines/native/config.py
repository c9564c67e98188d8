"""Reads a Hugging Face config.json into the few numbers a decoder needs; refuses what this engine cannot run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transfer.errors import InvalidValue
from transfer.models import CONFIG_FILE, read_json

FAMILIES = ("llama", "qwen2", "qwen3")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position encoding. `kind` is "default", "linear" or "llama3"; the rest as transformers names it."""

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 0

    @property
    def description(self) -> str:
        """Equal text, equal rotation: goes into KvLayout.rope and with it into every KV key."""
        text = f"theta={self.theta:g}"
        if self.kind == "default":
            return text
        text += f",{self.kind},factor={self.factor:g}"
        if self.kind == "llama3":
            text += f",low={self.low_freq_factor:g},high={self.high_freq_factor:g},from={self.original_max_position}"
        return text


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """Shape of a decoder-only transformer of the Llama, Qwen2 or Qwen3 family."""

    family: str
    vocab_size: int
    hidden_size: int
    ffn_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_context: int
    norm_eps: float
    rope: RopeConfig
    tied_head: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    head_norm: bool

    @property
    def group_size(self) -> int:
        """Query heads that share one KV head."""
        return self.num_heads // self.num_kv_heads


def read_config(directory: Path) -> DecoderConfig:
    """Raises InvalidValue when a key is missing or the model is of a kind this engine does not run."""
    return parse_config(read_json(directory / CONFIG_FILE), str(directory))


def parse_config(config: dict[str, Any], where: str) -> DecoderConfig:
    """`config` as in config.json; `where` names the model in errors."""
    family = config.get("model_type")
    if family not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise InvalidValue(f"{where} is of family {family!r}; the native engine runs {known}: choose such a model")
    _refuse_variants(config, where)

    def number(key: str, default: int | None = None) -> int:
        value = config.get(key)
        if value is None:
            value = default
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise InvalidValue(f"{key} of {where} must be a positive integer, got {value!r}; repair its {CONFIG_FILE}")
        return value

    num_heads, hidden_size = number("num_attention_heads"), number("hidden_size")
    num_kv_heads = number("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise InvalidValue(f"{where} has {num_heads} heads, not a multiple of its {num_kv_heads} KV heads; repair it")
    bias = bool(config.get("attention_bias", False))
    return DecoderConfig(
        family=family,
        vocab_size=number("vocab_size"),
        hidden_size=hidden_size,
        ffn_size=number("intermediate_size"),
        num_layers=number("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=number("head_dim", hidden_size // num_heads),
        max_context=number("max_position_embeddings"),
        norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        rope=parse_rope(config, where),
        tied_head=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=family == "qwen2" or bias,
        output_bias=family != "qwen2" and bias,
        mlp_bias=family == "llama" and bool(config.get("mlp_bias", False)),
        head_norm=family == "qwen3",
    )


def parse_rope(config: dict[str, Any], where: str) -> RopeConfig:
    """Understands both spellings: rope_theta with rope_scaling, and rope_parameters. Raises InvalidValue."""
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = float(scaling.get("rope_theta") or config.get("rope_theta") or 10000.0)
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind not in ("default", "linear", "llama3"):
        raise InvalidValue(
            f"{where} scales its rotary positions by {kind!r}; this engine knows default, linear, llama3"
        )
    if kind == "default":
        return RopeConfig(theta=theta)
    try:
        factor = float(scaling["factor"])
        if kind == "linear":
            return RopeConfig(theta=theta, kind=kind, factor=factor)
        return RopeConfig(
            theta=theta,
            kind=kind,
            factor=factor,
            low_freq_factor=float(scaling["low_freq_factor"]),
            high_freq_factor=float(scaling["high_freq_factor"]),
            original_max_position=int(scaling["original_max_position_embeddings"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidValue(
            f"the {kind} rope scaling of {where} lacks or misstates {error}; repair its config"
        ) from None


def _refuse_variants(config: dict[str, Any], where: str) -> None:
    """Settings that would change the mathematics if they were ignored."""
    if config.get("quantization_config"):
        raise InvalidValue(f"{where} holds quantised weights; the native engine needs plain ones: choose those")
    if config.get("hidden_act", "silu") != "silu":
        raise InvalidValue(f"{where} uses the activation {config['hidden_act']!r}; the native engine runs silu only")
    sliding = "sliding_attention" in (config.get("layer_types") or ()) or config.get("use_sliding_window")
    if sliding or float(config.get("partial_rotary_factor") or 1.0) != 1.0:
        raise InvalidValue(f"{where} uses sliding windows or partial rotation; the native engine runs neither")
