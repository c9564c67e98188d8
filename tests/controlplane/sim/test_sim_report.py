"""What a run's report says of its records: counts, reasons, instances, time series, drawings; and faults as text."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from pathlib import Path

import pytest
from msgspec.structs import replace

from controlplane.core.config import CoreConfig
from controlplane.sim.options import core_config, parse_faults
from controlplane.sim.plots import terminal_plots, write_png
from controlplane.sim.report import About, SimReport, summarize
from controlplane.sim.series import make_series
from controlplane.sim.spec import Fault, NodeSpec, SimConfig, SimResult
from controlplane.sim.view import make_console, show
from transfer.api import RequestRecord
from transfer.declared import HardwareProfile, ModelShape
from transfer.errors import InvalidValue
from transfer.profile import LatencyProfile, StepRange
from transfer.terms import Role, Slo
from transfer.traces.request import TraceRequest

HARDWARE = HardwareProfile(
    name="H800", num_gpus=2, peak_flops=1e15, memory_bytes=8e10, memory_bytes_per_s=3e12, link_bytes_per_s=5e10,
    price_per_hour=4.0,
)  # fmt: skip
SHAPE = ModelShape(
    num_layers=2, hidden_size=64, num_heads=4, num_kv_heads=2, head_dim=16, ffn_size=128, vocab_size=100
)  # fmt: skip
LATENCY = LatencyProfile(hardware=HARDWARE, shape=SHAPE, tp=2, error=0.03, provenance="fitted")
ABOUT = About(trace="t", format="azure", fleet="1xH800:prefill", model="m", policy="slo", seed=0)


def node(name: str, role: Role) -> NodeSpec:
    return NodeSpec(
        id=name, role=role, hardware="H800", num_gpus=2, price_per_hour=4.0, link_bytes_per_s=5e10, num_blocks=100,
        latency=None if role is Role.KV_POOL else LATENCY,
    )  # fmt: skip


NODES = (node("p0", Role.PREFILL), node("d0", Role.DECODE), node("kv0", Role.KV_POOL))
CONFIG = SimConfig(
    core=CoreConfig(classes={"default": Slo(ttft_s=1.0, tpot_s=0.1), "batch": None}), model="m", token_bytes=1.0
)  # fmt: skip


def record(name: str, at: float, **more: object) -> RequestRecord:
    values: dict[str, object] = {
        "request_id": name, "model": "m", "traffic_class": "default", "arrived_at": 1e9 + at, "outcome": "ok",
        "finish_reason": "length", "prompt_tokens": 100, "output_tokens": 11, "cached_tokens": 20, "ttft_s": 0.5,
        "tpot_s": 0.05, "e2e_s": 1.0, "max_itl_s": 0.06, "good": True, "prefill": "p0", "decode": "d0",
        "stages_s": {"queue": 0.1, "prefill": 0.3, "transfer": 0.06, "decode": 0.04},
    }  # fmt: skip
    return RequestRecord(**(values | more))  # type: ignore[arg-type]


RECORDS = (
    record("a", 0.0),
    record("b", 1.0, ttft_s=1.5, good=False, e2e_s=3.0, stages_s={"queue": 1.2, "prefill": 0.3}),
    record("c", 2.0, ttft_s=1.5, tpot_s=0.2, good=False, e2e_s=2.0, stages_s={"queue": 0.2, "prefill": 1.3}),
    record("d", 3.0, outcome="rejected", good=False, ttft_s=None, tpot_s=None, output_tokens=0, decode=None,
           prefill=None, e2e_s=0.0, stages_s={}),
    record("e", 4.0, traffic_class="batch", good=None, kv_source="kv0", fetched_tokens=15, prefill=None, e2e_s=6.0),
)  # fmt: skip
TRACE = [TraceRequest(at_s=float(n), prompt_tokens=100, output_tokens=11) for n in range(5)]
RESULT = SimResult(
    records=RECORDS, wall_s=0.5, span_s=10.0, gpu_s=40.0, dollars=0.02, good=1, counted=4, rejected=1,
    num_preemptions=2, num_moves=0, notes=("a note",), busy_s={"p0": 5.0, "d0": 1.0},
)  # fmt: skip


def report(bound: float | None = None, nodes: Sequence[NodeSpec] = NODES) -> SimReport:
    return summarize(ABOUT, nodes, TRACE, CONFIG, RESULT, bound, ("first",))


def test_a_report_counts_what_ended_and_why_it_missed() -> None:
    found = report(0.2)
    assert (found.requests, found.completed, found.rejected, found.good, found.counted) == (5, 4, 1, 1, 4)
    assert (found.goodput_per_s, found.goodput_per_gpu, found.attainment) == (0.1, 1 / 40, 0.25)
    assert (found.bound, found.of_bound, found.cost_per_good) == (0.2, 0.5, 0.02)
    assert (found.requests_per_wall_s, found.offered_per_s, found.throughput_per_s) == (10.0, 1.25, 0.4)
    assert found.missed == {"ttft": 1, "ttft and tpot": 1, "rejected": 1}
    assert found.missed_stages_s == pytest.approx({"prefill": 1.6, "queue": 1.4})
    assert found.bottleneck == "prefill"
    assert (found.ttft_s.p50, found.ttft_s.p90) == pytest.approx((1.0, 1.5))
    assert found.verdict == (
        "25.0% of 4 requests met their objectives; goodput 0.1/s, 0.025/s per GPU; $0.02 each; 50% of possible; "
        "most misses by TTFT, waiting longest in prefill"
    )
    assert found.notes == ("first", "a note")
    assert report().of_bound is None
    assert "of possible" not in report().verdict


def test_what_lies_beyond_the_steps_that_were_measured_is_said() -> None:
    known = StepRange(num_new_tokens=79, context_tokens=100, batch=8, attention_pairs=9000)
    for num_new, said in ((80, ""), (79, ", extrapolated for prompts of 100 tokens")):
        known = replace(known, num_new_tokens=num_new)
        nodes = tuple(replace(one, latency=one.latency and replace(one.latency, fitted_to=known)) for one in NODES)
        assert report(nodes=nodes).predicted_from == (f"H800 (2 GPUs): fitted profile, median error 3.0%{said}",)


def test_classes_and_instances_have_their_own_rows() -> None:
    found = report()
    batch, default = found.classes
    assert (batch.name, batch.slo, batch.attainment, batch.total) == ("batch", None, None, 0)
    assert (default.good, default.total, default.attainment) == (1, 4, 0.25)
    prefill, decode, pool = found.instances
    assert (prefill.num_requests, prefill.prefill_tokens, prefill.output_tokens, prefill.use) == (3, 240, 0, 0.5)
    assert (decode.num_requests, decode.prefill_tokens, decode.output_tokens, decode.use) == (4, 80, 44, 0.1)
    assert (pool.num_requests, pool.fetched_tokens, pool.use) == (0, 15, None)
    assert found.predicted_from == ("H800 (2 GPUs): fitted profile, median error 3.0%",)


def test_a_person_reads_the_verdict_first() -> None:
    out = io.StringIO()
    show(make_console(out), report())
    lines = out.getvalue().splitlines()
    assert lines[0].startswith("25.0% of 4 requests met their objectives")
    text = out.getvalue()
    for said in (
        "missed by: TTFT 1, TTFT and TPOT 1, rejection 1", "prefill 53%, queue 47%", "no bound is known",
        "step times from: H800 (2 GPUs): fitted profile", "note: first", "TTFT 1 s, TPOT 0.1 s",
    ):  # fmt: skip
        assert said in text


def test_a_series_spreads_the_records_over_the_span() -> None:
    series = make_series(NODES, TRACE, RESULT, num_slices=10)
    assert series.offered_per_s.tolist() == [1, 1, 1, 1, 1, 0, 0, 0, 0, 0]
    assert series.throughput_per_s.tolist() == [0, 1, 0, 0, 2, 0, 0, 0, 0, 1]
    assert series.goodput_per_s.sum() == 1
    assert series.ttft_p50_s[:3].tolist() == [0.5, 1.5, 1.5]
    assert math.isnan(series.ttft_p50_s[3])
    assert series.tpot_p90_s[2] == 0.2
    assert series.decoding.tolist() == pytest.approx([0.5, 0, 0.5, 1.5, 0.5, 1, 1, 1, 1, 1])
    assert series.prefilling.tolist() == pytest.approx([0.3, 0, 1.1, 0.5, 0.3, 0, 0, 0, 0, 0])


def test_drawings_show_rates_and_objectives(tmp_path: Path) -> None:
    series = make_series(NODES, TRACE, RESULT)
    text = terminal_plots(series, report(), 80)
    assert all(word in text for word in ("requests a second", "good", "offered", "TTFT, s", "objective"))
    assert max(len(line) for line in text.splitlines()) <= 80
    write_png(tmp_path / "run.png", series, report())
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(InvalidValue, match="another file with --png"):
        write_png(tmp_path / "none" / "run.png", series, report())


def test_faults_are_read_in_order_of_time() -> None:
    assert parse_faults(["slow:d0x2.5@60+120,mute:@5+10", "kill:p0@20"], NODES) == (
        Fault(at_s=5, kind="mute", instance="", duration_s=10),
        Fault(at_s=20, kind="kill", instance="p0"),
        Fault(at_s=60, kind="slow", instance="d0", duration_s=120, factor=2.5),
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("kill:d9@1", "no instance 'd9'; did you mean d0"),
        ("kill:d0", "write it like kill:p0@60"),
        ("burn:d0@1", "write it like kill:p0@60"),
        ("slow:d0@1+5", "takes a factor"),
        ("kill:d0x3@1", "takes a factor"),
        ("mute:d0@1", "for how many seconds"),
        ("kill:@1", "no instance ''"),
        ("kill:d0@1.2.3", "is not a fault"),
    ],
)
def test_a_fault_that_cannot_be_is_a_sentence(text: str, said: str) -> None:
    with pytest.raises(InvalidValue, match=said):
        parse_faults([text], NODES)


def test_a_default_that_decides_is_noted() -> None:
    config, notes = core_config("slo", ["chat=ttft=1,tpot=50ms"])
    assert (config.policy, config.classes["chat"]) == ("slo", Slo(ttft_s=1.0, tpot_s=0.05))
    assert config.classes["default"] == CoreConfig().classes["default"]
    assert notes == ()
    assert "TTFT 2 s, TPOT 0.2 s" in str(core_config("slo", [])[1][0])
    assert core_config("slo", ["ttft=1,tpot=1"])[0].classes["default"] == Slo(ttft_s=1.0, tpot_s=1.0)
    assert [core_config("slo", [], autopilot=mode)[0].autopilot for mode in ("off", "auto")] == ["off", "auto"]
    assert (config.autopilot, CoreConfig().autopilot) == ("off", "advise")
    with pytest.raises(InvalidValue, match="is unknown; did you mean 'slo'"):
        core_config("slos", [])
