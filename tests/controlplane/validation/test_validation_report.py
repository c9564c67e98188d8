"""The report says what is met, missed and skipped, in words that do not change from run to run."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace
from validation_data import PUBLIC

from controlplane.core.config import CoreConfig
from controlplane.core.events import Arrived, Event, FromNode
from controlplane.core.recorder import FlightRecorder
from controlplane.sim.driver import Simulation
from controlplane.sim.fleet import parse_fleet
from controlplane.sim.options import parse_faults
from controlplane.sim.spec import SimConfig
from controlplane.validation import __main__ as program
from controlplane.validation.cluster import splitwise_clusters
from controlplane.validation.goodput import distserve_goodput
from controlplane.validation.mooncake import mooncake_policies
from controlplane.validation.parts import NAMES, make_parts
from controlplane.validation.recorded import recorded_fleet
from controlplane.validation.report import Part, chosen, document
from controlplane.validation.section import Section, percent
from controlplane.validation.simulated import attained, quantile
from controlplane.validation.sources import DISTSERVE, SOURCES, data_directory
from controlplane.validation.steps import distserve_steps, splitwise_steps
from transfer.api import RequestRecord
from transfer.errors import InvalidValue
from transfer.terms import Slo
from transfer.traces.generating import generate, parse_traffic
from transfer.wire.messages import Reserved

MET = Section("One", "It is 1 % off.", [("a", "b"), ("x|y", "1")], ["A note."], True, (("error", 0.01),))
CORE = CoreConfig(classes={"default": Slo(ttft_s=2.0, tpot_s=0.1)}, default_class="default")


def test_a_section_in_markdown() -> None:
    assert MET.markdown() == (
        "## One\n\n**Meets its bar.** It is 1 % off.\n\n| a | b |\n| --- | --- |\n| x/y | 1 |\n\n- A note."
    )
    assert "Misses its bar" in Section("Two", "No.", passed=False).markdown()
    assert percent(0.0314) == "3.1 %"


def test_the_document_names_every_source_and_repeats_itself() -> None:
    text = document([MET, Section("Two", "No.", passed=False), Section("Three", "Skipped: no file.")])
    assert text == document([MET, Section("Two", "No.", passed=False), Section("Three", "Skipped: no file.")])
    assert "| One | met |" in text
    assert "| Two | missed |" in text
    assert "| Three | none |" in text
    for source in SOURCES:
        assert source.origin in text
        assert source.licence in text


def test_missing_data_is_skipped_with_where_to_get_it(tmp_path: Path) -> None:
    part = Part("d", "D", (DISTSERVE,), lambda data: MET)
    section = part.section(tmp_path)
    assert section.passed is None
    assert DISTSERVE.files[1] in section.verdict
    assert DISTSERVE.origin in section.verdict
    for file in DISTSERVE.files:
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text("{}")
    assert part.section(tmp_path) is MET


def test_parts_are_chosen_by_name_in_order() -> None:
    parts = make_parts(None)
    assert [part.name for part in chosen(parts, [NAMES[2], NAMES[0]])] == [NAMES[0], NAMES[2]]
    assert chosen(parts, []) == parts
    with pytest.raises(InvalidValue, match="no part 'steps'"):
        chosen(parts, ["steps"])
    with pytest.raises(InvalidValue, match="no a directory nowhere"):
        data_directory(Path("nowhere"))


def test_the_program_prints_json_writes_and_says_what_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    data = tmp_path / "data"
    data.mkdir()
    assert program.main(["--only", "distserve-steps,recorded", "--json", "--out", "report.md"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [*told] == ["distserve-steps", "recorded"]
    assert told["distserve-steps"]["passed"] is None
    assert (tmp_path / "report.md").read_text().startswith("# Validation")
    assert str(tmp_path) not in (tmp_path / "report.md").read_text()
    assert program.main(["--only", "nothing"]) == 1
    assert "no part 'nothing'" in capsys.readouterr().err
    assert program.main(["--only", "recorded", "--recording", "gone.msgpack"]) == 1
    assert "gone.msgpack cannot be read" in capsys.readouterr().err
    with pytest.raises(SystemExit) as usage:
        program.main(["--nope"])
    assert usage.value.code == 2


def test_only_a_full_run_updates_the_report_that_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("data", "docs"):
        (tmp_path / name).mkdir()
    report = tmp_path / "docs" / "validation.md"
    report.write_text("old")
    assert program.main(["--only", "recorded"]) == 0
    assert report.read_text() == "old"
    assert program.main([]) == 0
    assert "Skipped" in report.read_text()
    assert "wrote docs/validation.md" in capsys.readouterr().err


def test_an_install_that_only_serves_is_told_what_to_add(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(sys.modules, "controlplane.validation.parts")
    monkeypatch.delitem(sys.modules, "controlplane.validation.cluster")
    monkeypatch.delitem(sys.modules, "nodes.fitting")
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    assert program.main([]) == 1
    assert "phaseplane[plan]" in capsys.readouterr().err


def record(**changes: object) -> RequestRecord:
    values: dict[str, object] = {
        "request_id": "r", "model": "m", "traffic_class": "default", "arrived_at": 0.0, "outcome": "ok",
        "finish_reason": "length", "prompt_tokens": 10, "output_tokens": 11, "cached_tokens": 0, "ttft_s": 0.5,
        "tpot_s": 0.05, "e2e_s": 1.2, "max_itl_s": 0.1, "good": True,
        "stages_s": {"queue": 0.1, "prefill": 0.1, "transfer": 0.2, "decode": 0.1},
    }  # fmt: skip
    return RequestRecord(**(values | changes))  # type: ignore[arg-type]


def test_the_papers_ttft_ends_with_the_prefill_and_their_tpot_begins_there() -> None:
    one = record()
    assert attained([one], 0.2, 0.1) == 1.0
    assert attained([one], 0.19, 0.1) == 0.0
    assert attained([one], 0.2, 0.099) == 0.0
    assert attained([record(output_tokens=1), record(outcome="rejected")], 0.2, 0.001) == 0.5
    assert quantile([3.0, 1.0, 2.0], 0.5) == 2.0


def flight(*faults: str) -> tuple[bytes, bytes]:
    """Recordings of a simulated fleet: one, and the same with instances that take 250 ms to answer."""
    model = "llama-3.1-8b"
    nodes = parse_fleet("1xA100:prefill,1xA100:decode", model, 16)
    config = SimConfig(
        core=CORE, model=model, token_bytes=131072.0, block_size=16, faults=parse_faults(list(faults), nodes)
    )
    run = Simulation(nodes, generate(parse_traffic("generated:poisson?rate=3&num=40")), config)
    recorder, frames = FlightRecorder(CORE, 1, 0), bytearray()
    frames += recorder.header()

    def journal(now: float, event: Event) -> None:
        if isinstance(event, Arrived):  # simulated prompts have no text, and so would seem to share it
            number = int(event.request.request_id[1:]) + 1
            tokens = number.to_bytes(4, "little") * (len(event.request.tokens) // 4)
            event = Arrived(request=replace(event.request, tokens=tokens))
        frames.extend(recorder.entry(now, event))
        answer_s = 0.25 if isinstance(event, FromNode) and isinstance(event.message, Reserved) else 0.0
        late.extend(recorder.entry(now + answer_s, event))

    late = bytearray(frames)
    run.journal = journal
    run.run()
    return bytes(frames), bytes(late)


def test_a_recorded_fleet_is_predicted_from_what_it_declared(tmp_path: Path) -> None:
    frames, late = flight()
    file = tmp_path / "flight.msgpack"
    file.write_bytes(frames)
    section = recorded_fleet(file)
    assert section.passed
    assert all(value < 0.02 for _, value in section.figures)  # type: ignore[operator]
    file.write_bytes(late)  # instances answer slowly, and TTFT counts it
    slow = recorded_fleet(file)
    assert "250.0 ms for messages" in " ".join(slow.notes)
    assert float(slow.table[1][2]) - float(section.table[1][2]) == pytest.approx(250.0, abs=1.0)
    assert slow.table[3] == section.table[3]
    file.write_bytes(FlightRecorder(CORE, 1, 0).header())
    with pytest.raises(InvalidValue, match="at least 20"):
        recorded_fleet(file)


def test_what_instances_learned_of_their_steps_counts_and_is_not_learned_from_what_is_judged(tmp_path: Path) -> None:
    file = tmp_path / "flight.msgpack"
    file.write_bytes(flight("slow:d0x1.4@0+900")[0])
    slow = recorded_fleet(file)
    assert "30 requests, the last of 40" in slow.notes[0]
    assert slow.notes[0].endswith("came: 1.00, 1.40.")
    assert dict(slow.figures)["TPOT_p50_error"] < 0.02  # type: ignore[operator]
    file.write_bytes(flight("slow:d0x1.4@6+900")[0])
    later = recorded_fleet(file)
    assert later.notes[0].endswith("came: 1.00, 1.00.")
    assert dict(later.figures)["TPOT_p50_error"] == pytest.approx(1.0 - 1 / 1.4, abs=0.02)


@pytest.mark.slow
@pytest.mark.skipif(not PUBLIC.is_dir(), reason="needs the public measurements")
def test_the_published_measurements_are_met() -> None:
    assert distserve_steps(PUBLIC).passed
    assert splitwise_steps(PUBLIC).passed
    assert mooncake_policies(PUBLIC).passed
    figures = dict(distserve_goodput(PUBLIC).figures)
    assert figures["DistServe_within_5_points_at_0.4_s"] >= 6  # type: ignore[operator]
    assert dict(splitwise_clusters(PUBLIC).figures)["median_ttft_quantile_error"] < 0.15  # type: ignore[operator]
