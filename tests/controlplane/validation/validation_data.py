"""Small data in the public formats, made from known coefficients."""

from __future__ import annotations

from pathlib import Path

import msgspec

from nodes.fitting import StepSample
from nodes.hardware import preset
from nodes.shapes import latency_profile, shape
from transfer.profile import LatencyProfile

PUBLIC = Path(__file__).parents[4] / "shared" / "data"
"""Present on machines that have the public measurements."""
COLUMNS = (
    "model", "hardware", "prompt_size", "batch_size", "token_size", "peak_power", "average_power", "prompt_time",
    "token_time", "e2e_time", "tensor_parallel",
)  # fmt: skip


def truth() -> LatencyProfile:
    """What made the steps below."""
    base = latency_profile(preset("A100"), shape("llama-3.1-8b"))
    return msgspec.structs.replace(
        base, mfu=0.62, mfu_attention=0.21, mbu=0.81, mbu_kv=0.47, alpha_s=0.004, beta_s=9e-5, overlap=0.7
    )


def steps(profile: LatencyProfile) -> list[StepSample]:
    """Prefills of several sizes and decodes of several batches and contexts, as `profile` has them."""
    base = latency_profile(profile.hardware, profile.shape)
    sizes = [(tokens, tokens, 1, tokens * (tokens + 1) // 2) for tokens in (64, 128, 256, 512, 1024, 4096, 16384)]
    sizes += [(rows, rows * each, rows, rows * each) for rows in (1, 4, 16, 64, 256) for each in (64, 1024, 8192)]
    return [StepSample(base, *one, profile.step_s(*one)) for one in sizes]


def write_splitwise(data: Path, rows: list[tuple[str, str, int, int, int, float, float, float, int]]) -> None:
    """model, hardware, prompt, batch, tokens, prompt ms, token ms, end-to-end ms, tp."""
    (data / "splitwise").mkdir(parents=True)
    lines = [",".join(COLUMNS)]
    lines += [",".join(map(str, (*one[:5], 1.0, 0.7, *one[5:]))) for one in rows]
    (data / "splitwise" / "perf_model.csv").write_text("\n".join(lines) + "\n")
