"""`docker compose up --wait` in an engine of the test's own: healthy, answers with real weights, leaves nothing."""

from __future__ import annotations

import json
import shutil
import socket
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from compose_engine import Engine, running_engine, why_no_engine
from playwright.sync_api import sync_playwright

HEALTHY_S = 60
HEALTHY = ("console", "control", "decode", "decode", "pool", "prefill", "prefill")
CHROMIUM = shutil.which("chromium")
NO_ENGINE = why_no_engine()

pytestmark = [
    pytest.mark.slow,
    pytest.mark.compose,
    pytest.mark.timeout(480),
    pytest.mark.skipif(NO_ENGINE is not None, reason=NO_ENGINE or ""),
]


@dataclass(frozen=True)
class Up:
    """A fleet that is up. took_s: from the command to healthy. key: of clients, also the console's."""

    engine: Engine
    took_s: float
    url: str
    console: str
    key: str

    def ask(self, path: str, body: dict[str, Any] | None = None, key: str | None = None) -> bytes:
        """The answer's body. Raises HTTPError."""
        headers = {"Authorization": f"Bearer {key or self.key}", "Content-Type": "application/json"}
        request = urllib.request.Request(self.url + path, json.dumps(body).encode() if body else None, headers)
        with urllib.request.urlopen(request, timeout=60) as answer:
            found: bytes = answer.read()
        return found

    def inside(self, service: str, script: str) -> str:
        """What a shell in a container says."""
        return self.engine.compose("exec", "--no-TTY", service, "sh", "-c", script)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    """With the image built. Not below tmp_path: pytest would keep its files."""
    with running_engine(Path(tempfile.mkdtemp(prefix="phaseplane-engine-"))) as engine:
        engine.compose("build", timeout_s=300)
        yield engine


@pytest.fixture(scope="module")
def up(engine: Engine) -> Up:
    """The fleet without profiles, on free ports."""
    engine.environment |= {name: str(free_port()) for name in ("PORT", "CONSOLE_PORT", "FLEET_PORT")}
    begun = time.monotonic()
    try:
        engine.compose("up", "--detach", "--wait", "--wait-timeout", "150")
    except AssertionError as error:
        raise AssertionError(f"{error}\n{engine.compose('logs', '--tail', '20')}") from None
    took_s = time.monotonic() - begun
    key = engine.compose("exec", "--no-TTY", "load", "cat", "/keys/clients/api_key")
    port, console = engine.environment["PORT"], engine.environment["CONSOLE_PORT"]
    return Up(engine, took_s, f"http://127.0.0.1:{port}", f"http://127.0.0.1:{console}", key)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_it_is_healthy_in_a_minute(up: Up) -> None:
    assert up.took_s <= HEALTHY_S
    shown = [json.loads(line) for line in up.engine.compose("ps", "--all", "--format", "json").splitlines()]
    states = sorted((one["Service"], one["State"], one["Health"]) for one in shown)
    ready = [(name, "running", "healthy") for name in HEALTHY]
    assert states == sorted([*ready, ("keys", "exited", ""), ("load", "running", "")])


def test_it_answers_with_real_weights_and_only_with_the_key(up: Up) -> None:
    chat = {"model": "smollm2-135m", "temperature": 0, "max_tokens": 24}
    chat["messages"] = [{"role": "user", "content": "What is the capital of France?"}]
    answer = json.loads(up.ask("/v1/chat/completions", chat))
    assert "Paris" in answer["choices"][0]["message"]["content"]
    with pytest.raises(urllib.error.HTTPError, match="401"):
        up.ask("/v1/chat/completions", chat, key="another key, not known")
    fleet = json.loads(up.engine.compose("run", "--rm", "--no-TTY", "cli", "status", "--json"))
    assert fleet["xpyd"] == "2P2D"
    assert sorted(view["role"] for view in fleet["instances"]) == ["decode"] * 2 + ["kv_pool"] + ["prefill"] * 2
    assert "2P2D" in up.engine.compose("run", "--rm", "--no-TTY", "cli", "top", "--once")


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here; run `make system`")
def test_the_console_asks_for_the_key_and_shows_the_fleet(up: Up) -> None:
    with sync_playwright() as playing:
        browser = playing.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page()
        errors: list[str] = []
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(up.console)
        assert "2P2D" not in page.content()
        page.fill("input[name=key]", up.key)
        page.click("button")
        page.get_by_text("2P2D").first.wait_for(timeout=45_000)
        assert errors == []
        browser.close()


def test_the_load_is_served(up: Up) -> None:
    deadline = time.monotonic() + 30
    while 'outcome="ok"' not in (text := up.ask("/metrics").decode()):
        assert time.monotonic() < deadline, "no request has ended in 30 s"
        time.sleep(0.5)
    assert 'outcome="error"' not in text


def test_a_container_sees_and_changes_nothing_that_is_not_its_own(up: Up) -> None:
    assert up.inside("control", "touch /opt/phaseplane/x 2>/dev/null || echo refused") == "refused\n"
    assert up.inside("control", "id -u; ls /keys/nodes /keys/clients").split() == [
        "10001",
        "/keys/clients:",
        "/keys/nodes:",
    ]
    assert up.inside("prefill", "ls /keys/control /keys/clients").split() == ["/keys/clients:", "/keys/control:"]
    assert up.inside("load", "ls /keys/control /keys/nodes").split() == ["/keys/control:", "/keys/nodes:"]


def test_the_emulated_fleet_runs_beside_it(up: Up) -> None:
    up.engine.compose("stop", "load", "prefill", "decode", "pool", "--timeout", "5")
    up.engine.compose("--profile", "fleet", "up", "--detach", "--wait", "--wait-timeout", "100", "fleet-load")
    there = f"http://127.0.0.1:{up.engine.environment['FLEET_PORT']}"
    fleet = json.loads(replace(up, url=there).ask("/v1/fleet"))
    assert fleet["xpyd"] == "32P32D"
    assert {view["hardware"] for view in fleet["instances"]} == {"H800", "H20", "CPU"}


def test_down_leaves_nothing(up: Up) -> None:
    up.engine.compose("--profile", "*", "down", "--volumes")
    for what in ("container", "volume", "network"):
        left = up.engine.docker(what, "ls", "--quiet", "--filter", "label=com.docker.compose.project=phaseplane")
        assert left == "", what
    with pytest.raises(OSError, match="refused"):
        up.ask("/healthz")
