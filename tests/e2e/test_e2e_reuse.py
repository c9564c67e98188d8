"""Agents' prompts served again: KV is reused from caches, from the pool, from its SSD, and no text changes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.weights, pytest.mark.slow, pytest.mark.timeout(400)]

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "bench_agent.py"


def test_kv_is_reused_again_after_engines_and_pool_were_killed_and_text_stays(
    tmp_path: Path, smollm2_dir: Path
) -> None:
    out = tmp_path / "lines.json"
    run = subprocess.run(
        [sys.executable, str(SCRIPT), "--prompts", "generated", "--num", "12", "--json", str(out)],
        capture_output=True, text=True, timeout=380, check=False, cwd=SCRIPT.parents[1],
    )  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr
    passes = {line["name"]: line for line in map(json.loads, out.read_text().splitlines())}
    assert all(line["same_text"] for line in passes.values())
    assert passes["agent_cold"]["reused"] < 0.9, "nothing was cold"
    for name in ("agent_again", "agent_engines_killed", "agent_all_killed"):
        assert passes[name]["reused"] >= 0.9, f"{name}: {passes[name]}"
