"""The fitted latency model gives back the seconds it was fitted to."""

from __future__ import annotations

import pytest

from nodes.engines.native.calibration import fit_latency_profile
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


def test_the_fit_reproduces_its_measurements() -> None:
    profile = LatencyProfile(hardware=HARDWARE, shape=SHAPE)
    fitted = fit_latency_profile(profile, 0.0115, 8, 0.0165, 512, 0.19)
    assert fitted.provenance == "measured"
    assert fitted.decode_step_s(1, 1) == pytest.approx(0.0115, rel=0.05)
    assert fitted.decode_step_s(8, 8) == pytest.approx(0.0165, rel=0.05)
    assert fitted.prefill_s(512) == pytest.approx(0.19, rel=0.05)


def test_absurd_measurements_stay_within_bounds() -> None:
    profile = LatencyProfile(hardware=HARDWARE, shape=SHAPE)
    fitted = fit_latency_profile(profile, 1e-9, 1, 1e-9, 1, 1e-9)
    assert 0 < fitted.mfu <= 10
    assert 0 < fitted.mbu <= 10
    slow = fit_latency_profile(profile, 1e4, 8, 1.0, 64, 1e5)
    assert slow.mfu > 0
    assert slow.mbu > 0
    assert slow.beta_s == 0.0
