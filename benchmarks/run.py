"""`make bench`: runs every benchmark in turn, keeps its JSON lines, and prints ours beside the peers' in one table.

Each benchmark is a program of its own (`--json PATH` names its results), so that none warms or slows another.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
BENCHMARKS = ("engine", "transfer", "gateway", "agent", "feed", "tui")
KEYS = ("name", "ours", "peer", "peer_name", "unit", "ratio")
TIMEOUT_S = 1800.0


def main(arguments: list[str] | None = None) -> int:
    """Exit status 0 when every benchmark ran and wrote lines of the agreed form."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("only", nargs="*", metavar="NAME", help=f"some of {', '.join(BENCHMARKS)}; by default all")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for the JSON lines")
    parser.add_argument("--timeout", type=float, default=TIMEOUT_S, help="longest time of one benchmark, seconds")
    options = parser.parse_args(arguments)
    unknown = [name for name in options.only if name not in BENCHMARKS]
    if unknown:
        parser.error(f"there is no benchmark {unknown[0]!r}; choose from {', '.join(BENCHMARKS)}")
    stamp = time.strftime("%Y%m%d-%H%M%S")
    options.results.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    failures: list[str] = []
    for name in options.only or BENCHMARKS:
        print(f"== {name}", file=sys.stderr, flush=True)
        try:
            rows += run_one(name, options.results / f"{stamp}-{name}.jsonl", options.timeout)
        except ValueError as error:
            failures.append(f"{name}: {error}")
    if rows:
        (options.results / "latest.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        show(rows)
    for failure in failures:
        print(f"error: {failure}", file=sys.stderr)
    return 1 if failures else 0


def run_one(name: str, results: Path, timeout_s: float) -> list[dict[str, Any]]:
    """Run benchmarks/bench_NAME.py; returns its lines. Raises ValueError with what went wrong."""
    script = HERE / f"bench_{name}.py"
    command = [sys.executable, str(script), "--json", str(results)]
    try:
        code = subprocess.run(command, check=False, timeout=timeout_s, cwd=HERE.parent).returncode
    except subprocess.TimeoutExpired:
        raise ValueError(f"did not end within {timeout_s:g} s; run it alone: python {script.name}") from None
    if code:
        raise ValueError(f"ended with status {code}; run it alone: python benchmarks/{script.name}")
    return read_lines(results)


def read_lines(results: Path) -> list[dict[str, Any]]:
    """The lines of one results file. Raises ValueError for a missing file, key or number."""
    try:
        lines = results.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ValueError(f"wrote no results ({error.strerror})") from None
    rows: list[dict[str, Any]] = [json.loads(line) for line in lines if line.strip()]
    for row in rows:
        missing = [key for key in KEYS if key not in row]
        if missing:
            raise ValueError(f"line {row.get('name', '?')!r} lacks {', '.join(missing)}")
    if not rows:
        raise ValueError("wrote no results")
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    """One row a measurement."""
    table = Table(title="ours beside peers, measured in one run")
    for column in ("what", "ours", "peer", "", "unit", "ratio"):
        table.add_column(column, justify="left" if column in ("what", "", "unit") else "right")
    for row in rows:
        ratio = "-" if row["ratio"] is None else f"{row['ratio']:.2f}x"
        peer = "-" if row["peer"] is None else f"{row['peer']:,.4g}"
        table.add_row(row["name"], f"{row['ours']:,.4g}", peer, row["peer_name"] or "-", row["unit"], ratio)
    Console(width=None if sys.stdout.isatty() else 140).print(table)


if __name__ == "__main__":
    sys.exit(main())
