"""Two vLLMs as prefill and decode with a pool: the text of one vLLM, KV used again, deaths and departures survived."""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from e2e_fleet import ask_and_leave, complete, complete_all
from vllm_fleet import Answer, Fleet, alone, ask_alone, bodies, needs_vllm, sockets, vllm_fleet, vllm_metrics

pytestmark = [pytest.mark.vllm, pytest.mark.weights, needs_vllm, pytest.mark.timeout(600)]

CONCURRENCY = 8
FIRST_TURN = bodies(1, seed=11)[0] | {"prompt": [*range(2000, 2600)], "max_tokens": 200}
REST_S = 30.0


@pytest.fixture(scope="module")
def single(smollm2_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Answer], list[Answer]]:
    """What a single vLLM answers, and what it says in two turns of a chat."""
    with alone(smollm2_dir, tmp_path_factory.mktemp("alone") / "vllm.log") as socket:
        answers = asyncio.run(ask_alone(socket, bodies(40), CONCURRENCY))
        first = asyncio.run(ask_alone(socket, [FIRST_TURN], 1))
        return answers, first + asyncio.run(ask_alone(socket, [second_turn(first[0])], 1))


@pytest.fixture(scope="module")
def expected(single: tuple[list[Answer], list[Answer]]) -> list[Answer]:
    return single[0]


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory, expected: list[Answer]) -> Iterator[Fleet]:
    """After `expected`: three vLLMs at once would take each other's cores."""
    with vllm_fleet(tmp_path_factory.mktemp("fleet"), "--prefill", "1", "--decode", "1", "--pool", "1") as up:
        yield up


def second_turn(first: Answer) -> dict[str, Any]:
    return FIRST_TURN | {"prompt": [*FIRST_TURN["prompt"], *first.token_ids, *range(5000, 5020)], "max_tokens": 24}


def nothing_held(fleet: Fleet) -> None:
    """By our ledger, and by vLLM's own account."""
    fleet.at_rest()
    end = time.monotonic() + REST_S
    for socket in sockets(fleet):
        while True:
            seen = asyncio.run(vllm_metrics(socket))
            held = [seen[name] for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")]
            if held == [0.0, 0.0, 0.0]:
                break
            assert time.monotonic() < end, f"{socket} still holds {held}"
            time.sleep(0.2)


def test_greedy_text_is_that_of_a_single_vllm(fleet: Fleet, expected: list[Answer]) -> None:
    got = asyncio.run(complete_all(fleet.url, bodies(40), CONCURRENCY))
    assert [one.error for one in got] == [None] * 40
    assert [one.token_ids for one in got] == [one.token_ids for one in expected]
    assert len(sockets(fleet)) == 2
    states = {one["id"]: one for one in fleet.status()["instances"]}
    assert {states["node-0"]["engine"], states["node-1"]["engine"]} == {"vllm"}
    nothing_held(fleet)


def test_a_chat_that_names_no_length_is_answered(fleet: Fleet) -> None:
    """The model could hold 8,192 tokens, vLLM was started for half of them."""
    asked = fleet.cli("chat", "What is the capital of France?", "--temperature", "0", timeout_s=120)
    assert asked.returncode == 0, asked.stderr
    assert "Paris" in asked.stdout


def test_the_second_turn_of_a_chat_has_the_first_answer_cached(
    fleet: Fleet, single: tuple[list[Answer], list[Answer]]
) -> None:
    """It was generated on the one instance and is prompt to the other, which has it from the pool."""
    first = asyncio.run(complete_all(fleet.url, [FIRST_TURN], 1))
    time.sleep(2.0)  # until heartbeats tell of it
    end = time.monotonic() + REST_S
    while any(one["unsettled"] for one in fleet.status()["instances"]):
        assert time.monotonic() < end
        time.sleep(0.2)
    second = asyncio.run(complete_all(fleet.url, [second_turn(first[0])], 1))
    assert [one.token_ids for one in first + second] == [one.token_ids for one in single[1]]
    usage = second[0].usage
    assert usage is not None
    assert usage["prompt_tokens"] == 820
    assert usage["prompt_tokens_details"]["cached_tokens"] >= 784, "whole blocks of 600 tokens and of the 200 drawn"
    nothing_held(fleet)


async def timed(fleet: Fleet, wanted: list[dict[str, Any]]) -> tuple[list[float], list[Answer]]:
    """One after another: seconds to the first token each, and the answers."""
    ttfts, answers = [], []
    async with aiohttp.ClientSession() as session:
        for body in wanted:
            since = time.perf_counter()
            answers.append(await complete(session, fleet.url, body))  # of one token
            ttfts.append(time.perf_counter() - since)
    return ttfts, answers


def test_a_second_pass_takes_its_prompts_from_where_the_first_left_them(fleet: Fleet) -> None:
    """Prompts of 2,000 tokens; the instances are killed between, so that only the pool still has them."""
    rng = random.Random(9)
    wanted = [
        body | {"prompt": [rng.randrange(1000, 40_000) for _ in range(2000)], "max_tokens": 1}
        for body in bodies(6, seed=9)
    ]
    cold, first = asyncio.run(timed(fleet, wanted))
    time.sleep(2.0)  # stores to the pool go on behind the answers
    before = fleet.epochs()
    for name in ("node-0", "node-1"):
        fleet.kill(name)
    fleet.wait_until_ready(["node-0", "node-1"], before, timeout_s=240)
    warm, second = asyncio.run(timed(fleet, wanted))
    assert [one.token_ids for one in second] == [one.token_ids for one in first]
    reused = [one.usage["prompt_tokens_details"]["cached_tokens"] for one in second if one.usage]
    assert min(reused) >= 1900, reused
    ratio = statistics.median(cold) / statistics.median(warm)
    print(f"TTFT p50 at 2,000 tokens: cold {statistics.median(cold):.3f} s, from the pool "
          f"{statistics.median(warm):.3f} s, {ratio:.1f}x")  # fmt: skip
    assert ratio >= 2.0


@pytest.mark.parametrize("victim", ["node-0", "node-1"])
def test_a_killed_instance_loses_no_request(fleet: Fleet, victim: str, expected: list[Answer]) -> None:
    """The agent dies and takes its vLLM along; `up` starts another one."""
    before = fleet.epochs()

    async def scenario() -> list[Answer]:
        answers = asyncio.create_task(complete_all(fleet.url, bodies(40), CONCURRENCY))
        await asyncio.sleep(3.0)
        await asyncio.to_thread(fleet.kill, victim)
        return await answers

    got = asyncio.run(scenario())
    assert [one.error for one in got] == [None] * 40
    assert [one.token_ids for one in got] == [one.token_ids for one in expected]
    fleet.wait_until_ready([victim], before, timeout_s=240)
    nothing_held(fleet)


def test_a_storm_of_departures_leaves_no_block_held(fleet: Fleet) -> None:
    asyncio.run(ask_and_leave(fleet.url, bodies(60, seed=7, output=200), random.Random(5), 4.0))
    nothing_held(fleet)
    again = asyncio.run(complete_all(fleet.url, bodies(4, seed=8), CONCURRENCY))
    assert [one.error for one in again] == [None] * 4
