"""A fleet of its own for a benchmark: `phaseplane up` on a free port, ready to serve, stopped at the end."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CLI = [sys.executable, "-m", "ui.cli"]
START_S = 120.0


@dataclass(frozen=True)
class Fleet:
    """url: its HTTP address. state: where its logs are; in the environment of all of its processes."""

    url: str
    state: Path

    def status(self) -> dict[str, Any]:
        """As `phaseplane status --json`."""
        with urllib.request.urlopen(f"{self.url}/v1/fleet", timeout=10) as response:
            parsed: dict[str, Any] = json.load(response)
        return parsed

    def processes(self) -> dict[int, list[str]]:
        """Command lines of the fleet's control plane and agents, by process id."""
        found = {}
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                words = (entry / "cmdline").read_bytes().decode().split("\0") if entry.name.isdigit() else []
                ours = "controlplane.main" in words or "nodes.agent" in words
                if ours and str(self.state).encode() in (entry / "environ").read_bytes():
                    found[int(entry.name)] = words
        return found


@contextlib.contextmanager
def running(state: Path, *args: str, env: dict[str, str] | None = None) -> Iterator[Fleet]:
    """`phaseplane up ARGS`. Raises SystemExit with its output when it does not come up."""
    ready, log = state / "ready.json", state / "up.log"
    command = [*CLI, "up", "--port", "0", "--no-console", "--state", str(state), "--ready-file", str(ready), *args]
    environment = {**os.environ, "BENCH_STATE": str(state), **(env or {})}
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env=environment)
        try:
            end = time.monotonic() + START_S
            while not ready.exists():
                if process.poll() is not None or time.monotonic() > end:
                    raise SystemExit(f"the fleet did not come up: {log.read_text()}")
                time.sleep(0.1)
            yield Fleet(json.loads(ready.read_text())["url"], state)
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(30)
