"""`phaseplane up` with the real control plane and emulated nodes: what dies comes back, and nothing stays behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from ui_fakes import eventually

START_S = 60.0
BACK_S = 30.0


class Up:
    """A running `phaseplane up`, and what it started."""

    def __init__(self, directory: Path, *arguments: str) -> None:
        self.ready_file = directory / "ready"
        self.log = directory / "up.log"
        command = [sys.executable, "-m", "ui.cli", "up", "--engine", "emulated", "--speed", "20", "--port", "0"]
        command += ["--state", str(directory / "state"), "--ready-file", str(self.ready_file), *arguments]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)

    def wait_ready(self) -> None:
        assert eventually(self.ready_file.exists, START_S), self.log.read_text()
        ready = json.loads(self.ready_file.read_text())
        self.url, self.console = ready["url"], ready["console"]

    def num_ready(self) -> int:
        try:
            with urllib.request.urlopen(f"{self.url}/v1/fleet", timeout=5) as answer:
                fleet = json.load(answer)
        except (OSError, urllib.error.URLError):
            return 0
        return sum(view["state"] == "ready" for view in fleet["instances"])

    def children(self) -> dict[int, str]:
        """Process id -> command line."""
        found = {}
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
            if parent == self.process.pid and command:
                found[int(entry.name)] = command
        return found

    def child(self, word: str) -> int:
        """Its process id; 0 while there is none."""
        return next((pid for pid, command in self.children().items() if word in command), 0)

    def stop(self) -> None:
        """As Ctrl-C does; what does not end is killed, and that is a failure."""
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise


@pytest.fixture
def up(tmp_path: Path) -> Iterator[Up]:
    running = Up(tmp_path, "--prefill", "1", "--decode", "1", "--no-console")
    try:
        running.wait_ready()
        yield running
    finally:
        running.stop()


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_what_dies_comes_back_and_ctrl_c_leaves_nothing(up: Up):
    node, control = up.child("nodes.agent"), up.child("controlplane.main")
    os.kill(node, signal.SIGKILL)
    assert eventually(lambda: "died (killed by SIGKILL)" in up.log.read_text(), BACK_S)
    assert eventually(lambda: up.child("nodes.agent") not in (0, node) and up.num_ready() == 2, BACK_S), (
        up.log.read_text()
    )
    assert eventually(lambda: "node 0 (2 instances) is back, serving decode and prefill" in up.log.read_text(), BACK_S)
    os.kill(control, signal.SIGKILL)
    assert eventually(lambda: control not in up.children(), BACK_S)
    assert eventually(lambda: up.num_ready() == 2, BACK_S), up.log.read_text()
    assert eventually(lambda: "the control plane is back" in up.log.read_text(), BACK_S)
    pids = list(up.children())
    assert len(pids) == 2
    up.process.send_signal(signal.SIGINT)
    assert up.process.wait(20) == 0
    assert all(is_gone(pid) for pid in pids)
    assert not up.ready_file.exists()


def test_nothing_outlives_a_killed_up(up: Up):
    pids = list(up.children())
    assert len(pids) == 2
    up.process.kill()
    up.process.wait()
    assert eventually(lambda: all(is_gone(pid) for pid in pids), 15.0)
