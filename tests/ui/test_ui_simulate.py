"""`phaseplane simulate`: the command starts the simulator, and the simulator says what it found or what is wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from controlplane.sim.program import main
from controlplane.sim.report import SimReport
from ui import programs

FLEET = ("--fleet", "2xH800:prefill,2xH20:decode,1xCPU:kv_pool", "--model", "llama-3.1-8b")
SMALL = (*FLEET, "--trace", "generated:agentic", "--rate", "4", "--num", "40", "--slo", "ttft=20,tpot=.5")
ASKED = (
    "requests", "wall_s", "requests_per_wall_s", "goodput_per_s", "goodput_per_gpu", "cost_per_good", "attainment",
    "rejected", "bound", "of_bound",
)  # fmt: skip


def test_one_command_predicts_a_fleet() -> None:
    command = [sys.executable, "-m", "ui.cli", "simulate", *SMALL, "--json"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (ran.returncode, ran.stderr) == (0, "")
    found = json.loads(ran.stdout)
    assert set(ASKED) <= set(found)
    assert tuple(found) == SimReport.__struct_fields__
    assert found["requests"] == found["completed"] == found["good"] == 40
    assert found["attainment"] == 1.0
    assert found["goodput_per_s"] == pytest.approx(40 / found["span_s"])
    assert found["goodput_per_gpu"] == pytest.approx(found["goodput_per_s"] / 4)
    assert 0.1 < found["cached_tokens"] / found["prompt_tokens"] < 0.7
    assert [one["id"] for one in found["instances"]] == ["p0", "p1", "d0", "d1", "k0"]
    assert all(0 < one["use"] <= 1 for one in found["instances"][:2])


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> SimReport:
    assert main([*SMALL, "--json", *arguments]) == 0
    return msgspec.json.decode(capsys.readouterr().out, type=SimReport)


def test_equal_runs_are_equal_and_faults_are_not(capsys: pytest.CaptureFixture[str]) -> None:
    once, again = (msgspec.structs.replace(told(capsys), wall_s=0.0, requests_per_wall_s=0.0) for _ in range(2))
    assert once == again
    stepwise = told(capsys, "--stepwise")
    assert stepwise.good == once.good
    assert stepwise.e2e_s.p99 == pytest.approx(once.e2e_s.p99, rel=1e-9)
    hurt = told(capsys, "--fault", "kill:d0@2+5,slow:p0x4@0+30", "--fault", "mute:@1+1")
    assert hurt.resumes > 0
    assert hurt.ttft_s.p90 > once.ttft_s.p90  # type: ignore[operator]
    assert any("d0 is lost" in note for note in hurt.notes)


def test_a_person_is_told_and_shown(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    png = tmp_path / "run.png"
    assert main([*SMALL, "--plot", "--png", str(png), "--policy", "round_robin"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("100.0% of 40 requests met their objectives; goodput ")
    assert "by policy round_robin" in out
    assert "requests a second:  . offered" in out
    assert err == f"wrote {png}\n"
    assert png.stat().st_size > 10_000


def test_a_recorded_trace_of_any_format_is_taken(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    trace.write_text("Timestamp,Request tokens,Response tokens\n1,500,20\n2,900,30\n3,90,0\n")
    assert main([*FLEET, "--trace", str(trace), "--json"]) == 0
    report = msgspec.json.decode(capsys.readouterr().out, type=SimReport)
    assert (report.requests, report.prompt_tokens, report.output_tokens) == (2, 1400, 50)
    assert report.about.format == "burstgpt"
    assert report.notes[0].startswith("1 of 3 requests of the trace had failed")
    assert "set them with --slo" in report.notes[1]
    assert main([*FLEET, "--trace", str(trace), "--format", "azure"]) == 1
    assert "has no column TIMESTAMP" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--policy", "goodputt"), "did you mean 'goodput'"),
        (("--slo", "fast"), "is not an objective"),
        (("--fault", "kill:d7@1"), "did you mean d"),
        (("--trace", "generated:bursti"), "use --trace generated:bursty"),
        (("--trace", "none.csv"), "cannot read the trace none.csv"),
        (("--num", "0"), "--num must be above 0"),
        (("--plot", "--json"), "use --png FILE"),
        (("--png", "/nowhere/run.png"), "another file with --png"),
        (("--fleet", "8xH900:prefill"), "H900"),
        (("--model", "llama-9"), "llama"),
        (("--block-size", "300"), "blocks are 512 tokens long"),
    ],
)
def test_what_cannot_be_is_a_sentence(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], said: str
) -> None:
    assert main([*SMALL, *arguments]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert said in err
    assert "Traceback" not in err


def test_flags_that_are_not_there_are_usage(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["--fleet", "1xH20:mixed"])
    assert stopped.value.code == 2
    assert "--model; run `phaseplane simulate --help`" in capsys.readouterr().err


class Became(BaseException):
    """In execv's place."""


def test_flags_variables_and_the_file_reach_it(run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls: list[list[str]] = []

    def execv(path: str, arguments: list[str]) -> None:
        calls.append(arguments[1:])
        raise Became

    monkeypatch.setattr(programs.os, "execv", execv)
    file = tmp_path / "phaseplane.toml"
    file.write_text('[simulate]\nfleet = "1xH20:mixed"\nslo = ["ttft:2,tpot:1", "chat=ttft:1,tpot:1"]\nplot = true\n')
    monkeypatch.setenv("PHASEPLANE_SIMULATE_POLICY", "slo")
    with pytest.raises(Became):
        run("simulate", "--config", str(file), "--model", "llama-3.1-8b", "--fault", "a", "--fault", "b")
    flags = [
        "--fleet=1xH20:mixed", "--model=llama-3.1-8b", "--trace=generated:conversation", "--trace-start=0.0",
        "--slo=ttft:2,tpot:1", "--slo=chat=ttft:1,tpot:1", "--policy=slo", "--seed=0", "--fault=a", "--fault=b",
        "--block-size=512", "--plot",
    ]  # fmt: skip
    assert calls[0][:2] == ["-m", "controlplane.sim"]
    assert sorted(calls[0][2:]) == sorted(flags)
    assert "format" in run("simulate", *FLEET, "--format", "parquet").err
