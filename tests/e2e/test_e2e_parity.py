"""Greedy text through a real fleet equals what transformers makes of the same float32 weights, token for token.

A differing token counts where the reference's best two logits are more than 1e-3 apart.
"""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import pytest
from e2e_fleet import Answer, Fleet, complete_all, running

pytestmark = [pytest.mark.weights, pytest.mark.timeout(400)]

REFERENCE = json.loads((Path(__file__).parent.parent / "reference" / "smollm2_greedy.json").read_text())
PROMPTS: list[dict[str, Any]] = REFERENCE["prompts"]
NUM_OUTPUT: int = REFERENCE["num_output_tokens"]
MARGIN = 1e-3
F32 = ("--dtype", "float32")
SHORT = [prompt for prompt in PROMPTS if len(prompt["prompt"]) <= 700]
"""32 of the 40."""
SHORT_OR_ALL = pytest.mark.parametrize(
    "prompts", [pytest.param(SHORT, id="short"), pytest.param(PROMPTS, id="all", marks=pytest.mark.slow)]
)


def bodies(prompts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    common = {"model": "smollm2-135m", "max_tokens": NUM_OUTPUT, "temperature": 0, "ignore_eos": True}
    return [{**common, "prompt": prompt["prompt"]} for prompt in prompts]


def check_parity(prompts: list[dict[str, Any]], answers: list[Answer]) -> None:
    """Every answer is its reference up to the first near-tie, where both continuations are right."""
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.error is None, f"{prompt['name']}: {answer.error}"
        assert answer.finish == "length"
        assert len(answer.token_ids) == NUM_OUTPUT, f"{prompt['name']} gave {len(answer.token_ids)} tokens"
        wrong = [i for i, pair in enumerate(zip(answer.token_ids, prompt["output"], strict=True)) if pair[0] != pair[1]]
        if wrong:
            assert prompt["margins"][wrong[0]] <= MARGIN, f"{prompt['name']} differs at token {wrong[0]}"


def ask(fleet: Fleet, prompts: list[dict[str, Any]]) -> list[Answer]:
    answers = asyncio.run(complete_all(fleet.url, bodies(prompts), concurrency=32))
    check_parity(prompts, answers)
    return answers


def cached(answers: list[Answer]) -> int:
    return sum((answer.usage or {})["prompt_tokens_details"]["cached_tokens"] for answer in answers)


@SHORT_OR_ALL
def test_1p1d_cold_then_prefix_cache_then_pool(
    tmp_path: Path, smollm2_dir: Path, prompts: list[dict[str, Any]]
) -> None:
    """40 prompts of 5 to 3,000 tokens (or the short ones) at concurrency 32: computed, then from prefix caches, then
    from the pool."""
    with running(tmp_path / "s", "--prefill", "1", "--decode", "1", "--pool", "1", *F32) as fleet:
        ask(fleet, prompts)
        fleet.at_rest()
        again = ask(fleet, prompts)
        assert cached(again) > 0.9 * sum(len(prompt["prompt"]) for prompt in prompts)
        before = fleet.epochs()
        fleet.kill("node-0")
        fleet.kill("node-1")
        fleet.wait_until_ready(["node-0", "node-1"], than=before)
        pooled = ask(fleet, prompts)
        assert cached(pooled) > 0.5 * sum(len(prompt["prompt"]) for prompt in prompts), "the pool was not used"
        fleet.at_rest()


@pytest.mark.slow
def test_forced_preemption_changes_no_token(tmp_path: Path, smollm2_dir: Path) -> None:
    """A decode arena too small for what runs in it preempts and recomputes; small steps chunk every prompt. Under a
    policy that does not foresee that memory runs out, as goodput does."""
    env = {"PHASEPLANE_NUM_BLOCKS": "256", "PHASEPLANE_TOKEN_BUDGET": "64", "PHASEPLANE_MAX_RUNNING": "32",
           "PHASEPLANE_SCHEDULER_POLICY": "slo"}  # fmt: skip
    with running(tmp_path / "s", "--prefill", "1", "--decode", "1", *F32, env=env) as fleet:
        ask(fleet, PROMPTS)
        state = fleet.at_rest()
        assert sum(instance["num_preemptions"] for instance in state["instances"]) > 0, "nothing was preempted"


@SHORT_OR_ALL
def test_migration_changes_no_token(tmp_path: Path, smollm2_dir: Path, prompts: list[dict[str, Any]]) -> None:
    """Running decodes move to another instance when theirs becomes a prefill instance, and back."""
    with running(tmp_path / "s", "--prefill", "1", "--decode", "2", *F32) as fleet:

        async def both() -> list[Answer]:
            answers = asyncio.create_task(complete_all(fleet.url, bodies(prompts), concurrency=32))
            for shape in ("2P1D", "1P2D"):
                await asyncio.sleep(1.5)
                moved = await asyncio.to_thread(fleet.cli, "rebalance", shape, "--json")
                assert moved.returncode == 0, moved.stderr
            return await answers

        check_parity(prompts, asyncio.run(both()))
        fleet.at_rest()
        records = fleet.get("/v1/requests?limit=200")["requests"]
        assert sum(record["num_migrations"] for record in records) > 0, "nothing migrated"


@pytest.mark.slow
def test_mixed_instance_is_the_same_model_with_and_without_a_pool(tmp_path: Path, smollm2_dir: Path) -> None:
    """The colocated baseline: prompts and decodes share one instance's steps; then their fronts come from the pool."""
    with running(tmp_path / "s", "--prefill", "0", "--decode", "0", "--mixed", "1", "--pool", "1", *F32) as fleet:
        ask(fleet, SHORT)
        fleet.at_rest()
        before = fleet.epochs()
        fleet.kill("node-0")
        fleet.wait_until_ready(["node-0"], than=before)
        pooled = ask(fleet, SHORT)
        assert cached(pooled) > 0.5 * sum(len(prompt["prompt"]) for prompt in SHORT), "the pool was not used"
        fleet.at_rest()
        records = fleet.get("/v1/requests?limit=200")["requests"]
        assert {record["prefill"] for record in records} == {None}
        assert sum(record["fetched_tokens"] for record in records) > 0.5 * cached(pooled)


@pytest.mark.slow
def test_decode_killed_under_load_loses_no_token(tmp_path: Path, smollm2_dir: Path) -> None:
    with running(tmp_path / "s", "--prefill", "1", "--decode", "2", "--pool", "1", *F32) as fleet:

        async def both() -> list[Answer]:
            answers = asyncio.create_task(complete_all(fleet.url, bodies(SHORT), concurrency=32))
            await asyncio.sleep(3.0)
            fleet.kill("node-1")
            return await answers

        started = time.monotonic()
        check_parity(SHORT, asyncio.run(both()))
        assert time.monotonic() - started < 300
        fleet.at_rest()
        records = fleet.get("/v1/requests?limit=200")["requests"]
        assert sum(record["num_resumes"] for record in records) > 0, "nothing had to resume"
