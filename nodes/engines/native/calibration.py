"""Fits the LatencyProfile of this machine and model from a few timed steps, in under two seconds.

The form is transfer.profile's; here are only its coefficients. A busy machine measures slow: the scheduler
corrects with what it sees.
"""

from __future__ import annotations

import logging
import os
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import msgspec
import torch

from nodes.engines.engine import Chunk, Sampling, StepBatch
from nodes.engines.native.config import DecoderConfig
from nodes.engines.native.linear import make_linear
from nodes.engines.native.plan import Limits
from nodes.engines.prediction import predicted_step_s
from transfer.profile import HardwareProfile, LatencyProfile, ModelShape, StepRange
from transfer.terms import SamplingParams

log = logging.getLogger(__name__)

RunStep = Callable[[StepBatch], float]
"""Runs one step and returns its seconds."""

BUDGET_S = 1.5
MAX_DRIFT = 1.5
"""A kept profile that is off by more than this factor is not used."""
_LOOPBACK_BYTES_PER_S = 5e9
_EFFICIENCIES = (1e-7, 10.0)
"""Bounds that only absurd measurements meet. Above 1 means that the declared hardware is slower than this one."""
_DECODE_BATCH = 8
_DEEP_CONTEXT = 512
_ALPHA_SHARE = 0.2
"""Part of a one-token step counted as constant cost; the rest is reading the weights."""


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Measured seconds: a token of one new sequence, one token each of `batch` new ones, the same with `context`
    tokens of KV each, and a prompt of `num_tokens`."""

    decode_one_s: float
    batch: int
    decode_batch_s: float
    context: int
    decode_deep_s: float
    num_tokens: int
    prompt_s: float


def decoder_shape(config: DecoderConfig, itemsize: int) -> ModelShape:
    """The model as the latency model sees it; weights and KV share one element size."""
    return ModelShape(
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        ffn_size=config.ffn_size,
        vocab_size=config.vocab_size,
        weight_bytes_per_param=float(itemsize),
        kv_bytes_per_element=float(itemsize),
    )


def measure_machine(dtype: torch.dtype, device: torch.device) -> HardwareProfile:
    """Matrix FLOP/s in `dtype` and read bandwidth, from about a tenth of a second of each."""
    with torch.inference_mode():
        size = 1024 if device.type == "cpu" else 8192
        square = torch.ones(size, size, dtype=dtype, device=device)
        linear = make_linear(square)
        flops = 2.0 * size**3 / _seconds(lambda: linear(square), device)
        words = torch.ones(1 << 26, dtype=torch.float32, device=device)
        bandwidth = words.numel() * words.element_size() / _seconds(words.sum, device)
    memory = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else _host_memory_bytes()
    return HardwareProfile(
        name="cpu" if device.type == "cpu" else torch.cuda.get_device_name(device),
        num_gpus=1,
        peak_flops=flops,
        memory_bytes=float(memory),
        memory_bytes_per_s=bandwidth,
        link_bytes_per_s=_LOOPBACK_BYTES_PER_S,
        price_per_hour=0.0,
    )


def device_name(device: torch.device) -> str:
    """What a fit of latency holds for: the accelerator's name, or the processor's and how many cores are ours."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    name = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        name = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), name)
    except OSError:
        pass  # not Linux: the architecture has to do
    return f"{name} x {len(os.sched_getaffinity(0))}"


def still_holds(latency: LatencyProfile, run: RunStep, limits: Limits) -> bool:
    """Whether a step of one token takes about what the profile says; if not, says so in the log."""
    step = _decode(1, 0, limits)
    measured_s, predicted_s = _timed(run, step, time.monotonic() + BUDGET_S, 5), predicted_step_s(latency, step.chunks)
    if predicted_s / MAX_DRIFT <= measured_s <= predicted_s * MAX_DRIFT:
        return True
    log.warning(
        "the calibrated profile says %.1f ms for a decode step and it takes %.1f ms; a shorter measurement is used: "
        "run `phaseplane calibrate` again", 1e3 * predicted_s, 1e3 * measured_s,
    )  # fmt: skip
    return False


def measure_latency(profile: LatencyProfile, run: RunStep, limits: Limits) -> LatencyProfile:
    """`profile` with coefficients fitted to timed steps of one token, of a batch (new and deep), and of a prompt.

    Writes KV into the first blocks: call it before the arena is in use.
    """
    deadline = time.monotonic() + BUDGET_S
    room = limits.num_blocks * limits.block_size
    one = _timed(run, _decode(1, 0, limits), deadline, 5)
    many = _timed(run, _decode(_DECODE_BATCH, 0, limits), deadline, 5)
    context = min(_DEEP_CONTEXT, limits.max_context - 1)
    deep = _timed(run, _decode(_DECODE_BATCH, context, limits), deadline, 3)
    num_tokens = min(64, room, limits.max_context)
    prompt = _timed(run, _prompt(num_tokens, limits), deadline, 2)
    larger = min(512, room, limits.max_context)
    if larger > num_tokens and time.monotonic() + 2.5 * prompt * larger / num_tokens < deadline:
        num_tokens, prompt = larger, _timed(run, _prompt(larger, limits), deadline, 2)
    times = StepTimes(
        decode_one_s=one, batch=_DECODE_BATCH, decode_batch_s=many, context=context, decode_deep_s=deep,
        num_tokens=num_tokens, prompt_s=prompt,
    )  # fmt: skip
    return fit_latency_profile(profile, times)


def fit_latency_profile(profile: LatencyProfile, times: StepTimes) -> LatencyProfile:
    """Coefficients under which the model's steps take the measured seconds.

    Attention of a prompt is taken to be half as efficient as its matrix products.
    """
    hardware, shape = profile.hardware, profile.shape
    beta = max(0.0, times.decode_batch_s - times.decode_one_s) / max(1, times.batch - 1)
    alpha = _ALPHA_SHARE * times.decode_one_s
    weights_bytes = shape.linear_params * shape.weight_bytes_per_param
    mbu = weights_bytes / hardware.memory_bytes_per_s / max(1e-9, times.decode_one_s - alpha - beta)
    context_bytes = shape.kv_token_bytes * times.batch * times.context
    mbu_kv = context_bytes / hardware.memory_bytes_per_s / max(1e-9, times.decode_deep_s - times.decode_batch_s)
    busy = max(1e-9, times.prompt_s - alpha - beta)
    pairs = times.num_tokens * (times.num_tokens + 1) // 2
    attention_flops = 4.0 * shape.num_layers * shape.num_heads * shape.head_dim * pairs
    linear_flops = 2.0 * shape.linear_params * times.num_tokens
    mfu = (linear_flops + 2.0 * attention_flops) / hardware.peak_flops / busy
    return msgspec.structs.replace(
        profile,
        mfu=_efficiency(mfu),
        mfu_attention=_efficiency(mfu / 2),
        mbu=_efficiency(mbu),
        mbu_kv=_efficiency(mbu_kv),
        alpha_s=alpha,
        beta_s=beta,
        provenance="measured",
        fitted_to=StepRange(
            num_new_tokens=max(times.num_tokens, times.batch),
            batch=times.batch,
            context_tokens=max(times.num_tokens, times.batch * (times.context + 1)),
            attention_pairs=max(pairs, times.batch * (times.context + 1)),
        ),
    )


def _efficiency(value: float) -> float:
    return min(_EFFICIENCIES[1], max(_EFFICIENCIES[0], value))


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    """Best of several runs within a tenth of a second."""
    best, end = float("inf"), time.monotonic() + 0.1
    run()
    while True:  # once at least: on a machine that is busy the warm-up alone may take all of the time
        started = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - started)
        if time.monotonic() >= end:
            return best


def _timed(run: RunStep, batch: StepBatch, deadline: float, rounds: int) -> float:
    """Median seconds of up to `rounds` steps after one that warms up; past the deadline that one must do."""
    warm_up = run(batch)
    if time.monotonic() > deadline:
        return warm_up
    times = [run(batch)]
    while len(times) < rounds and time.monotonic() < deadline:
        times.append(run(batch))
    return median(times)


def _decode(batch: int, context: int, limits: Limits) -> StepBatch:
    """One token of each sequence. Each reads blocks of its own, where there are enough: shared ones would be in a
    cache."""
    greedy = Sampling(params=SamplingParams(max_tokens=1, temperature=0.0), history=(), num_output=0)
    count = context // limits.block_size + 1
    firsts = [row * count if (row + 1) * count <= limits.num_blocks else 0 for row in range(batch)]
    return StepBatch([
        Chunk(str(row), tokens=[0], start=context, block_table=list(range(first, first + count)), sampling=greedy)
        for row, first in enumerate(firsts)
    ])  # fmt: skip


def _prompt(num_tokens: int, limits: Limits) -> StepBatch:
    blocks = list(range(-(-num_tokens // limits.block_size)))
    return StepBatch(chunks=[Chunk(request_id="0", tokens=[0] * num_tokens, start=0, block_table=blocks)])


def _host_memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
