"""Reads measured TTFT and TPOT rows of serving engines (the measured set of NVIDIA's AIConfigurator) as they are.

It knows the models and the file's odd spellings; what a row does not say is added by recipes.py.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import date
from pathlib import Path

from transfer.errors import InvalidValue

MODELS = {
    "Llama-3.1-70B": "llama-3.1-70b",
    "Llama-3.1-8B": "llama-3.1-8b",
    "Qwen3-32B": "qwen3-32b",
    "Qwen3-235B": "qwen3-235b-a22b",
    "Qwen3.5-397B": "qwen3.5-397b-a17b",
    "gpt-oss-120b": "gpt-oss-120b",
    "DeepSeek": "deepseek-v3",
    "Kimi-K2": "kimi-k2",
    "MiniMax-M2": "minimax-m2",
    "GLM-5": "glm-5",
}
"""Part of a model's name in the file -> its name in the catalogue of shapes."""
SYSTEMS = {"h100_sxm": "H100", "h200_sxm": "H200", "b200_sxm": "B200", "b300_sxm": "B300", "gb200": "GB200",
           "gb300": "GB300"}  # fmt: skip
BACKENDS = ("trtllm", "vllm", "sglang")
PRECISIONS = ("bf16", "fp8", "fp4", "int4")
SWEPT_LENGTHS = (1024, 8192)
"""Prompt lengths of the public sweep, whose lengths are drawn from the upper fifth below them."""
GPUS_PER_NODE = 8


@dataclass(frozen=True, slots=True)
class Engine:
    """`workers` equal engines of `gpus` each; dp: every GPU attends for its own requests; ep: whole experts."""

    workers: int
    gpus: int
    dp: bool = False
    ep: bool = False


@dataclass(frozen=True, slots=True)
class MeasuredRow:
    """One measurement. prefill is None where one engine does both; decode is then that engine.

    concurrency: clients in closed loop, None where the row has it not. spread: lengths are drawn from the upper fifth
    below input_tokens and output_tokens, else all equal them.
    """

    key: str
    gpu: str
    backend: str
    precision: str
    model: str
    input_tokens: int
    output_tokens: int
    concurrency: int | None
    batch: int | None
    image: str
    measured: date | None
    prefill: Engine | None
    decode: Engine
    workers_known: bool
    spread: bool
    ttft_s: float
    tpot_s: float

    @property
    def disaggregated(self) -> bool:
        return self.prefill is not None


def read_rows(file: Path) -> list[MeasuredRow]:
    """All rows of measured.csv. Raises InvalidValue naming the row that cannot be read."""
    with file.open(encoding="utf-8", newline="") as stream:
        return parse_rows(csv.DictReader(stream))


def parse_rows(lines: Iterable[Mapping[str, str]]) -> list[MeasuredRow]:
    """`lines` as csv.DictReader gives them."""
    rows = []
    for number, line in enumerate(lines, start=2):
        try:
            rows.append(_row(line))
        except (KeyError, ValueError) as error:
            raise InvalidValue(f"line {number} of the measured rows cannot be read: {error!r}") from error
    return rows


def _row(line: Mapping[str, str]) -> MeasuredRow:
    source = line["silicon_data_source"]
    concurrency = re.search(r"silicon_concurrency=(\d+)", source)
    measured = re.search(r"measured=(\d{4}-\d\d-\d\d)", source)
    disaggregated = line["mode"] == "disagg"
    isl = int(line["isl"])
    return MeasuredRow(
        key=line["id"],
        gpu=SYSTEMS[line["system"]],
        backend=_one_of(line["backend"], BACKENDS),
        precision=_precision(line),
        model=_model(line["model_path"]),
        input_tokens=isl,
        output_tokens=int(line["osl"]),
        concurrency=int(concurrency[1]) if concurrency else None,
        batch=_count(line, "decode_batch_size" if disaggregated else "batch_size") or None,
        image=_image(source),
        measured=date.fromisoformat(measured[1]) if measured else None,
        prefill=_disaggregated(line, "prefill") if disaggregated else None,
        decode=_disaggregated(line, "decode") if disaggregated else _aggregated(line),
        workers_known=bool(_count(line, "decode_num_workers")),
        spread=isl in SWEPT_LENGTHS and "aic-auto" not in source,
        ttft_s=float(line["silicon_ttft_ms"]) / 1000.0,
        tpot_s=float(line["silicon_tpot_ms"]) / 1000.0,
    )


def _model(path: str) -> str:
    for part, name in MODELS.items():
        if part in path:
            return name
    raise ValueError(f"no shape is known for model {path!r}; known: {', '.join(MODELS)}")


def _precision(line: Mapping[str, str]) -> str:
    told = line["precision"]
    if not told:
        told = "fp8" if "FP8" in line["model_path"] else "bf16"
    return _one_of(told, PRECISIONS)


def _one_of(value: str, known: tuple[str, ...]) -> str:
    if value not in known:
        raise ValueError(f"{value!r} is none of {', '.join(known)}")
    return value


def _image(source: str) -> str:
    """Name and version of the container image, "" where the row has none."""
    named = re.search(r"image=([^;]+)", source)
    last = named[1] if named else source.rsplit(";", maxsplit=1)[-1].strip()
    return last.split("/")[-1] if ":" in last and (named or "=" not in last) else ""


def _disaggregated(line: Mapping[str, str], phase: str) -> Engine:
    tp, dp = (_count(line, f"{phase}_{name}_size") for name in ("tp", "attention_dp"))
    return Engine(
        workers=max(1, _count(line, f"{phase}_num_workers")),
        gpus=max(1, tp) * max(1, dp),
        dp=dp > 1,
        ep=_count(line, f"{phase}_moe_ep_size") > 1,
    )


def _aggregated(line: Mapping[str, str]) -> Engine:
    """Some rows give the product of the sizes of both expert splits as tp: 64 for 8 GPUs, 16 for 4."""
    tp, dp, moe_tp, ep = (_count(line, f"{name}_size") for name in ("tp", "attention_dp", "moe_tp", "moe_ep"))
    tp, dp, ep = max(1, tp), max(1, dp), max(1, ep)
    gpus = tp * dp
    if moe_tp == ep > 1 and gpus == moe_tp * ep > 4:
        gpus = ep
    elif dp > 1 and (moe_tp * ep == gpus == 16 or tp == dp):
        gpus = tp
    return Engine(workers=1, gpus=gpus, dp=dp > 1, ep=ep > 1)


def _count(line: Mapping[str, str], name: str) -> int:
    return int(line.get(name) or 0)
