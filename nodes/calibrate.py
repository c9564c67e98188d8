"""`python -m nodes.calibrate`: times an engine here, native or vLLM, fits its LatencyProfile, and keeps the fit.

Engines that start later here, with the same model, dtype, device and threads, use it. Nothing may run beside.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from nodes.profiles import ProfileKey, StoredProfile, save_profile
from transfer.errors import InvalidValue
from transfer.models import model_dir
from transfer.profile import LatencyProfile
from transfer.program import run

if TYPE_CHECKING:
    from nodes.fitting import Fit, OnTimed, StepSample, Timed

PROGRAM = "phaseplane calibrate"
DEFAULT_SECONDS = 60.0
GIB = 1 << 30
BUSY_SPREAD = 0.15
"""Steps that scatter by more than this say that something else is running."""


Measured = tuple["Timed", LatencyProfile, ProfileKey]
"""What was timed, under which profile so far, and what a fit holds for."""


class TimedStep(msgspec.Struct, frozen=True):
    """One kind of step, its median of measured seconds, and what the fit says."""

    num_new_tokens: int
    context_tokens: int
    batch: int
    attention_pairs: int
    seconds: float
    predicted_s: float


class Report(msgspec.Struct, frozen=True):
    """error: relative median error on the steps fitted to; held_out: on steps left out, five parts in turn."""

    model: str
    dtype: str
    device: str
    num_threads: int
    num_steps: int
    num_timed: int
    spread: float
    error: float
    held_out: float
    worst: float
    known_tokens: int
    known_context: int
    """Of a step, over its sequences: as far as the fit describes what was measured."""
    coefficients: dict[str, float]
    path: str
    seconds: float
    steps: tuple[TimedStep, ...]


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    if options.threads is not None:
        os.environ["OMP_NUM_THREADS"] = str(options.threads)
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # as agents run: spinning threads starve each other
    return run(PROGRAM, "native,plan", lambda: _run(options))


def _run(options: argparse.Namespace) -> None:
    report = asyncio.run(calibrate(options))
    print(msgspec.json.encode(report).decode() if options.json else _shown(report))


async def calibrate(options: argparse.Namespace) -> Report:
    """Raises InvalidValue for a model, dtype or size that cannot be used, EngineFailed when vLLM does not start."""
    from nodes.fitting import fit  # not above: an install may have no scipy

    begun = time.monotonic()
    show = sys.stderr.isatty() and not options.json
    try:
        timed, latency, key = await (_time_vllm if options.engine == "vllm" else _time_native)(
            options, _show_timed if show else None
        )
    finally:
        if show:
            print(file=sys.stderr)
    found = fit(timed.samples)
    latency = found.profile(latency)
    path = save_profile(StoredProfile(key, latency, time.time(), len(timed.samples)))
    return Report(
        model=options.model, dtype=key.dtype, device=key.device, num_threads=key.num_threads,
        num_steps=len(timed.samples), num_timed=timed.num_timed, spread=timed.spread, error=found.error,
        held_out=found.held_out, worst=found.worst,
        known_tokens=found.largest.num_new_tokens, known_context=found.largest.context_tokens,
        coefficients=_coefficients(found), path=str(path),
        seconds=time.monotonic() - begun, steps=tuple(_step(one, latency) for one in timed.samples),
    )  # fmt: skip


async def _time_native(options: argparse.Namespace, on_timed: OnTimed | None) -> Measured:
    from nodes.engines.native.engine import NativeEngine  # not above: an install may have no torch
    from nodes.engines.native.grid import time_steps

    engine = NativeEngine(
        model_dir(options.model), dtype=options.dtype, device=options.device, kv_bytes=int(options.kv_gib * GIB),
        block_size=options.block_size, num_threads=options.threads, calibrated=False,
    )  # fmt: skip
    try:
        return await time_steps(engine, options.seconds, on_timed), engine.latency, engine.profile_key
    finally:
        await engine.close()


async def _time_vllm(options: argparse.Namespace, on_timed: OnTimed | None) -> Measured:
    from nodes.engines.served_grid import time_requests
    from nodes.engines.vllm.engine import VllmOptions, start_vllm

    if options.vllm_python is None:
        raise InvalidValue("--engine vllm needs --vllm-python FILE, the interpreter of the environment with vllm")
    engine = await start_vllm(
        VllmOptions(
            model_dir=model_dir(options.model), python=Path(options.vllm_python), dtype=options.dtype,
            block_size=options.block_size, kv_bytes=int(options.kv_gib * GIB), threads=options.threads,
            args=tuple(shlex.split(options.vllm_args)),
        )
    )  # fmt: skip
    try:
        timed = await time_requests(engine, options.seconds, on_timed)
        return timed, timed.samples[0].profile, engine.profile_key
    finally:
        await engine.close()


def _step(one: StepSample, latency: LatencyProfile) -> TimedStep:
    return TimedStep(
        num_new_tokens=one.num_new_tokens, context_tokens=one.context_tokens, batch=one.batch,
        attention_pairs=one.attention_pairs, seconds=one.seconds, predicted_s=one.predicted_s(latency),
    )  # fmt: skip


def _coefficients(found: Fit) -> dict[str, float]:
    return {name: float(f"{value:.4g}") for name, value in found.coefficients.items()}


def _shown(report: Report) -> str:
    lines = [
        f"{report.model} in {report.dtype} on {report.device}, {report.num_threads} threads: "
        f"{report.num_steps} kinds of steps, {report.num_timed} timed in {report.seconds:.0f} s",
        f"median error {report.error:.1%}, on steps left out {report.held_out:.1%}, worst {report.worst:.1%}",
        f"known for steps of up to {report.known_tokens} new tokens and {report.known_context} tokens of KV; "
        "larger ones are extrapolated",
        "  ".join(f"{name} {value:g}" for name, value in report.coefficients.items()),
        f"kept in {report.path}; engines that start from now on use it",
    ]
    if report.spread > BUSY_SPREAD:
        lines.append(f"warning: times scatter by {report.spread:.0%}: something else is running; stop it and run again")
    return "\n".join(lines)


def _show_timed(num_timed: int, share: float) -> None:
    print(f"\r{num_timed} steps timed, {share:4.0%}", end="", file=sys.stderr, flush=True)


def _positive(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=PROGRAM, description=__doc__, allow_abbrev=False)
    add: Any = parser.add_argument
    add("--model", default="smollm2-135m", help="a pulled model's name, or a directory")
    add("--engine", default="native", choices=("native", "vllm"))
    add("--vllm-python", metavar="FILE", help="interpreter of the environment with vllm (vllm)")
    add("--vllm-args", default="", metavar="TEXT", help="more arguments for `vllm serve`, as `up` is told (vllm)")
    add("--dtype", default="auto", choices=("auto", "float32", "bfloat16", "float16"), help="as `up` is told")
    add("--device", default="auto", choices=("auto", "cpu", "cuda"), help="(native)")
    add("--threads", type=int, help="as `up` is told; by default torch's own choice")
    add("--kv-gib", type=_positive, default=1.0, help="memory for the KV of the steps that are timed")
    add("--block-size", type=int, default=16)
    add(
        "--seconds",
        type=_positive,
        default=DEFAULT_SECONDS,
        help="how long to time; each step is timed three times at least",
    )
    add("--json", action="store_true", help="one line of JSON")
    return parser


if __name__ == "__main__":
    sys.exit(main())
