"""What this machine has free: ports and memory. It only looks."""

from __future__ import annotations

import errno
import os
import random
import socket
from pathlib import Path

PORTS = range(20_000, 30_000)
TRIES = 20
_RANDOM = random.SystemRandom()


def state_dir() -> Path:
    """Where logs, history and audit go unless --state says otherwise: ~/.local/state/phaseplane."""
    configured = os.environ.get("XDG_STATE_HOME")
    return (Path(configured) if configured else Path.home() / ".local" / "state") / "phaseplane"


def free_port(host: str) -> int:
    """A port that nobody listens on at this moment, of those that no system gives to outgoing connections: one of these
    might have it before it is used."""
    for _ in range(TRIES):
        if port_is_free(host, port := _RANDOM.choice(PORTS)):
            return port
    family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.bind(address)
        return int(probe.getsockname()[1])


def port_is_free(host: str, port: int) -> bool:
    """Whether a server can bind there now. Raises OSError when the host itself is not of this machine."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            if error.errno in (errno.EADDRINUSE, errno.EACCES):
                return False
            raise
    return True


def available_memory() -> float:
    """Bytes that new processes can use: what the kernel says, or the container's limit if that is less."""
    available = float("inf")
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                available = float(line.split()[1]) * 1024
        limit = Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii").strip()
        used = float(Path("/sys/fs/cgroup/memory.current").read_text(encoding="ascii"))
    except OSError:
        return available
    return available if limit == "max" else min(available, max(0.0, float(limit) - used))
