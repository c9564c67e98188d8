"""The driver of `make bench`: runs small programs in the benchmarks' place and refuses lines of another form."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    path = Path(__file__).parent.parent / "benchmarks" / "run.py"
    spec = importlib.util.spec_from_file_location("bench_runner", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "HERE", tmp_path / "benchmarks")
    monkeypatch.setattr(module, "BENCHMARKS", ("one", "two"))
    (tmp_path / "benchmarks").mkdir()
    return module


def program(runner: ModuleType, name: str, row: dict[str, object], code: int = 0) -> None:
    text = f"import sys, pathlib\npathlib.Path(sys.argv[2]).write_text({json.dumps(row)!r})\nsys.exit({code})\n"
    (runner.HERE / f"bench_{name}.py").write_text(text)


ROW = {"name": "decode", "ours": 3.0, "peer": 2.0, "peer_name": "transformers", "unit": "tokens/s", "ratio": 1.5}


def test_all_results_end_in_one_file_and_one_table(runner, tmp_path, capfd):
    program(runner, "one", ROW)
    program(runner, "two", {**ROW, "name": "gateway", "peer": None, "peer_name": None, "ratio": None})
    assert runner.main(["--results", str(tmp_path / "results")]) == 0
    lines = (tmp_path / "results" / "latest.jsonl").read_text().splitlines()
    assert [json.loads(line)["name"] for line in lines] == ["decode", "gateway"]
    out = capfd.readouterr().out
    assert "1.50x" in out
    assert "transformers" in out


def test_one_failure_fails_the_run_and_keeps_the_rest(runner, tmp_path, capfd):
    program(runner, "one", ROW, code=3)
    program(runner, "two", ROW)
    assert runner.main(["--results", str(tmp_path)]) == 1
    assert "one: ended with status 3" in capfd.readouterr().err
    assert (tmp_path / "latest.jsonl").exists()


def test_a_line_of_another_form_is_refused(runner, tmp_path, capfd):
    program(runner, "one", {"name": "decode", "ours": 1.0})
    assert runner.main(["one", "--results", str(tmp_path)]) == 1
    assert "lacks peer, peer_name, unit, ratio" in capfd.readouterr().err
    with pytest.raises(SystemExit):
        runner.main(["three"])
