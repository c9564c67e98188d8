"""The decoder of the Llama, Qwen2 and Qwen3 families over paged KV: one forward pass of a mixed step.

It neither samples nor decides what a step holds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

from nodes.engines.native.attention import Attention
from nodes.engines.native.config import DecoderConfig
from nodes.engines.native.kv import LayerKv, PagedKv
from nodes.engines.native.linear import Linear, make_linear
from nodes.engines.native.plan import StepPlan
from nodes.engines.native.rope import rope_tables
from nodes.engines.native.weights import Weights


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """One transformer layer's parameters. head_norms: weights of q_norm and k_norm [head_dim] (Qwen3)."""

    attention_norm: torch.Tensor
    qkv: Linear
    output: Linear
    head_norms: tuple[torch.Tensor, torch.Tensor] | None
    ffn_norm: torch.Tensor
    gate_up: Linear
    down: Linear


class Decoder:
    """Parameters in `dtype` on `device`; positions up to `num_positions`."""

    def __init__(
        self, directory: Path, config: DecoderConfig, dtype: torch.dtype, device: torch.device, num_positions: int
    ) -> None:
        self.config, self.dtype, self.device = config, dtype, device
        with torch.inference_mode(), Weights(directory, config) as weights:
            self._embedding = weights.take("model.embed_tokens.weight", dtype, device)
            head = self._embedding if config.tied_head else weights.take("lm_head.weight", dtype, device)
            self._head = make_linear(head)
            self._final_norm = weights.take("model.norm.weight", dtype, device)
            self._layers = [_load_layer(weights, layer, config, dtype, device) for layer in range(config.num_layers)]
            self._cos, self._sin = rope_tables(config.rope, config.head_dim, num_positions, dtype, device)
        self._attention = Attention(config, dtype, device)

    def forward(
        self, plan: StepPlan, kv: PagedKv, on_layer: Callable[[int], None] | None,
        before_layer: Callable[[int], None] | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Writes the step's KV and returns float32 logits [len(plan.sampled), vocab_size].

        on_layer is called for each layer as soon as its KV is written, before_layer just before that: it may block
        until KV of earlier positions has come, or raise to end the step.
        """
        with torch.inference_mode():
            hidden = F.embedding(plan.tokens, self._embedding)
            cos, sin = self._cos.index_select(0, plan.positions), self._sin.index_select(0, plan.positions)
            last = len(self._layers) - 1
            for index, layer in enumerate(self._layers):
                q, k, v = self._project(layer, hidden, cos, sin)
                cache = kv.layers[index]
                _write(cache, plan.slots, k, v)
                kv.mark_written(index)
                if before_layer is not None:
                    before_layer(index)
                if on_layer is not None:
                    on_layer(index)
                if index == last and not plan.sampled:
                    break
                attended = self._attention.run(plan, cache, q, k, v)
                if index == last:
                    attended, hidden = attended[plan.logit_rows], hidden[plan.logit_rows]
                hidden = self._feed_forward(layer, layer.output.plus(attended, hidden))
            if not plan.sampled:
                return torch.empty(0, self.config.vocab_size)
            return self._head(self._norm(hidden, self._final_norm)).float()

    def _project(
        self, layer: DecoderLayer, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Rotated q and k, and v: [num_rows, heads, head_dim] each."""
        num_heads, num_kv_heads = self.config.num_heads, self.config.num_kv_heads
        qkv = layer.qkv(self._norm(hidden, layer.attention_norm)).view(hidden.shape[0], -1, self.config.head_dim)
        rotated, v = torch.split_with_sizes(qkv, (num_heads + num_kv_heads, num_kv_heads), dim=1)
        if layer.head_norms is not None:
            q_weight, k_weight = layer.head_norms
            q, k = self._norm(rotated[:, :num_heads], q_weight), self._norm(rotated[:, num_heads:], k_weight)
            rotated = torch.cat((q, k), dim=1)
        rolled = rotated.roll(self.config.head_dim // 2, -1)
        rotated = torch.addcmul(rotated * cos, rolled, sin)
        q, k = torch.split_with_sizes(rotated, (num_heads, num_kv_heads), dim=1)
        return q, k, v

    def _feed_forward(self, layer: DecoderLayer, hidden: torch.Tensor) -> torch.Tensor:
        gate, up = layer.gate_up(self._norm(hidden, layer.ffn_norm)).chunk(2, dim=-1)
        return layer.down.plus(F.silu(gate).mul_(up), hidden)

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.rms_norm(x, weight.shape, weight, self.config.norm_eps)


def _write(cache: LayerKv, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    cache.rows_k.index_copy_(0, slots, k.flatten(1))
    cache.rows_v.index_copy_(0, slots, v.flatten(1))


def _load_layer(
    weights: Weights, index: int, config: DecoderConfig, dtype: torch.dtype, device: torch.device
) -> DecoderLayer:
    prefix = f"model.layers.{index}."

    def take(name: str) -> torch.Tensor:
        return weights.take(prefix + name, dtype, device)

    def linear(names: tuple[str, ...], has_bias: bool) -> Linear:
        weight = torch.cat([take(f"{name}.weight") for name in names])
        return make_linear(weight, torch.cat([take(f"{name}.bias") for name in names]) if has_bias else None)

    qkv_names = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    norms = (take("self_attn.q_norm.weight"), take("self_attn.k_norm.weight")) if config.head_norm else None
    return DecoderLayer(
        attention_norm=take("input_layernorm.weight"),
        qkv=linear(qkv_names, config.qkv_bias),
        output=linear(("self_attn.o_proj",), config.output_bias),
        head_norms=norms,
        ffn_norm=take("post_attention_layernorm.weight"),
        gate_up=linear(("mlp.gate_proj", "mlp.up_proj"), config.mlp_bias),
        down=linear(("mlp.down_proj",), config.mlp_bias),
    )
