"""Commands that become a program: what they tell it, from flags, variables and files."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ui import programs


class Became(BaseException):
    """In execv's place: this process would be another program now."""


@pytest.fixture
def became(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    calls: list[list[str]] = []

    def execv(path: str, arguments: list[str]) -> None:
        assert path == arguments[0] == sys.executable
        calls.append(arguments[1:])
        raise Became

    monkeypatch.setattr(programs.os, "execv", execv)
    return calls


def test_a_pool_is_told_flags_variables_and_the_file(run, became, monkeypatch, tmp_path: Path) -> None:
    file = tmp_path / "phaseplane.toml"
    file.write_text('[kvpool]\nblock_bytes = 4096\ndram_gib = 2.0\nssd_dir = "/var/kv"\n')
    monkeypatch.setenv("PHASEPLANE_KVPOOL_PORT", "4242")
    with pytest.raises(Became):
        run("kvpool", "--config", str(file), "--dram-gib", "4")
    told = ["-m", "nodes.kvpool", "--port=4242", "--block-bytes=4096", "--dram-gib=4.0", "--ssd-dir=/var/kv"]
    assert became[0][:2] == told[:2]
    assert sorted(became[0]) == sorted(told)


def test_a_pool_is_asked_for_its_statistics(run, became) -> None:
    with pytest.raises(Became):
        run("kvpool", "stats", "--endpoint", "tcp://127.0.0.1:4242", "--data-key-file", "data.key")
    flags = ["--endpoint=tcp://127.0.0.1:4242", "--data-key-file=data.key", "--timeout=10.0"]
    assert became[0][:3] == ["-m", "nodes.kvpool", "stats"]
    assert sorted(became[0][3:]) == sorted(flags)


def test_bench_kv_is_told_what_to_measure(run, became) -> None:
    with pytest.raises(Became):
        run("bench", "kv", "--only", "tcp,pool", "--json", "--peers-python", "/peers/bin/python")
    flags = ["--only=tcp,pool", "--rounds=7", "--peers-python=/peers/bin/python", "--json"]
    assert became[0][:2] == ["-m", "nodes.benches.kv"]
    assert sorted(became[0][2:]) == sorted(flags)


def test_the_validation_is_told_parts_and_data(run, became) -> None:
    with pytest.raises(Became):
        run("validate", "--data", "public", "--only", "recorded", "--only", "distserve-steps", "--json")
    flags = ["--data=public", "--only=recorded", "--only=distserve-steps", "--json"]
    assert became[0][:2] == ["-m", "controlplane.validation"]
    assert sorted(became[0][2:]) == sorted(flags)


def test_a_plan_of_several_models_is_told_each(run, became) -> None:
    wants = ["llama-3-70b rate=3 slo=ttft=2,tpot=0.05", "llama-3.1-8b rate=20"]
    with pytest.raises(Became):
        run("plan", "--fleet", "8xH800", "--model", wants[0], "--model", wants[1], "--effort", "1")
    told = [flag for flag in became[0] if flag.startswith("--model")]
    assert told == [f"--model={want}" for want in wants]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["kvpool", "--port", "70000"], "'--port'"),
        (["kvpool", "--dram-gib", "-1"], "'--dram-gib'"),
        (["kvpool", "--dtype", "int4"], "'--dtype'"),
        (["kvpool", "--log-level", "loud"], "'--log-level'"),
        (["kvpool", "stats"], "'--endpoint'"),
        (["kvpool", "stat"], "no such command 'stat'"),
        (["bench", "kv", "--rounds", "0"], "'--rounds'"),
    ],
)
def test_usage_errors_never_start_it(run, became, arguments: list[str], said: str) -> None:
    ran = run(*arguments)
    assert (ran.code, became) == (2, [])
    assert said in ran.err


def test_the_planner_is_told_flags_and_the_file(run, became, tmp_path: Path) -> None:
    file = tmp_path / "phaseplane.toml"
    file.write_text('[plan]\nfleet = "8xH800,16xH20"\nslo = ["ttft:2,tpot:0.05"]\nno_baselines = true\n')
    with pytest.raises(Became):
        run("plan", "--config", str(file), "--model", "llama-3.1-70b", "--rate", "4", "--budget", "30")
    flags = [
        "--fleet=8xH800,16xH20", "--model=llama-3.1-70b", "--slo=ttft:2,tpot:0.05", "--target=0.9", "--rate=4.0",
        "--budget=30.0", "--num=500", "--effort=2", "--no-baselines", "--seed=0", "--block-size=512",
    ]  # fmt: skip
    assert became[0][:2] == ["-m", "controlplane.planner"]
    assert sorted(became[0][2:]) == sorted(flags)
