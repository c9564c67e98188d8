"""The preStop hook as a script: what it asks, how long it waits, what it says. test_deploy_run.py empties a node."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from deploy_manifests import script

drain = script("drain")
NAME = "phaseplane-decode-5d9c7-x2x4z"


@dataclass
class Script:
    """What a control plane answers: work left at each look, the last for good; refusals of the first drains."""

    left: list[int]
    refusals: list[str] = field(default_factory=list)
    asked: list[Any] = field(default_factory=list)

    def fleet(self) -> dict[str, Any]:
        work = self.left.pop(0) if len(self.left) > 1 else self.left[0]
        one = {"id": NAME, "state": "draining", "num_running": work, "num_waiting": 0, "unsettled": 0}
        return {"version": 7, "instances": [one, {**one, "id": "another", "num_running": 9}]}


@pytest.fixture
def control(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Script]:
    told = Script([0])

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(200, told.fleet())

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            told.asked.append((self.path, self.headers["Authorization"], body["base_version"]))
            refusal = told.refusals.pop(0) if told.refusals else None
            self._answer(409 if refusal else 200, {"error": {"message": refusal}})

        def _answer(self, status: int, body: dict[str, Any]) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps(body).encode())

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    ready = tmp_path / "ready"
    ready.write_text(f"http://127.0.0.1:{server.server_port}/readyz?instance={NAME}")
    (tmp_path / "api_key").write_text("a secret")
    monkeypatch.setattr(drain, "READY", ready)
    monkeypatch.setattr(drain, "PAUSE_S", 0.01)
    monkeypatch.setattr(drain, "REFUSED_S", 0.05)
    yield told
    server.shutdown()
    server.server_close()


def run(tmp_path: Path, seconds: float) -> int:
    return int(drain.main(str(tmp_path / "api_key"), str(seconds)))


def test_it_waits_until_nothing_is_left_after_a_moments_refusal(control: Script, tmp_path: Path) -> None:
    control.left, control.refusals = [3, 3, 3, 1, 0], ["the fleet has changed"]
    assert run(tmp_path, 20) == 0
    assert control.left == [0]
    assert control.asked == [(f"/v1/instances/{NAME}/drain", "Bearer a secret", 7)] * 2


def test_it_gives_up_in_time(control: Script, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    control.left = [2]
    assert run(tmp_path, 0.05) == 1
    assert f"{NAME} still has 2 requests or stores; they go on elsewhere" in capsys.readouterr().err


def test_a_refusal_is_said(control: Script, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    control.refusals = ["it is the last ready decode instance"] * 99
    assert run(tmp_path, 20) == 1
    assert capsys.readouterr().err == "it is the last ready decode instance\n"


def test_without_a_control_plane_it_says_so(
    control: Script, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    drain.READY.write_text(f"http://127.0.0.1:9/readyz?instance={NAME}")
    assert run(tmp_path, 20) == 1
    assert "the control plane cannot be asked to drain this node" in capsys.readouterr().err
