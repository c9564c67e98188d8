"""`phaseplane top` from the command line: one look as text and JSON, what it refuses, and what it does not load."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from test_tui_recording import recorded
from top_fakes import TopFake
from ui_fakes import serving

from ui import top_command
from ui.cli import main

ROOT = Path(__file__).parents[3]


@pytest.fixture
def fake() -> Iterator[TopFake]:
    with serving(TopFake()) as running:  # type: ignore[arg-type]
        yield running  # type: ignore[misc]


def test_one_look_reads_line_by_line(fake: TopFake, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "--once", "--url", fake.url]) == 0
    said = capsys.readouterr().out
    for part in ("Objectives met: 97.0%", "2P2D  9.70/s goodput", "move n0 P->D", "P prefill", "TTFT 2.00 s", "pool-0"):
        assert part in said
    assert max(map(len, said.splitlines())) <= 120


def test_one_look_tells_those_that_wait_past_their_objective(fake: TopFake, capsys: pytest.CaptureFixture[str]) -> None:
    fake.fleet = msgspec.structs.replace(fake.fleet, queue_depth=180, queue_late=172)
    assert main(["top", "--once", "--url", fake.url]) == 0
    assert "\n180 wait for a place, 172 of them past their objective.\n" in capsys.readouterr().out


def test_one_look_in_ascii_and_in_chinese(fake: TopFake, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "--once", "--ascii", "--target", "0.99", "--url", fake.url]) == 0
    said = capsys.readouterr().out
    assert said.isascii()
    assert "! Objectives missed: 97.0% of requests within them (target 99%)" in said
    assert main(["top", "--once", "--lang", "zh-TW", "--url", fake.url]) == 0
    assert "已達成目標：97.0%" in capsys.readouterr().out


def test_one_look_as_json_has_the_figures_of_the_api(fake: TopFake, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "--once", "--json", "--url", fake.url]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["verdict"] == {
        "kind": "met", "sentence": "Objectives met: 97.0% of requests within them (target 90%)", "attainment": 0.97,
        "target": 0.9, "troubles": [],
    }  # fmt: skip
    assert found["fleet"]["goodput"]["per_s"] == 9.7
    assert sum(found["stages"].values()) == pytest.approx(1.0)
    assert [one["request_id"] for one in found["requests"]] == ["cmpl-1", "cmpl-2", "cmpl-3"]


def test_the_end_of_a_recording_needs_no_fleet(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorded(tmp_path / "x.rec", 30)
    assert main(["top", "--once", "--json", "--replay", str(tmp_path / "x.rec")]) == 0
    assert json.loads(capsys.readouterr().out)["mode"] == "replay"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--json"], "needs --once"),
        (["--once", "--record", "x"], "leave out --once"),
        (["--record", "x", "--replay", "y"], "leave out --once and --replay"),
        (["--once", "--lang", "fr"], "choose en or zh-Hant"),
        ([], "needs a terminal"),
        (["--once", "--url", "http://127.0.0.1:1"], "no fleet answers"),
        (["--once", "--replay", "/nonexistent/x.rec"], "cannot be read"),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["top", *arguments]) != 0
    err = capsys.readouterr().err
    assert said in err
    assert len(err.splitlines()) == 1


def test_without_textual_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert main(["top"]) == 1
    assert capsys.readouterr().err == f"error: {top_command.MISSING}\n"


@pytest.mark.parametrize(
    ("module", "unwanted"),
    [
        ("ui.tui.run", {"torch", "streamlit", "numpy", "pandas", "controlplane", "nodes", "zmq", "plotext"}),
        ("ui.tui.once", {"textual", "torch", "streamlit", "controlplane", "nodes"}),
        ("ui.cli", {"textual", "streamlit", "torch"}),
    ],
)
def test_starting_it_loads_no_more_than_it_needs(module: str, unwanted: set[str]) -> None:
    code = f"import sys, {module}; print('\\n'.join(sys.modules))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60, check=True)
    assert not {name.split(".")[0] for name in run.stdout.split()} & unwanted
