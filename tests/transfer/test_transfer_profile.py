"""The latency model: terms add up, parallelism, experts and latent attention cost what the form says."""

from __future__ import annotations

import time

import msgspec
import pytest

from transfer.errors import InvalidValue
from transfer.profile import HardwareProfile, LatencyProfile, ModelShape, StepRange, StepTerms

GPU = HardwareProfile(
    name="X", num_gpus=1, peak_flops=1e15, memory_bytes=8e10, memory_bytes_per_s=4e12, link_bytes_per_s=5e10,
    price_per_hour=2.0, peak_flops_fp8=2e15, scale_up_bytes_per_s=4e11,
)  # fmt: skip
DENSE = ModelShape(
    num_layers=32, hidden_size=4096, num_heads=32, num_kv_heads=8, head_dim=128, ffn_size=14336, vocab_size=128256
)
EXPERTS = msgspec.structs.replace(
    DENSE, num_experts=64, experts_per_token=4, expert_ffn_size=2048, shared_experts=1, num_dense_layers=2
)
LATENT = msgspec.structs.replace(
    EXPERTS, kv_lora_rank=512, rope_head_dim=64, q_lora_rank=1536, v_head_dim=128, num_kv_heads=32
)
WINDOWED = msgspec.structs.replace(DENSE, num_window_layers=16, window=128)
STEPS = [(1, 1000, 1, None), (64, 128_000, 64, None), (4096, 6000, 3, 9_000_000), (2, 5, 2, None), (0, 0, 0, None)]


def profile(shape: ModelShape = DENSE, **changes: object) -> LatencyProfile:
    return LatencyProfile(hardware=GPU, shape=shape, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("overlap", [1.0, 0.3])
@pytest.mark.parametrize(
    "one",
    [
        profile(), profile(tp=4, allreduce_s=1e-5), profile(EXPERTS, tp=2, dp=4, ep=8), profile(LATENT, tp=8),
        profile(WINDOWED, pp=2, tp=2), profile(LATENT, dp=8, ep=8, allreduce_s=1e-5, pp=2),
    ],
)  # fmt: skip
def test_terms_add_up_to_the_step_and_scale_with_it(one: LatencyProfile, overlap: float) -> None:
    one = msgspec.structs.replace(one, overlap=overlap)
    for step in STEPS:
        terms = one.step_terms(*step)
        assert terms.step_s == pytest.approx(one.step_s(*step), rel=1e-12)
        assert all(getattr(terms, name) >= 0.0 for name in terms.__struct_fields__)
        assert one.scaled(3.0).step_s(*step) == pytest.approx(3.0 * one.step_s(*step), rel=1e-12)
        assert sum(terms.shares().values()) == pytest.approx(1.0 if step[0] else 0.0)
    assert one.scaled(2.0).pp == one.pp


def test_a_dense_step_is_the_published_form() -> None:
    one = profile(alpha_s=0.003, beta_s=1e-4)
    weights = DENSE.linear_params * 2.0 / (4e12 * 0.73)
    kv = 32 * 2 * 8 * 128 * 2 * 5000 / (4e12 * 0.6)
    assert one.step_s(8, 5000, 8) == pytest.approx(weights + kv + 0.003 + 8e-4)
    compute = 2.0 * DENSE.linear_params * 4096 / (1e15 * 0.5)
    attention = 4.0 * 32 * 32 * 128 * 8_000_000 / (1e15 * 0.3)
    assert one.step_s(4096, 4096, 1, 8_000_000) == pytest.approx(compute + attention + 0.003 + 1e-4)
    assert one.step_terms(4096, 4096, 1, 8_000_000).weight_s == 0.0


def test_an_overlap_below_one_charges_part_of_the_shorter() -> None:
    none, whole = profile(overlap=0.0), profile()
    compute = 2.0 * DENSE.linear_params * 100 / (1e15 * 0.5)
    attention = 4.0 * 32 * 32 * 128 * 300_000 / (1e15 * 0.3)
    extra = compute + attention
    assert none.step_s(100, 300_000, 100) - whole.step_s(100, 300_000, 100) == pytest.approx(extra)


def test_experts_read_only_the_weights_a_batch_touches() -> None:
    one, full = profile(EXPERTS), EXPERTS.expert_weight_bytes / (4e12 * 0.73)
    base = EXPERTS.dense_weight_bytes / (4e12 * 0.73)
    for rows in (1, 8, 32):
        touched = 1 - (1 - 4 / 64) ** rows
        assert one.step_terms(rows, 0, rows).weight_s == pytest.approx(base + touched * full)
        assert EXPERTS.experts_touched(rows) == pytest.approx(64 * touched)
    assert EXPERTS.experts_touched(1) == pytest.approx(4)
    assert DENSE.experts_touched(5) == 0.0


def test_latent_attention_reads_one_vector_a_token_and_is_not_split_by_tp() -> None:
    assert LATENT.kv_token_bytes == 32 * 576 * 2
    one, eight = profile(LATENT), profile(LATENT, tp=8)
    assert eight.step_terms(1, 100_000, 1).kv_s == pytest.approx(one.step_terms(1, 100_000, 1).kv_s)
    spread = profile(LATENT, dp=8)
    assert spread.step_terms(8, 800_000, 8).kv_s == pytest.approx(one.step_terms(1, 100_000, 1).kv_s)
    gqa = profile(tp=16).step_terms(1, 100_000, 1).kv_s
    assert gqa == pytest.approx(profile(tp=8).step_terms(1, 100_000, 1).kv_s), "8 KV heads cannot be split further"


def test_windowed_layers_read_no_more_than_their_window() -> None:
    far, near = profile(WINDOWED).step_terms(4, 4 * 8000, 4).kv_s, profile().step_terms(4, 4 * 8000, 4).kv_s
    assert far == pytest.approx(near / 2 * (1 + 128 / 8000))
    assert WINDOWED.kv_token_bytes == DENSE.kv_token_bytes / 2


def test_a_pipeline_decodes_in_micro_batches_and_takes_new_work_after_one_stage() -> None:
    two, one = profile(pp=2, send_s=1e-3), profile()
    send = 1e-3 + 4 * 4096 * 2.0 / (4e11 * 0.7)
    assert two.decode_step_s(8, 8000) == pytest.approx(one.decode_step_s(4, 4000) + send)
    assert two.prefill_s(4096) == pytest.approx(one.prefill_s(4096) + 1e-3 + 4096 * 4096 * 2.0 / (4e11 * 0.7))
    assert two.interval_s(4096, 4096, 1) == pytest.approx(two.step_s(4096, 4096, 1) / 2)
    assert one.interval_s(4096, 4096, 1) == one.step_s(4096, 4096, 1)


def test_collectives_cost_latency_and_bytes_and_slow_links_beyond_the_scale_up_group() -> None:
    one, eight = profile(), profile(tp=8, allreduce_s=1e-5)
    assert one.step_terms(4096, 4096, 1).communication_s == 0.0
    bytes_s = 64 * 2 * 7 / 8 * 4096 * 4096 * 2 / (4e11 * 0.7)
    assert eight.step_terms(4096, 4096, 1).communication_s == pytest.approx(64e-5 + bytes_s)
    wide = profile(EXPERTS, dp=16, ep=16).step_terms(4096, 4096, 64).communication_s
    near = profile(EXPERTS, dp=8, ep=8).step_terms(4096, 4096, 64).communication_s
    assert wide > 2 * near


def test_narrow_weights_use_the_units_the_class_has() -> None:
    fp8, fp4 = (msgspec.structs.replace(DENSE, weight_bytes_per_param=width) for width in (1.0, 0.5))
    widened = msgspec.structs.replace(fp4, weight_only=True)
    base = profile().step_terms(8192, 0, 1).compute_s
    assert profile(fp8).step_terms(8192, 0, 1).compute_s == pytest.approx(base / 2)
    assert profile(fp4).step_terms(8192, 0, 1).compute_s == pytest.approx(base), "no fp4 unit here"
    assert profile(widened).step_terms(8192, 0, 1).compute_s == pytest.approx(base)
    assert profile(fp8).step_terms(1, 0, 1).weight_s == pytest.approx(profile().step_terms(1, 0, 1).weight_s / 2)


def test_impossible_steps_are_refused() -> None:
    for one in (profile(), profile(LATENT, dp=2)):
        assert one.step_s(0, 5, 1) == 0.0
        for wrong in ((-1, 0, 1), (1, -1, 1), (1, 1, -1)):
            with pytest.raises(InvalidValue, match="a step cannot hold"):
                one.step_s(*wrong)
            with pytest.raises(InvalidValue, match="a step cannot hold"):
                one.step_terms(*wrong)


def test_a_profile_travels_and_one_of_before_is_still_read() -> None:
    one = profile(LATENT, tp=2, error=0.04, provenance="fitted")
    one.step_s(1, 1, 1)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(one), type=LatencyProfile) == one
    old = {name: getattr(GPU, name) for name in HardwareProfile.__struct_fields__[:7]}
    sizes = {name: getattr(DENSE, name) for name in ModelShape.__struct_fields__[:9]}
    read = msgspec.convert({"hardware": old, "shape": sizes, "tp": 1}, type=LatencyProfile)
    assert (read.error, read.pp, read.overlap, read.shape) == (None, 1, 1.0, DENSE)


def test_a_larger_step_than_any_measured_is_extrapolated() -> None:
    known = StepRange(num_new_tokens=512, context_tokens=4000, batch=8, attention_pairs=150_000)
    one = profile(provenance="fitted", fitted_to=known)
    assert one.provenance_at(512, 4000, 8, 150_000) == "fitted"
    for larger in ((513, 4000, 8, 150_000), (512, 4001, 8, 150_000), (512, 4000, 9, 150_000), (8, 600, 8, 150_001)):
        assert one.provenance_at(*larger) == "extrapolated", larger
    assert one.provenance_at(8, 150_000, 8) == "extrapolated"
    assert profile().provenance_at(10**6, 10**9, 10**4) == "preset"
    assert one.prefill_provenance(500, 0, 512) == "fitted"
    assert one.prefill_provenance(500, 0, 256) == "fitted"
    assert one.prefill_provenance(500, 0, 0) == "fitted"
    assert one.prefill_provenance(600, 0, 0) == "extrapolated"
    assert one.prefill_provenance(600, 0, 256) == "fitted"  # 256 tokens after 344: 121 000 pairs
    assert one.prefill_provenance(800, 0, 256) == "extrapolated"  # 256 after 544: 172 000 pairs
    assert one.prefill_provenance(100, 3900, 512) == "extrapolated"


def test_predicting_a_step_takes_microseconds() -> None:
    one = profile()
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(2000):
            one.step_s(16, 32_000, 16)
        best = min(best, (time.perf_counter() - start) / 2000)
    assert best < 10e-6


def test_no_terms_for_no_step() -> None:
    zero = StepTerms(compute_s=0, weight_s=0, attention_s=0, kv_s=0, communication_s=0, constant_s=0)
    assert zero.shares() == {}
