"""Real vLLM for tests: a fleet of it by `phaseplane up`, a single one to compare with, and what its own metrics say."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from e2e_fleet import Answer, Fleet, complete, running

MODEL = "smollm2-135m"
PYTHON = os.environ.get("TEST_VLLM_PYTHON")
LLAMACPP = os.environ.get("TEST_LLAMACPP_PYTHON")
needs_vllm = pytest.mark.skipif(not PYTHON, reason="TEST_VLLM_PYTHON names no Python with vLLM; `make test-vllm`")
needs_llamacpp = pytest.mark.skipif(
    not LLAMACPP, reason="TEST_LLAMACPP_PYTHON names no Python with xllamacpp; `make test-vllm`"
)
START_S = 240.0
ARGS = "--enforce-eager --max-model-len 4096"
"""Of every vLLM here: compiling takes longer than all else."""
# In float32: greedy text of bfloat16 depends on what else is in a batch.
ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "1"}


@contextlib.contextmanager
def vllm_fleet(state: Path, *args: str, dtype: str = "float32") -> Iterator[Fleet]:
    flags = ("--engine", "vllm", "--vllm-python", str(PYTHON), "--vllm-args", ARGS, "--dtype", dtype, *args)
    with running(state, *flags, env=ENVIRONMENT, start_s=START_S) as fleet:
        yield fleet


@contextlib.contextmanager
def alone(model_dir: Path, log: Path, dtype: str = "float32") -> Iterator[str]:
    """One `vllm serve` as it comes, without anything of ours; its unix socket."""
    with tempfile.TemporaryDirectory() as place:
        socket = f"{place}/http"
        command = [
            str(PYTHON), "-m", "vllm.entrypoints.cli.main", "serve", str(model_dir), "--uds", socket,
            "--served-model-name", MODEL, "--dtype", dtype, "--generation-config", "vllm", *ARGS.split(),
        ]  # fmt: skip
        quiet = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_HOST_IP": "127.0.0.1"}
        with log.open("w") as out:
            process = subprocess.Popen(
                command, stdout=out, stderr=out, cwd=place, env={**os.environ, **ENVIRONMENT, **quiet}
            )
        try:
            end = time.monotonic() + START_S
            while asyncio.run(health(socket)) != 200:
                assert process.poll() is None, log.read_text()[-2000:]
                assert time.monotonic() < end, log.read_text()[-2000:]
                time.sleep(0.5)
            yield socket
        finally:
            process.terminate()
            process.wait(30)


async def health(socket: str) -> int:
    with contextlib.suppress(aiohttp.ClientError, OSError):
        async with (
            aiohttp.ClientSession(connector=aiohttp.UnixConnector(socket)) as session,
            session.get("http://vllm/health") as response,
        ):
            return response.status
    return 0


async def ask_alone(socket: str, bodies: list[dict[str, Any]], concurrency: int) -> list[Answer]:
    gate = asyncio.Semaphore(concurrency)
    async with aiohttp.ClientSession(connector=aiohttp.UnixConnector(socket, limit=0)) as session:

        async def one(body: dict[str, Any]) -> Answer:
            async with gate:
                return await complete(session, "http://vllm", body)

        return list(await asyncio.gather(*(one(body) for body in bodies)))


def bodies(count: int, *, longest: int = 400, output: int = 24, seed: int = 0) -> list[dict[str, Any]]:
    """Greedy completions of prompts of token ids, 8 to `longest` of them."""
    rng = random.Random(seed)
    return [
        {
            "model": MODEL, "prompt": [rng.randrange(1000, 40_000) for _ in range(rng.randint(8, longest))],
            "max_tokens": output, "temperature": 0, "ignore_eos": True,
        }
        for _ in range(count)
    ]  # fmt: skip


def sockets(fleet: Fleet) -> list[str]:
    """Where the vLLM servers of a fleet listen."""
    found = set()
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            argv = (entry / "cmdline").read_bytes().split(b"\0") if entry.name.isdigit() else []
            if b"--uds" in argv and str(fleet.state).encode() in (entry / "environ").read_bytes():
                found.add(argv[argv.index(b"--uds") + 1].decode())
    return sorted(found)


async def vllm_metrics(socket: str) -> dict[str, float]:
    """Of vLLM itself, summed over labels: num_requests_running, kv_cache_usage_perc, ..."""
    async with (
        aiohttp.ClientSession(connector=aiohttp.UnixConnector(socket)) as session,
        session.get("http://vllm/metrics") as response,
    ):
        text = await response.text()
    found: dict[str, float] = {}
    for line in text.splitlines():
        if line.startswith("vllm:"):
            name = line.removeprefix("vllm:").partition("{")[0].partition(" ")[0]
            found[name] = found.get(name, 0.0) + float(line.rsplit(" ", 1)[1])
    return found
