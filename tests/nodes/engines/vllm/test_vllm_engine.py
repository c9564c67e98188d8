"""VllmEngine against a server that answers as vLLM does, with a real connector's worker behind it."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from aiohttp import web

from nodes.engines.served import Job, Output
from nodes.engines.vllm.engine import VllmEngine, VllmOptions, start_vllm
from nodes.engines.vllm.frames import PROTOCOL, Hello
from nodes.engines.vllm.launch import command, launch
from nodes.engines.vllm.mover import PlainCache
from nodes.engines.vllm.plan import StepItem
from nodes.engines.vllm.worker import Worker
from nodes.hardware import preset
from transfer.errors import EngineFailed, InvalidValue, JobFailed
from transfer.terms import FinishReason, SamplingParams

CONFIG = {
    "num_hidden_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 8, "vocab_size": 50,
    "max_position_embeddings": 64, "eos_token_id": 2,
}  # fmt: skip
HELLO = Hello(
    protocol=PROTOCOL, version="0.32.0", pid=1, model="m", revision="aa", tokenizer="bb", dtype="float32",
    cache_dtype="float32", num_layers=2, num_kv_heads=2, head_dim=4, block_size=8, num_blocks=6, world_size=1,
    max_model_len=64, device="cpu",
)  # fmt: skip
GREEDY = SamplingParams(max_tokens=3, temperature=0.0)


@dataclass
class StandIn:
    """Answers every request with the tokens 11, 12, ... in a table of its own, its cache filled by nobody."""

    worker: Worker
    held: asyncio.Event = field(default_factory=asyncio.Event)
    num_open: int = 0
    bodies: list[dict[str, Any]] = field(default_factory=list)
    breaks: bool = False
    is_ill: bool = False
    said: web.Response | None = None

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        if self.said is not None:
            return self.said
        if len(body["prompt"]) > 40:
            return web.json_response({"error": {"message": "too long", "type": "BadRequestError"}}, status=400)
        ticket = body["kv_transfer_params"]["phaseplane"]
        start = min(ticket["num_loaded"], len(body["prompt"]) - 1)
        item = StepItem(ticket["job"], [3, 1, 4, 0, 5], start, len(body["prompt"]), 0, fresh=True)
        response = web.StreamResponse()
        await response.prepare(request)
        self.num_open += 1
        try:
            await asyncio.to_thread(self._step, item)
            for index in range(body["max_tokens"]):
                if index == 1 and self.breaks and request.transport is not None:
                    request.transport.abort()
                if index == 2:
                    await self.held.wait()
                last = index == body["max_tokens"] - 1
                choice = {"text": "", "token_ids": [11 + index], "finish_reason": "length" if last else None}
                await response.write(b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n")
            await response.write(b"data: [DONE]\n\n")
        finally:
            self.num_open -= 1
        return response

    def _step(self, item: StepItem) -> None:
        self.worker.begin([item], [])
        self.worker.load()
        for layer in range(2):
            self.worker.save_layer(layer)


@dataclass
class Fixture:
    stand_in: StandIn
    engine: VllmEngine
    options: VllmOptions
    worker: Worker


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(CONFIG))
    (directory / "phaseplane.json").write_text(json.dumps({"name": "m", "revision": "aa", "tokenizer": "bb"}))
    return directory


@pytest.fixture
async def served(tmp_path: Path, model_dir: Path) -> AsyncIterator[Fixture]:
    caches = [PlainCache(torch.randn(6, 2, 8, 8)) for _ in range(2)]
    socket = tmp_path / "link"
    worker = Worker(list(caches), 8, torch.device("cpu"), socket, HELLO, launched=False)
    stand_in = StandIn(worker)

    async def say(request: web.Request) -> web.Response:
        if stand_in.is_ill:
            return web.Response(status=503)
        return web.json_response(
            {"/version": {"version": "0.32.0"}, "/v1/models": {"data": [{"id": "served", "max_model_len": 64}]}}.get(
                request.path, {}
            )
        )

    app = web.Application()
    app.router.add_post("/v1/completions", stand_in.complete)
    for path in ("/version", "/v1/models", "/health"):
        app.router.add_get(path, say)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    options = VllmOptions(
        model_dir=model_dir, url=f"http://127.0.0.1:{runner.addresses[0][1]}", socket=socket, dtype="float32",
        block_size=8, num_blocks=8, hardware=preset("CPU"), start_timeout_s=10.0,
    )  # fmt: skip
    engine = await start_vllm(options)
    yield Fixture(stand_in, engine, options, worker)
    stand_in.held.set()
    await engine.close()
    worker.close()
    await runner.cleanup()


def job(sampling: SamplingParams | None, num_tokens: int = 20, num_loaded: int = 0, save_from: int = 0) -> Job:
    return Job("r", 1, list(range(num_tokens)), 0, sampling, [7, 2, 5], num_loaded, save_from)


async def run(engine: VllmEngine, one: Job) -> tuple[list[Output], list[tuple[int, int, int]], int]:
    saved: list[tuple[int, int, int]] = []
    started: list[int] = []
    async with aclosing(engine.run(one, lambda: started.append(1), lambda *what: saved.append(what))) as outputs:
        return [output async for output in outputs], saved, len(started)


async def test_facts_come_from_the_vllm(served: Fixture) -> None:
    engine = served.engine
    assert (engine.kind, engine.version, engine.shares_kv) == ("vllm", "0.32.0", True)
    assert (engine.num_blocks, engine.capacity_blocks) == (8, 6)
    assert engine.layout.rope == "theta=10000"
    assert engine.model.eos_token_ids == (2,)


async def test_kv_alone_is_saved_before_the_only_output(served: Fixture) -> None:
    outputs, saved, started = await run(served.engine, job(None))
    assert outputs == [Output((), finish=FinishReason.LENGTH, cached_tokens=0)]
    assert sorted(saved) == [(0, 0, 3), (1, 0, 3)]
    assert started == 1
    assert served.stand_in.bodies[0]["prompt"] == list(range(19))


async def test_tokens_come_as_they_are_drawn_and_the_loaded_ones_count_as_cached(served: Fixture) -> None:
    served.stand_in.held.set()
    outputs, saved, started = await run(served.engine, job(GREEDY, num_loaded=19, save_from=3))
    assert outputs == [Output((11,), cached_tokens=19), Output((12,)), Output((13,), finish=FinishReason.LENGTH)]
    assert (saved, started) == ([], 1)
    assert served.stand_in.bodies[0]["model"] == "served"


async def test_what_needs_no_computing_does_not_reach_vllm(served: Fixture) -> None:
    outputs, saved, started = await run(served.engine, job(None, num_loaded=19, save_from=3))
    assert outputs == [Output((), finish=FinishReason.LENGTH, cached_tokens=19)]
    assert (saved, started, served.stand_in.bodies) == ([], 1, [])


async def test_closing_aborts_and_gives_the_blocks_back(served: Fixture) -> None:
    outputs = served.engine.run(job(GREEDY), lambda: None, lambda *what: None)
    assert (await anext(outputs)).token_ids == (11,)
    await outputs.aclose()
    assert served.engine._link._jobs == {}
    async with asyncio.timeout(5):
        while served.stand_in.num_open:  # noqa: ASYNC110 (the server notices on its own)
            await asyncio.sleep(0.005)


async def test_cancelling_whoever_waits_for_a_token_aborts(served: Fixture) -> None:
    task = asyncio.create_task(run(served.engine, job(GREEDY)))
    async with asyncio.timeout(5):
        while not served.stand_in.num_open:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert served.engine._link._jobs == {}


async def test_a_refused_request_fails_alone(served: Fixture) -> None:
    with pytest.raises(JobFailed, match=r"refused the request with 400 \(BadRequestError\)$"):
        await run(served.engine, job(GREEDY, num_tokens=41))
    assert (await run(served.engine, job(None)))[0]


async def test_one_that_is_cancelled_while_it_gives_blocks_back_gives_them_back_first(served: Fixture) -> None:
    """Its blocks are given to others once it has ended."""
    with served.worker._link.lock:
        task = asyncio.create_task(run(served.engine, job(GREEDY, num_tokens=41)))
        async with asyncio.timeout(5):
            while not (jobs := served.engine._link._jobs) or not served.stand_in.bodies:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        await asyncio.sleep(0.1)  # refused meanwhile: only its revocation is not answered
        for _ in range(2):
            task.cancel()
            await asyncio.sleep(0.01)
        assert jobs, "the connector holds its lock, as in a copy"
        assert not task.done()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, 5)
    assert served.engine._link._jobs == {}


async def test_an_answer_in_pieces_is_read_whole_and_one_that_may_repeat_the_prompt_is_not_shown(
    served: Fixture,
) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for piece in (b'{"error": {"message": "a secret", "ty', b'pe": "BadRequestError"}}'):
            yield piece
            await asyncio.sleep(0.05)

    served.stand_in.said = web.Response(status=400, body=pieces())
    with pytest.raises(JobFailed, match=r"refused the request with 400 \(BadRequestError\)$"):
        await run(served.engine, job(GREEDY))
    served.stand_in.said = web.json_response({"detail": [{"input": "a secret"}]}, status=422)
    with pytest.raises(JobFailed, match=r"refused the request with 422$"):
        await run(served.engine, job(GREEDY))


async def test_a_redirect_is_not_followed_with_a_prompt(served: Fixture) -> None:
    served.stand_in.said = web.Response(status=307, headers={"Location": "/health"})
    with pytest.raises(JobFailed, match=r"with 307"):
        await run(served.engine, job(GREEDY))
    assert len(served.stand_in.bodies) == 1


async def test_a_lost_connector_fails_what_runs_and_the_engine(served: Fixture) -> None:
    running = asyncio.create_task(run(served.engine, job(GREEDY)))
    watching = asyncio.create_task(served.engine.watch())
    async with asyncio.timeout(5):
        while not served.stand_in.num_open:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    served.worker.close()
    for task in (running, watching):
        with pytest.raises(EngineFailed, match="connector is gone"):
            await asyncio.wait_for(task, 5)
    with pytest.raises(EngineFailed, match="connector is gone"):
        await run(served.engine, job(GREEDY))


async def test_a_request_that_breaks_off_fails_alone_while_the_server_is_well(served: Fixture) -> None:
    served.stand_in.breaks = True
    with pytest.raises(JobFailed, match="broke off"):
        await run(served.engine, job(GREEDY))
    assert (await run(served.engine, job(None)))[0]


async def test_a_request_that_breaks_off_with_the_server_is_the_engines_end(served: Fixture) -> None:
    served.stand_in.breaks = served.stand_in.is_ill = True
    with pytest.raises(EngineFailed, match="does not answer any more"):
        await run(served.engine, job(GREEDY))


async def test_another_servers_url_is_refused(served: Fixture, tmp_path: Path) -> None:
    socket = tmp_path / "other"
    wrong = msgspec.structs.replace(HELLO, version="0.33.0")
    worker = Worker([], 8, torch.device("cpu"), socket, wrong, launched=False)
    with pytest.raises(InvalidValue, match=r"server is vLLM 0\.32\.0, its connector's vLLM is 0\.33\.0"):
        await start_vllm(replace(served.options, socket=socket))
    worker.close()


async def test_start_and_attach_exclude_each_other(model_dir: Path) -> None:
    for wrong in ({}, {"python": Path(sys.executable), "url": "http://x"}, {"url": "http://x"}):
        with pytest.raises(InvalidValue, match="either vLLM's python"):
            await start_vllm(VllmOptions(model_dir=model_dir, **wrong))


async def test_a_vllm_that_does_not_start_says_why(model_dir: Path, tmp_path: Path) -> None:
    options = VllmOptions(model_dir=model_dir, python=Path(sys.executable), log_dir=tmp_path)
    with pytest.raises(EngineFailed, match="No module named 'vllm'"):
        await start_vllm(options)
    with pytest.raises(InvalidValue, match="cannot be run"):
        await start_vllm(VllmOptions(model_dir=model_dir, python=tmp_path / "none"))


async def test_the_command_asks_for_our_connector(model_dir: Path) -> None:
    line = command(
        Path("/p"), model_dir, Path("/s"), Path("/u"), name="m", dtype="auto", block_size=48, max_model_len=99,
        args=("--enforce-eager",),
    )  # fmt: skip
    assert line[line.index("--block-size") + 1] == "96"
    assert line[line.index("--max-model-len") + 1] == "99"
    assert line[-1] == "--enforce-eager"
    transfer = json.loads(line[line.index("--kv-transfer-config") + 1])
    assert transfer["kv_connector_extra_config"] == {"socket": "/s", "launched": True}
    assert transfer["kv_load_failure_policy"] == "recompute"


async def test_once_it_has_served_its_log_is_not_quoted(tmp_path: Path) -> None:
    log = tmp_path / "log"
    for code, kind in (("raise ValueError('a secret')", "ValueError"), ("print('a secret')", "no error named")):
        ended = await launch([sys.executable, "-c", code], tmp_path, log, {})
        assert "a secret" in await asyncio.wait_for(ended.ended(has_served=False), 10)
        said = await ended.ended(has_served=True)
        assert said.endswith(f": {kind} (see {log})")
        assert "secret" not in said
        log.unlink()


async def test_a_child_ends_with_its_agent(tmp_path: Path) -> None:
    sleeper = await launch([sys.executable, "-c", "import time; time.sleep(60)"], tmp_path, tmp_path / "log", {})
    await sleeper.stop()
    assert "ended with status" in await asyncio.wait_for(sleeper.ended(has_served=False), 5)
    with pytest.raises(ProcessLookupError):
        os.kill(sleeper.pid, 0)
    code = (
        "import subprocess, sys; from nodes.engines.vllm import child; import os;"
        "print(subprocess.Popen([sys.executable, child.__file__, str(os.getpid()), sys.executable, '-c',"
        "'import time; time.sleep(60)']).pid)"
    )
    agent = await asyncio.create_subprocess_exec(sys.executable, "-c", code, stdout=asyncio.subprocess.PIPE)
    said, _ = await asyncio.wait_for(agent.communicate(), 20)
    async with asyncio.timeout(10):
        while Path(f"/proc/{int(said)}/cmdline").exists():  # noqa: ASYNC110, ASYNC240
            await asyncio.sleep(0.02)
