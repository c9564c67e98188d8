"""A control plane and nodes on different addresses beyond loopback: with keys they serve, without they are refused.

Each host is a network namespace of this machine; needs root and iproute2.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from e2e_fleet import ROOT

from nodes.engines.emulated import continuation
from transfer.keys import CONTROL_KEY, DATA_KEY, NODE_KEY, make_keys
from transfer.wire.curve import load_keys

HOSTS = {"a": "10.213.7.1", "b": "10.213.7.2"}
SECRET = "an-api-key-for-the-test"
START_S = 30.0


@pytest.fixture
def hosts() -> Iterator[dict[str, str]]:
    """Names of two namespaces joined by a cable: host a and host b."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("needs root and iproute2 to make network namespaces")
    names = {host: f"pp-{os.getpid()}-{host}" for host in HOSTS}
    try:
        for name in names.values():
            made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
            if made.returncode:
                pytest.skip(f"cannot make a network namespace here: {made.stderr.strip()}")
        _ip("link", "add", "pp-a", "netns", names["a"], "type", "veth", "peer", "name", "pp-b", "netns", names["b"])
        for host, name in names.items():
            _ip("-n", name, "addr", "add", f"{HOSTS[host]}/24", "dev", f"pp-{host}")
            _ip("-n", name, "link", "set", f"pp-{host}", "up")
            _ip("-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        for name in names.values():
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def test_a_fleet_across_two_hosts_needs_and_uses_its_keys(hosts: dict[str, str], tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    make_keys(keys)
    control_public, node_public = (load_keys(keys / name).public for name in (CONTROL_KEY, NODE_KEY))
    config = tmp_path / "phaseplane.toml"
    config.write_text(
        f"""[server]
host = "{HOSTS["a"]}"
wire_host = "{HOSTS["a"]}"
wire_port = 8001
curve_key_file = "{keys / CONTROL_KEY}"
curve_allowed = ["{node_public}"]
[server.api_keys]
tester = "{SECRET}"
[model]
name = "llama-3.1-8b"
engine = "emulated"
[history]
directory = "{tmp_path / "state"}"
"""
    )
    common = ["-m", "nodes.agent", "--control", f"tcp://{HOSTS['a']}:8001", "--engine", "emulated", "--model",
              "llama-3.1-8b", "--hardware", "H800"]  # fmt: skip
    curve = ["--curve-key-file", str(keys / NODE_KEY), "--control-public-key", control_public]
    data = ["--data-key-file", str(keys / DATA_KEY)]
    with contextlib.ExitStack() as stack:
        start = lambda host, *argv: stack.enter_context(_running(hosts[host], *argv))  # noqa: E731
        start("a", "-m", "controlplane.main", "--config", str(config))
        start("a", *common, *curve, *data, "--data-host", HOSTS["a"], "--instance", "p0=prefill")
        start("b", *common, *curve, *data, "--data-host", HOSTS["b"], "--instance", "d0=decode")
        no_curve = subprocess.run(
            ["ip", "netns", "exec", hosts["b"], sys.executable, *common, *data, "--instance", "x=decode"],
            capture_output=True, text=True, cwd=ROOT, timeout=START_S, check=False,
        )  # fmt: skip
        assert no_curve.returncode == 2
        assert "give CURVE keys" in no_curve.stderr
        prompt = [97 + i % 26 for i in range(700)]
        body = json.dumps({"model": "llama-3.1-8b", "prompt": prompt, "max_tokens": 40, "ignore_eos": True})
        text = bytes(continuation(prompt, 40)).decode()
        end = time.monotonic() + START_S
        while (answer := _ask(hosts["b"], body, SECRET)).get("choices") is None:
            assert time.monotonic() < end, answer
            time.sleep(0.2)
        assert answer["choices"][0]["text"] == text
        assert "error" in _ask(hosts["b"], body, "a-wrong-secret")
        log = subprocess.run(
            ["ip", "netns", "exec", hosts["a"], "ss", "-tnH", "state", "established"],
            capture_output=True, text=True, check=True,
        ).stdout  # fmt: skip
        assert HOSTS["b"] in log, "nothing crossed the cable"


def _ask(namespace: str, body: str, secret: str) -> dict[str, object]:
    url = f"http://{HOSTS['a']}:8000/v1/completions"
    command = ["ip", "netns", "exec", namespace, "curl", "-s", "-m", "20", url, "-H", f"Authorization: Bearer {secret}"]
    command += ["-H", "Content-Type: application/json", "-d", body]
    out = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    made: dict[str, object] = json.loads(out) if out else {}
    return made


def _ip(*argv: str) -> None:
    subprocess.run(["ip", *argv], check=True, capture_output=True)


@contextlib.contextmanager
def _running(namespace: str, *argv: str) -> Iterator[None]:
    process = subprocess.Popen(["ip", "netns", "exec", namespace, sys.executable, *argv], cwd=ROOT)
    try:
        yield
    finally:
        process.terminate()
        try:
            process.wait(15)
        finally:
            process.kill()
