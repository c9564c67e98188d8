"""`phaseplane console` and the console that `phaseplane up` starts: where it listens, and what is said without it."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from ui_fakes import eventually

from ui import console_command, up, up_command
from ui.launch import console_argv


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[up.Fleet]:
    """The fleets that `up` would have started."""
    found: list[up.Fleet] = []

    def record(self: up.Fleet):
        found.append(self)
        return asyncio.sleep(0)

    monkeypatch.setattr(up.Fleet, "run", record)
    monkeypatch.setattr(up_command, "control_fault", lambda argv: None)
    return found


def test_up_starts_the_console_unless_told_otherwise(run, seen, tmp_path: Path):
    command = ("up", "--port", "0", "--engine", "emulated", "--state", str(tmp_path / "s"))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert run(*command, "--console-port", str(port)).code == 0
    assert run(*command, "--console-port", str(port)).code == 0
    assert run(*command, "--no-console").code == 0
    assert seen[0].console_port not in (None, 0, port)
    assert [fleet.console_port for fleet in seen[1:]] == [port, None]
    assert seen[1].console_url == f"http://127.0.0.1:{port}"


def test_where_streamlit_is_missing_up_says_so_and_goes_on(run, seen, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(console_command, "NEEDED", "a_package_that_is_not_there")
    ran = run("up", "--port", "0", "--engine", "emulated", "--state", str(tmp_path / "s"))
    assert ran.code == 0
    assert ran.err.strip() == (
        "no console: the console needs Streamlit, which is not installed; run `pip install 'phaseplane[console]'`"
    )
    assert [fleet.console_port for fleet in seen] == [None]
    ran = run("console")
    assert ran.code == 1
    assert "`pip install 'phaseplane[console]'`" in ran.err


def test_the_key_is_not_on_the_command_line():
    assert console_argv("http://127.0.0.1:8000", 8501)[1:] == [
        "-m", "ui.cli", "console", "--url", "http://127.0.0.1:8000", "--port", "8501",
    ]  # fmt: skip


def test_the_console_refuses_what_others_reach_without_a_key(run):
    ran = run("console", "--host", "0.0.0.0", "--port", "0")
    assert ran.code == 1
    assert "set PHASEPLANE_API_KEY" in ran.err


def test_a_console_serves_before_its_fleet_and_ctrl_c_ends_it_with_tabs_open():
    command = [sys.executable, "-m", "ui.cli", "console", "--url", "http://127.0.0.1:9", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            said = process.stdout.readline()
            url = said.split()[2]
            assert said == f"console at {url} for the fleet at http://127.0.0.1:9; Ctrl-C stops it\n"
            assert eventually(lambda: answers(f"{url}/healthz"), 20.0)
            with urllib.request.urlopen(f"{url}/live?lang=zh-TW", timeout=10) as live:
                lines = [live.readline().decode() for _ in range(3)]
                assert "http://127.0.0.1:9" in lines[2]  # connecting to it, in Chinese
                process.send_signal(signal.SIGINT)
                assert process.wait(5) == 0
        finally:
            process.kill()
        assert process.stderr is not None
        assert process.stderr.read() == ""


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False
