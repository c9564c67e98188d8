"""Time per output token of a served model from first principles, with efficiencies to be fitted.

The terms are those of LatencyProfile; an engine that prefills, too, gives each decoding step the prompts that arrive
while it decodes (clients x prompt / output tokens a step in the steady state of a closed loop).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from controlplane.validation.silicon_fit import Array, Coefficient
from controlplane.validation.silicon_table import Table

REFERENCE_RATE = 2.25e15
EXPECTED = 13.0
"""Month from which an engine's age counts: January 2026."""

COEFFICIENTS = (
    Coefficient("mbu", 0.8, 0.1, 0.1, ("backend", "precision")),
    Coefficient("mbu_expert", 0.75, 0.2, 0.12, ("backend", "precision")),
    Coefficient("mbu_kv", 0.6, 0.2, 0.15),
    Coefficient("mfu", 0.6, 0.15, 0.1, ("backend", "precision")),
    Coefficient("mfu_expert", 0.5, 0.4, 0.3, ("backend", "precision")),
    Coefficient("mfu_attention", 0.4, 0.3, 0.3),
    Coefficient("layer_s", 15e-6, 0.4, 0.3),
    Coefficient("expert_layer_s", 15e-6, 0.4, 0.3),
    Coefficient("latent_layer_s", 15e-6, 0.4, 0.3),
    Coefficient("alpha_s", 1e-3, 0.5, 0.5),
    Coefficient("beta_s", 15e-6, 0.7, 0.5),
    Coefficient("collective_s", 6e-6, 0.4, 0.3),
    Coefficient("scale_up", 0.4, 0.3, 0.3),
    Coefficient("tile", 4.0, 0.5, 0.4),
    Coefficient("activations", 0.7, 0.4, 0.3),
    Coefficient("joined", 0.5, 0.5, 0.5),
    Coefficient("mixed", 1.0, 0.1, 0.1),
    Coefficient("mixed_equal", 0.8, 0.2, 0.15),
    Coefficient("draft_gain", 1.1, 0.3, 0.3, ("draft",)),
    Coefficient("draft_cost", 0.12, 0.4),
    Coefficient("imbalance", 0.15, 0.5, 0.3),
    Coefficient("prefill_imbalance", 0.2, 0.5, 0.3),
    Coefficient("apart", 1.0, 0.1, 0.1),
    Coefficient("yearly", 1.0, 0.15, 0.15),
    Coefficient("speed", 1.0, 0.3),
    Coefficient("between_nodes", 3.0, 0.4),
)
"""Efficiencies, seconds and factors; all but the last two positive by nature. yearly: the factor of a year's
engine development. speed: its logarithm is the exponent of how constants shrink with the rate of a GPU."""


@dataclass(frozen=True, slots=True)
class Served:
    """What decoding costs: per output token, per step, per prompt (its share of the engine's time), the batch."""

    tpot_s: Array
    step_s: Array
    prompt_s: Array
    batch: Array


def serve(columns: Table, log: Mapping[str, Array]) -> Served:
    """Steady state of each row, by fixed point of batch and time per token."""
    at = {name: np.exp(value) for name, value in log.items()}
    apart = columns["apart"] > 0
    gain = np.where(columns["draft"] > 0, 1.0 + at["draft_gain"], 1.0)
    drafting = 1.0 + columns["draft"] * at["draft_cost"]
    prompt = prompt_s(columns, at, False)
    dp = np.where(apart, columns["prefill_dp"], columns["dp"])
    uneven = np.where(dp > 0, 1.0 + at["prefill_imbalance"], 1.0)
    mixed = np.where(apart, 0.0, at["mixed"] * np.where(columns["spread"] > 0, 1.0, at["mixed_equal"]))
    clients = columns["clients"] / columns["engines"]
    most = np.minimum(clients, columns["capacity"])
    factor = np.where(apart, at["apart"], 1.0) * at["yearly"] ** ((columns["months"] - EXPECTED) / 12.0)
    batch = most
    for _ in range(3):
        terms = step_terms(columns, at, batch)
        step = sum(terms.values()) * drafting
        alone = np.minimum(1.0, columns["osl"] / batch)
        joined = np.minimum(at["joined"], 1.0) * alone
        hidden = np.minimum(terms["dense"] + terms["experts"] + terms["constant"], 0.8 * prompt)
        extra = np.where(apart, prompt, prompt - joined * hidden) * uneven
        tpot = (step / gain + mixed * batch * extra / columns["osl"]) * factor
        decoding = columns["osl"] * tpot
        supply = columns["clients"] * extra / columns["prefill_engines"]
        waiting = extra + np.where(apart, np.maximum(supply - decoding, 0.0), 0.0)
        batch = np.maximum(np.minimum(most, clients * decoding / (decoding + waiting)), 0.5)
    return Served(tpot, step * factor, prompt * uneven, batch)


def step_terms(columns: Table, at: Mapping[str, Array], batch: Array) -> dict[str, Array]:
    """Seconds of one decoding step of `batch` requests on an engine, by what they go to."""
    gpus, dp, bandwidth = columns["gpus"], columns["dp"] > 0, columns["bandwidth"]
    split = np.where(dp, 1.0, gpus)
    tokens = batch * (1.0 + columns["draft"])
    own, own_batch = np.where(dp, tokens / gpus, tokens), np.where(dp, batch / gpus, batch)
    uneven = np.where(dp, 1.0 + at["imbalance"], 1.0)
    context = columns["isl"] + 0.5 * columns["osl"]
    near = np.minimum(context, columns["window"])
    holders = np.where(dp, 1.0, np.minimum(gpus, columns["kv_heads"]))
    kv = own_batch * (columns["kv_bytes"] * context + columns["window_kv_bytes"] * near) / holders
    pairs = columns["decode_pair_flops"] * context + columns["window_pair_flops"] * near
    far = gpus > columns["scale_up_size"]
    latency = np.where(far, at["between_nodes"], 1.0) * at["collective_s"] * 2.0 * columns["layers"] * np.log2(gpus)
    return {
        "dense": np.maximum(*dense_s(columns, at, own, split)),
        "experts": np.maximum(*experts_s(columns, at, tokens, gpus)),
        "attention": np.maximum(
            kv / (bandwidth * at["mbu_kv"]) * uneven, pairs * own / split / (columns["rate"] * at["mfu_attention"])
        ),
        "constant": constant_s(columns, at) + latency,
        "moving": collective_s(columns, at, tokens, gpus, dp) + activations_s(columns, at, own, split),
        "rows": at["beta_s"] * own_batch,
    }


def prompt_s(columns: Table, at: Mapping[str, Array], alone: bool) -> Array:
    """Seconds of an engine's time that one prompt takes; `alone`: until it is done with no other at work."""
    apart = columns["apart"] > 0
    gpus = np.where(apart, columns["prefill_gpus"], columns["gpus"])
    dp = np.where(apart, columns["prefill_dp"], columns["dp"]) > 0
    tokens = columns["isl"]
    shared = np.where(dp, gpus, 1.0)
    split = np.where(dp, 1.0, gpus) if alone else gpus
    near = np.minimum(tokens, columns["window"])
    pairs = columns["pair_flops"] * tokens / 2.0 + columns["window_pair_flops"] * near
    together = np.ones(len(columns)) if alone else shared
    dense_read, dense = dense_s(columns, at, tokens, split)
    read, experts = experts_s(columns, at, tokens * together, gpus)
    return np.asarray(
        np.maximum(dense, dense_read / together)
        + np.maximum(experts, read) / together
        + pairs * tokens / split / (columns["rate"] * at["mfu_attention"])
        + collective_s(columns, at, tokens, gpus, dp)
        + activations_s(columns, at, tokens, split)
        + constant_s(columns, at) / together
    )


def dense_s(columns: Table, at: Mapping[str, Array], tokens: Array, split: Array) -> tuple[Array, Array]:
    """Seconds to read all that is no expert, and to multiply `tokens` with it, over `split` GPUs."""
    read = columns["dense_bytes"] / split / (columns["bandwidth"] * at["mbu"])
    return read, 2.0 * columns["dense_params"] * tokens / split / (columns["dense_rate"] * at["mfu"])


def experts_s(columns: Table, at: Mapping[str, Array], tokens: Array, gpus: Array) -> tuple[Array, Array]:
    """Seconds to read the experts that `tokens` touch, and to multiply, each expert's rows padded to a tile."""
    routed = columns["experts"] > 0
    unrouted = 1.0 - columns["per_token"] / np.maximum(columns["experts"], 1.0)
    touched = np.where(routed, 1.0 - unrouted**tokens, 0.0)
    padding = np.where(routed, touched * columns["experts"] / np.maximum(columns["per_token"], 1.0) * at["tile"], 0.0)
    read = touched * columns["expert_bytes"] / gpus / (columns["bandwidth"] * at["mbu_expert"])
    work = 2.0 * columns["routed_params"] * (tokens + padding) / gpus
    return read, work / (columns["expert_rate"] * at["mfu_expert"])


def activations_s(columns: Table, at: Mapping[str, Array], tokens: Array, split: Array) -> Array:
    """Seconds of operations between products: they read and write the tokens' activations."""
    passes = 16.0 + 4.0 * columns["per_token"]
    return np.asarray(
        tokens * columns["layers"] * columns["hidden"] * 2.0 * passes / split / columns["bandwidth"] * at["activations"]
    )


def constant_s(columns: Table, at: Mapping[str, Array]) -> Array:
    """Seconds of a step whatever is in it: launches, gaps between kernels, the scheduler."""
    faster = (REFERENCE_RATE / columns["rate"]) ** np.log(at["speed"])
    layer = columns["layers"] * (at["layer_s"] + columns["latent"] * at["latent_layer_s"])
    return np.asarray(faster * (at["alpha_s"] + layer + columns["expert_layers"] * at["expert_layer_s"]))


def collective_s(columns: Table, at: Mapping[str, Array], tokens: Array, gpus: Array, dp: NDArray[np.bool_]) -> Array:
    """Seconds to move the tokens' activations between an engine's GPUs: all-reduce, or to and from experts."""
    far = gpus > columns["scale_up_size"]
    rate = np.where(far, columns["link"], columns["scale_up"]) * at["scale_up"]
    copies = np.where(dp, np.maximum(columns["per_token"], 1.0) / gpus, 1.0)
    moved = 2.0 * columns["layers"] * tokens * columns["hidden"] * 2.0 * (gpus - 1.0) / gpus * copies
    return np.asarray(moved / rate)
