"""A pull gives a whole model or nothing: every failure is one sentence that names the next command."""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from collections import namedtuple
from pathlib import Path

import pytest

from nodes.models import pull as pull_module
from nodes.models import wheel as wheel_module
from nodes.models.catalogue import CATALOGUE, CatalogueEntry, find_entry
from nodes.models.progress import BarReporter, LineReporter
from nodes.models.pull import is_complete, main, pull
from nodes.models.wheel import PullFailed
from transfer.errors import InvalidValue

REPOSITORY = Path(__file__).resolve().parents[3]


def make_wheel(directory: Path, gguf_bytes: bytes = b"not a gguf", member: str = "m/model.gguf") -> Path:
    wheel = directory / "m-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(member, gguf_bytes)
    return wheel


def register(monkeypatch: pytest.MonkeyPatch, wheel: Path, gguf_bytes: bytes = b"not a gguf") -> CatalogueEntry:
    """Put a model `m` into the catalogue whose digests fit the wheel and these GGUF bytes."""
    entry = CatalogueEntry(
        name="m",
        title="M",
        requirement="m==1",
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        member="m/model.gguf",
        gguf_sha256=hashlib.sha256(gguf_bytes).hexdigest(),
        disk_bytes=1000,
    )
    monkeypatch.setitem(CATALOGUE, "m", entry)
    return entry


def left_behind(home: Path) -> list[str]:
    return sorted(path.name for path in (home / "models").glob("*")) if (home / "models").exists() else []


def failure(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line that a failing command prints."""
    assert main(list(arguments)) == 1
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    return errors[0]


def test_an_unknown_model_names_the_nearest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    error = failure(capsys, "smolm2", "--cache", str(tmp_path))
    assert "no model 'smolm2'" in error
    assert "`phaseplane pull smollm2-135m`" in error
    with pytest.raises(InvalidValue):
        find_entry("")


def test_a_corrupted_wheel_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wheel = make_wheel(tmp_path)
    error = failure(capsys, "smollm2-135m", "--cache", str(tmp_path), "--wheel", str(wheel))
    assert "the wheel m-1-py3-none-any.whl is not the expected file" in error
    assert "`phaseplane pull smollm2-135m`" in error
    assert left_behind(tmp_path) == []


def test_a_corrupted_gguf_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wheel = make_wheel(tmp_path, b"tampered")
    register(monkeypatch, wheel, b"original")
    error = failure(capsys, "m", "--cache", str(tmp_path), "--wheel", str(wheel))
    assert "the GGUF in m-1-py3-none-any.whl is not the expected file" in error
    assert "`phaseplane pull m`" in error
    assert left_behind(tmp_path) == []


@pytest.mark.parametrize("content", [b"not a gguf", b"GGUF", b"GGUF\x03\0\0\0" + b"\xff" * 16])
def test_bytes_that_are_no_gguf_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    wheel = make_wheel(tmp_path, content)
    register(monkeypatch, wheel, content)
    with pytest.raises((PullFailed, InvalidValue), match=r"not a GGUF file.*pull the model again"):
        pull("m", tmp_path, wheel, LineReporter())
    assert left_behind(tmp_path) == []


def test_a_wheel_without_the_model_or_no_zip_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = make_wheel(tmp_path, member="m/other.gguf")
    register(monkeypatch, wheel)
    with pytest.raises(PullFailed, match="damaged"):
        pull("m", tmp_path, wheel, LineReporter())
    wheel.write_bytes(b"PK no zip")
    register(monkeypatch, wheel)
    with pytest.raises(PullFailed, match="damaged"):
        pull("m", tmp_path, wheel, LineReporter())
    with pytest.raises(PullFailed, match=r"there is no wheel .*gone\.whl; run `phaseplane pull m` without --wheel"):
        pull("m", tmp_path, tmp_path / "gone.whl", LineReporter())
    assert left_behind(tmp_path) == []


def test_a_full_disk_is_noticed_before_anything_is_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage(10**9, 10**9 - 5_000_000, 5_000_000))
    error = failure(capsys, "smollm2-135m", "--cache", str(tmp_path))
    assert "has 5 MB free and smollm2-135m needs 760 MB" in error
    assert left_behind(tmp_path) == []


def test_a_disk_that_fills_up_on_the_way_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = make_wheel(tmp_path)
    register(monkeypatch, wheel)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pull_module, "extract", full)
    with pytest.raises(PullFailed, match=r"the disk is full.*--cache DIR"):
        pull("m", tmp_path, wheel, LineReporter())
    assert left_behind(tmp_path) == []


def test_a_cache_that_cannot_be_written_is_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    error = failure(capsys, "smollm2-135m", "--cache", str(tmp_path / "file"))
    assert "cannot write smollm2-135m" in error
    assert "--cache DIR" in error


@pytest.mark.parametrize(
    ("script", "sentence"),
    [
        ("echo '/usr/bin/python3: No module named pip' >&2; exit 1", "pip is missing.*ensurepip.*phaseplane pull m"),
        ("echo 'ERROR: No matching distribution found for m==1' >&2; exit 1", "No matching distribution.*--wheel FILE"),
        ("echo 'OSError: [Errno 28] No space left on device' >&2; exit 1", "the disk is full"),
        ("exit 0", "could not download m==1"),
        ("sleep 30", "did not arrive in 0 s"),
    ],
)
def test_what_pip_reports_becomes_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, sentence: str
) -> None:
    register(monkeypatch, make_wheel(tmp_path))
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setattr(wheel_module, "DOWNLOAD_TIMEOUT_S", 0.3 if "sleep" in script else 20.0)
    with pytest.raises(PullFailed, match=sentence):
        pull("m", tmp_path, None, LineReporter())
    assert left_behind(tmp_path) == []


def test_what_a_killed_pull_left_is_removed_by_the_next_and_a_live_one_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    models = tmp_path / "models"
    for name in (f".pull-{dead.pid}-abc", f".pull-{os.getpid()}-abc"):
        (models / name / "wheel").mkdir(parents=True)
    wheel = make_wheel(tmp_path)
    register(monkeypatch, wheel, b"original")
    with pytest.raises(PullFailed):
        pull("m", tmp_path, wheel, LineReporter())
    assert left_behind(tmp_path) == [f".pull-{os.getpid()}-abc"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_pull_leaves_nothing(tmp_path: Path, number: signal.Signals) -> None:
    """The download is a pip that never ends; the pull is a real process."""
    script = (
        "import subprocess, sys\n"
        "from nodes.models import pull, wheel\n"
        "def download(entry, directory):\n"
        "    child = 'import time; print(\"downloading\", flush=True); time.sleep(60)'\n"
        "    subprocess.run([sys.executable, '-c', child], timeout=60)\n"
        "pull.download = download\n"
        "import signal\n"
        "signal.signal(signal.SIGTERM, pull._interrupt)\n"
        f"sys.exit(pull.main(['smollm2-135m', '--cache', {str(tmp_path)!r}]))\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script], cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "downloading\n"
    assert len(left_behind(tmp_path)) == 1
    process.send_signal(number)
    started = time.monotonic()
    _, errors = process.communicate(timeout=20)
    assert time.monotonic() - started < 10
    assert process.returncode == 130
    assert "interrupted; run `phaseplane pull smollm2-135m` again" in errors
    assert "Traceback" not in errors
    assert left_behind(tmp_path) == []


def test_a_damaged_model_is_not_complete(tmp_path: Path) -> None:
    directory = tmp_path / "m"
    directory.mkdir()
    assert not is_complete(directory)
    (directory / "weights").write_bytes(b"1234")
    marker = directory / "phaseplane.json"
    marker.write_text('{"files": {"weights": 4}}', encoding="utf-8")
    assert is_complete(directory)
    for text in ('{"files": {"weights": 5}}', '{"files": {"gone": 1}}', '{"files": {}}', "[]", "{", '{"files": 3}'):
        marker.write_text(text, encoding="utf-8")
        assert not is_complete(directory), text


def test_bars_and_lines_report_the_same_stages(capsys: pytest.CaptureFixture[str]) -> None:
    for reporter in (LineReporter(), BarReporter()):
        with reporter.stage("dequantising") as advance:
            advance(3, 7)
        reporter.note("ready")
        shown = capsys.readouterr().err
        assert "dequantising" in shown
        assert "ready" in shown
