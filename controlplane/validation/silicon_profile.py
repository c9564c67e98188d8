"""LatencyProfile with the efficiencies that measured rows of serving engines gave, by engine and number format.

The coefficients are data, silicon_coefficients.json; `python -m controlplane.validation.silicon_profile MEASURED.CSV`
writes them anew.
"""

from __future__ import annotations

import functools
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

from controlplane.validation.rows import BACKENDS
from controlplane.validation.silicon_fit import Fitted
from controlplane.validation.silicon_study import Study, study
from controlplane.validation.silicon_table import FORMATS, GPUS, served_shape
from controlplane.validation.silicon_tpot import REFERENCE_RATE
from transfer.errors import InvalidValue
from transfer.profile import HardwareProfile, LatencyProfile, ModelShape
from transfer.terms import Struct

FILE = Path(__file__).parent / "silicon_coefficients.json"
PASSES, PASSES_PER_EXPERT = 16.0, 4.0


class Coefficients(Struct, frozen=True):
    """shared, deviations ("name/level"): logarithms, as in Fitted; errors ("backend/format"): relative medians of TPOT
    on types of GPU left out."""

    shared: dict[str, float]
    deviations: dict[str, list[float]]
    errors: dict[str, float]


def fitted_profile(
    hardware: HardwareProfile, shape: ModelShape, backend: str, precision: str, tp: int = 1, dp: int = 1, ep: int = 1
) -> LatencyProfile:
    """The profile of `shape` (with its widths as served, see served_shape) on tp x dp GPUs under an engine.

    backend: one of BACKENDS; precision: one of FORMATS. provenance is "fitted" for the types of GPU and pairs of both
    that were measured, else "extrapolated". LatencyProfile has one efficiency for experts and the rest: theirs is
    blended by bytes and by products. Raises InvalidValue for an unknown engine or format.
    """
    if backend not in BACKENDS or precision not in FORMATS:
        raise InvalidValue(
            f"no efficiencies are known for {backend!r} in {precision!r}; engines: {', '.join(BACKENDS)}; "
            f"formats: {', '.join(FORMATS)}"
        )
    data = coefficients()
    values = _fitted(data)
    at = functools.partial(values.at, backend=BACKENDS.index(backend), precision=FORMATS.index(precision))
    error = data.errors.get(f"{backend}/{precision}")
    known = error is not None and hardware.name in GPUS
    gpus = tp * dp
    faster = (REFERENCE_RATE / hardware.peak_flops) ** math.log(at("speed"))
    constant = at("alpha_s") + shape.num_layers * (at("layer_s") + bool(shape.kv_lora_rank) * at("latent_layer_s"))
    far = at("between_nodes") if gpus > hardware.scale_up_size else 1.0
    return LatencyProfile(
        hardware=hardware, shape=shape, tp=tp, dp=dp, ep=ep,
        mfu=_products(hardware, shape, at("mfu"), at("mfu_expert"), at("activations")),
        mfu_attention=at("mfu_attention"),
        mbu=_reads(shape, at("mbu"), at("mbu_expert")),
        mbu_kv=at("mbu_kv"),
        allreduce_s=far * faster * at("collective_s") * math.log2(max(2, gpus)),
        alpha_s=faster * (constant + shape.num_expert_layers * at("expert_layer_s")),
        beta_s=at("beta_s") / dp,
        scale_up_efficiency=2.0 * at("scale_up"),
        provenance="fitted" if known else "extrapolated",
        error=error,
    )  # fmt: skip


@functools.cache
def coefficients() -> Coefficients:
    """Those of the file beside this module."""
    return msgspec.json.decode(FILE.read_bytes(), type=Coefficients)


def of_study(found: Study) -> Coefficients:
    """What the file holds: the fit to all rows, and errors on types of GPU left out."""
    columns = found.columns
    errors = np.abs(found.left_out.tpot_s / columns["tpot_s"] - 1.0)
    by: dict[str, list[float]] = {}
    for backend, form, error in zip(columns.levels["backend"], columns.levels["precision"], errors, strict=True):
        by.setdefault(f"{BACKENDS[backend]}/{FORMATS[form]}", []).append(float(error))
    return Coefficients(
        shared={name: round(value, 4) for name, value in found.coefficients.shared.items()},
        deviations={
            f"{name}/{level}": [round(part, 4) for part in parts]
            for (name, level), parts in found.coefficients.deviations.items()
        },
        errors={name: round(float(np.median(values)), 3) for name, values in sorted(by.items())},
    )


def main(arguments: Sequence[str]) -> int:
    if len(arguments) != 1:
        print("error: name the file of measured rows", file=sys.stderr)
        return 2
    found = of_study(study(Path(arguments[0])))
    FILE.write_text(json.dumps(msgspec.to_builtins(found), indent=1) + "\n", encoding="utf-8")
    print(f"wrote {FILE}", file=sys.stderr)
    return 0


def _fitted(data: Coefficients) -> Fitted:
    deviations = {}
    for key, parts in data.deviations.items():
        name, _, level = key.partition("/")
        deviations[name, level] = tuple(parts)
    return Fitted(data.shared, deviations)


def _reads(shape: ModelShape, dense: float, experts: float) -> float:
    """Share of the bandwidth in use while all weights are read."""
    read = shape.dense_weight_bytes / dense + shape.expert_weight_bytes / experts
    return (shape.dense_weight_bytes + shape.expert_weight_bytes) / read


def _products(hardware: HardwareProfile, shape: ModelShape, dense: float, experts: float, passes: float) -> float:
    """Share of the rate in use for one token, the reads and writes between products included."""
    width = shape.weight_bytes_per_param
    expert_width = 2.0 if shape.weight_only else shape.expert_bytes_per_param or width
    routed = shape.num_expert_layers * shape.experts_per_token * shape.expert_params
    ideal = shape.dense_params / hardware.peak_for(width) + routed / hardware.peak_for(expert_width)
    spent = shape.dense_params / (hardware.peak_for(width) * dense)
    spent += routed / (hardware.peak_for(expert_width) * experts)
    moved = shape.num_layers * shape.hidden_size * 2.0 * (PASSES + PASSES_PER_EXPERT * shape.experts_per_token)
    return 2.0 * ideal / (2.0 * spent + passes * moved / hardware.memory_bytes_per_s)


__all__ = ["FORMATS", "Coefficients", "coefficients", "fitted_profile", "of_study", "served_shape"]

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
