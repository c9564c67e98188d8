"""Agent prompts with long shared prefixes, served again: what reuse of KV is worth, and that it changes no text.

A fleet of its own (1 prefill, 1 decode, 1 KV pool with an SSD tier, real weights, float32, greedy) answers every
distinct prompt in four passes: cold; again; after both engines were killed, so from the pool; and after the engines and
the pool were killed, so from the pool's SSD, whose index was rebuilt. Prints TTFT and the share of reusable prompt
tokens that were reused in each pass beside the cold one. Exits with 1 when an answer failed or its text is not that of
the cold pass.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from bench_fleet import Fleet, running

MODEL = "smollm2-135m"
FLEET = ("--prefill", "1", "--decode", "1", "--pool", "1", "--ssd-gib", "8", "--dtype", "float32")
BLOCK_SIZE = 16
RESTART_S = 120.0
SETTLE_S = 60.0
WORDS = (
    "flight",
    "booking",
    "order",
    "refund",
    "item",
    "address",
    "payment",
    "user",
    "policy",
    "agent",
    "price",
    "date",
)


@dataclass(frozen=True)
class Answer:
    """ttft_s: request sent to first streamed text, at the client. cached, prompt: tokens by usage."""

    text: str
    ttft_s: float
    cached: int
    prompt: int


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--prompts", default="generated", help="a folder of LMCache agent traces (*.jsonl), or generated"
    )
    parser.add_argument("--num", type=int, help="at most so many prompts")
    parser.add_argument("--output-tokens", type=int, default=16)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--json", type=Path, help="where to write the JSON lines")
    options = parser.parse_args()
    prompts = read_prompts(options.prompts)[: options.num]
    with tempfile.TemporaryDirectory(prefix="phaseplane-agent-") as state, running(Path(state), *FLEET) as fleet:
        lines, same = passes(fleet, prompts, options.output_tokens, options.concurrency)
    for line in lines:
        print(f"{line['name']:20} TTFT p50 {1e3 * line['ours']:8.1f} ms  {line['ratio']:6.1f}x  mean "
              f"{1e3 * line['mean_s']:8.1f} ms  {line['mean_ratio']:6.1f}x  "
              f"reused {line['reused']:.3f} of the reusable  same text {line['same_text']}")  # fmt: skip
    if options.json:
        options.json.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return 0 if same else 1


def read_prompts(source: str) -> list[str]:
    """Distinct prompts in the order they were asked. Raises SystemExit when there are none."""
    if source == "generated":
        return generated(random.Random(7))
    rows = [json.loads(text) for path in sorted(Path(source).glob("*.jsonl")) for text in path.read_text().splitlines()]
    rows.sort(key=lambda row: row["timestamp"])
    prompts = list(dict.fromkeys(row["input"] for row in rows if row["input"]))
    if not prompts:
        raise SystemExit(f"{source} holds no *.jsonl file with prompts; give a folder of agent traces, or generated")
    return prompts


def generated(rng: random.Random, num_agents: int = 4, num_turns: int = 6) -> list[str]:
    """Agents with a long system prompt each, whose every turn repeats all that was said before."""
    prompts = []
    for agent in range(num_agents):
        said = f"You are agent {agent}. " + " ".join(rng.choices(WORDS, k=200))
        for turn in range(num_turns):
            said += f"\nturn {turn}: " + " ".join(rng.choices(WORDS, k=60))
            prompts.append(said)
    return prompts


def passes(
    fleet: Fleet, prompts: Sequence[str], num_output: int, concurrency: int
) -> tuple[list[dict[str, Any]], bool]:
    """Serve everything four times; a line for each pass, and whether all texts were those of the first."""

    def serve() -> list[Answer]:
        return asyncio.run(ask_all(fleet.url, prompts, num_output, concurrency))

    cold = serve()
    settle(fleet)
    lines = [line("cold", cold, cold), line("again", serve(), cold)]
    settle(fleet)
    engines = named(fleet, "prefill", "decode")
    restart(fleet, *engines)
    lines.append(line("engines_killed", serve(), cold))
    settle(fleet)
    restart(fleet, *engines, *named(fleet, "kv_pool"))
    lines.append(line("all_killed", serve(), cold))
    return lines, all(one["same_text"] for one in lines)


def named(fleet: Fleet, *roles: str) -> list[str]:
    return [one["id"] for one in fleet.status()["instances"] if one["role"] in roles]


def restart(fleet: Fleet, *instances: str) -> None:
    """Kill -9 what hosts them, and wait until `phaseplane up` has started them again."""

    def epochs() -> dict[str, int]:
        return {one["id"]: one["epoch"] for one in fleet.status()["instances"] if one["state"] == "ready"}

    before = epochs()
    for pid, words in fleet.processes().items():
        if any(word.startswith(f"{name}=") for word in words for name in instances):
            os.kill(pid, signal.SIGKILL)
    end = time.monotonic() + RESTART_S
    while any(epochs().get(name, before[name]) == before[name] for name in instances):
        if time.monotonic() > end:
            raise SystemExit(f"{', '.join(instances)} did not come back within {RESTART_S:g} s")
        time.sleep(0.3)


def settle(fleet: Fleet) -> None:
    """Wait until what runs behind the answers is done: stores to the pool, then its writes to SSD."""
    end = time.monotonic() + SETTLE_S
    for _ in ("engines", "pool"):  # the pool's word counts once the engines have said, before it, that they are done
        since = time.monotonic()
        while not at_rest(fleet, since):
            if time.monotonic() > end:
                raise SystemExit(f"write-through was not done within {SETTLE_S:g} s: {fleet.status()['instances']}")
            time.sleep(0.2)


def at_rest(fleet: Fleet, since: float) -> bool:
    """Whether every instance has said, after `since` on the monotonic clock, that it has no write under way."""
    asked = time.monotonic()
    return all(
        one["unsettled"] == 0 and one["last_seen_s"] < asked - since
        for one in fleet.status()["instances"] if one["state"] == "ready"
    )  # fmt: skip


def line(name: str, answers: Sequence[Answer], cold: Sequence[Answer]) -> dict[str, Any]:
    """ratio: the cold pass's TTFT p50 by this one's; mean_ratio: of means, which count the few long waits where short
    prompts may pass. reused: cached tokens by whole blocks that might have been."""
    p50, first = (statistics.median(one.ttft_s for one in some) for some in (answers, cold))
    mean, first_mean = (statistics.fmean(one.ttft_s for one in some) for some in (answers, cold))
    reusable = sum((one.prompt - 1) // BLOCK_SIZE * BLOCK_SIZE for one in answers)
    return {
        "name": f"agent_{name}", "ours": round(p50, 4), "peer": round(first, 4), "peer_name": "cold", "unit": "s",
        "ratio": round(first / p50, 2), "mean_s": round(mean, 4), "mean_ratio": round(first_mean / mean, 2),
        "reused": round(sum(one.cached for one in answers) / reusable, 4), "num_prompts": len(answers),
        "same_text": [one.text for one in answers] == [one.text for one in cold],
    }  # fmt: skip


async def ask_all(url: str, prompts: Sequence[str], num_output: int, concurrency: int) -> list[Answer]:
    gate = asyncio.Semaphore(concurrency)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=600)) as session:

        async def one(prompt: str) -> Answer:
            async with gate:
                return await ask(session, url, prompt, num_output)

        return list(await asyncio.gather(*(one(prompt) for prompt in prompts)))


async def ask(session: aiohttp.ClientSession, url: str, prompt: str, num_output: int) -> Answer:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": num_output, "temperature": 0, "ignore_eos": True,
            "stream": True, "stream_options": {"include_usage": True}}  # fmt: skip
    text, usage, ttft_s, started = "", None, None, time.perf_counter()
    async with session.post(f"{url}/v1/completions", json=body) as response:
        if response.status != 200:
            raise SystemExit(f"the fleet answered {response.status}: {await response.text()}")
        async for raw in response.content:
            if not raw.startswith(b"data: {"):
                continue
            event = json.loads(raw[6:])
            if "error" in event:
                raise SystemExit(f"a stream ended with an error: {event['error']['message']}")
            usage = event.get("usage") or usage
            for choice in event["choices"]:
                ttft_s = ttft_s or time.perf_counter() - started
                text += choice["text"]
    if usage is None or ttft_s is None:
        raise SystemExit("a stream ended without text or usage")
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    return Answer(text, ttft_s, cached, usage["prompt_tokens"])


if __name__ == "__main__":
    sys.exit(main())
