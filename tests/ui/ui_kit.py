"""What tests of `up` and other commands share: a plan to start from, a program that sleeps, ports, processes."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from ui.launch import FleetPlan

SLEEP = "import time; time.sleep(60)"


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


def closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def a_fleet_plan(tmp_path: Path, **changes: object) -> FleetPlan:
    values: dict[str, object] = {
        "prefill": 1, "decode": 1, "mixed": 0, "pool": 0, "engine": "native", "model": "tiny",
        "hardware": ("auto", "auto"), "host": "127.0.0.1", "port": 8000, "wire_port": 8001, "state": tmp_path,
    }  # fmt: skip
    return FleetPlan(**(values | changes))  # type: ignore[arg-type]
