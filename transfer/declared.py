"""What a latency prediction is about: HardwareProfile, an accelerator as declared, and ModelShape. Only data."""

from __future__ import annotations

from transfer.terms import Struct


class HardwareProfile(Struct, frozen=True):
    """One instance's accelerator as declared or probed. Prices are indicative, in dollars an hour.

    peak_flops is dense FLOP/s in 16 bit, peak_flops_fp8 and _fp4 those of narrower products (0: has none, computes in
    16 bit); memory_bytes_per_s the memory bandwidth; all of one GPU. link_bytes_per_s: what one instance can send to
    another host. scale_up_bytes_per_s: what one GPU can send to its at most
    scale_up_size - 1 neighbours (0: not charged).
    """

    name: str
    num_gpus: int
    peak_flops: float
    memory_bytes: float
    memory_bytes_per_s: float
    link_bytes_per_s: float
    price_per_hour: float
    peak_flops_fp8: float = 0.0
    peak_flops_fp4: float = 0.0
    scale_up_bytes_per_s: float = 0.0
    scale_up_size: int = 8

    def peak_for(self, bytes_per_param: float) -> float:
        """FLOP/s of products with weights of that width; those of 16 bit where the class has no unit for it."""
        if bytes_per_param <= 0.75:
            return self.peak_flops_fp4 or self.peak_flops
        if bytes_per_param <= 1.25:
            return self.peak_flops_fp8 or self.peak_flops
        return self.peak_flops


class ModelShape(Struct, frozen=True):
    """What the latency model needs to know of a decoder-only transformer.

    With num_experts > 0 all layers but the first num_dense_layers route each token to experts_per_token of num_experts
    experts of expert_ffn_size, and through shared_experts more of that size. kv_lora_rank > 0 is latent attention
    (MLA, DeepSeek-V2, section 2.1): KV is one vector of kv_lora_rank + rope_head_dim a token and layer; head_dim is
    then that of the unrotated part. window > 0: num_window_layers of the layers attend to the last `window` tokens.
    """

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    vocab_size: int
    weight_bytes_per_param: float = 2.0
    kv_bytes_per_element: float = 2.0
    ffn_matrices: int = 3
    """3 with a gate (Llama), 2 without (OPT, BLOOM)."""
    num_experts: int = 0
    experts_per_token: int = 0
    expert_ffn_size: int = 0
    shared_experts: int = 0
    num_dense_layers: int = 0
    expert_bytes_per_param: float = 0.0
    """0: as weight_bytes_per_param."""
    weight_only: bool = False
    """Weights are widened before they are multiplied: they are read narrow and computed in 16 bit."""
    kv_lora_rank: int = 0
    rope_head_dim: int = 0
    q_lora_rank: int = 0
    v_head_dim: int = 0
    num_window_layers: int = 0
    window: int = 0

    @property
    def attention_params(self) -> int:
        """Of one layer: projections of queries, keys, values and output."""
        hidden, heads = self.hidden_size, self.num_heads
        if not self.kv_lora_rank:
            return hidden * self.head_dim * (2 * heads + 2 * self.num_kv_heads)
        query, value = heads * (self.head_dim + self.rope_head_dim), self.v_head_dim or self.head_dim
        down = hidden * self.q_lora_rank + self.q_lora_rank * query if self.q_lora_rank else hidden * query
        latent = hidden * (self.kv_lora_rank + self.rope_head_dim)
        return down + latent + self.kv_lora_rank * heads * (self.head_dim + value) + heads * value * hidden

    @property
    def num_expert_layers(self) -> int:
        return self.num_layers - self.num_dense_layers if self.num_experts else 0

    @property
    def expert_params(self) -> int:
        """Of one routed expert of one layer."""
        return self.ffn_matrices * self.hidden_size * self.expert_ffn_size

    @property
    def params_per_layer(self) -> int:
        """Of one dense layer."""
        return self.attention_params + self.ffn_matrices * self.hidden_size * self.ffn_size

    @property
    def dense_params(self) -> int:
        """Parameters read whatever the routing: layers without their routed experts, and the output head."""
        routed = self.num_expert_layers
        always = self.attention_params + self.shared_experts * self.expert_params + self.hidden_size * self.num_experts
        dense = (self.num_layers - routed) * self.params_per_layer
        return dense + routed * always + self.hidden_size * self.vocab_size

    @property
    def linear_params(self) -> int:
        """Parameters every token multiplies with: layers, of the experts those it is routed to, and output head."""
        return self.dense_params + self.num_expert_layers * self.experts_per_token * self.expert_params

    @property
    def total_params(self) -> int:
        """All that is stored: every expert and the input embedding, too."""
        experts = self.num_expert_layers * self.num_experts * self.expert_params
        return self.dense_params + experts + self.hidden_size * self.vocab_size

    @property
    def expert_weight_bytes(self) -> float:
        """Of all routed experts of all layers."""
        width = self.expert_bytes_per_param or self.weight_bytes_per_param
        return self.num_expert_layers * self.num_experts * self.expert_params * width

    @property
    def dense_weight_bytes(self) -> float:
        """Of everything else that is read in a step."""
        return self.dense_params * self.weight_bytes_per_param

    @property
    def kv_token_bytes(self) -> float:
        """KV of one token over the layers that keep it for the whole context."""
        return (self.num_layers - self.num_window_layers) * self.kv_layer_bytes

    @property
    def kv_layer_bytes(self) -> float:
        """KV of one token in one layer."""
        latent = self.kv_lora_rank + self.rope_head_dim
        width = latent if self.kv_lora_rank else 2 * self.num_kv_heads * self.head_dim
        return width * self.kv_bytes_per_element

    def experts_touched(self, num_tokens: float) -> float:
        """Expected number of distinct experts of a layer that `num_tokens` evenly routed tokens need."""
        if not self.num_experts:
            return 0.0
        return float(self.num_experts * (1.0 - (1.0 - self.experts_per_token / self.num_experts) ** num_tokens))
