"""The fitted latency model gives back the seconds it was fitted to."""

from __future__ import annotations

import pytest

from nodes.engines.native.calibration import StepTimes, fit_latency_profile
from transfer.profile import HardwareProfile, LatencyProfile, ModelShape

HARDWARE = HardwareProfile(
    name="cpu",
    num_gpus=1,
    peak_flops=9e11,
    memory_bytes=2e10,
    memory_bytes_per_s=6e10,
    link_bytes_per_s=5e9,
    price_per_hour=0.0,
)
SHAPE = ModelShape(
    num_layers=30, hidden_size=576, num_heads=9, num_kv_heads=3, head_dim=64, ffn_size=1536, vocab_size=49152
)


def times(**changes: float) -> StepTimes:
    measured = {
        "decode_one_s": 0.0115,
        "batch": 8,
        "decode_batch_s": 0.0165,
        "context": 512,
        "decode_deep_s": 0.029,
        "num_tokens": 512,
        "prompt_s": 0.19,
    }
    return StepTimes(**(measured | changes))  # type: ignore[arg-type]


def test_the_fit_reproduces_its_measurements() -> None:
    fitted = fit_latency_profile(LatencyProfile(hardware=HARDWARE, shape=SHAPE), times())
    assert fitted.provenance == "measured"
    assert fitted.decode_step_s(1, 1) == pytest.approx(0.0115, rel=0.05)
    assert fitted.decode_step_s(8, 8) == pytest.approx(0.0165, rel=0.05)
    assert fitted.decode_step_s(8, 8 * 512) == pytest.approx(0.029, rel=0.05)
    assert fitted.prefill_s(512) == pytest.approx(0.19, rel=0.05)


def test_absurd_measurements_stay_within_bounds() -> None:
    profile = LatencyProfile(hardware=HARDWARE, shape=SHAPE)
    instant = times(decode_one_s=1e-9, decode_batch_s=1e-9, decode_deep_s=1e-9, prompt_s=1e-9)
    endless = times(decode_one_s=1e4, decode_batch_s=1.0, decode_deep_s=0.5, prompt_s=1e9)
    for measured in (instant, endless):
        fitted = fit_latency_profile(profile, measured)
        for value in (fitted.mfu, fitted.mfu_attention, fitted.mbu, fitted.mbu_kv):
            assert 1e-7 <= value <= 10
        assert fitted.beta_s == 0.0
