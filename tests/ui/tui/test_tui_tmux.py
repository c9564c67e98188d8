"""`phaseplane top` inside tmux, over emulated nodes: every key arrives, a rebalance is carried out and undone from the
keyboard, and a control plane that dies and comes back is seen as such."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_ui_up_real import Up
from ui_fakes import eventually

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is missing; `make system` installs it"),
]
FILTER = "only rows with this text"
KEYS = {
    "2": "[2 Instances]", "3": "[3 Requests]", "4": "Prompt tokens found in KV", "5": "[5 Events]",
    "6": "Autopilot: ", "1": "[1 Overview]", "Enter": "[2 Instances]", "s": "instance▲", "/": FILTER,
    "u": "Nothing to undo", "m": "Move h800-0 (prefill) to", "d": "Type h800-0 to confirm", "p": "can change role",
    "a": "Set to advise", "Space": "PAUSED", "L": "live ", "[": "PAST", "]": "live ", "{": "PAST", "}": "live ",
    "?": "nothing is changed before you confirm it", ":": "type to narrow", "e": "Written to",
}  # fmt: skip
"""What shows that a key arrived, in an order in which each can be seen."""
CLOSED_BY_ESCAPE = ("/", "m", "d", "p", "a", "?", ":")


class Tmux:
    """A server of its own with one window, which runs a program."""

    def __init__(self, directory: Path, command: list[str], size: tuple[int, int]) -> None:
        self._socket = str(directory / "tmux")
        environ = {**os.environ, "LANG": "C.UTF-8", "HOME": str(directory)}
        for name in ("TMUX", "COLUMNS", "LINES"):  # of the terminal the tests run in
            environ.pop(name, None)
        shape = ["-x", str(size[0]), "-y", str(size[1])]
        self._run(["-f", "/dev/null", "new-session", "-d", "-c", str(directory), *shape, *command], environ)

    def press(self, *keys: str) -> None:
        for key in keys:
            self._run(["send-keys", key])

    def type(self, text: str) -> None:
        self._run(["send-keys", "-l", text])

    def screen(self) -> str:
        return self._run(["capture-pane", "-p"])

    def shows(self, sign: str, within_s: float = 10.0) -> None:
        assert eventually(lambda: sign in self.screen(), within_s), f"{sign!r} is not on the screen:\n{self.screen()}"

    def close(self) -> None:
        subprocess.run(["tmux", "-S", self._socket, "kill-server"], check=False, capture_output=True, timeout=10)

    def _run(self, arguments: list[str], environ: dict[str, str] | None = None) -> str:
        command = ["tmux", "-u", "-S", self._socket, *arguments]
        done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=10, env=environ)
        return done.stdout


@pytest.fixture
def up(tmp_path: Path) -> Iterator[Up]:
    running = Up(tmp_path, "--prefill", "2", "--decode", "1", "--hardware", "H800", "--model", "llama-3.1-8b")
    try:
        running.wait_ready()
        yield running
    finally:
        running.stop()


@pytest.fixture
def tmux(up: Up, tmp_path: Path) -> Iterator[Tmux]:
    root = Path(__file__).parents[3]
    command = ["env", f"PYTHONPATH={root}", sys.executable, "-m", "ui.cli", "top", "--url", up.url]
    running = Tmux(tmp_path, command, (110, 36))
    try:
        running.shows("[1 Overview]", 20.0)
        running.shows("2P1D")
        yield running
    finally:
        running.close()


def test_every_key_works_inside_tmux(tmux: Tmux, up: Up) -> None:
    for key, sign in KEYS.items():
        tmux.press(key)
        tmux.shows(sign)
        if key in CLOSED_BY_ESCAPE:
            tmux.press("Escape")
            assert eventually(lambda sign=sign: sign not in tmux.screen(), 10.0), f"Esc did not close {sign!r}"  # type: ignore[misc]
    tmux.press("q")
    assert eventually(lambda: subprocess.run(
        ["tmux", "-S", tmux._socket, "has-session"], check=False, capture_output=True, timeout=10
    ).returncode != 0, 10.0), "q did not leave"  # fmt: skip


def test_a_rebalance_is_carried_out_and_undone_from_the_keyboard(tmux: Tmux, up: Up) -> None:
    tmux.press("p")
    tmux.shows("Now 2P1D: 3 instances can change role")
    tmux.type("1P2D")
    tmux.press("Enter")
    tmux.shows("planned")
    tmux.press("Enter")
    assert eventually(lambda: "planned" not in tmux.screen())
    assert xpyd(up) == "2P1D", "Enter was on Cancel"
    tmux.press("p")
    tmux.shows("can change role")
    tmux.type("1P2D")
    tmux.press("Enter")
    tmux.shows("planned")
    tmux.press("Right", "Enter")
    tmux.shows("verified on", 30.0)
    assert xpyd(up) == "1P2D"
    tmux.press("u")
    assert eventually(lambda: xpyd(up) == "2P1D", 30.0)
    tmux.press("Escape")
    assert eventually(lambda: "Rebalance" not in tmux.screen())
    tmux.press("5")
    tmux.shows("undo", 10.0)


def test_a_control_plane_that_dies_is_stale_and_comes_back(tmux: Tmux, up: Up) -> None:
    pid = up.child("controlplane.main")
    os.kill(pid, signal.SIGSTOP)
    tmux.shows("STALE", 10.0)
    tmux.press("p")
    tmux.shows("Disabled: the figures are older than 3 s")
    os.kill(pid, signal.SIGKILL)
    tmux.shows("live ", 40.0)
    assert eventually(lambda: xpyd(up) == "2P1D", 30.0)
    tmux.press("p")
    tmux.shows("can change role")


def xpyd(up: Up) -> str:
    with urllib.request.urlopen(f"{up.url}/v1/fleet", timeout=5) as answer:
        return str(json.load(answer)["xpyd"])
