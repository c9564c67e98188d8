"""Processes die under load and the fleet is rebalanced meanwhile: every request ends once, with the right text.

The engines are emulated (their text is a function of all tokens before, and they verify every KV byte they read);
each has a process of its own, so that SIGKILL is real.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Iterator
from typing import Any

import aiohttp
import pytest
from e2e_fleet import Answer, Fleet, ask_and_leave, complete, complete_all, running

from nodes.engines.emulated import continuation

MODEL = "llama-3.1-8b"
SHAPE = ("--engine", "emulated", "--per-process", "1")


def load(count: int, seed: int = 0, longest: int = 600, output: int = 150) -> list[dict[str, Any]]:
    rng = random.Random(seed)
    made = []
    for _ in range(count):
        prompt = [rng.randrange(97, 123) for _ in range(rng.randrange(1, longest))]
        wanted = rng.randrange(1, output)
        made.append({"model": MODEL, "prompt": prompt, "max_tokens": wanted, "ignore_eos": True, "temperature": 0})
    return made


def check(bodies: list[dict[str, Any]], answers: list[Answer]) -> None:
    for body, answer in zip(bodies, answers, strict=True):
        assert answer.error is None, answer.error
        assert answer.finish == "length"
        assert answer.token_ids == continuation(body["prompt"], body["max_tokens"])


async def over(fleet: Fleet, bodies: list[dict[str, Any]], seconds: float) -> list[Answer]:
    """Offer the bodies evenly over so many seconds, open loop."""
    timeout = aiohttp.ClientTimeout(total=120)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:

        async def one(place: int, body: dict[str, Any]) -> Answer:
            await asyncio.sleep(seconds * place / len(bodies))
            return await complete(session, fleet.url, body)

        return list(await asyncio.gather(*(one(i, body) for i, body in enumerate(bodies))))


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with running(tmp_path_factory.mktemp("fleet"), "--prefill", "2", "--decode", "2", "--pool", "1", *SHAPE) as up:
        yield up


def test_300_requests_while_the_fleet_is_rebalanced_and_back(fleet: Fleet) -> None:
    bodies = load(300, seed=1)

    async def scenario() -> list[Answer]:
        answers = asyncio.create_task(over(fleet, bodies, 20.0))
        for shape in ("1P3D", "3P1D", "2P2D"):
            await asyncio.sleep(2.0)
            done = await asyncio.to_thread(fleet.cli, "rebalance", shape, "--json", "--no-measure")
            assert done.returncode == 0, done.stderr
            assert json.loads(done.stdout)["status"] == "done"
        return await answers

    check(bodies, asyncio.run(scenario()))
    state = fleet.at_rest()
    assert state["xpyd"] == "2P2D"
    audit = fleet.get("/v1/audit")["audit"]
    assert sum(row["action"] == "done" for row in audit) == 3
    assert all(row["predicted"] is not None for row in audit if row["action"] in ("apply", "done"))


@pytest.mark.parametrize(
    "victim", ["h20-0", *(pytest.param(one, marks=pytest.mark.slow) for one in ("h800-0", "pool-0"))]
)
def test_a_killed_process_loses_no_request(fleet: Fleet, victim: str) -> None:
    bodies = load(120, seed=2)

    async def scenario() -> list[Answer]:
        answers = asyncio.create_task(over(fleet, bodies, 8.0))
        for _ in range(2):
            await asyncio.sleep(2.0)
            await asyncio.to_thread(fleet.kill, victim)
            await asyncio.sleep(1.5)  # `up` starts another one
        return await answers

    check(bodies, asyncio.run(scenario()))
    fleet.wait_until_ready([victim])
    fleet.at_rest()


def test_a_storm_of_disconnects_leaves_nothing(fleet: Fleet) -> None:
    """vllm#46283, sglang#28651, llm-d#1138: clients leave at any stage; both sides stop and blocks return."""
    rng = random.Random(5)
    bodies = load(200, seed=3, output=400)

    async def scenario() -> float:
        await ask_and_leave(fleet.url, bodies, rng, 0.6)
        left = time.monotonic()
        while (await asyncio.to_thread(fleet.status))["in_flight"]:
            assert time.monotonic() - left < 5, "requests of clients that left are still in flight"
        return time.monotonic() - left

    asyncio.run(scenario())
    fleet.at_rest()
    again = load(20, seed=4)
    check(again, asyncio.run(complete_all(fleet.url, again)))


def test_the_control_plane_is_killed_and_comes_back(fleet: Fleet) -> None:
    history = {record["request_id"] for record in fleet.get("/v1/requests?limit=50")["requests"]}
    bodies = load(30, seed=6, output=900)

    async def scenario() -> None:
        cut = asyncio.create_task(over(fleet, bodies, 0.5))
        await asyncio.sleep(1.0)
        await asyncio.to_thread(fleet.kill_control)
        await asyncio.gather(cut, return_exceptions=True)

    asyncio.run(scenario())
    fleet.wait_until_ready(["h800-0", "h800-1", "h20-0", "h20-1", "pool-0"], timeout_s=15)
    fleet.at_rest()
    assert history & {record["request_id"] for record in fleet.get("/v1/requests?limit=1000")["requests"]} == history
    assert fleet.get("/v1/audit")["audit"], "the audit log was lost"
    again = load(40, seed=7)
    check(again, asyncio.run(complete_all(fleet.url, again)))


def test_sigstop_of_a_decode_instance_resumes_its_requests_elsewhere(fleet: Fleet) -> None:
    """A frozen process is lost like a dead one; thawed, its late tokens are fenced and it serves again."""
    bodies = load(60, seed=8)

    async def scenario() -> list[Answer]:
        answers = asyncio.create_task(over(fleet, bodies, 3.0))
        await asyncio.sleep(1.0)
        pids = await asyncio.to_thread(fleet.signal, "h20-1", "STOP")
        await asyncio.sleep(6.0)
        await asyncio.to_thread(fleet.signal, "h20-1", "CONT")
        assert pids
        return await answers

    check(bodies, asyncio.run(scenario()))
    fleet.wait_until_ready(["h20-1"])
    fleet.at_rest()
