"""What `phaseplane top` costs: its CPU beside a fleet of 64 instances that all change every second.

The screen is the real program on a pseudo-terminal; the control plane is the real one, in this process, with nodes
that are heartbeats. CPU is the screen's own (/proc), so that what else runs here does not count.
"""

from __future__ import annotations

import argparse
import asyncio
import fcntl
import json
import os
import struct
import sys
import tempfile
import termios
import time
from pathlib import Path

import uvloop
from bench_feed import Nodes, configured

from controlplane.main import start

SIZES = ((80, 24), (120, 40), (200, 60))
PANELS = {"overview": b"1", "instances": b"2", "requests": b"3", "kv": b"4"}
SETTLE_S = 4.0
FIRST_S = 20.0
TICK_S = 1 / os.sysconf("SC_CLK_TCK")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--instances", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=15.0, help="length of each measurement")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        rows = uvloop.run(measure(Path(folder), options.instances, options.seconds))
    print(f"{options.instances} instances, {options.seconds:g} s each, share of one core:")
    for name, (share, per_s) in rows.items():
        print(f"  {name:24} {share:6.2%}  {per_s / 1024:7.1f} KiB/s to the terminal")
    if options.json is not None:
        keys = {"unit": "cores", "peer": None, "peer_name": None, "ratio": None}
        lines = [{"name": f"phaseplane top, {name}", "ours": share, **keys} for name, (share, _) in rows.items()]
        options.json.write_text("".join(json.dumps(row) + "\n" for row in lines), encoding="utf-8")
    return 0


async def measure(folder: Path, num_instances: int, seconds: float) -> dict[str, tuple[float, float]]:
    """CPU share and bytes a second by panel and size."""
    server = await start(configured(folder))
    beating = asyncio.create_task(Nodes(server, num_instances).run())
    found = {}
    try:
        for size in SIZES:
            screen = Screen(server.url, size)
            try:
                await screen.wait_for(b"live ", FIRST_S)
                for panel, key in PANELS.items():
                    screen.press(key)
                    await asyncio.sleep(SETTLE_S)
                    used, sent, began = screen.cpu_s(), screen.num_bytes, time.monotonic()
                    await asyncio.sleep(seconds)
                    took = time.monotonic() - began
                    name = f"{panel} {size[0]}x{size[1]}"
                    found[name] = ((screen.cpu_s() - used) / took, (screen.num_bytes - sent) / took)
            finally:
                screen.close()
        return found
    finally:
        beating.cancel()
        await server.close()


class Screen:
    """`phaseplane top` on a pseudo-terminal that is read as it writes."""

    def __init__(self, url: str, size: tuple[int, int]) -> None:
        self.num_bytes = 0
        self._seen = b""
        self._read_some = asyncio.Event()
        self._pid, self._fd = os.forkpty()
        if self._pid == 0:
            os.environ |= {"TERM": "xterm-256color", "COLORTERM": "truecolor"}
            os.execv(sys.executable, [sys.executable, "-m", "ui.cli", "top", "--url", url])
        fcntl.ioctl(self._fd, termios.TIOCSWINSZ, struct.pack("HHHH", size[1], size[0], 0, 0))
        os.set_blocking(self._fd, False)
        asyncio.get_running_loop().add_reader(self._fd, self._read)

    def press(self, key: bytes) -> None:
        os.write(self._fd, key)

    def cpu_s(self) -> float:
        fields = Path(f"/proc/{self._pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) * TICK_S

    async def wait_for(self, sign: bytes, within_s: float) -> None:
        async with asyncio.timeout(within_s):
            while sign not in self._seen:
                self._read_some.clear()
                await self._read_some.wait()

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._fd)
        os.kill(self._pid, 9)
        os.waitpid(self._pid, 0)
        os.close(self._fd)

    def _read(self) -> None:
        try:
            data = os.read(self._fd, 1 << 16)
        except OSError:
            return
        self.num_bytes += len(data)
        self._seen = (self._seen + data)[-65536:]
        self._read_some.set()


if __name__ == "__main__":
    sys.exit(main())
