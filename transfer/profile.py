"""How fast a model runs on an instance: LatencyProfile predicts, pure. What it is about is in declared.py.

Step time (form as in DistServe, OSDI'24, section 3, widened by KV, communication and constant terms):
  t_step = max(F_linear / (tp peak MFU), W / (tp BW MBU)) + max(F_attn / (tp peak MFU_a), KV / (tp BW MBU_kv))
           + collectives + (pp - 1) send + alpha + beta batch
Experts are a linear term of their own: they read the weights of those experts only that the batch touches.
The compute term is kept for decode: an H20 turns compute-bound near batch 37 (ridge 37 FLOP/B).
"""

from __future__ import annotations

from functools import cached_property

import msgspec

from transfer.declared import HardwareProfile, ModelShape
from transfer.errors import InvalidValue
from transfer.terms import Struct

__all__ = ["HardwareProfile", "LatencyProfile", "ModelShape", "StepRange", "StepTerms", "UnitCosts"]

ACTIVATION_BYTES = 2.0
DISPATCH_BYTES = 1.0
"""An element sent to an expert (fp8); what comes back is an activation."""
EXTRAPOLATED = "extrapolated"


class StepTerms(Struct, frozen=True):
    """Seconds of one step by what they are spent on; `step_s` is their sum.

    Of two parts that overlap, the longer is charged, and of the shorter what does not overlap.
    """

    compute_s: float
    weight_s: float
    attention_s: float
    kv_s: float
    communication_s: float
    constant_s: float

    @property
    def step_s(self) -> float:
        return self.compute_s + self.weight_s + self.attention_s + self.kv_s + self.communication_s + self.constant_s

    def shares(self) -> dict[str, float]:
        """Share of the step by term, largest first; empty for a step of no time."""
        total = self.step_s
        terms = {name.removesuffix("_s"): getattr(self, name) for name in self.__struct_fields__}
        return {name: value / total for name, value in sorted(terms.items(), key=lambda one: -one[1]) if total > 0}


class StepRange(Struct, frozen=True):
    """The largest steps that coefficients were found from, each figure as step_s takes it."""

    num_new_tokens: int
    context_tokens: int
    batch: int
    attention_pairs: int


class LatencyProfile(Struct, frozen=True, dict=True):
    """Predicts seconds for a model on an instance. Pure: equal arguments, equal answers.

    The instance has tp x dp x pp GPUs: each of pp stages of layers splits its layers over tp GPUs and its sequences
    over dp such groups; experts are split over all tp x dp of a stage, as whole experts where ep > 1. overlap: the part
    of the shorter of computing and reading that hides behind the longer. `provenance` is "preset", "measured", "fitted"
    or "extrapolated" and travels into every prediction, with `error`: the relative median error of step times, None
    where nobody measured it.
    """

    hardware: HardwareProfile
    shape: ModelShape
    mfu: float = 0.5
    mfu_attention: float = 0.3
    mbu: float = 0.73
    mbu_kv: float = 0.6
    tp: int = 1
    allreduce_s: float = 0.0
    """Latency of one collective, beside what its bytes take."""
    alpha_s: float = 0.002
    beta_s: float = 0.00002
    link_efficiency: float = 0.8
    provenance: str = "preset"
    error: float | None = None
    pp: int = 1
    dp: int = 1
    ep: int = 1
    send_s: float = 0.00002
    """Latency of handing a batch to the next stage, beside what its bytes take."""
    scale_up_efficiency: float = 0.7
    overlap: float = 1.0
    fitted_to: StepRange | None = None
    """None: not known, as of a preset; no step counts as beyond it."""

    @property
    def num_gpus(self) -> int:
        return self.tp * self.dp * self.pp

    def step_s(self, num_new_tokens: int, context_tokens: int, batch: int, attention_pairs: int | None = None) -> float:
        """Seconds for one mixed step, from its start to its results through all stages.

        num_new_tokens: tokens computed in the step, over all sequences. context_tokens: KV tokens read,
        over all sequences. batch: sequences in the step. attention_pairs: (query, key) pairs; by default
        context_tokens, right for decodes of one token each.
        A step of decodes only runs as pp smaller batches that follow each other through the stages.
        """
        if num_new_tokens <= 0 or context_tokens < 0 or batch < 0:
            return _no_step(num_new_tokens, context_tokens, batch)
        pairs = context_tokens if attention_pairs is None else attention_pairs
        flat, costs = self._costs
        if flat and self.overlap == 1.0:  # as below, for what is asked most
            step = num_new_tokens * costs.send + costs.collectives + (self.alpha_s + self.beta_s * batch)
            linear, weights = num_new_tokens * costs.linear, costs.weights
            attention, kv = pairs * costs.attention, context_tokens * costs.kv
            step += linear if linear > weights else weights
            return step + (attention if attention > kv else kv)
        linear, weights, experts, expert_weights, attention, kv, communication, constant = self._parts(
            num_new_tokens, context_tokens, batch, pairs
        )
        step = communication + constant
        step += linear if linear > weights else weights
        step += experts if experts > expert_weights else expert_weights
        step += attention if attention > kv else kv
        exposed = 1.0 - self.overlap
        if exposed:
            step += exposed * (min(linear, weights) + min(experts, expert_weights) + min(attention, kv))
        return step

    def step_terms(
        self, num_new_tokens: int, context_tokens: int, batch: int, attention_pairs: int | None = None
    ) -> StepTerms:
        """Where step_s of the same arguments goes; the terms add up to it."""
        if num_new_tokens <= 0 or context_tokens < 0 or batch < 0:
            zero = _no_step(num_new_tokens, context_tokens, batch)
            return StepTerms(
                compute_s=zero, weight_s=zero, attention_s=zero, kv_s=zero, communication_s=zero, constant_s=zero
            )
        pairs = context_tokens if attention_pairs is None else attention_pairs
        linear, weights, experts, expert_weights, attention, kv, communication, constant = self._parts(
            num_new_tokens, context_tokens, batch, pairs
        )
        linear, weights = _charged(linear, weights, self.overlap)
        experts, expert_weights = _charged(experts, expert_weights, self.overlap)
        attention, kv = _charged(attention, kv, self.overlap)
        return StepTerms(
            compute_s=linear + experts, weight_s=weights + expert_weights, attention_s=attention, kv_s=kv,
            communication_s=communication, constant_s=constant,
        )  # fmt: skip

    def provenance_at(
        self, num_new_tokens: int, context_tokens: int, batch: int, attention_pairs: int | None = None
    ) -> str:
        """Where step_s of the same arguments comes from: `provenance`, or "extrapolated" for a larger step in any
        figure than those that were measured."""
        known = self.fitted_to
        if known is None:
            return self.provenance
        pairs = context_tokens if attention_pairs is None else attention_pairs
        within = (
            num_new_tokens <= known.num_new_tokens and context_tokens <= known.context_tokens
            and batch <= known.batch and pairs <= known.attention_pairs
        )  # fmt: skip
        return self.provenance if within else EXTRAPOLATED

    def prefill_provenance(self, num_new_tokens: int, num_cached_tokens: int, token_budget: int) -> str:
        """provenance_at of the last step of a prompt computed in steps of at most token_budget (0: one step)."""
        total = num_new_tokens + num_cached_tokens
        last = min(num_new_tokens, token_budget or num_new_tokens)
        return self.provenance_at(last, total, 1, (total * (total + 1) - (total - last) * (total - last + 1)) // 2)

    def interval_s(
        self, num_new_tokens: int, context_tokens: int, batch: int, attention_pairs: int | None = None
    ) -> float:
        """Seconds after a step's start until the first stage can take other work: step_s, but for a pipeline."""
        return self.step_s(num_new_tokens, context_tokens, batch, attention_pairs) / self.pp

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

    @property
    def unit_costs(self) -> UnitCosts:
        """What a step is made of, for whoever needs its time as a sum (a bound, a linear program)."""
        return self._costs[1]

    def scaled(self, factor: float) -> LatencyProfile:
        """The same profile with every step `factor` times as long: a measured correction."""
        return msgspec.structs.replace(
            self, mfu=self.mfu / factor, mfu_attention=self.mfu_attention / factor, mbu=self.mbu / factor,
            mbu_kv=self.mbu_kv / factor, scale_up_efficiency=self.scale_up_efficiency / factor,
            allreduce_s=self.allreduce_s * factor, send_s=self.send_s * factor, alpha_s=self.alpha_s * factor,
            beta_s=self.beta_s * factor, provenance="measured",
        )  # fmt: skip

    def _parts(self, num_new: float, context: float, batch: float, pairs: float) -> tuple[float, ...]:
        """Seconds computing and reading linear layers, then experts, then attention; communication; constants."""
        flat, costs = self._costs
        if flat:
            return (
                num_new * costs.linear, costs.weights, 0.0, 0.0, pairs * costs.attention, context * costs.kv,
                num_new * costs.send + costs.collectives, self.alpha_s + self.beta_s * batch,
            )  # fmt: skip
        if self.pp > 1 and num_new == batch:
            split = min(self.pp, batch)
            num_new, context, batch, pairs = num_new / split, context / split, batch / split, pairs / split
        rows = min(costs.dp, max(1.0, batch if num_new == batch else num_new))
        groups = min(costs.dp, max(1.0, batch))
        latent = min(pairs, context)
        touched = costs.expert_weights * (1.0 - costs.unrouted**num_new) if costs.expert_weights else 0.0
        attention = (pairs - latent) * costs.attention + latent * costs.attention_decode
        kv = context * costs.kv
        if costs.window:
            near = min(context, batch * costs.window)
            attention += min(pairs, num_new * costs.window) * costs.window_attention
            kv += near * costs.window_kv
        return (
            num_new * costs.linear / rows, costs.weights, num_new * costs.experts, touched, attention / groups,
            kv / groups, num_new * costs.send + costs.collectives, self.alpha_s + self.beta_s * batch,
        )  # fmt: skip

    @cached_property
    def _costs(self) -> tuple[bool, UnitCosts]:
        """Whether none of dp, pp, experts, latent or windowed attention is in use, and seconds a unit."""
        shape = self.shape
        plain = not (shape.num_experts or shape.kv_lora_rank or (shape.window and shape.num_window_layers))
        return plain and self.dp == 1 and self.pp == 1, _costs(self)


class UnitCosts(Struct, frozen=True):
    """Seconds of one token, pair, row or step on one dp group; computed once for a profile."""

    linear: float
    weights: float
    experts: float
    expert_weights: float
    """Of reading all experts."""
    unrouted: float
    """Chance that a token does not go to a given expert."""
    attention: float
    attention_decode: float
    kv: float
    window: float
    window_attention: float
    window_kv: float
    collectives: float
    send: float
    dp: float


def _costs(profile: LatencyProfile) -> UnitCosts:
    hw, shape, tp = profile.hardware, profile.shape, profile.tp
    width = 2.0 if shape.weight_only else shape.weight_bytes_per_param
    expert_width = 2.0 if shape.weight_only else shape.expert_bytes_per_param or width
    gpus, bandwidth = tp * profile.dp, hw.memory_bytes_per_s
    routed = shape.num_expert_layers * shape.experts_per_token * shape.expert_params
    whole = shape.num_layers - shape.num_window_layers
    value = shape.v_head_dim or shape.head_dim
    pair = 2.0 * shape.num_heads * (shape.head_dim + shape.rope_head_dim + value)
    absorbed = 2.0 * shape.num_heads * (2 * shape.kv_lora_rank + shape.rope_head_dim) if shape.kv_lora_rank else pair
    attention = tp * hw.peak_flops * profile.mfu_attention
    kv = min(tp, 1 if shape.kv_lora_rank else shape.num_kv_heads) * bandwidth * profile.mbu_kv
    collectives, send = _communication(profile)
    return UnitCosts(
        linear=2.0 * shape.dense_params / (tp * hw.peak_for(width) * profile.mfu),
        weights=shape.dense_weight_bytes / (tp * bandwidth * profile.mbu),
        experts=2.0 * routed / (gpus * hw.peak_for(expert_width) * profile.mfu),
        expert_weights=shape.expert_weight_bytes / (gpus * bandwidth * profile.mbu),
        unrouted=1.0 - shape.experts_per_token / shape.num_experts if shape.num_experts else 1.0,
        attention=whole * pair / attention,
        attention_decode=whole * absorbed / attention,
        kv=shape.kv_token_bytes / kv,
        window=float(shape.window if shape.num_window_layers else 0),
        window_attention=shape.num_window_layers * pair / attention,
        window_kv=shape.num_window_layers * shape.kv_layer_bytes / kv,
        collectives=collectives,
        send=send,
        dp=float(profile.dp),
    )


def _communication(profile: LatencyProfile) -> tuple[float, float]:
    """Seconds a step and a new token spend in collectives of the layers and in hand-overs between stages.

    A ring all-reduce moves 2 (g - 1) / g of the activations through each of g GPUs; whole experts take a dispatch and
    a combine of experts_per_token copies of each token instead.
    """
    shape, tp, gpus = profile.shape, profile.tp, profile.tp * profile.dp
    one = shape.hidden_size * ACTIVATION_BYTES
    reduces = (2 * shape.num_layers - shape.num_expert_layers) if tp > 1 else 0
    latency = reduces * profile.allreduce_s
    token = reduces * 2.0 * (tp - 1) / tp * one / profile.dp / _group_bytes_per_s(profile, tp) if reduces else 0.0
    if shape.num_expert_layers and gpus > 1:
        rate = _group_bytes_per_s(profile, gpus)
        if profile.ep > 1:
            copies = shape.experts_per_token * shape.hidden_size * (DISPATCH_BYTES + ACTIVATION_BYTES)
            moved = copies * (profile.ep - 1) / profile.ep / gpus
        else:
            moved = 2.0 * (gpus - 1) / gpus * one
        latency += shape.num_expert_layers * profile.allreduce_s * (2 if profile.ep > 1 else 1)
        token += shape.num_expert_layers * moved / rate
    stages = profile.pp - 1
    if stages:
        token += stages * one / tp / _group_bytes_per_s(profile, profile.num_gpus)
    return latency + stages * profile.send_s, token


def _group_bytes_per_s(profile: LatencyProfile, num_gpus: int) -> float:
    """What one GPU sends within a group of that many: over the scale-up fabric where the group fits into it."""
    hw = profile.hardware
    if num_gpus <= hw.scale_up_size:
        return hw.scale_up_bytes_per_s * profile.scale_up_efficiency or float("inf")
    return hw.link_bytes_per_s / max(1, hw.num_gpus) * profile.scale_up_efficiency


def _charged(first: float, second: float, overlap: float) -> tuple[float, float]:
    if first > second:
        return first, second * (1.0 - overlap)
    return first * (1.0 - overlap), second


def _no_step(num_new_tokens: int, context_tokens: int, batch: int) -> float:
    if num_new_tokens < 0 or context_tokens < 0 or batch < 0:
        raise InvalidValue(f"a step cannot hold {num_new_tokens} tokens, {context_tokens} context, {batch} rows")
    return 0.0
