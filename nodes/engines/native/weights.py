"""Opens safetensors files, checks that exactly the expected tensors are there, and hands them out one by one.

Tensors are memory-mapped; only a change of dtype or device copies.
"""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open

from nodes.engines.native.config import DecoderConfig
from transfer.errors import InvalidValue
from transfer.models import weight_files

_IGNORED_SUFFIXES = (".rotary_emb.inv_freq", ".masked_bias", ".attn.bias")


class Weights:
    """The tensors of one model directory. Raises InvalidValue when one is missing, unknown or of the wrong shape."""

    def __init__(self, directory: Path, config: DecoderConfig) -> None:
        self._directory = directory
        self._files: dict[str, Any] = {}
        for path in weight_files(directory):
            try:
                handle: Any = safe_open(path, framework="pt")
                names = list(handle.keys())
            except (SafetensorError, OSError) as error:
                raise InvalidValue(f"{path} is not a whole safetensors file ({error}); pull the model again") from None
            self._files.update(dict.fromkeys(names, handle))
        self._check(config)

    def take(self, name: str, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """One tensor as `dtype` on `device`; a view of the mapped file when both are as stored."""
        tensor: torch.Tensor = self._files[name].get_tensor(name)
        return tensor.to(device=device, dtype=dtype)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._files.clear()

    def _check(self, config: DecoderConfig) -> None:
        expected = expected_shapes(config)
        for name, shape in expected.items():
            if name not in self._files:
                raise InvalidValue(
                    f"{self._directory} lacks the tensor {name}; its download is incomplete: pull it again"
                )
            found = tuple(self._files[name].get_slice(name).get_shape())
            if found != shape:
                raise InvalidValue(
                    f"tensor {name} of {self._directory} has shape {found}, the config says {shape}; "
                    "the weights belong to another config: restore both"
                )
        for name in sorted(self._files):
            unused_head = config.tied_head and name == "lm_head.weight"
            if name not in expected and not unused_head and not name.endswith(_IGNORED_SUFFIXES):
                raise InvalidValue(
                    f"{self._directory} holds a tensor {name} that a {config.family} decoder does not have; "
                    "the native engine would compute something else: choose another model"
                )


def expected_shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor that a model of this configuration has, by its Hugging Face name."""
    hidden, ffn, vocab = config.hidden_size, config.ffn_size, config.vocab_size
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden), "model.norm.weight": (hidden,)}
    if not config.tied_head:
        shapes["lm_head.weight"] = (vocab, hidden)
    linears = (
        ("self_attn.q_proj", q_size, hidden, config.qkv_bias),
        ("self_attn.k_proj", kv_size, hidden, config.qkv_bias),
        ("self_attn.v_proj", kv_size, hidden, config.qkv_bias),
        ("self_attn.o_proj", hidden, q_size, config.output_bias),
        ("mlp.gate_proj", ffn, hidden, config.mlp_bias),
        ("mlp.up_proj", ffn, hidden, config.mlp_bias),
        ("mlp.down_proj", hidden, ffn, config.mlp_bias),
    )
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}."
        shapes[prefix + "input_layernorm.weight"] = (hidden,)
        shapes[prefix + "post_attention_layernorm.weight"] = (hidden,)
        for name, rows, columns, has_bias in linears:
            shapes[f"{prefix}{name}.weight"] = (rows, columns)
            if has_bias:
                shapes[f"{prefix}{name}.bias"] = (rows,)
        if config.head_norm:
            shapes[prefix + "self_attn.q_norm.weight"] = (config.head_dim,)
            shapes[prefix + "self_attn.k_norm.weight"] = (config.head_dim,)
    return shapes
