"""The control plane as a process: how it starts, what it says when it cannot, and how it ends."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from controlplane import main
from controlplane.core.series import SeriesBook
from controlplane.history.store import HistoryStore

Spawn = Callable[..., "Process"]
EMULATED = ("--model", "llama-3.1-8b", "--engine", "emulated")


class Process:
    """A child process and its stderr, line by line."""

    def __init__(self, module: str, *arguments: str, **environ: str) -> None:
        inherited = {key: value for key, value in os.environ.items() if not key.startswith("PHASEPLANE_")}
        command = [sys.executable, "-m", module, *arguments]
        self.child = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=inherited | environ)
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.child.stderr is not None
        self.lines.extend(iter(self.child.stderr.readline, ""))

    def match(self, pattern: str, timeout_s: float = 15.0) -> re.Match[str]:
        """The first match in what it wrote so far."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if found := re.search(pattern, "".join(self.lines)):
                return found
            time.sleep(0.02)
        raise AssertionError(f"no {pattern!r} in {''.join(self.lines)!r}")

    def wait(self, timeout_s: float = 15.0) -> int:
        status = self.child.wait(timeout_s)
        self._reader.join(5)
        return status

    def close(self) -> None:
        if self.child.poll() is None:
            self.child.kill()
        self.wait()
        assert self.child.stderr is not None
        self.child.stderr.close()


@pytest.fixture
def spawn(tmp_path: Path) -> Iterator[Spawn]:
    """spawn(*arguments, **variables): a control plane of its own on free ports."""
    started: list[Process] = []

    def run(*arguments: str, module: str = "controlplane.main", **environ: str) -> Process:
        if module == "controlplane.main":
            arguments = ("--port", "0", "--wire-port", "0", "--state", str(tmp_path / "state"), *arguments)
        started.append(Process(module, *arguments, **environ))
        return started[-1]

    yield run
    for process in started:
        process.close()


@pytest.fixture
def taken() -> Iterator[str]:
    """A port that something listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield str(listener.getsockname()[1])


def addresses(process: Process) -> tuple[str, str]:
    found = process.match(r"at (http://\S+), nodes connect to (tcp://\S+)")
    return found[1], found[2]


def call(url: str, body: dict[str, Any] | None = None, method: str | None = None) -> tuple[int, Any]:
    data = None if body is None else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data=data, method=method), timeout=30) as response:
            return response.status, json.loads(response.read())
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read())


def test_a_port_in_use_is_a_sentence_and_exit_status_4(spawn: Spawn, taken: str) -> None:
    for flag in ("--port", "--wire-port"):
        process = spawn(*EMULATED, flag, taken)
        assert process.wait() == 4
        (line,) = process.lines
        assert re.match(rf"phaseplane: cannot (listen on|bind) \S*{taken} .*another port|.*choose --port", line)
        assert "Traceback" not in line


@pytest.mark.parametrize(
    ("arguments", "environ", "sentence"),
    [
        (("--set", "server.prot=1"), {}, "did you mean server.port?"),
        (("--set", "nonsense"), {}, "must look like SECTION.KEY=VALUE"),
        (("--model", "nope"), {}, "run `phaseplane pull nope`"),
        ((), {"PHASEPLANE_LIMITS_MAX_BODY": "1"}, "did you mean limits.max_body_bytes?"),
        ((*EMULATED, "--host", "0.0.0.0"), {}, "set server.api_keys"),
        (("--config", "/nowhere/p.toml"), {}, "cannot read the configuration"),
        ((*EMULATED, "--state", "/dev/null"), {}, "choose another history.directory"),
    ],
)
def test_a_wrong_setting_is_a_sentence_and_exit_status_2(
    spawn: Spawn, arguments: tuple[str, ...], environ: dict[str, str], sentence: str
) -> None:
    process = spawn(*arguments, **environ)
    assert process.wait() == 2
    assert len(process.lines) == 1
    assert sentence in process.lines[0]


def test_without_nodes_it_lives_is_not_ready_and_stops_telling_its_clients(spawn: Spawn, tmp_path: Path) -> None:
    ready = tmp_path / "ready.json"
    ready.write_text("left behind")
    process = spawn(*EMULATED, "--ready-file", str(ready))
    url, _ = addresses(process)
    assert call(f"{url}/healthz") == (200, {"status": "ok"})
    status, body = call(f"{url}/readyz")
    assert status == 503
    assert "no prefill and no decode instance is ready" in body["error"]["message"]
    answers: list[tuple[int, Any]] = []
    asking = threading.Thread(
        target=lambda: answers.append(call(f"{url}/v1/completions", {"model": "llama-3.1-8b", "prompt": "x"}))
    )
    asking.start()
    deadline = time.monotonic() + 5
    while call(f"{url}/v1/fleet")[1]["in_flight"] == 0:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert not ready.exists()
    process.child.send_signal(signal.SIGTERM)
    assert process.wait() == 0
    asking.join(5)
    assert answers[0][0] == 503
    assert "stopping" in answers[0][1]["error"]["message"]
    assert "Traceback" not in "".join(process.lines)


def test_a_fleet_joins_serves_and_history_survives_a_restart(spawn: Spawn, tmp_path: Path) -> None:
    ready = tmp_path / "ready.json"
    process = spawn(*EMULATED, "--ready-file", str(ready))
    url, wire = addresses(process)
    instances = ("--instance", "p0=prefill", "--instance", "d0=decode")
    node = spawn("--control", wire, *EMULATED, "--speed", "inf", *instances, module="nodes.agent")
    process.match("ready at")
    about = json.loads(ready.read_text())
    assert (about["url"], about["wire"], about["pid"]) == (url, wire, process.child.pid)
    prompt = "a prompt that is long enough to be prefilled on another instance, since few tokens stay local " * 2
    body = {"model": "llama-3.1-8b", "prompt": prompt, "max_tokens": 12, "ignore_eos": True}
    status, answer = call(f"{url}/v1/completions", body)
    assert status == 200
    assert answer["usage"]["completion_tokens"] == 12
    (record,) = call(f"{url}/v1/requests")[1]["requests"]
    assert (record["prefill"], record["decode"], record["good"]) == ("p0", "d0", True)
    assert sum(record["stages_s"].values()) == pytest.approx(record["ttft_s"], rel=0.02)
    check_screens(url)
    process.child.send_signal(signal.SIGINT)
    assert process.wait() == 0
    assert not ready.exists()
    node.child.send_signal(signal.SIGTERM)
    assert node.wait() == 0
    again = spawn(*EMULATED)
    assert call(f"{addresses(again)[0]}/v1/requests/{record['request_id']}") == (200, record)
    flights = list((tmp_path / "state" / "flight").glob("*.msgpack"))
    assert len(flights) == 2


def test_the_autopilots_mode_pins_and_reasons_and_objectives_survive_a_kill(spawn: Spawn) -> None:
    process = spawn(*EMULATED, "--set", "scheduler.autopilot_every_s=0.1")
    url, wire = addresses(process)
    spawn("--control", wire, *EMULATED, "--instance", "d0=decode", module="nodes.agent")
    while not call(f"{url}/v1/fleet")[1]["instances"]:
        time.sleep(0.02)
    assert call(f"{url}/v1/autopilot", {"mode": "auto", "floor": 2, "actor": "alice"}, "PUT")[0] == 200
    assert call(f"{url}/v1/autopilot/pins", {"subject": "split", "why": "a test"})[0] == 200
    version = call(f"{url}/v1/classes")[1]["version"]
    change = {"base_version": version, "classes": {"default": {"ttft_s": 1.5, "tpot_s": 0.1}}}
    assert call(f"{url}/v1/classes", change, "PUT")[0] == 200
    assert call(f"{url}/v1/classes", {**change, "classes": {"default": None}}, "PUT")[0] == 409
    assert call(f"{url}/v1/autopilot/pins", {"subject": "d0", "ttl_s": 600.0})[0] == 200
    time.sleep(0.3)
    said = call(f"{url}/v1/autopilot/looks?since_s=60")[1]["looks"]
    assert "requests in the last" in said[0]["line"], said
    process.child.kill()
    process.wait()
    again, _ = addresses(spawn(*EMULATED))
    view = call(f"{again}/v1/autopilot")[1]
    assert (view["mode"], view["settings"]["floor"]) == ("auto", 2)
    assert [(one["subject"], one["why"]) for one in view["pins"]] == [("split", "a test"), ("d0", "")]
    assert 500.0 < view["pins"][1]["left_s"] < 600.0
    default = next(one for one in call(f"{again}/v1/classes")[1]["classes"] if one["name"] == "default")
    assert (default["slo"]["ttft_s"], default["configured"]["ttft_s"]) == (1.5, 2.0)
    kept = call(f"{again}/v1/autopilot/looks")[1]["looks"]
    assert said[-1]["look_id"] in [row["look_id"] for row in kept]
    assert kept[-1]["ended_at"] >= kept[-1]["began_at"] > time.time() - 60
    assert call(f"{again}/v1/autopilot/looks?since_s=-1")[0] == 400


async def test_what_cannot_be_read_of_an_earlier_life_keeps_nobody_from_starting(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    history = HistoryStore(tmp_path / "history.db")
    with sqlite3.connect(tmp_path / "history.db") as db:
        db.execute("INSERT INTO series VALUES (?, ?)", (int(time.time()) - 50, b"junk"))
        db.execute("INSERT INTO autopilot VALUES (1, ?)", (b'{"mode": "nonsense"}',))
    db.close()
    posted: list[object] = []
    book = SeriesBook()
    await main._recall(history, book, SimpleNamespace(post=posted.append))  # type: ignore[arg-type]
    history.close()
    assert (book.names(), posted) == ([], [])
    assert "charts begin anew" in caplog.text
    assert "the autopilot is as configured" in caplog.text


def check_screens(url: str) -> None:
    """What screens ask for is sampled, counted and refused by the running program."""
    deadline = time.monotonic() + 5
    names = ["in_flight", "instance.d0.kv_use"]
    while sorted(call(f"{url}/v1/series?names={','.join(names)}")[1]["series"]) != names:
        assert time.monotonic() < deadline, "nothing was sampled since d0 joined"
        time.sleep(0.05)
    (link,) = call(f"{url}/v1/kv")[1]["links"]
    assert (link["prefill"], link["decode"], link["num_transfers"]) == ("p0", "d0", 1)
    assert link["num_bytes"] > 0
    version = call(f"{url}/v1/fleet")[1]["version"]
    status, refused = call(f"{url}/v1/instances/d0/drain", {"base_version": version})
    assert (status, "d0 is the last ready decode instance" in refused["error"]["message"]) == (409, True)


def test_a_node_of_another_model_is_refused_with_a_sentence(spawn: Spawn) -> None:
    process = spawn(*EMULATED)
    _, wire = addresses(process)
    other = ("--model", "qwen3-8b", "--engine", "emulated", "--instance", "d0=decode")
    node = spawn("--control", wire, *other, module="nodes.agent")
    assert node.wait() == 3
    process.match("d0 is not welcome: d0 serves model qwen3-8b, but this control plane serves llama-3.1-8b")
    assert "start the node with --model llama-3.1-8b" in "".join(node.lines)


def test_it_stops_when_its_parent_ends(spawn: Spawn) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as parent:
        process = spawn(*EMULATED, "--parent-pid", str(parent.pid))
        addresses(process)
        parent.kill()
    assert process.wait() == 0
    assert spawn(*EMULATED, "--parent-pid", str(parent.pid)).wait() == 0
