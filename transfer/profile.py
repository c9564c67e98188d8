"""What a node is and how fast: HardwareProfile (declared) and LatencyProfile (predicts), both pure.

Step time (form as in DistServe, OSDI'24, section 3, widened by a KV and a constant term):
  t_step = max(F_linear / (tp peak MFU), W / (tp BW MBU)) + max(F_attn / (tp peak MFU_a), KV / (tp BW MBU_kv))
           + 2 layers allreduce(tp) + alpha + beta batch
The compute term is kept for decode: an H20 turns compute-bound near batch 37 (ridge 37 FLOP/B).
"""

from __future__ import annotations

from transfer.errors import InvalidValue
from transfer.terms import Struct


class HardwareProfile(Struct, frozen=True):
    """One instance's accelerator as declared or probed. Prices are indicative, in dollars an hour.

    peak_flops is dense FLOP/s in the serving dtype; memory_bytes_per_s its memory bandwidth;
    link_bytes_per_s what one instance can send to another host.
    """

    name: str
    num_gpus: int
    peak_flops: float
    memory_bytes: float
    memory_bytes_per_s: float
    link_bytes_per_s: float
    price_per_hour: float


class ModelShape(Struct, frozen=True):
    """What the latency model needs to know of a decoder-only transformer."""

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    vocab_size: int
    weight_bytes_per_param: float = 2.0
    kv_bytes_per_element: float = 2.0

    @property
    def params_per_layer(self) -> int:
        attention = self.hidden_size * self.head_dim * (2 * self.num_heads + 2 * self.num_kv_heads)
        return attention + 3 * self.hidden_size * self.ffn_size

    @property
    def linear_params(self) -> int:
        """Parameters every token multiplies with: layers and output head."""
        return self.num_layers * self.params_per_layer + self.hidden_size * self.vocab_size

    @property
    def kv_token_bytes(self) -> float:
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.kv_bytes_per_element


class LatencyProfile(Struct, frozen=True):
    """Predicts seconds for a model on an instance. Pure: equal arguments, equal answers.

    `provenance` is "preset", "measured", "fitted" or "extrapolated" and travels into every prediction.
    """

    hardware: HardwareProfile
    shape: ModelShape
    mfu: float = 0.5
    mfu_attention: float = 0.3
    mbu: float = 0.73
    mbu_kv: float = 0.6
    tp: int = 1
    allreduce_s: float = 0.0
    alpha_s: float = 0.002
    beta_s: float = 0.00002
    link_efficiency: float = 0.8
    provenance: str = "preset"

    def step_s(self, num_new_tokens: int, context_tokens: int, batch: int, attention_pairs: int | None = None) -> float:
        """Seconds for one mixed step.

        num_new_tokens: tokens computed in the step, over all sequences. context_tokens: KV tokens read,
        over all sequences. batch: sequences in the step. attention_pairs: (query, key) pairs; by default
        context_tokens, right for decodes of one token each.
        """
        if num_new_tokens < 0 or context_tokens < 0 or batch < 0:
            raise InvalidValue(f"a step cannot hold {num_new_tokens} tokens, {context_tokens} context, {batch} rows")
        if num_new_tokens == 0:
            return 0.0
        hw, shape = self.hardware, self.shape
        pairs = context_tokens if attention_pairs is None else attention_pairs
        flops = 2.0 * shape.linear_params * num_new_tokens
        weights = shape.linear_params * shape.weight_bytes_per_param
        attention_flops = 4.0 * shape.num_layers * shape.num_heads * shape.head_dim * pairs
        kv_bytes = shape.kv_token_bytes * context_tokens
        linear = max(
            flops / (self.tp * hw.peak_flops * self.mfu), weights / (self.tp * hw.memory_bytes_per_s * self.mbu)
        )
        attention = max(
            attention_flops / (self.tp * hw.peak_flops * self.mfu_attention),
            kv_bytes / (self.tp * hw.memory_bytes_per_s * self.mbu_kv),
        )
        reduce = 2 * shape.num_layers * self.allreduce_s if self.tp > 1 else 0.0
        return linear + attention + reduce + self.alpha_s + self.beta_s * batch

    def prefill_s(self, num_new_tokens: int, num_cached_tokens: int = 0) -> float:
        """Seconds to compute `num_new_tokens` of one prompt after `num_cached_tokens` already held."""
        total = num_new_tokens + num_cached_tokens
        pairs = (total * (total + 1) - num_cached_tokens * (num_cached_tokens + 1)) // 2
        return self.step_s(num_new_tokens, total, 1, pairs)

    def decode_step_s(self, batch: int, context_tokens: int) -> float:
        """Seconds for one token of each of `batch` sequences holding `context_tokens` of KV in all."""
        return self.step_s(batch, context_tokens, batch)

    def transfer_s(self, num_tokens: int) -> float:
        """Seconds to move the KV of `num_tokens` tokens to another host."""
        return num_tokens * self.shape.kv_token_bytes / (self.hardware.link_bytes_per_s * self.link_efficiency)

    def scaled(self, factor: float) -> LatencyProfile:
        """The same profile with every step `factor` times as long: a measured correction."""
        return LatencyProfile(
            hardware=self.hardware, shape=self.shape, mfu=self.mfu / factor, mfu_attention=self.mfu_attention / factor,
            mbu=self.mbu / factor, mbu_kv=self.mbu_kv / factor, tp=self.tp, allreduce_s=self.allreduce_s * factor,
            alpha_s=self.alpha_s * factor, beta_s=self.beta_s * factor, link_efficiency=self.link_efficiency,
            provenance="measured",
        )  # fmt: skip
