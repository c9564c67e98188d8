"""Draws follow the distribution asked for, depend on (seed, index) alone, and honour every sampling parameter."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nodes.engines.engine import Sampling
from nodes.engines.native.sampling import sample, uniform
from transfer.errors import EngineFailed
from transfer.terms import SamplingParams

LOGITS = torch.tensor([1.0, 3.0, 2.0, 0.5, 3.5, -1.0])
PROBABILITIES = torch.softmax(LOGITS, -1)


def sampling(
    history: list[int] | None = None, num_output: int = 0, banned: tuple[int, ...] = (), **params: Any
) -> Sampling:
    return Sampling(SamplingParams(max_tokens=1, **params), history or [], num_output, banned)


def draw_one(logits: torch.Tensor, **options: Any) -> int:
    [drawn] = sample(logits.clone()[None], [sampling(**options)])
    return drawn.token_id


def frequencies(num_draws: int = 4000, **params: Any) -> torch.Tensor:
    """How often each id of LOGITS is drawn over as many seeds."""
    rows = LOGITS.repeat(num_draws, 1)
    drawn = sample(rows, [sampling(seed=seed, **params) for seed in range(num_draws)])
    return torch.bincount(torch.tensor([d.token_id for d in drawn]), minlength=LOGITS.numel()) / num_draws


def test_the_random_number_is_the_same_on_every_machine() -> None:
    assert uniform(0, 0) == 0.768839417492909
    assert uniform(7, 3) != uniform(3, 7)
    assert uniform(-1, 0) == uniform(2**64 - 1, 0)
    numbers = [uniform(seed, index) for seed in range(50) for index in range(50)]
    assert 0 <= min(numbers) < 0.01
    assert 0.99 < max(numbers) < 1
    assert sum(numbers) / len(numbers) == pytest.approx(0.5, abs=0.02)
    assert len(set(numbers)) == len(numbers)


def test_temperature_zero_takes_the_best_and_the_lowest_id_of_equals() -> None:
    assert draw_one(LOGITS, temperature=0.0) == 4
    assert draw_one(torch.tensor([0.0, 2.0, 2.0, 1.0]), temperature=0.0) == 1
    assert draw_one(LOGITS, temperature=1e-9) == 4


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_softmax(temperature: float) -> None:
    expected = torch.softmax(LOGITS / temperature, -1)
    assert (frequencies(temperature=temperature) - expected).abs().max() < 0.03


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        ({"top_k": 2}, [1, 4]),
        ({"top_k": 1}, [4]),
        ({"top_p": 0.6}, [1, 4]),
        ({"top_p": 0.95}, [0, 1, 2, 4]),
        ({"min_p": 0.2}, [1, 2, 4]),
        ({"min_p": 0.3, "top_k": 5}, [1, 4]),
        ({"top_k": 3, "top_p": 0.6}, [1, 4]),
        ({"top_k": 6, "top_p": 1.0}, [0, 1, 2, 3, 4, 5]),
    ],
)
def test_truncation_keeps_exactly_the_right_ids_in_proportion(params: dict[str, Any], kept: list[int]) -> None:
    found = frequencies(**params)
    expected = torch.zeros_like(PROBABILITIES)
    expected[kept] = PROBABILITIES[kept] / PROBABILITIES[kept].sum()
    assert (found - expected).abs().max() < 0.03
    assert torch.equal(found == 0, expected == 0) or found[expected == 0].sum() == 0


def brute_force_interval(logits: torch.Tensor, params: SamplingParams, token: int) -> tuple[float, float] | None:
    """The random numbers for which `token` is right, straight from the definitions; None when it is cut off."""
    probabilities = torch.softmax(logits.double() / params.temperature, -1).tolist()
    if params.top_k == 0 and params.top_p == 1.0 and params.min_p == 0.0:
        kept = list(range(len(probabilities)))
    else:
        kept = sorted(range(len(probabilities)), key=lambda i: (-probabilities[i], i))
        kept = [i for i in kept if probabilities[i] >= params.min_p * max(probabilities)][: params.top_k or None]
        mass, before, inside = sum(probabilities[i] for i in kept), 0.0, []
        for i in kept:
            if before < params.top_p * mass * (1 + 1e-6):
                inside.append(i)
            before += probabilities[i]
        kept = inside
    if token not in kept:
        return None
    total = sum(probabilities[i] for i in kept)
    begin = sum(probabilities[i] for i in kept[: kept.index(token)]) / total
    return begin, begin + probabilities[token] / total


@settings(max_examples=60, deadline=None)
@given(
    logits_seed=st.integers(0, 10_000),
    spread=st.floats(0.01, 6.0),
    top_k=st.sampled_from([0, 0, 1, 40, 255, 256, 300]),
    top_p=st.sampled_from([1.0, 0.999, 0.9, 0.3]),
    min_p=st.sampled_from([0.0, 0.0, 0.001, 0.2]),
)
def test_a_large_vocabulary_is_drawn_from_by_the_definitions(
    logits_seed: int, spread: float, top_k: int, top_p: float, min_p: float
) -> None:
    """Wider than the short list, so that both ways of ranking are taken."""
    logits = torch.randn(900, generator=torch.Generator().manual_seed(logits_seed)) * spread
    options = {"top_k": top_k, "top_p": top_p, "min_p": min_p}
    params = SamplingParams(max_tokens=1, **options)
    drawn = sample(logits.repeat(12, 1), [sampling(seed=seed, **options) for seed in range(12)])
    for seed, one in enumerate(drawn):
        interval = brute_force_interval(logits, params, one.token_id)
        assert interval is not None, f"token {one.token_id} was cut off"
        assert interval[0] - 1e-4 <= uniform(seed, 0) <= interval[1] + 1e-4


def test_a_draw_depends_on_seed_and_index_but_not_on_the_batch() -> None:
    logits = torch.randn(12, 700, generator=torch.Generator().manual_seed(5)).bfloat16().float()  # with equals
    kinds: list[dict[str, Any]] = [
        {},
        {"top_p": 0.9},
        {"top_k": 5},
        {"temperature": 0.0},
        {"min_p": 0.01},
        {"top_k": 400},
    ]
    samplings = [sampling(seed=row, num_output=row % 3, history=[1] * 3, **kinds[row % 6]) for row in range(12)]
    together = [d.token_id for d in sample(logits.clone(), samplings)]
    alone = [sample(logits[row : row + 1].clone(), [samplings[row]])[0].token_id for row in range(12)]
    assert together == alone
    different = {draw_one(logits[0], seed=1, num_output=i, history=[1] * i) for i in range(20)}
    assert len(different) > 15


def test_banned_ids_are_never_drawn_also_when_greedy() -> None:
    assert draw_one(LOGITS, temperature=0.0, banned=(4,)) == 1
    assert frequencies(banned=(4, 1))[[1, 4]].sum() == 0


def test_repetition_penalty_counts_prompt_and_output() -> None:
    logits = torch.tensor([2.0, 1.9, -0.5, -0.6])
    assert draw_one(logits, temperature=0.0, repetition_penalty=1.2, history=[0, 0]) == 1
    assert draw_one(logits, temperature=0.0, repetition_penalty=1.2, history=[0, 1]) == 0
    assert draw_one(logits[2:], temperature=0.0, repetition_penalty=2.0, history=[0]) == 1  # -0.5 becomes -1.0


def test_presence_and_frequency_count_the_output_alone() -> None:
    logits = torch.tensor([2.0, 1.5, 1.0])
    assert draw_one(logits, temperature=0.0, presence_penalty=0.6, history=[0, 0], num_output=0) == 0
    assert draw_one(logits, temperature=0.0, presence_penalty=0.6, history=[0, 0], num_output=1) == 1
    assert draw_one(logits, temperature=0.0, frequency_penalty=0.3, history=[0, 0], num_output=1) == 0
    assert draw_one(logits, temperature=0.0, frequency_penalty=0.3, history=[0, 0], num_output=2) == 1
    assert draw_one(logits, temperature=0.0, presence_penalty=-1.5, history=[2], num_output=1) == 2


def test_logprobs_are_of_the_raw_distribution() -> None:
    options: dict[str, Any] = {"temperature": 0.0, "banned": (4,), "repetition_penalty": 3.0, "history": [1]}
    [drawn] = sample(LOGITS.clone()[None], [sampling(logprobs=3, **options)])
    assert drawn.token_id == 2
    assert drawn.logprob is not None
    assert drawn.logprob.logprob == pytest.approx(math.log(PROBABILITIES[2]), abs=1e-5)
    assert drawn.logprob.top_ids == (4, 1, 2)
    assert drawn.logprob.top_logprobs == pytest.approx([math.log(PROBABILITIES[i]) for i in (4, 1, 2)], abs=1e-5)
    [without] = sample(LOGITS.clone()[None], [sampling(temperature=0.0)])
    assert without.logprob is None
    [chosen_only] = sample(LOGITS.clone()[None], [sampling(temperature=0.0, logprobs=0)])
    assert chosen_only.logprob is not None
    assert chosen_only.logprob.top_ids == ()


def test_a_row_that_is_not_numbers_fails() -> None:
    rows = torch.stack((LOGITS, LOGITS))
    rows[1, 3] = math.nan
    with pytest.raises(EngineFailed, match="not numbers"):
        sample(rows, [sampling(temperature=0.0), sampling()])
