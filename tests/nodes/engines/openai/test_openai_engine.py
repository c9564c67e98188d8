"""An OpenAI-compatible server as an engine: what is found out, what is sent, what comes back, what fails."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from openai_servers import EOS, KEY, Script, make_model, serving

from nodes.engines.openai import engine as engine_module
from nodes.engines.openai.carry import Carry
from nodes.engines.openai.engine import OpenAiEngine, OpenAiOptions, start_openai
from nodes.engines.openai.pace import fitted
from nodes.engines.openai.upstream import _socket
from nodes.engines.served import Job, Output, ServedEngine
from nodes.hardware import preset
from nodes.shapes import latency_profile, shape
from transfer.errors import EngineFailed, InvalidValue, JobFailed
from transfer.terms import FinishReason, SamplingParams, TokenLogprob

KINDS = {  # (prompts as ids, beyond OpenAI, ids come back, only beside log-probabilities)
    "vllm": (True, True, True, False), "llamacpp": (True, True, True, True), "ids": (True, True, False, False),
    "plain": (False, False, False, False),
}  # fmt: skip


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_model(tmp_path / "tiny")


@contextlib.asynccontextmanager
async def started(script: Script, model: Path, **options: object) -> AsyncIterator[OpenAiEngine]:
    async with serving(script, model) as url:
        given = {"url": url, "model_dir": model, "hardware": preset("CPU"), "ready_s": 0.0, **options}
        engine = await start_openai(OpenAiOptions(**given))  # type: ignore[arg-type]
        script.bodies.clear()
        script.aborted.clear()
        try:
            yield engine
        finally:
            await engine.close()


def job(tokens: list[int], num_output: int = 0, **sampling: object) -> Job:
    params = SamplingParams(**{"max_tokens": 4, "temperature": 0.0, **sampling})  # type: ignore[arg-type]
    return Job("r", 1, tokens, num_output, params, [], 0, 0)


async def outputs(
    engine: OpenAiEngine, wanted: Job, on_started: Callable[[], None] = lambda: None
) -> list[Output]:  # fmt: skip
    async with contextlib.aclosing(engine.run(wanted, on_started, lambda layer, first, count: None)) as found:
        return [one async for one in found]


@pytest.mark.parametrize("kind", KINDS)
async def test_what_a_server_understands_is_found_out_and_its_tokens_come_back(kind: str, model: Path) -> None:
    script, starts = Script(kind), []
    async with started(script, model) as engine:
        assert isinstance(engine, ServedEngine)
        found = engine._dialect
        assert (found.by_ids, found.extended, found.exact, found.needs_logprobs) == KINDS[kind]
        said = await outputs(engine, job([1, 2, 3]), lambda: starts.append(1))
    assert [token for one in said for token in one.token_ids] == script.tokens[:4]
    assert [one.finish for one in said] == [None, None, None, FinishReason.LENGTH]
    assert starts == [1]
    prompt = script.bodies[0]["prompt"]
    assert prompt == [1, 2, 3] if found.by_ids else isinstance(prompt, str)


async def test_what_it_says_of_itself_and_of_its_speed_is_taken(model: Path) -> None:
    async with started(Script(gap_s=0.02), model, num_blocks=99, block_size=32) as engine:
        assert engine.model.name == "tiny"
        assert engine.model.max_context == 256, "the server's, which is shorter than the model's"
        assert engine.served_name == "tiny-served"
        assert (engine.capacity_blocks, engine.layout.block_size, engine.num_blocks) == (99, 32, 1)
        assert (engine.shares_kv, engine.kind) == (False, "openai")
        assert engine.latency.provenance == "measured"
        assert 0.015 < engine.latency.decode_step_s(1, 248) < 0.2, "what a step after the longer prompt took"


def test_a_profile_is_fitted_to_both_phases() -> None:
    profile = latency_profile(preset("H20"), shape("llama-3.1-8b"))
    found = fitted(profile, 256, prefill_s=0.5, step_s=0.04)
    assert found.prefill_s(256) == pytest.approx(0.5, rel=0.02)
    assert found.decode_step_s(1, 256) == pytest.approx(0.04, rel=0.02)


@pytest.mark.parametrize("kind", KINDS)
async def test_the_end_of_the_text_is_a_stop_with_its_token(kind: str, model: Path) -> None:
    async with started(Script(kind, tokens=[40, 41], ends=True), model) as engine:
        said = await outputs(engine, job([1], max_tokens=9))
    assert [token for one in said for token in one.token_ids] == [40, 41, EOS], "which the gateway does not show"
    assert said[-1].finish is FinishReason.STOP


@pytest.mark.parametrize("kind", KINDS)
async def test_stop_tokens_end_it_whether_the_server_knows_them_or_not(kind: str, model: Path) -> None:
    async with started(Script(kind), model) as engine:
        said = await outputs(engine, job([1], max_tokens=8, stop_token_ids=(42,)))
        later = await outputs(engine, job([1], max_tokens=8, stop_token_ids=(40, 43))) if kind == "vllm" else said
    assert [token for one in said for token in one.token_ids] == [40, 41, 42]
    assert said[-1].finish is FinishReason.STOP
    assert later[-1].finish is FinishReason.STOP


async def test_a_resumed_request_asks_for_what_is_left(model: Path) -> None:
    script = Script()
    async with started(script, model) as engine:
        said = await outputs(engine, job([1, 2, 40, 41], 2, max_tokens=4, min_tokens=3, seed=5, top_k=7))
        first = script.bodies[0]
        assert (first["max_tokens"], first["min_tokens"], first["top_k"]) == (2, 1, 7)
        await outputs(engine, job([1, 2], seed=5))
    assert first["seed"] != script.bodies[1]["seed"], "its draws do not begin anew"
    assert script.bodies[1]["top_k"] == -1, "said, since servers have defaults of their own"
    assert sum(len(one.token_ids) for one in said) == 2
    assert said[-1].finish is FinishReason.LENGTH


@pytest.mark.parametrize(
    ("kind", "carry"),
    [("vllm", Carry.BIAS), ("llamacpp", Carry.COUNTED), ("ids", Carry.LOST), ("plain", Carry.LOST)],
)
async def test_a_resumed_request_keeps_its_penalties_or_is_refused(kind: str, carry: Carry, model: Path) -> None:
    script = Script(kind)
    async with started(script, model) as engine:
        assert engine._dialect.carry is carry
        penalized = {"presence_penalty": 0.5, "frequency_penalty": 1.0}
        await outputs(engine, job([1, 2], **penalized))
        assert "logit_bias" not in script.bodies.pop(), "nothing is drawn yet"
        resumed = job([1, 40, 41, 40], 3, max_tokens=5, **penalized)
        if carry is Carry.LOST:
            with pytest.raises(JobFailed, match="cannot go on with a request that has presence_penalty"):
                await outputs(engine, resumed)
            assert script.bodies == []
        else:
            await outputs(engine, resumed)
            (body,) = script.bodies
            assert body.get("logit_bias") == ({"40": -2.5, "41": -1.5} if carry is Carry.BIAS else None)
        assert await outputs(engine, job([1, 40], 1)), "without penalties it goes on anywhere"


async def test_a_stream_of_pings_is_no_progress(model: Path) -> None:
    script = Script()
    async with started(script, model, idle_s=0.5) as engine:
        script.gap_s = 0.1
        assert len(await outputs(engine, job([1], max_tokens=8))) == 8, "longer in all, but never between two tokens"
        script.fault = "pings"
        with pytest.raises(JobFailed, match=r"brought no token for 0\.5 s; see its log, or allow it longer with --eng"):
            await outputs(engine, job([1], max_tokens=8))
        await asyncio.wait_for(script.aborted.wait(), 2.0)


@pytest.mark.parametrize("kind", KINDS)
async def test_log_probabilities_are_told_by_token(kind: str, model: Path) -> None:
    async with started(Script(kind), model) as engine:
        said = await outputs(engine, job([1], max_tokens=2, logprobs=2))
    second = 7 if kind == "llamacpp" else 256  # "th"
    assert said[0].logprobs == (TokenLogprob(logprob=-0.5, top_ids=(40, second), top_logprobs=(-0.5, -1.5)),)


async def test_text_is_read_back_as_it_stands_within_a_text(model: Path) -> None:
    async with started(Script("ids"), model) as engine:
        for text in (" the", "the", "é", "€uro", " ", "\n", "<|end|>"):
            assert engine._text.decode(engine._text.encode(text)) == text
        assert engine._text.encode(" the") == [258]


async def test_what_the_server_cannot_be_told_is_refused_and_not_drawn_by_other_rules(model: Path) -> None:
    async with started(Script("plain"), model) as engine:
        with pytest.raises(JobFailed, match="does not know min_p"):
            await outputs(engine, job([1], min_p=0.1))
        with pytest.raises(JobFailed, match="whole requests"):
            await outputs(engine, Job("r", 1, [1, 2], 0, None, [0], 0, 0))


async def test_leaving_a_request_ends_it_at_the_server(model: Path) -> None:
    script = Script(tokens=[40] * 500, gap_s=0.01)
    async with started(script, model) as engine:
        running = engine.run(job([1], max_tokens=400), lambda: None, lambda layer, first, count: None)
        assert (await anext(running)).token_ids == (40,)
        await running.aclose()
        await asyncio.wait_for(script.aborted.wait(), 2.0)
        assert script.num_open == 0
        began = asyncio.Event()
        task = asyncio.create_task(outputs(engine, job([1], max_tokens=400), began.set))
        await asyncio.wait_for(began.wait(), 2.0)
        script.aborted.clear()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.wait_for(script.aborted.wait(), 2.0)


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        ("refuse", r"refused the request with 400 \(BadRequestError\)$"), ("echo", "refused the request with 422$"),
        ("break", r"gave the request up \(server_error\)$"), ("silent", "ended the stream without a reason"),
        ("redirect", "refused the request with 307"),
    ],
)  # fmt: skip
async def test_a_request_that_fails_fails_alone_and_in_a_sentence(fault: str, sentence: str, model: Path) -> None:
    script = Script(key=KEY)
    async with started(script, model, key=KEY) as engine:
        script.fault = fault
        with pytest.raises(JobFailed, match=sentence):
            await outputs(engine, job([1], max_tokens=9))
        assert script.fault != "stolen", "a redirect is not followed: the key stays where it was sent"
        script.fault = ""
        assert (await outputs(engine, job([1])))[-1].finish is FinishReason.LENGTH


async def test_a_lost_server_is_found_out_also_at_rest(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "WATCH_S", 0.01)
    script = Script()
    async with started(script, model) as engine:
        watching = asyncio.create_task(engine.watch())
        await asyncio.sleep(0.1)
        assert not watching.done()
        script.healthy = False
        with pytest.raises(EngineFailed, match="answers /health with 503"):
            await asyncio.wait_for(watching, 2.0)


async def test_the_key_is_sent_and_a_wrong_one_is_a_sentence(model: Path) -> None:
    script = Script(key=KEY)
    async with started(script, model, key=KEY):
        assert set(script.keys) == {f"Bearer {KEY}"}
    with pytest.raises(InvalidValue, match="refuses the key"):
        async with started(script, model, key="sk-wrong"):
            pass


@pytest.mark.parametrize(
    ("script", "options", "error", "sentence"),
    [
        (Script(healthy=False), {}, EngineFailed, "answers /health with 503"),
        (Script(fault="refuse"), {}, InvalidValue, "too long: a secret; it must serve /v1/completions"),
        (Script(fault="break"), {}, EngineFailed, "fails its first request: .* out of memory: a secret"),
        (Script(names=("a", "b")), {}, InvalidValue, "has no model 'tiny', but a, b; name one by"),
        (Script(), {"served_name": "x"}, InvalidValue, "has no model 'x', but tiny-served"),
        (Script(), {"url": "http://127.0.0.1:9"}, EngineFailed, "does not answer"),
    ],
)
async def test_a_server_that_cannot_serve_is_named(
    script: Script, options: dict[str, object], error: type[Exception], sentence: str, model: Path
) -> None:
    with pytest.raises(error, match=sentence):
        async with started(script, model, **options):
            pass


async def test_an_answer_that_comes_in_pieces_is_read_whole(model: Path) -> None:
    async with started(Script(in_pieces=True), model) as engine:
        assert engine.served_name == "tiny-served"


@pytest.mark.parametrize("status", [429, 503])
async def test_a_server_that_is_busy_at_start_is_come_back_to(status: int, model: Path) -> None:
    """What it says of the moment is not taken for what it understands."""
    with pytest.raises(EngineFailed, match=f"{status}: come back later"):
        async with started(Script(busy=status), model):
            pass


def test_small_writes_leave_at_once() -> None:
    made = _socket((socket.AF_INET, socket.SOCK_STREAM, 0, "", ("127.0.0.1", 1)))
    with made:
        assert made.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
