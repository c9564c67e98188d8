"""The emulated engine: same text by any path, wrong KV found out, steps that take the profile's time."""

from __future__ import annotations

import asyncio
import time

import numpy as np
import pytest

from nodes.engines.emulated import ALPHABET, END_OF_TEXT, EmulatedEngine, continuation, emulated_identity
from nodes.engines.engine import Chunk, Sampling, StepBatch
from nodes.hardware import preset
from nodes.shapes import latency_profile, shape
from transfer.errors import EngineFailed, InvalidValue
from transfer.terms import SamplingParams

PROFILE = latency_profile(preset("H800"), shape("llama-3.1-8b"))
PROMPT = [ord(c) for c in "The quick brown fox jumps over the lazy dog, twice a day."]


def make(speed: float = float("inf"), blocks: int = 64) -> EmulatedEngine:
    return EmulatedEngine(PROFILE, emulated_identity("llama-3.1-8b"), blocks, block_size=4, speed=speed)


def draw(
    history: list[int], num_output: int = 0, banned: tuple[int, ...] = (), logprobs: int | None = None
) -> Sampling:
    return Sampling(SamplingParams(max_tokens=8, logprobs=logprobs), history, num_output, banned)


async def one(
    engine: EmulatedEngine, tokens: list[int], start: int, table: list[int], sampling: Sampling | None
) -> int:
    result = await engine.step(StepBatch([Chunk("r", tokens, start, table, sampling)]))
    return result.sampled["r"].token_id if sampling else -1


async def generate(engine: EmulatedEngine, prompt: list[int], num: int, table: list[int], chunk: int = 7) -> list[int]:
    for start in range(0, len(prompt) - 1, chunk):
        await one(engine, prompt[start : min(start + chunk, len(prompt) - 1)], start, table, None)
    history = list(prompt)
    for index in range(num):
        history.append(await one(engine, history[-1:], len(history) - 1, table, draw(history, index)))
    return history[len(prompt) :]


async def generate_more(engine: EmulatedEngine, history: list[int], num: int, table: list[int]) -> None:
    for index in range(num):
        history.append(await one(engine, history[-1:], len(history) - 1, table, draw(history, index)))


def copy_blocks(source: EmulatedEngine, blocks: list[int], target: EmulatedEngine, into: list[int]) -> None:
    for block, other in zip(blocks, into, strict=True):
        for mine, theirs in zip(source.arena.views(0, block, 1), target.arena.views(0, other, 1), strict=True):
            theirs[:] = mine


async def test_chunking_and_block_order_do_not_change_the_text() -> None:
    expected = continuation(PROMPT, 24)
    assert all(token < END_OF_TEXT and chr(token) in "abcdefghijklmnopqrstuvwxyz " for token in expected)
    for chunk, table in ((1, list(range(30))), (3, list(range(30, 0, -1))), (64, [*range(20, 40), *range(10)])):
        engine = make()
        assert await generate(engine, PROMPT, 24, table, chunk) == expected
        await engine.close()


def test_continuation_depends_on_every_token_and_its_place() -> None:
    reference = continuation(PROMPT, 8)
    for index in range(0, len(PROMPT) - 1, 5):
        assert continuation([*PROMPT[:index], PROMPT[index] ^ 1, *PROMPT[index + 1 :]], 8) != reference
        swapped = [*PROMPT[:index], PROMPT[index + 1], PROMPT[index], *PROMPT[index + 2 :]]
        assert swapped == PROMPT or continuation(swapped, 8) != reference
    assert continuation([*PROMPT, *reference[:5]], 3) == reference[5:]


async def test_a_handoff_continues_and_a_wrong_one_is_found_out() -> None:
    prefill, decode = make(), make()
    table, other = list(range(15)), list(range(40, 55))
    await one(prefill, PROMPT[:-1], 0, table, None)
    copy_blocks(prefill, table, decode, other)
    assert await one(decode, PROMPT[-1:], len(PROMPT) - 1, other, draw(PROMPT)) == continuation(PROMPT, 1)[0]

    other[3], other[4] = other[4], other[3]
    with pytest.raises(EngineFailed, match=r"position 12 \(block 44\)"):
        await one(decode, PROMPT[-1:], len(PROMPT) - 1, other, draw(PROMPT))
    assert decode.num_corruptions == 1


async def test_a_block_overwritten_in_mid_decode_is_found_out_within_sixteen_tokens() -> None:
    engine, table = make(), list(range(40))
    history = [*PROMPT, *await generate(engine, PROMPT, 3, table)]
    engine.arena.views(0, table[2], 1)[0][1] ^= 0xFF
    with pytest.raises(EngineFailed, match="position 8"):
        await generate_more(engine, history, 17, table)


async def test_the_tail_is_checked_at_every_token() -> None:
    engine, table = make(), list(range(40))
    history = [*PROMPT, *await generate(engine, PROMPT, 2, table)]
    assert (len(history) - 1) % 16, "a full check would hide the tail check"
    block, offset = divmod(len(history) - 2, 4)
    engine.arena.views(0, table[block], 1)[1][2 * offset] ^= 1
    with pytest.raises(EngineFailed, match="does not match its tokens"):
        await one(engine, history[-1:], len(history) - 1, table, draw(history, 2))


async def test_retrying_a_step_writes_the_same_kv_and_draws_the_same_token() -> None:
    engine, table = make(), list(range(15))
    await one(engine, PROMPT[:-1], 0, table, None)
    first = await one(engine, PROMPT[-1:], len(PROMPT) - 1, table, draw(PROMPT))
    before = [bytes(view) for view in engine.arena.views(0, 0, 64)]
    assert await one(engine, PROMPT[-1:], len(PROMPT) - 1, table, draw(PROMPT)) == first
    assert [bytes(view) for view in engine.arena.views(0, 0, 64)] == before


async def test_a_request_that_bans_the_whole_alphabet_does_not_cost_the_instance() -> None:
    alphabet = tuple(ALPHABET)
    [token] = continuation(PROMPT, 1, alphabet)
    assert token not in alphabet


async def test_banned_ids_are_not_drawn_and_logprobs_are_as_many_as_asked() -> None:
    engine, table = make(), list(range(15))
    await one(engine, PROMPT[:-1], 0, table, None)
    usual = continuation(PROMPT, 1)[0]
    chunk = Chunk("r", PROMPT[-1:], len(PROMPT) - 1, table, draw(PROMPT, 0, (usual,), 3))
    sampled = (await engine.step(StepBatch([chunk]))).sampled["r"]
    assert sampled.token_id == continuation(PROMPT, 1, (usual,))[0] != usual
    assert sampled.logprob is not None
    assert sampled.logprob.top_ids[0] == sampled.token_id
    assert sampled.logprob.top_logprobs[0] == sampled.logprob.logprob < 0
    assert len(set(sampled.logprob.top_ids)) == len(sampled.logprob.top_logprobs) == 3
    assert np.all(np.diff(sampled.logprob.top_logprobs) < 0)


async def test_steps_keep_to_absolute_deadlines() -> None:
    engine, table, layers = make(speed=1.0), list(range(15)), list[int]()
    await one(engine, PROMPT[:-1], 0, table, None)
    batch = StepBatch([Chunk("r", PROMPT[-1:], len(PROMPT) - 1, table, draw(PROMPT))])
    expected = PROFILE.step_s(1, len(PROMPT), 1, len(PROMPT))
    loop = asyncio.get_running_loop()
    await asyncio.sleep(0.01)
    start, spent = loop.time(), 0.0
    for _ in range(20):
        spent += (await engine.step(batch, layers.append)).duration_s
        time.sleep(0.0004)  # noqa: ASYNC251  the event loop is held up between steps, as by other instances
    took = loop.time() - start
    assert layers == [0] * 20
    assert 20 * expected * 0.98 < took < 20 * expected * 1.02 + 0.01
    assert spent == pytest.approx(took, rel=0.15)


async def test_after_a_pause_a_step_takes_its_full_time() -> None:
    engine, table = make(speed=2.0), list(range(15))
    await one(engine, PROMPT[:-1], 0, table, None)
    await asyncio.sleep(0.05)
    start = asyncio.get_running_loop().time()
    await one(engine, PROMPT[-1:], len(PROMPT) - 1, table, draw(PROMPT))
    assert asyncio.get_running_loop().time() - start >= PROFILE.step_s(1, len(PROMPT), 1) / 2
    assert engine.handoff_s(1000) == pytest.approx(PROFILE.transfer_s(1000) / 2)


def test_impossible_settings_are_refused() -> None:
    for settings in ({"speed": 0.0}, {"speed": float("nan")}, {"jitter": 1.0}):
        with pytest.raises(InvalidValue):
            EmulatedEngine(PROFILE, emulated_identity("m"), 4, **settings)
