"""vLLM beside the native engine, and what `phaseplane calibrate` on vLLM says of requests that are then measured."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from e2e_fleet import CLI, ROOT, Fleet, complete_all, running
from vllm_fleet import ARGS, ENVIRONMENT, PYTHON, START_S, bodies, needs_vllm, vllm_fleet

from controlplane.validation.recorded import recorded_fleet

pytestmark = [pytest.mark.vllm, pytest.mark.weights, needs_vllm, pytest.mark.timeout(600)]

BAR = 0.15


def test_a_native_and_a_vllm_instance_both_serve_by_their_measured_speeds(tmp_path: Path) -> None:
    with running(tmp_path, "--mixed", "1", "--prefill", "0", "--decode", "0", "--dtype", "float32") as fleet:
        control = re.search(r"join at (tcp://\S+)", (tmp_path / "up.log").read_text())
        assert control is not None
        command = [
            sys.executable, "-m", "nodes.agent", "--control", control[1], "--instance", "vllm-0=mixed",
            "--engine", "vllm", "--vllm-python", str(PYTHON), "--vllm-args", ARGS, "--dtype", "float32",
            "--model", "smollm2-135m", "--threads", "1",
        ]  # fmt: skip
        with (tmp_path / "vllm-0.log").open("w") as log:
            agent = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, env={**os.environ, **ENVIRONMENT})
        try:
            fleet.wait_until_ready(["node-0", "vllm-0"], timeout_s=START_S)
            engines = {one["id"]: one["engine"] for one in fleet.status()["instances"]}
            assert engines == {"node-0": "native", "vllm-0": "vllm"}
            answers = asyncio.run(complete_all(fleet.url, bodies(60, seed=3), 8))
            assert [one.error for one in answers] == [None] * 60
            assert all(len(one.token_ids) == 24 for one in answers)
            served = served_by(fleet)
            assert set(served) == {"node-0", "vllm-0"}, served
            print(f"served by {dict(served)}")
            fleet.at_rest()
        finally:
            agent.terminate()
            agent.wait(30)


def served_by(fleet: Fleet) -> Counter[str]:
    rows = fleet.get("/v1/requests?limit=200")["requests"]
    return Counter(row["decode"] for row in rows if row["outcome"] == "ok")


def test_calibration_predicts_a_bench_run(tmp_path: Path) -> None:
    """On a machine that does nothing else."""
    ttft, tpot = errors_of_p50(tmp_path)
    assert ttft <= BAR
    assert tpot <= BAR


def errors_of_p50(directory: Path) -> tuple[float, float]:
    """Calibrate, then measure: how far the predicted p50 of TTFT and of TPOT are off, as shares of the measured."""
    done = subprocess.run(
        [*CLI, "calibrate", "--engine", "vllm", "--vllm-python", str(PYTHON), "--vllm-args", ARGS, "--dtype",
         "bfloat16", "--threads", str(max(1, len(os.sched_getaffinity(0)) - 1)), "--seconds", "60", "--json"],
        cwd=ROOT, capture_output=True, text=True, timeout=400, check=False, env={**os.environ, **ENVIRONMENT},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    print(f"fit: median error {found['error']:.1%}, on kinds left out {found['held_out']:.1%}")
    with vllm_fleet(directory, "--mixed", "1", "--prefill", "0", "--decode", "0", dtype="bfloat16") as fleet:
        bench = fleet.cli(
            "bench", "--num", "60", "--rate", "0.5", "--prompt-tokens", "64-512", "--output-tokens", "16-48", "--json",
            timeout_s=300,
        )  # fmt: skip
        assert bench.returncode == 0, bench.stderr
        time.sleep(1.0)  # the journal is written behind
    section = recorded_fleet(min(directory.rglob("flight-*.msgpack")))
    print("\n".join(section.notes), section.verdict)
    figures = dict(section.figures)
    return figures["TTFT_p50_error"], figures["TPOT_p50_error"]
