"""The fit finds the coefficients that made the steps, and says how far off it is."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from validation_data import PUBLIC, steps, truth, write_splitwise

from controlplane.validation import distserve, splitwise
from nodes.fitting import BOUNDS, COEFFICIENTS, fit, relative_errors, solve
from transfer.errors import InvalidValue


def test_the_fit_recovers_what_made_the_steps() -> None:
    made = truth()
    samples = steps(made)
    found = fit(samples)
    assert found.error < 1e-3
    assert found.held_out < 0.01
    for name in ("mfu", "mfu_attention", "mbu", "mbu_kv", "alpha_s"):
        assert found.coefficients[name] == pytest.approx(getattr(made, name), rel=0.05), name
    profile = found.profile(samples[0].profile)
    assert (profile.provenance, profile.error) == ("fitted", found.held_out)
    assert profile.prefill_s(3000) == pytest.approx(made.prefill_s(3000), rel=0.01)
    assert profile.decode_step_s(32, 32 * 2000) == pytest.approx(made.decode_step_s(32, 32 * 2000), rel=0.01)


def test_a_wild_step_moves_the_others_little_and_shows_as_the_worst() -> None:
    samples = steps(truth())
    samples[3] = dataclasses.replace(samples[3], seconds=20 * samples[3].seconds)
    found = fit(samples)
    assert found.error < 0.01
    assert found.worst == pytest.approx(0.95, abs=0.02)


def test_a_fit_is_known_as_far_as_it_describes_the_steps() -> None:
    samples = steps(truth())
    found = fit(samples)
    most = max(one.context_tokens for one in samples)
    assert found.largest.context_tokens == most
    assert found.profile(samples[0].profile).fitted_to == found.largest
    far = [dataclasses.replace(one, seconds=2 * one.seconds) if one.context_tokens == most else one for one in samples]
    assert fit(far).largest.context_tokens < most


def test_steps_the_form_cannot_describe_leave_an_error() -> None:
    samples = [
        dataclasses.replace(one, seconds=one.seconds * (1.3 if index % 2 else 0.7))
        for index, one in enumerate(steps(truth()))
    ]
    assert fit(samples).error > 0.1


def test_what_is_not_free_stays() -> None:
    samples = steps(truth())
    assert set(solve(samples, ("mfu", "mbu"))) == {"mfu", "mbu"}
    assert set(COEFFICIENTS) <= set(BOUNDS)
    assert max(relative_errors(samples, {name: getattr(truth(), name) for name in COEFFICIENTS})) < 1e-12


def test_too_few_steps_or_an_unknown_coefficient_are_refused() -> None:
    samples = steps(truth())
    with pytest.raises(InvalidValue, match="3 steps cannot determine"):
        fit(samples[:3])
    with pytest.raises(InvalidValue, match="known coefficients"):
        fit(samples, ("speed",))


def test_distserve_coefficients_are_milliseconds_by_tokens_and_rows(tmp_path: Path) -> None:
    one = {
        "decoding_large_small_bs_threshold": 95, "prefill": [10.0, 0.1, 1e-5], "decoding_smallbs": [20.0, 1e-3, 0.05],
        "decoding_largebs": [5.0, 1e-3, 0.2],
    }  # fmt: skip
    (tmp_path / "distserve").mkdir()
    (tmp_path / "distserve" / distserve.PROFILES["vllm"]).write_text(json.dumps({"facebook/opt-13b": {"1": one}}))
    read = distserve.load(tmp_path, "vllm")["facebook/opt-13b"]["1"]
    assert distserve.prefill_s(read, (1000, 500)) == pytest.approx(1e-3 * (10 + 150 + 12.5))
    assert distserve.decode_s(read, 94, 10_000) == pytest.approx(1e-3 * (20 + 10 + 4.7))
    assert distserve.decode_s(read, 95, 10_000) == pytest.approx(1e-3 * (5 + 10 + 19))
    base = distserve.base_profile("facebook/opt-13b", 2)
    assert (base.tp, base.hardware.name, base.shape.ffn_matrices) == (2, "A100", 2)
    samples = distserve.prefill_samples(base, read) + distserve.decode_samples(base, read)
    assert all(sample.seconds > 0 for sample in samples)


def test_splitwise_rows_become_medians_and_what_cannot_be_is_left_out(tmp_path: Path) -> None:
    llama, a100 = "llama2-70b", "a100-80gb"
    write_splitwise(
        tmp_path,
        [
            (llama, a100, 512, 1, 128, 190.0, 50.0, 6590.0, 2),
            (llama, a100, 512, 1, 128, 200.0, 52.0, 6856.0, 2),
            (llama, a100, 512, 1, 128, 290.0, 99.0, 9999.0, 2),
            (llama, a100, 512, 64, 128, 800.0, 67.0, 9376.0, 2),
            (llama, "h100-80gb-pcap", 512, 1, 128, 90.0, 30.0, 3900.0, 2),
        ],
    )
    ((group, samples),) = splitwise.load(tmp_path).items()
    assert group == ("llama2-70b", "A100", 2)
    assert [(one.num_new_tokens, one.seconds) for one in samples.prefill] == [(512, pytest.approx(0.2))]
    assert [(one.batch, one.seconds) for one in samples.decode] == [(1, pytest.approx(0.052))]
    assert samples.decode[0].context_tokens == 512 + 64
    assert samples.impossible == [(512, 64)], "64 prompts in 0.8 s are beyond the accelerators"


@pytest.mark.skipif(not (PUBLIC / "splitwise").is_dir(), reason="needs the public measurements")
def test_a_measured_group_is_fitted_within_three_percent() -> None:
    samples = splitwise.load(PUBLIC)[splitwise.Group("llama2-70b", "H100", 2)]
    near = [one for one in samples.prefill if one.num_new_tokens <= 2048]
    assert fit([*near, *samples.decode]).error <= 0.03
