"""Splitwise's measured prompt and token times (Llama-2-70B, BLOOM-176B; A100, H100) as samples of step times."""

from __future__ import annotations

import csv
import statistics
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

from nodes.fitting import StepSample
from nodes.hardware import preset, with_gpus
from nodes.shapes import latency_profile, shape

FILE = "perf_model.csv"
HARDWARE = {"a100-80gb": "A100", "h100-80gb": "H100"}
"""Of the file's classes those that were measured: the power-capped rows are derived from others."""
MS = 1e-3


class Group(NamedTuple):
    """One kind of instance."""

    model: str
    hardware: str
    tp: int


class Samples(NamedTuple):
    """Of one group: one sample a configuration, the median of its repetitions.

    impossible: configurations left out, as (prompt tokens, batch): their prompts would have run above the
    accelerators' peak, so that the batch cannot have been computed at once.
    """

    prefill: list[StepSample]
    decode: list[StepSample]
    impossible: list[tuple[int, int]]


def load(data: Path) -> dict[Group, Samples]:
    """All groups. Raises OSError when the file is not there."""
    rows: dict[Group, list[dict[str, str]]] = defaultdict(list)
    with (data / "splitwise" / FILE).open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            if row["hardware"] in HARDWARE:
                rows[Group(row["model"], HARDWARE[row["hardware"]], int(row["tensor_parallel"]))].append(row)
    return {group: _samples(group, rows[group]) for group in sorted(rows)}


def _samples(group: Group, rows: list[dict[str, str]]) -> Samples:
    profile = latency_profile(with_gpus(preset(group.hardware), group.tp), shape(group.model))
    prompts: dict[tuple[int, int], list[float]] = defaultdict(list)
    tokens: dict[tuple[int, int, int], list[tuple[float, float]]] = defaultdict(list)
    for row in rows:
        length, batch, wanted = (int(row[name]) for name in ("prompt_size", "batch_size", "token_size"))
        prompt_s, token_s, e2e_s = (float(row[name]) * MS for name in ("prompt_time", "token_time", "e2e_time"))
        prompts[length, batch].append(prompt_s)
        tokens[length, batch, wanted].append((token_s, min(float(wanted), (e2e_s - prompt_s) / token_s)))
    peak = group.tp * profile.hardware.peak_flops
    prefill, decode, impossible = [], [], []
    for (length, batch), times in sorted(prompts.items()):
        num, seconds = length * batch, statistics.median(times)
        if 2.0 * profile.shape.linear_params * num / seconds > peak:
            impossible.append((length, batch))
            continue
        prefill.append(StepSample(profile, num, num, batch, num * (length + 1) // 2, seconds))
    for (length, batch, _), measured in sorted(tokens.items()):
        if (length, batch) in impossible:
            continue
        generated = statistics.median(one[1] for one in measured)
        context = int(batch * (length + generated / 2))  # on average over the tokens it was averaged over
        seconds = statistics.median(one[0] for one in measured)
        decode.append(StepSample(profile, batch, context, batch, context, seconds))
    return Samples(prefill, decode, impossible)
