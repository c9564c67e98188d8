"""`phaseplane bench prefix` starts the replay; `phaseplane bench` alone stays a command."""

from __future__ import annotations

import json
import os
import subprocess
import sys

LINE = '{"timestamp": 0, "input_length": 9, "output_length": 1, "hash_ids": [%s]}'


def phaseplane(*arguments, **environment):
    command = [sys.executable, "-m", "ui.cli", "bench", *arguments]
    env = {**os.environ, **environment}
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=env)


def test_the_replay_is_printed_as_json_lines(tmp_path):
    trace = tmp_path / "trace.jsonl"
    trace.write_text(f"{LINE % '1, 2'}\n{LINE % '1, 3'}\n")
    ran = phaseplane("prefix", "--trace", str(trace), "--capacity", "4,5", "--json")
    assert ran.returncode == 0, ran.stderr
    lines = [json.loads(line) for line in ran.stdout.splitlines()]
    assert [(line["capacity_blocks"], line["hit_rate"], line["lru"]) for line in lines] == [
        (4, 0.25, 0.25),
        (5, 0.25, 0.25),
    ]


def test_its_options_come_from_variables_and_files_too(tmp_path):
    trace = tmp_path / "trace.jsonl"
    trace.write_text(LINE % "1, 2")
    config = tmp_path / "phaseplane.toml"
    config.write_text(f'[bench_prefix]\ntrace = "{trace}"\npolicy = "lru"\njson = true\n')
    ran = phaseplane("prefix", "--config", str(config), PHASEPLANE_BENCH_PREFIX_CAPACITY="7")
    assert ran.returncode == 0, ran.stderr
    line = json.loads(ran.stdout)
    assert (line["capacity_blocks"], line["policy"]) == (7, "lru")


def test_what_cannot_be_is_a_sentence(run, tmp_path):
    assert "there is no trace to replay; give one with --trace FILE" in run("bench", "prefix").err
    assert "no such command 'prefxi'" in run("bench", "prefxi").err.lower()
    config = tmp_path / "phaseplane.toml"
    config.write_text("[bench_prefix]\ntrase = 1\n")
    assert "did you mean bench_prefix.trace?" in run("bench", "prefix", "--config", str(config)).err
    ran = phaseplane("prefix", "--trace", str(tmp_path / "none.jsonl"))
    assert ran.returncode == 1
    assert "cannot read the trace" in ran.stderr
    assert "Traceback" not in ran.stderr
