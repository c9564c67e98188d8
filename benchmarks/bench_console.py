"""What the console costs: CPU and memory of its process with five tabs of Overview, 64 instances, a frame a second.

The fleet is emulated and under a light load, the tabs are Chromium's. Beside it the same figures as a Streamlit page
with a fragment that runs once a second: what the live islands are there to avoid. Also the time to the first useful
paint: from the address to a verdict with figures, in a browser that has cached nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from bench_fleet import CLI, running

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests/ui/console"))
from console_browser import browsing  # noqa: E402

TICKS_A_SECOND = os.sysconf("SC_CLK_TCK")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
SETTLE_S = 5.0
PEER = """
import json, sys, urllib.request
import streamlit as st
st.title("fleet")
@st.fragment(run_every=1.0)
def figures():
    with urllib.request.urlopen(URL + "/v1/fleet") as answer:
        fleet = json.load(answer)
    st.metric("goodput", fleet["goodput"]["per_s"])
    st.session_state.setdefault("past", []).append(fleet["goodput"]["per_s"])
    st.line_chart(st.session_state["past"][-600:])
    st.dataframe(fleet["instances"])
figures()
"""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--instances", type=int, default=64)
    parser.add_argument("--tabs", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=30.0, help="length of each measurement")
    parser.add_argument("--no-peer", action="store_true", help="measure the console alone")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    half = str(options.instances // 2)
    with (
        tempfile.TemporaryDirectory() as folder,
        running(Path(folder), "--engine", "emulated", "--prefill", half, "--decode", half) as fleet,
        loaded(fleet.url),
    ):
        command = [*CLI, "console", "--url", fleet.url, "--port", "18771"]
        with serving(command, "http://127.0.0.1:18771/healthz") as pid:
            before = resident(pid)
            paints = paint_times("http://127.0.0.1:18771")
            ours, memory = measure(pid, "http://127.0.0.1:18771", ".pp-figures dl", options.tabs, options.seconds)
        peer, peer_memory = (None, None) if options.no_peer else fragment(fleet.url, Path(folder), options)
    paint = statistics.median(paints)
    print(f"{options.instances} instances, {options.tabs} tabs of Overview, {options.seconds:g} s:")
    before_mb, memory_mb = before / 1e6, memory / 1e6
    print(f"  console                   {ours:6.2%} of a core, {memory_mb:.0f} MB resident ({before_mb:.0f} before)")
    if peer is not None:
        print(f"  a fragment once a second  {peer:6.2%} of a core, {peer_memory / 1e6:.0f} MB resident")
    print(
        f"  first useful paint        {paint:.2f} s (median of {len(paints)}: {min(paints):.2f} to {max(paints):.2f})"
    )
    if options.json is not None:
        named = "a fragment once a second"
        rows = [row("console with five tabs", "cores", ours, peer, named),
                row("console's memory", "bytes", memory, peer_memory, named),
                row("console's first useful paint", "seconds", paint, None, None)]  # fmt: skip
        options.json.write_text("".join(json.dumps(one) + "\n" for one in rows), encoding="utf-8")
    return 0


def row(name: str, unit: str, ours: float, peer: float | None, peer_name: str | None) -> dict[str, object]:
    ratio = None if peer is None else peer / ours
    return {
        "name": name,
        "ours": ours,
        "peer": peer,
        "peer_name": peer_name if peer else None,
        "unit": unit,
        "ratio": ratio,
    }


def fragment(url: str, folder: Path, options: argparse.Namespace) -> tuple[float, float]:
    """The same figures by Streamlit alone."""
    script = folder / "peer.py"
    script.write_text(f"URL = {url!r}\n{PEER}")
    command = [sys.executable, "-m", "streamlit", "run", str(script), "--server.port", "18772", "--server.headless",
               "true", "--browser.gatherUsageStats", "false", "--server.address", "127.0.0.1"]  # fmt: skip
    with serving(command, "http://127.0.0.1:18772/_stcore/health") as pid:
        return measure(pid, "http://127.0.0.1:18772", "[data-testid=stMetricValue]", options.tabs, options.seconds)


def measure(pid: int, url: str, awaited: str, num_tabs: int, seconds: float) -> tuple[float, float]:
    """(share of a core, resident bytes at the end) of a process while that many tabs are open."""
    with browsing(url) as tab:
        for _ in range(num_tabs):
            page = tab.page.context.browser.new_context().new_page()
            page.goto(url)
            page.wait_for_selector(awaited, timeout=60_000)
        time.sleep(SETTLE_S)
        began, used = time.monotonic(), cpu_s(pid)
        tab.page.wait_for_timeout(1000 * seconds)
        share = (cpu_s(pid) - used) / (time.monotonic() - began)
        return share, resident(pid)


def paint_times(url: str, num: int = 5) -> list[float]:
    """Seconds from the address to a verdict with figures, each in a context of its own."""
    found = []
    with browsing(url) as tab:
        for _ in range(num):
            context = tab.page.context.browser.new_context()
            page, began = context.new_page(), time.perf_counter()
            page.goto(url)
            page.wait_for_selector(".pp-figures dl")
            found.append(time.perf_counter() - began)
            context.close()
    return found


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_A_SECOND


def resident(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE_BYTES


@contextlib.contextmanager
def serving(command: list[str], health: str) -> Iterator[int]:
    """Its process id, once it answers."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(300):
            with contextlib.suppress(OSError), urllib.request.urlopen(health, timeout=5):
                break
            time.sleep(0.1)
        yield process.pid
    finally:
        process.terminate()
        process.wait(20)


@contextlib.contextmanager
def loaded(url: str) -> Iterator[None]:
    """Two requests a second, so that figures move."""
    command = [*CLI, "bench", "--url", url, "--rate", "2", "--num", "5000", "--output-tokens", "8-32"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield
    finally:
        process.terminate()
        process.wait(20)


if __name__ == "__main__":
    sys.exit(main())
