"""The compiled copy: which sources it is of, how it is made, what is said where it cannot be; and that it is equal."""

from __future__ import annotations

import ast
import fcntl
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from controlplane.sim import __main__ as start
from controlplane.sim import compiled, compiling
from controlplane.sim.compiled import (
    FOLDERS,
    NO_COMPILE,
    ROOT,
    SUFFIX,
    copy_dir,
    is_compiled,
    sources,
    use_compiled,
    use_copy,
)
from controlplane.sim.compiling import ensure_copy, lacking
from controlplane.sim.program import main

RUN = ("--model", "llama-3.1-8b", "--trace", "generated:agentic", "--rate", "6", "--slo", "ttft=5,tpot=.05")
PLAIN_FLEET, POOL_FLEET = "2xH800:prefill,2xH20:decode", "2xH800:prefill,2xH20:decode,1xH800:mixed,1xCPU:kv_pool"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PHASEPLANE_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Stands in for mypyc and the C compiler: each run of them, which leaves one file of the copy."""
    runs: list[list[str]] = []

    def run(command: list[str], said: Path, timeout_s: float) -> str:
        runs.append(command)
        said.write_text("so many lines")
        (Path(command[-1]) / "lib").mkdir()
        (Path(command[-1]) / "lib" / f"one{SUFFIX}").touch()
        return ""

    monkeypatch.setattr(compiling, "_run", run)
    monkeypatch.setattr(compiling, "lacking", str)
    return runs


def test_every_change_of_a_source_names_another_copy(tmp_path: Path, home: Path) -> None:
    source = tmp_path / "transfer" / "deep" / "terms.py"
    source.parent.mkdir(parents=True)
    names = []
    for text in ("a = 1\n", "a = 2\n", "a = 1\n"):
        source.write_text(text)
        names.append(copy_dir(tmp_path))
    assert names[0] == names[2] != names[1]
    assert names[0].parent == home / "compiled"
    source.rename(source.with_name("other.py"))
    assert copy_dir(tmp_path) != names[0]
    (tmp_path / "ui").mkdir()
    (tmp_path / "ui" / "not_in_it.py").touch()
    source.with_name("other.py").rename(source)
    assert copy_dir(tmp_path) == names[0]


def test_all_that_compiled_modules_import_from_counts_as_source() -> None:
    hashed = {path for folder in FOLDERS for path in [ROOT / folder, *(ROOT / folder).rglob("*.py")]}
    assert hashed.issuperset(sources())
    for source in sources():
        for node in ast.walk(ast.parse(source.read_text())):
            names = [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
            names += [one.name for one in node.names] if isinstance(node, ast.Import) else []
            for name in names:
                file = ROOT.joinpath(*name.split(".")).with_suffix(".py")
                assert not file.is_file() or file in hashed, f"{source} imports {name}"


def test_what_is_compiled_exists_and_is_not_used_here() -> None:
    assert all(path.is_file() for path in sources())
    assert not is_compiled()
    assert not use_compiled(copy_dir())  # there is none


def test_who_wants_plain_python_gets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Path] = []
    monkeypatch.setattr(compiled, "use_compiled", lambda directory: not asked.append(directory))
    assert use_copy()
    assert asked == [copy_dir()]
    monkeypatch.setattr(compiled.sys, "argv", ["simulate", NO_COMPILE])
    assert not use_copy()
    assert asked == [copy_dir()]


def test_a_copy_is_not_used_beside_modules_of_the_sources(tmp_path: Path) -> None:
    file = tmp_path / "controlplane" / "sim" / f"compiled{SUFFIX}"
    file.parent.mkdir(parents=True)
    file.touch()
    assert not use_compiled(tmp_path)
    assert not is_compiled()


def test_it_is_made_once_and_in_one_move(builds: list[list[str]], home: Path) -> None:
    assert ensure_copy(copy_dir()) == ensure_copy(copy_dir()) == ""
    assert len(builds) == 1
    assert sorted(path.name for path in (home / "compiled").iterdir()) == sorted([copy_dir().name, "lock"])
    assert [path.name for path in copy_dir().iterdir()] == [f"one{SUFFIX}"]


def test_sources_that_change_while_they_are_compiled_leave_no_copy(
    builds: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    target = copy_dir()
    monkeypatch.setattr(compiling, "copy_dir", lambda: target.with_name("newer"))
    assert "changed meanwhile" in ensure_copy(target)
    assert not target.exists()


def test_old_copies_go(builds: list[list[str]], home: Path) -> None:
    for place, name in enumerate(("oldest", "old", "new", "newest", ".building-killed")):
        (home / "compiled" / name).mkdir(parents=True)
        os.utime(home / "compiled" / name, (place, place))
    assert ensure_copy(copy_dir()) == ""
    kept = {path.name for path in (home / "compiled").iterdir()}
    assert kept == {"lock", "new", "newest", copy_dir().name}


def test_two_do_not_compile_at_once(builds: list[list[str]], home: Path) -> None:
    (home / "compiled").mkdir(parents=True)
    with (home / "compiled" / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert ensure_copy(copy_dir(), timeout_s=0.0) == "another process has compiled for 0 s"
    assert builds == []
    assert ensure_copy(copy_dir(), timeout_s=0.0) == ""


def test_what_failed_is_said_and_not_tried_again_unless_asked(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    ran = [sys.executable, "-c", "print('no such type'); raise SystemExit(3)"]
    run = compiling._run
    monkeypatch.setattr(compiling, "lacking", str)
    monkeypatch.setattr(compiling, "_run", lambda command, said, timeout_s: run(ran, said, timeout_s))
    log = copy_dir().with_suffix(".log")
    assert ensure_copy(copy_dir()) == f"it failed with status 3, see {log}"
    assert log.read_text() == "no such type\n"
    assert ensure_copy(copy_dir()) == f"it failed before, see {log}; `make fast` tries again"
    assert "status 3" in ensure_copy(copy_dir(), again=True)


def test_a_compiler_that_hangs_is_ended_with_all_it_started(tmp_path: Path) -> None:
    note = tmp_path / "child"
    command = ["sh", "-c", f"sleep 60 & echo $! > {note}; wait"]
    assert compiling._run(command, tmp_path / "said", 1.0) == "it took longer than 1 s"
    child = int(note.read_text())
    until = time.monotonic() + 5.0
    while _runs(child) and time.monotonic() < until:
        time.sleep(0.01)
    assert not _runs(child)


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, home: Path) -> None:
    monkeypatch.setattr(compiling.importlib.util, "find_spec", lambda name: None)
    assert lacking() == "that takes mypy and setuptools, which `make install` brings"
    assert ensure_copy(copy_dir()) == lacking()
    assert not home.exists()  # nothing was touched
    monkeypatch.setattr(compiling.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setenv("CC", "no-such-compiler -O2")
    assert lacking() == "there is no C compiler (no-such-compiler); install gcc"
    monkeypatch.setenv("CC", sys.executable)
    monkeypatch.setattr(compiling.sysconfig, "get_path", lambda name: str(tmp_path))
    assert lacking() == f"there is no {tmp_path}/Python.h; install Python's headers (python3-dev)"


def test_a_long_run_is_compiled_first_and_a_short_one_is_not(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[int] = []
    flags = ["--fleet", PLAIN_FLEET, *RUN, "--num", "20", "--json"]
    assert main(flags, lambda: asked.append(1)) == 0
    assert asked == []
    monkeypatch.setattr("controlplane.sim.program.MANY", 20)
    assert main(flags, lambda: asked.append(1)) == 0
    assert asked == [1]
    assert json.loads(capsys.readouterr().out.split("\n}\n")[1] + "}")["compiled"] is False


def test_it_starts_again_once_there_is_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    began: list[list[str]] = []
    monkeypatch.setattr(start.os, "execv", lambda path, arguments: began.append(arguments[1:]))
    monkeypatch.setattr(start.sys, "argv", ["simulate", "--num", "9000"])
    for made in (False, True):
        monkeypatch.setattr(compiling, "compile_aloud", lambda console, made=made: made)
        start._compile_first()
    assert began == [["-m", "controlplane.sim", "--num", "9000"]]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_compiled_runs_are_equal_to_plain_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole reports, for policies of every kind, with faults, with and without pools."""
    monkeypatch.undo()  # the copy that `make fast` has made, if there is one
    if reason := lacking():
        pytest.skip(reason)
    assert ensure_copy(copy_dir()) == ""
    for policy, fleet, fault in (
        ("goodput", PLAIN_FLEET, "kill:d0@20+10"), ("goodput", POOL_FLEET, "slow:p0x3@10+20"),
        ("conductor", POOL_FLEET, "mute:@10+8"), ("bin_packing", PLAIN_FLEET, "kill:p0@9"),
    ):  # fmt: skip
        flags = [*RUN, "--fleet", fleet, "--policy", policy, "--fault", fault, "--num", "300"]
        found = [_report(flags), _report([*flags, "--no-compile"])]
        assert [one.pop("compiled") for one in found] == [True, False]
        for one in found:
            del one["wall_s"], one["requests_per_wall_s"]
        assert found[0] == found[1]
    flags = ["--fleet=2xH800,2xH20", "--model=llama-3.1-8b", "--trace=generated:conversation?num=60", "--num=60",
             "--effort=1", "--no-baselines"]  # fmt: skip
    found = [_report(flags, "controlplane.planner"), _report([*flags, "--no-compile"], "controlplane.planner")]
    assert found[0].pop("wall_s") != found[1].pop("wall_s")
    assert found[0] == found[1]


def _runs(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().split()[2] not in "ZX"
    except FileNotFoundError:
        return False


def _report(flags: list[str], program: str = "controlplane.sim") -> dict[str, object]:
    command = [sys.executable, "-m", program, *flags, "--json"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=True)
    return json.loads(ran.stdout)
