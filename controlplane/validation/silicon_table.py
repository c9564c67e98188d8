"""Measured rows as columns: what was computed and moved, by public figures of GPU and model. Fits nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from controlplane.validation.recipes import Deployment
from controlplane.validation.rows import BACKENDS, MODELS, PRECISIONS, MeasuredRow
from nodes.hardware import PRESETS
from nodes.shapes import shape
from transfer.profile import HardwareProfile, ModelShape

T = TypeVar("T")
Column = NDArray[np.float64]
GPUS = ("H100", "H200", "B200", "B300", "GB200", "GB300")
MODEL_NAMES = tuple(sorted(set(MODELS.values())))
MODES = ("aggregated", "disaggregated")
FORMATS = (*PRECISIONS, "mxfp4")
NVFP4_BYTES = 0.5625
"""4 bits and an 8-bit scale for each 16."""
SPREAD_MEAN = 0.9
"""Mean length over the longest, where lengths are drawn from the upper fifth."""
MEMORY_FOR_KV_AND_WEIGHTS = 0.88
UNDATED = 11.0
"""Months since December 2024 of rows without a date: those of the vendor's own runs."""


GENERATIONS = ("H", "B")
"""Hopper and Blackwell: what kernels are written for."""
DRAFTS = 4
SIZES = {
    "backend": len(BACKENDS), "precision": len(FORMATS), "gpu": len(GPUS), "mode": len(MODES),
    "generation": len(GENERATIONS), "draft": DRAFTS,
    "model": len(MODEL_NAMES), "service": len(BACKENDS) * len(MODES), "served": len(BACKENDS) * len(MODEL_NAMES),
}  # fmt: skip
"""How many values each level has."""


@dataclass(frozen=True, slots=True)
class Table:
    """Columns over rows; see `table`. Levels are indices into BACKENDS, FORMATS, GPUS, MODES, and MODEL_NAMES."""

    rows: tuple[MeasuredRow, ...]
    deployments: tuple[Deployment, ...]
    shapes: tuple[ModelShape, ...]
    levels: dict[str, NDArray[np.int64]]
    columns: dict[str, Column]

    def __getitem__(self, name: str) -> Column:
        return self.columns[name]

    def __len__(self) -> int:
        return len(self.rows)

    def mode(self, name: str) -> NDArray[np.bool_]:
        return np.asarray(self.levels["mode"] == MODES.index(name))

    def gpu(self, name: str) -> NDArray[np.bool_]:
        return np.asarray(self.levels["gpu"] == GPUS.index(name))


def served_shape(model: str, precision: str, narrow_kv: bool = True) -> ModelShape:
    """The model as it is served: widths of weights and KV by precision. KV is 8 bit, for 16-bit models 16, and
    without narrow_kv always: an engine's default, which only the public sweep changes."""
    known = shape(model)
    if precision == "bf16":
        width = {"weight_bytes_per_param": 2.0, "expert_bytes_per_param": 0.0, "kv_bytes_per_element": 2.0}
    elif precision == "fp8":
        width = {"weight_bytes_per_param": 1.0, "expert_bytes_per_param": 0.0, "kv_bytes_per_element": 1.0}
    elif known.expert_bytes_per_param:
        width = {"kv_bytes_per_element": 1.0}
    else:
        narrow = NVFP4_BYTES
        dense = (1.0 if precision == "fp4" else 2.0) if known.num_experts else narrow
        width = {"weight_bytes_per_param": dense, "expert_bytes_per_param": narrow, "kv_bytes_per_element": 1.0}
    if not narrow_kv:
        width["kv_bytes_per_element"] = 2.0
    return msgspec.structs.replace(known, **width)


def table(rows: Sequence[MeasuredRow], deployments: Sequence[Deployment]) -> Table:
    """Columns of `rows` as deployed. Units are in the names: *_flops and *_bytes of a whole engine or token."""
    served = {key: served_shape(*key) for key in {(row.model, row.precision, row.spread) for row in rows}}
    shapes = tuple(served[row.model, row.precision, row.spread] for row in rows)
    levels = {
        "backend": _index([BACKENDS.index(row.backend) for row in rows]),
        "precision": _index([FORMATS.index(_format(row)) for row in rows]),
        "gpu": _index([GPUS.index(row.gpu) for row in rows]),
        "generation": _index([GENERATIONS.index(row.gpu.strip("G")[0]) for row in rows]),
        "mode": _index([int(one.prefill is not None) for one in deployments]),
        "draft": _index([one.draft_tokens for one in deployments]),
        "model": _index([MODEL_NAMES.index(row.model) for row in rows]),
    }
    levels["served"] = levels["backend"] * len(MODEL_NAMES) + levels["model"]
    levels["service"] = levels["mode"] * len(BACKENDS) + levels["backend"]
    columns = _workload(rows, deployments) | _model(shapes) | _hardware(rows, shapes)
    columns["capacity"] = _capacity(columns, deployments)
    return Table(tuple(rows), tuple(deployments), shapes, levels, columns)


def _workload(rows: Sequence[MeasuredRow], deployments: Sequence[Deployment]) -> dict[str, Column]:
    mean = _column(rows, lambda row: SPREAD_MEAN if row.spread else 1.0)
    prefill = [one.prefill or one.decode for one in deployments]
    decode = [one.decode for one in deployments]
    return {
        "isl": _column(rows, lambda row: row.input_tokens) * mean,
        "osl": _column(rows, lambda row: row.output_tokens) * mean,
        "spread": _column(rows, lambda row: row.spread),
        "months": _column(
            rows, lambda row: (row.measured.year - 2025) * 12 + row.measured.month if row.measured else UNDATED
        ),
        "ttft_s": _column(rows, lambda row: row.ttft_s),
        "tpot_s": _column(rows, lambda row: row.tpot_s),
        "clients": _column(deployments, lambda one: one.clients),
        "draft": _column(deployments, lambda one: one.draft_tokens),
        "certain": _column(deployments, lambda one: one.certain),
        "apart": _column(deployments, lambda one: one.prefill is not None),
        "engines": _column(decode, lambda one: one.workers),
        "gpus": _column(decode, lambda one: one.gpus),
        "dp": _column(decode, lambda one: one.dp and one.gpus > 1),
        "prefill_engines": _column(prefill, lambda one: one.workers),
        "prefill_gpus": _column(prefill, lambda one: one.gpus),
        "prefill_dp": _column(prefill, lambda one: one.dp and one.gpus > 1),
    }


def _model(shapes: Sequence[ModelShape]) -> dict[str, Column]:
    def pair(one: ModelShape) -> float:
        return 2.0 * one.num_heads * (one.head_dim + one.rope_head_dim + (one.v_head_dim or one.head_dim))

    def absorbed(one: ModelShape) -> float:
        return 2.0 * one.num_heads * (2 * one.kv_lora_rank + one.rope_head_dim) if one.kv_lora_rank else pair(one)

    return {
        "layers": _column(shapes, lambda one: one.num_layers),
        "expert_layers": _column(shapes, lambda one: one.num_expert_layers),
        "hidden": _column(shapes, lambda one: one.hidden_size),
        "latent": _column(shapes, lambda one: one.kv_lora_rank > 0),
        "kv_heads": _column(shapes, lambda one: 1 if one.kv_lora_rank else one.num_kv_heads),
        "experts": _column(shapes, lambda one: one.num_experts),
        "per_token": _column(shapes, lambda one: one.experts_per_token),
        "dense_params": _column(shapes, lambda one: one.dense_params),
        "dense_bytes": _column(shapes, lambda one: one.dense_weight_bytes),
        "expert_bytes": _column(shapes, lambda one: one.expert_weight_bytes),
        "routed_params": _column(
            shapes, lambda one: one.num_expert_layers * one.experts_per_token * one.expert_params
        ),
        "stored_bytes": _column(shapes, _stored_bytes),
        "kv_bytes": _column(shapes, lambda one: one.kv_token_bytes),
        "window": _column(shapes, lambda one: one.window if one.num_window_layers else 0),
        "window_kv_bytes": _column(shapes, lambda one: one.num_window_layers * one.kv_layer_bytes),
        "pair_flops": _column(shapes, lambda one: (one.num_layers - one.num_window_layers) * pair(one)),
        "window_pair_flops": _column(shapes, lambda one: one.num_window_layers * pair(one)),
        "decode_pair_flops": _column(shapes, lambda one: (one.num_layers - one.num_window_layers) * absorbed(one)),
    }  # fmt: skip


def _hardware(rows: Sequence[MeasuredRow], shapes: Sequence[ModelShape]) -> dict[str, Column]:
    """Public figures of the row's GPU; the rate of products by what the GPU has units for."""
    gpus: list[HardwareProfile] = [PRESETS[row.gpu] for row in rows]
    both = list(zip(rows, gpus, shapes, strict=True))

    def expert_rate(row: MeasuredRow, gpu: HardwareProfile, one: ModelShape) -> float:
        return (
            gpu.peak_flops
            if row.precision == "int4"
            else gpu.peak_for(one.expert_bytes_per_param or one.weight_bytes_per_param)
        )

    return {
        "bandwidth": _column(gpus, lambda gpu: gpu.memory_bytes_per_s),
        "memory": _column(gpus, lambda gpu: gpu.memory_bytes),
        "scale_up": _column(gpus, lambda gpu: gpu.scale_up_bytes_per_s),
        "scale_up_size": _column(gpus, lambda gpu: gpu.scale_up_size),
        "link": _column(gpus, lambda gpu: gpu.link_bytes_per_s),
        "rate": _column(gpus, lambda gpu: gpu.peak_flops),
        "dense_rate": _column(both, lambda all_: all_[1].peak_for(all_[2].weight_bytes_per_param)),
        "expert_rate": _column(both, lambda all_: expert_rate(*all_)),
    }


def _capacity(columns: dict[str, Column], deployments: Sequence[Deployment]) -> Column:
    """Requests whose KV fits beside the weights on one engine; GPUs that share one head's KV each hold a copy."""
    gpus, dp = columns["gpus"], columns["dp"] > 0
    memory = MEMORY_FOR_KV_AND_WEIGHTS * columns["memory"] * gpus
    free = np.maximum(memory - columns["stored_bytes"], 0.05 * memory)
    copies = np.where(dp, 1.0, gpus / np.minimum(gpus, columns["kv_heads"]))
    tokens = columns["isl"] + 0.8 * columns["osl"]
    one = columns["kv_bytes"] * tokens + columns["window_kv_bytes"] * np.minimum(tokens, columns["window"])
    return np.maximum(free / copies / one, 1.0)


def _stored_bytes(one: ModelShape) -> float:
    return one.dense_weight_bytes + one.expert_weight_bytes + 2.0 * one.hidden_size * one.vocab_size


def _format(row: MeasuredRow) -> str:
    return "mxfp4" if row.model.startswith("gpt-oss") else row.precision


def _column(items: Sequence[T], value: Callable[[T], float]) -> Column:
    return np.array([float(value(item)) for item in items])


def _index(values: Sequence[int]) -> NDArray[np.int64]:
    return np.array(values, dtype=np.int64)
