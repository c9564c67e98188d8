"""Replaying traces: the definition of a hit, Belady's optimum, and that the default policy is no worse than LRU."""

from __future__ import annotations

import heapq
import itertools
import json
import os
import random
from pathlib import Path

import pytest

from nodes.pool.policy import make_policy
from nodes.pool.replay import Prompt, belady, main, measure, read_prompts, replay
from transfer.errors import InvalidValue

TRACE_VARIABLE = "PHASEPLANE_TEST_CONVERSATION_TRACE"
OURS = '{"at_s": 1, "prompt_tokens": 9, "output_tokens": 1, "blocks": [%s]}'
LRU_RATES = {1000: 0.044, 3000: 0.065, 10_000: 0.212, 30_000: 0.326, 50_000: 0.355}


def blocks(*names: object) -> tuple[bytes, ...]:
    return tuple(repr(name).encode().rjust(32, b"-") for name in names)


def prompts(*chains: str) -> list[Prompt]:
    return [Prompt(float(number), blocks(*chain)) for number, chain in enumerate(chains)]


def conversations(num: int, think: float, goes_on: float, seed: int) -> list[Prompt]:
    """Turns that repeat what came before; all under one system prompt."""
    rng, waiting, found = random.Random(seed), list[tuple[float, int, int]](), list[Prompt]()
    for now in itertools.count():
        turns = [(now, rng.randint(2, 12))]
        while waiting and waiting[0][0] <= now:
            _, name, length = heapq.heappop(waiting)
            turns.append((name, length + rng.randint(1, 4)))
        for name, length in turns:
            found.append(Prompt(now, blocks("system", *((name, place) for place in range(length)))))
            if rng.random() < goes_on:
                heapq.heappush(waiting, (now + rng.gauss(think, think / 4), name, length))
        if len(found) >= num:
            return found


def documents_and_scans(num: int, seed: int) -> list[Prompt]:
    rng, found = random.Random(seed), list[Prompt]()
    for number in range(num):
        name, length = int(rng.paretovariate(0.8)) % 2000, 5
        if rng.random() < 0.3:
            name, length = -number, 20
        found.append(Prompt(number, blocks(*((name, place) for place in range(length)))))
    return found


def cycle(num: int) -> list[Prompt]:
    return [Prompt(number, blocks(*((number % 300, place) for place in range(5)))) for number in range(num)]


def drifting(num: int, seed: int) -> list[Prompt]:
    rng = random.Random(seed)
    return [
        Prompt(number, blocks(*((name, place) for name in [int(rng.gauss(number / 20, 15))] for place in range(4))))
        for number in range(num)
    ]


def test_only_leading_blocks_are_hits() -> None:
    asked = prompts("abc", "abd", "xbc", "abce")
    assert replay(asked, 100, make_policy(100, "lru")) == 2 + 0 + 3
    assert belady(asked, 100) == 2 + 0 + 3


def test_lru_through_the_store_is_plain_lru() -> None:
    asked = prompts("ab", "cd", "ab", "ef", "cd", "ab")
    assert replay(asked, 4, make_policy(4, "lru")) == 2 + 0 + 0 + 0
    assert belady(asked, 4) == 2 + 2 + 2


@pytest.mark.parametrize("seed", range(8))
def test_the_optimum_is_no_worse_than_any_policy_and_as_good_as_any_choice(seed: int) -> None:
    rng = random.Random(seed)
    asked = [Prompt(number, blocks(rng.randrange(5))) for number in range(14)]
    best = max_hits([prompt.hashes[0] for prompt in asked], 2)
    assert belady(asked, 2) == best
    assert all(replay(asked, 2, make_policy(2, name)) <= best for name in ("lru", "reuse"))


def max_hits(asked: list[bytes], capacity: int) -> int:
    """By trying every choice of what to keep."""
    states = {frozenset[bytes](): 0}
    for h in asked:
        following: dict[frozenset[bytes], int] = {}
        for held, hits in states.items():
            everything, gained = held | {h}, hits + (h in held)
            drops = everything if len(everything) > capacity else (None,)
            for kept in (everything - {drop} for drop in drops):
                following[kept] = max(gained, following.get(kept, 0))
        states = following
    return max(states.values())


@pytest.mark.parametrize(
    ("workload", "capacity", "at_least"),
    [
        (documents_and_scans(4000, 1), 400, 1.1),
        (documents_and_scans(4000, 2), 2000, 1.02),
        (documents_and_scans(4000, 3), 12_000, 1.0),
        (drifting(6000, 4), 100, 1.0),
        (conversations(4000, 60, 0.6, 5), 400, 1.0),
        (conversations(4000, 60, 0.6, 6), 1500, 0.99),
        (conversations(4000, 200, 0.8, 7), 1500, 1.0),
    ],
)
def test_the_default_is_no_worse_than_lru(workload: list[Prompt], capacity: int, at_least: float) -> None:
    rates = measure(workload, capacity)
    assert rates.hit_rate >= at_least * rates.lru > 0
    assert rates.belady >= rates.hit_rate


def test_a_loop_larger_than_the_pool_does_not_defeat_the_default() -> None:
    rates = measure(cycle(6000), 750)
    assert rates.lru == 0
    assert rates.hit_rate > 0.5 * rates.belady > 0


@pytest.mark.parametrize(
    "text",
    [
        '{"timestamp": 2000, "input_length": 9, "output_length": 1, "hash_ids": [1, 2]}\n\n'
        '{"timestamp": 1500, "input_length": 4, "output_length": 1, "hash_ids": [1]}\n'
        '{"timestamp": 3000, "input_length": 9, "output_length": 1, "hash_ids": []}\n',
        '{"at_s": 2.0, "prompt_tokens": 9, "output_tokens": 1, "blocks": [1, 2]}\n'
        '{"at_s": 1.5, "prompt_tokens": 4, "output_tokens": 1, "blocks": [1]}\n',
    ],
)
def test_traces_are_read_in_order_of_time(tmp_path: Path, text: str) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text(text)
    read = read_prompts(str(trace))
    assert [(prompt.at_s, len(prompt.hashes)) for prompt in read] == [(0.0, 1), (0.5, 2)]
    assert read[0].hashes[0] == read[1].hashes[0]
    assert len(read[0].hashes[0]) == 32


def test_generated_sessions_can_be_replayed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--trace", "generated:agentic?num=300", "--capacity", "500,20000", "--json"]) == 0
    small, large = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert 0 < small["hit_rate"] < large["hit_rate"]
    assert small["num_prompts"] == 300


@pytest.mark.parametrize(
    ("text", "arguments", "said"),
    [
        ("{]", (), "line 1 of .* is not a request of a trace"),
        ('{"timestamp": 1, "input_length": 9, "output_length": 1}', (), "names no blocks"),
        (OURS % "1, 2, 3", ("--capacity", "2"), "2 blocks cannot hold the longest prompt, of 3"),
        (OURS % "1", ("--capacity", "9,x"), "--capacity takes whole numbers"),
        (OURS % "1", ("--policy", "fifo"), "no eviction policy 'fifo'"),
    ],
)
def test_what_cannot_be_replayed_is_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, arguments: tuple[str, ...], said: str
) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text(text)
    assert main(["--trace", str(trace), *arguments]) == 1
    with pytest.raises(InvalidValue, match=said):
        raise InvalidValue(capsys.readouterr().err)
    assert main(["--trace", str(tmp_path / "none.jsonl")]) == 1
    assert "cannot read the trace" in capsys.readouterr().err


def test_json_is_a_line_for_each_capacity(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text(f"{OURS % '1, 2'}\n{OURS % '1, 3'}\n")
    assert main(["--trace", str(trace), "--capacity", "2,4", "--json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["capacity_blocks"] for line in lines] == [2, 4]
    assert lines[1]["hit_rate"] == lines[1]["lru"] == lines[1]["belady"] == 0.25
    assert lines[1]["ratio_to_lru"] == lines[1]["ratio_to_belady"] == 1.0
    assert main(["--trace", str(trace), "--capacity", "1000000000000", "--json"]) == 0  # costs no memory
    assert json.loads(capsys.readouterr().out) == lines[1] | {"capacity_blocks": 10**12}
    assert main(["--trace", str(trace), "--capacity", "4"]) == 0
    assert "2 prompts of 4 blocks" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.skipif(TRACE_VARIABLE not in os.environ, reason=f"{TRACE_VARIABLE} names no trace")
def test_the_conversation_trace_hits_more_than_lru_at_every_size() -> None:
    asked = read_prompts(os.environ[TRACE_VARIABLE])
    for capacity, lru in LRU_RATES.items():
        rates = measure(asked, capacity)
        assert rates.lru == pytest.approx(lru, abs=0.0006)
        assert rates.belady > rates.hit_rate > rates.lru
