"""The first-principles model of TPOT and TTFT, the fit, and the profiles made of it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest

from controlplane.validation import silicon_tpot, silicon_ttft
from controlplane.validation.recipes import Deployment
from controlplane.validation.rows import Engine, MeasuredRow
from controlplane.validation.silicon_correction import correction
from controlplane.validation.silicon_fit import Array, Coefficient, Fitted, solve
from controlplane.validation.silicon_profile import coefficients, fitted_profile
from controlplane.validation.silicon_table import SIZES, Table, served_shape, table
from nodes.hardware import preset
from transfer.errors import InvalidValue

ROW = MeasuredRow(
    key="one", gpu="H100", backend="vllm", precision="fp8", model="llama-3.1-70b", input_tokens=1024,
    output_tokens=1024, concurrency=16, batch=None, image="", measured=None, prefill=None, decode=Engine(1, 4),
    workers_known=False, spread=True, ttft_s=0.1, tpot_s=0.01,
)  # fmt: skip
PLAIN = {one.name: math.log(one.guess) for one in (*silicon_tpot.COEFFICIENTS, *silicon_ttft.COEFFICIENTS)}


def columns(
    *changes: Mapping[str, object], clients: int = 16, prefill: Engine | None = None, draft: int = 0, engines: int = 1
) -> Table:
    rows = [replace(ROW, **change) for change in changes]  # type: ignore[arg-type]
    return table(
        rows, [Deployment(prefill, replace(row.decode, workers=engines), clients, draft_tokens=draft) for row in rows]
    )


def plain(size: int) -> dict[str, Array]:
    return {name: np.full(size, value) for name, value in PLAIN.items()}


def served(found: Table) -> silicon_tpot.Served:
    return silicon_tpot.serve(found, plain(len(found)))


def tpot(found: Table) -> list[float]:
    return [float(value) for value in served(found).tpot_s]


def ttft(found: Table) -> list[float]:
    log = plain(len(found))
    return [float(value) for value in silicon_ttft.ttft_s(found, served(found), log, log)]


def test_tpot_of_a_dense_model_is_near_what_its_weights_take() -> None:
    [low] = tpot(columns({"output_tokens": 8192}, clients=1))
    weights = 70e9 / (4 * 3.35e12 * 0.8)
    assert weights < low < 1.8 * weights


def test_more_bandwidth_more_gpus_and_narrower_weights_are_faster() -> None:
    base, h200, eight, fp4 = tpot(
        columns({}, {"gpu": "H200"}, {"decode": Engine(1, 8)}, {"gpu": "B200", "precision": "fp4"})
    )
    assert h200 < base
    assert eight < base
    assert fp4 < base


def test_clients_slow_decoding_and_prompts_slow_it_where_they_share_an_engine() -> None:
    [few] = tpot(columns({}, clients=4))
    [many] = tpot(columns({}, clients=64))
    assert few < many
    long_prompts = {"input_tokens": 8192}
    [together] = tpot(columns(long_prompts, clients=64))
    [apart] = tpot(columns(long_prompts, clients=64, prefill=Engine(8, 4)))
    assert apart < 0.7 * together


def test_a_batch_reads_only_the_experts_it_touches() -> None:
    model = {"model": "deepseek-v3", "gpu": "H200", "decode": Engine(1, 8, ep=True)}
    found = [columns(model, clients=clients) for clients in (1, 32, 1024)]
    at = {name: np.exp(value) for name, value in plain(1).items()}
    read = [
        float(silicon_tpot.experts_s(one, at, np.array([tokens]), one["gpus"])[0][0])
        for one, tokens in zip(found, (1.0, 32.0, 1024.0), strict=True)
    ]
    assert read[1] / read[0] == pytest.approx(256 * (1 - (1 - 8 / 256) ** 32) / 8)
    assert read[2] == pytest.approx(found[0]["expert_bytes"][0] / 8 / (4.8e12 * PLAIN_MBU_EXPERT))


PLAIN_MBU_EXPERT = 0.75


def test_latent_kv_is_copied_by_tensor_and_split_by_data_parallel_attention() -> None:
    model = {"model": "deepseek-v3", "gpu": "B200", "decode": Engine(1, 8, ep=True), "input_tokens": 8192}
    split = model | {"decode": Engine(1, 8, dp=True, ep=True)}
    found = columns(model, split, clients=512)
    assert found["capacity"][1] == pytest.approx(8 * found["capacity"][0])
    at = {name: np.exp(value) for name, value in (plain(2) | {"mbu_kv": np.log([0.05, 0.05])}).items()}
    attention = silicon_tpot.step_terms(found, at, np.array([512.0, 512.0]))["attention"]
    assert attention[1] == pytest.approx(attention[0] / 8 * (1.0 + at["imbalance"][1]))


def test_draft_tokens_gain_at_low_and_cost_at_high_load() -> None:
    model = {"model": "deepseek-v3", "gpu": "H200", "decode": Engine(1, 8, ep=True)}
    gain = [tpot(columns(model, clients=clients))[0] / tpot(columns(model, clients=clients, draft=3))[0]
            for clients in (1, 512)]  # fmt: skip
    assert gain[0] > 1.2
    assert gain[1] < gain[0]


def test_what_does_not_fit_in_memory_does_not_decode_and_waits() -> None:
    small = {"decode": Engine(1, 2), "output_tokens": 8192, "spread": False}
    found = columns(small, clients=256)
    assert served(found).batch[0] <= found["capacity"][0] < 256
    assert ttft(found)[0] > 10 * ttft(columns(small, clients=16))[0]


def test_ttft_grows_with_prompt_and_clients_and_saturates_an_only_prefill_engine() -> None:
    short, long = ttft(columns({}, {"input_tokens": 8192}))
    assert short < long
    assert ttft(columns({}, clients=64))[0] > short
    heavy = {"input_tokens": 8192, "output_tokens": 256}
    one = columns(heavy, clients=512, prefill=Engine(1, 4), engines=8)
    many = columns(heavy, clients=512, prefill=Engine(32, 4), engines=8)
    assert ttft(one)[0] > 5 * ttft(many)[0]
    prompt, decoding = served(one).prompt_s[0], 256 * 0.9 * served(one).tpot_s[0]
    assert ttft(one)[0] > PLAIN_QUEUE * 0.8 * (512 * prompt - decoding)


PLAIN_QUEUE = 0.6


def test_the_fit_finds_shared_values_and_deviations_and_ignores_rows_left_out() -> None:
    random = np.random.default_rng(3)
    backend = np.arange(600) % 3
    work = random.uniform(1.0, 9.0, 600)
    truth = 2.0 * np.exp(np.array([-0.4, 0.0, 0.4])[backend]) * work + 3.0
    observed = np.log(truth) + random.normal(0.0, 0.02, 600)
    observed[::10] += 2.0
    levels = {"backend": backend}
    weights = np.where(backend == 2, 0.0, 1.0)
    wanted = (Coefficient("slope", 1.0, 1.0, 0.5), Coefficient("constant", 1.0, 1.0))

    def model(log: object) -> Array:
        values: dict[str, Array] = dict(log)  # type: ignore[call-overload]
        return np.asarray(np.log(np.exp(values["slope"]) * work + np.exp(values["constant"])))

    found = solve(model, wanted, levels, {"backend": 3}, observed, np.ones(600), 0.05)
    assert found.at("slope", backend=0) == pytest.approx(2.0 * math.exp(-0.4), rel=0.03)
    assert found.at("slope", backend=2) == pytest.approx(2.0 * math.exp(0.4), rel=0.03)
    assert found.at("constant") == pytest.approx(3.0, rel=0.1)
    held = solve(model, wanted, levels, {"backend": 3}, observed, weights, 0.05)
    again = solve(model, wanted, levels, {"backend": 3}, observed + 5.0 * (backend == 2), weights, 0.05)
    assert held == again
    assert held.deviations["slope", "backend"][2] == pytest.approx(0.0, abs=1e-9)


def test_the_correction_learns_a_bias_but_not_from_rows_left_out() -> None:
    found = columns(*({"backend": name} for name in ("vllm", "sglang") * 40))
    left = np.where(np.arange(80) % 2, 0.3, 0.0)
    learned = correction(found, left, np.ones(80), 0.1)
    assert learned[1] == pytest.approx(0.3, abs=0.05)
    assert learned[0] == pytest.approx(0.0, abs=0.05)
    blind = correction(found, left, np.where(np.arange(80) % 2, 0.0, 1.0), 0.1)
    assert np.allclose(blind, 0.0, atol=0.01)


@pytest.mark.parametrize(
    ("model", "gpu", "precision", "tp"),
    [("llama-3.1-70b", "H200", "fp8", 4), ("deepseek-v3", "B200", "fp4", 8), ("minimax-m2", "H100", "fp8", 4)],
)
def test_a_fitted_profile_steps_as_the_model_does(model: str, gpu: str, precision: str, tp: int) -> None:
    shape = served_shape(model, precision)
    profile = fitted_profile(preset(gpu), shape, "vllm", precision, tp=tp)
    data = coefficients()
    fitted = Fitted(data.shared, {tuple(key.split("/")): tuple(parts) for key, parts in data.deviations.items()})  # type: ignore[misc]
    found = columns({"model": model, "gpu": gpu, "precision": precision, "decode": Engine(1, tp)}, clients=32)
    at = {name: np.exp(value) for name, value in fitted.rows(found.levels).items()}
    expected = float(np.sum([*silicon_tpot.step_terms(found, at, np.array([32.0])).values()]))
    context = int(32 * (found["isl"][0] + 0.5 * found["osl"][0]))
    assert profile.decode_step_s(32, context) == pytest.approx(expected, rel=0.2)


def test_a_fitted_profile_carries_provenance_and_error() -> None:
    shape = served_shape("llama-3.1-70b", "fp8")
    fitted = fitted_profile(preset("H200"), shape, "vllm", "fp8", tp=4)
    assert fitted.provenance == "fitted"
    assert fitted.error is not None
    assert 0.0 < fitted.error < 0.3
    assert fitted_profile(preset("H20"), shape, "vllm", "fp8", tp=4).provenance == "extrapolated"
    with pytest.raises(InvalidValue, match="engines: trtllm, vllm, sglang"):
        fitted_profile(preset("H200"), shape, "other", "fp8")


def test_every_level_has_room_for_its_values() -> None:
    found = columns({"model": "gpt-oss-120b", "backend": "sglang", "gpu": "GB300", "precision": "fp4"}, draft=3)
    for name, values in found.levels.items():
        assert 0 <= int(values.max()) < SIZES[name]
