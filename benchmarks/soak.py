"""Steady load on a fleet of its own for a while: does anything grow? Resident memory of every process, sampled.

The fleet (2 prefill, 2 decode, 1 KV pool) has arenas small enough that eviction and write-through never rest. After a
warm-up the mean of the first fifth is compared with that of the last, process by process and summed. The slowest to
fill are the scheduler's window of traffic (5 minutes) and what instances remember of requests that ended (2 minutes),
hence 6 minutes. Exits with 1 when the sum grew or shrank by more than --within percent, a request failed, or an
orphaned block was seen.
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
from pathlib import Path
from typing import Any

from bench_fleet import CLI, Fleet, running

SAMPLE_S = 2.0
SHARE = 5
"""The first and the last 1/n of the samples are compared."""
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
MIB = 1 << 20


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", choices=("emulated", "native"), default="emulated")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--warm-up", type=float, default=6.0, help="minutes before the first sample counts")
    parser.add_argument("--rate", type=float, default=20.0, help="requests a second")
    parser.add_argument("--prompt-tokens", default="64-768")
    parser.add_argument("--output-tokens", default="8-32")
    parser.add_argument("--within", type=float, default=2.0, help="percent that resident memory may move")
    parser.add_argument("--json", type=Path, help="where to write the JSON line")
    options = parser.parse_args()
    small = {"PHASEPLANE_NUM_BLOCKS": "1024", "PHASEPLANE_SSD_GIB": "0.25"}
    args = ("--prefill", "2", "--decode", "2", "--pool", "1", "--engine", options.engine, "--per-process", "1")
    with (
        tempfile.TemporaryDirectory(prefix="phaseplane-soak-") as state,
        running(Path(state), *args, env=small) as fleet,
    ):
        result = soak(fleet, options)
    print(json.dumps(result))
    if options.json:
        options.json.write_text(json.dumps(result) + "\n", encoding="utf-8")
    return 0 if result["ok"] else 1


def soak(fleet: Fleet, options: argparse.Namespace) -> dict[str, Any]:
    """Load the fleet for warm-up and measurement, sample what its processes hold, judge."""
    total_s = (options.warm_up + options.minutes) * 60.0
    command = [
        *CLI, "bench", "--url", fleet.url, "--rate", str(options.rate), "--duration", str(total_s), "--json",
        "--prompt-tokens", options.prompt_tokens, "--output-tokens", options.output_tokens,
    ]  # fmt: skip
    samples: list[dict[str, int]] = []
    orphans = 0
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as load:
        try:
            started = time.monotonic()
            while time.monotonic() - started < total_s and load.poll() is None:
                time.sleep(SAMPLE_S)
                if time.monotonic() - started > options.warm_up * 60.0:
                    samples.append(resident(fleet))
                    orphans = max(orphans, fleet.status()["orphaned_kv_blocks"])
            answered = json.loads(load.communicate(timeout=120)[0])
        finally:
            load.terminate()  # nothing once it has ended
    fifth = max(1, len(samples) // SHARE)
    first, last = samples[:fifth], samples[-fifth:]
    changes = {name: change(first, last, name) for name in samples[0] if all(name in one for one in samples)}
    total = 100.0 * (mean_sum(last) / mean_sum(first) - 1.0)
    for name, percent in sorted(changes.items()):
        print(f"{name:14} {mean(first, name) / MIB:8.1f} -> {mean(last, name) / MIB:8.1f} MiB  {percent:+.2f} %")
    print(f"{'all':14} {mean_sum(first) / MIB:8.1f} -> {mean_sum(last) / MIB:8.1f} MiB  {total:+.2f} %")
    fine = answered["errors"] == 0 and answered["completed"] == answered["offered"] and orphans == 0
    return {
        "name": f"soak_{options.engine}", "minutes": options.minutes, "rate": options.rate,
        "first_mib": round(mean_sum(first) / MIB, 1), "last_mib": round(mean_sum(last) / MIB, 1),
        "change_percent": round(total, 2), "orphaned_kv_blocks": orphans, "offered": answered["offered"],
        "completed": answered["completed"], "errors": answered["errors"], "ok": fine and abs(total) <= options.within,
    }  # fmt: skip


def resident(fleet: Fleet) -> dict[str, int]:
    """Resident bytes of every process of this fleet, by what it hosts."""
    found: dict[str, int] = {}
    for pid, words in fleet.processes().items():
        hosted = next((word.split("=")[0] for word in words if "=" in word and "@" in word), "control")
        with contextlib.suppress(OSError):
            found[f"{hosted}:{pid}"] = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE_BYTES
    if not found:
        raise SystemExit("no process of the fleet was found; is it still running?")
    return found


def mean(samples: list[dict[str, int]], name: str) -> float:
    return statistics.fmean(one[name] for one in samples)


def mean_sum(samples: list[dict[str, int]]) -> float:
    return statistics.fmean(sum(one.values()) for one in samples)


def change(first: list[dict[str, int]], last: list[dict[str, int]], name: str) -> float:
    return 100.0 * (mean(last, name) / mean(first, name) - 1.0)


if __name__ == "__main__":
    sys.exit(main())
