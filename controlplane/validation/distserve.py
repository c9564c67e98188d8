"""DistServe's published step-time profiles of OPT on A100, as samples of the latency model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from nodes.fitting import StepSample
from nodes.hardware import preset, with_gpus
from nodes.shapes import latency_profile, shape
from transfer.profile import LatencyProfile

PROFILES = {"distserve": "profiler-a100-80g.distserve.json", "vllm": "profiler-a100-80g.vllm.json"}
PROMPT_TOKENS = (64, 128, 256, 384, 512, 768, 1024, 1536, 2048)
PROMPT_BATCHES = (1, 2, 4)
DECODE_ROWS = (1, 2, 4, 8, 16, 32, 48, 64, 80, 96, 112, 128)
DECODE_CONTEXT = (128, 256, 512, 1024)
MS = 1e-3


def load(data: Path, engine: str) -> dict[str, dict[str, dict[str, Any]]]:
    """Coefficients by model and tp, of the engine "distserve" or "vllm". Raises OSError when they are not there."""
    loaded: dict[str, dict[str, dict[str, Any]]] = json.loads((data / "distserve" / PROFILES[engine]).read_text())
    return loaded


def prefill_s(coefficients: dict[str, Any], lengths: tuple[int, ...]) -> float:
    """Seconds of one prefill batch: a + b tokens + c sum of squared lengths, in ms."""
    a, b, c = coefficients["prefill"]
    return float(a + b * sum(lengths) + c * sum(one * one for one in lengths)) * MS


def decode_s(coefficients: dict[str, Any], rows: int, context: int) -> float:
    """Seconds of one decode step: a + b context tokens in all + c rows, in ms; large steps have other coefficients."""
    large = rows >= coefficients["decoding_large_small_bs_threshold"]
    a, b, c = coefficients["decoding_largebs" if large else "decoding_smallbs"]
    return float(a + b * context + c * rows) * MS


def base_profile(model: str, tp: int) -> LatencyProfile:
    """The preset of an A100 instance for "facebook/opt-13b" and the like."""
    name = model.rsplit("/", maxsplit=1)[-1]
    return latency_profile(with_gpus(preset("A100"), tp), shape(name))


def prefill_samples(profile: LatencyProfile, coefficients: dict[str, Any]) -> list[StepSample]:
    samples = []
    for batch in PROMPT_BATCHES:
        for length in PROMPT_TOKENS:
            tokens, pairs = batch * length, batch * length * (length + 1) // 2
            seconds = prefill_s(coefficients, (length,) * batch)
            samples.append(StepSample(profile, tokens, tokens, batch, pairs, seconds))
    return samples


def decode_samples(profile: LatencyProfile, coefficients: dict[str, Any]) -> list[StepSample]:
    samples = []
    for rows in DECODE_ROWS:
        for each in DECODE_CONTEXT:
            context = rows * each
            samples.append(StepSample(profile, rows, context, rows, context, decode_s(coefficients, rows, context)))
    return samples
