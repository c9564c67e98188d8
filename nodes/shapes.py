"""The sizes of known models, how fast they run on a hardware class and how much KV fits beside their weights.

For emulation, placement and planning; reads at most a config.json, never weights.
"""

from __future__ import annotations

import difflib
from pathlib import Path

import msgspec

from nodes.shape_catalogue import ALIASES, MXFP4_BYTES, SHAPES
from nodes.shape_config import shape_from_config
from transfer.errors import InvalidValue
from transfer.models import CONFIG_FILE, model_dir
from transfer.profile import HardwareProfile, LatencyProfile, ModelShape
from transfer.said import say

__all__ = [
    "SHAPES", "kv_blocks", "latency_profile", "shape", "shape_from_config", "weights_bytes", "with_precision",
]  # fmt: skip

MEMORY_FOR_WEIGHTS_AND_KV = 0.9
"""The rest is activations, the runtime and fragmentation."""
MBU_BY_TP = {1: 0.73, 2: 0.61, 4: 0.46, 8: 0.29}
"""Decode bandwidth use seen on H200 with tensor parallelism (TensorRT-LLM)."""
PRECISIONS = {"bf16": 2.0, "fp8": 1.0, "fp4": 0.5625, "mxfp4": MXFP4_BYTES, "int4": 0.53125}
"""Bytes a weight takes, scales included."""


def shape(name_or_dir: str) -> ModelShape:
    """The shape of a catalogued model, or of a directory with a config.json.

    A precision may follow a catalogued name: "llama-3.1-70b-fp8" (see with_precision).
    Raises InvalidValue naming the nearest catalogued model, or what is wrong with the directory.
    """
    name = name_or_dir.lower()
    if found := SHAPES.get(ALIASES.get(name, name)):
        return found
    base, _, precision = name.rpartition("-")
    if precision in PRECISIONS and (found := SHAPES.get(ALIASES.get(base, base))):
        return with_precision(found, precision)
    if "/" in name_or_dir or (Path(name_or_dir) / CONFIG_FILE).is_file():
        return shape_from_config(model_dir(name_or_dir))
    nearest = difflib.get_close_matches(name, SHAPES, n=1, cutoff=0.0)[0]
    raise InvalidValue(say("model.unknown", name=repr(name_or_dir), nearest=nearest))


def with_precision(model: ModelShape, weights: str, kv: str = "bf16") -> ModelShape:
    """The model with weights of "bf16", "fp8", "fp4", "mxfp4" or "int4" and KV of "bf16" or "fp8".

    Four bits are for the experts where there are any: the rest is then at most 8 bit, as published checkpoints have it.
    int4 is widened before it is multiplied. Raises InvalidValue for another precision.
    """
    if weights not in PRECISIONS or kv not in ("bf16", "fp8"):
        raise InvalidValue(f"weights may be {', '.join(PRECISIONS)} and KV bf16 or fp8, got {weights!r} and {kv!r}")
    width = PRECISIONS[weights]
    narrow = width < 1.0 and model.num_experts
    return msgspec.structs.replace(
        model,
        weight_bytes_per_param=min(1.0, model.weight_bytes_per_param) if narrow else width,
        expert_bytes_per_param=width if model.num_experts else 0.0,
        weight_only=weights == "int4",
        kv_bytes_per_element=PRECISIONS[kv],
    )


def latency_profile(
    hardware: HardwareProfile, model: ModelShape, *, tp: int = 0, pp: int = 1, dp: int = 1, ep: int = 1
) -> LatencyProfile:
    """The preset prediction for `model` on one instance of `hardware`, tensor-parallel over what dp and pp leave of its
    GPUs unless told otherwise. Raises InvalidValue when the parallelism does not fill the instance."""
    tp = tp or max(1, hardware.num_gpus // (dp * pp))
    if tp * dp * pp != hardware.num_gpus or not 1 <= ep <= tp * dp:
        raise InvalidValue(
            f"tp {tp} x dp {dp} x pp {pp} must be the instance's {hardware.num_gpus} GPUs, and ep {ep} at most tp x dp"
        )
    mbu = MBU_BY_TP.get(tp) or MBU_BY_TP[max(known for known in MBU_BY_TP if known < tp)]
    return LatencyProfile(hardware=hardware, shape=model, tp=tp, pp=pp, dp=dp, ep=ep, mbu=mbu)


def weights_bytes(model: ModelShape) -> float:
    """Bytes of all weights: what tokens multiply with, and the input embedding."""
    embedding = model.hidden_size * model.vocab_size * model.weight_bytes_per_param
    return model.dense_weight_bytes + model.expert_weight_bytes + embedding


def kv_blocks(hardware: HardwareProfile, model: ModelShape, block_size: int, *, pp: int = 1, dp: int = 1) -> int:
    """KV blocks of `block_size` tokens that fit beside the weights, the GPUs left by dp and pp being tensor-parallel.

    KV heads fewer than the GPUs that share them are held more than once; latent KV is held by each.
    Raises InvalidValue when not even one block fits.
    """
    gpus = hardware.num_gpus
    tp = max(1, gpus // (dp * pp))
    heads = 1 if model.kv_lora_rank else model.num_kv_heads
    weights = (weights_bytes(model) - model.expert_weight_bytes) * dp + model.expert_weight_bytes
    room = gpus * hardware.memory_bytes * MEMORY_FOR_WEIGHTS_AND_KV - weights
    blocks = int(room / max(1.0, tp / heads) // (model.kv_token_bytes * block_size))
    if blocks < 1:
        raise InvalidValue(
            f"{weights_bytes(model) / 1e9:.0f} GB of weights leave no room for KV in {gpus} x "
            f"{hardware.name} ({hardware.memory_bytes / 1e9:.0f} GB each); give the instance more GPUs with --tp"
        )
    return blocks
