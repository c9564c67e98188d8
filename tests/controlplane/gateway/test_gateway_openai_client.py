"""The official `openai` client, unmodified, against the gateway."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import openai
import pytest
from gateway_fakes import Front, front, items, until

from controlplane.config import Config, Model, Server
from controlplane.core.events import Fail
from transfer.said import say
from transfer.terms import FinishReason

HELLO = [{"role": "user", "content": "hello"}]


@asynccontextmanager
async def client(config: Config | None = None, key: str = "any") -> AsyncIterator[tuple[Front, openai.AsyncOpenAI]]:
    async with front(config) as f, openai.AsyncOpenAI(base_url=f.url + "v1", api_key=key, max_retries=0) as made:
        f.reply(lambda spec: items(spec.request_id, "Par", "is 中", " is it", logprobs=True))
        yield f, made


async def test_models() -> None:
    async with client() as (_, api):
        assert [model.id for model in (await api.models.list()).data] == ["m"]
        assert (await api.models.retrieve("m")).id == "m"


async def test_chat_not_streamed_with_n_logprobs_and_stop() -> None:
    async with client() as (_, api):
        answer = await api.chat.completions.create(
            model="m", messages=HELLO, n=2, logprobs=True, top_logprobs=1, stop=" is it", seed=1,
            max_completion_tokens=50,
        )  # type: ignore[call-overload]  # fmt: skip
        assert [choice.message.content for choice in answer.choices] == ["Paris 中"] * 2
        assert {choice.finish_reason for choice in answer.choices} == {"stop"}
        content = answer.choices[0].logprobs.content
        assert len(content) * 2 == answer.usage.completion_tokens
        assert (content[0].token, content[0].bytes, content[0].top_logprobs[0].token) == ("P", [80], "P")


async def test_chat_streamed_with_usage() -> None:
    async with client() as (_, api):
        stream = await api.chat.completions.create(
            model="m", messages=HELLO, stream=True, stream_options={"include_usage": True}
        )  # type: ignore[call-overload]
        chunks = [chunk async for chunk in stream]
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "Paris 中 is it"
        assert chunks[0].choices[0].delta.role == "assistant"
        assert chunks[-2].choices[0].finish_reason == "stop"
        assert (chunks[-1].choices, chunks[-1].usage.total_tokens) == ([], chunks[-1].usage.prompt_tokens + 16)


async def test_completions_both_ways() -> None:
    async with client() as (f, api):
        f.reply(lambda spec: items(spec.request_id, "a", "b", finish=FinishReason.LENGTH, logprobs=True))
        answer = await api.completions.create(model="m", prompt=["x", "y"], logprobs=1, max_tokens=2)
        assert [choice.text for choice in answer.choices] == ["ab", "ab"]
        assert answer.choices[0].finish_reason == "length"
        assert answer.choices[1].logprobs is not None
        assert answer.choices[1].logprobs.tokens == ["a", "b"]
        stream = await api.completions.create(model="m", prompt=[104, 105], stream=True)
        assert [chunk.choices[0].text async for chunk in stream] == ["a", "b"]


async def test_errors_are_the_clients_own_classes() -> None:
    async with client() as (f, api):
        with pytest.raises(openai.NotFoundError, match="gpt-4"):
            await api.chat.completions.create(model="gpt-4", messages=HELLO)  # type: ignore[arg-type]
        with pytest.raises(openai.BadRequestError, match="tools is not supported") as refused:
            await api.chat.completions.create(model="m", messages=HELLO, tools=[{"type": "function"}])  # type: ignore[call-overload]
        assert refused.value.param == "tools"
        f.reply(
            lambda spec: Fail(request_id=spec.request_id, status=429, kind="overloaded", said=say("text", text="busy"))
        )
        with pytest.raises(openai.RateLimitError, match="busy"):
            await api.completions.create(model="m", prompt="x", stream=True)
        f.reply(lambda spec: items(spec.request_id, "ab", finish=None))
        stream = await api.completions.create(model="m", prompt="x", stream=True)
        await until(lambda: len(f.core.first_tokens()) == 1)
        request_id = f.core.first_tokens()[0].request_id
        f.plane.router.fail(
            Fail(request_id=request_id, status=500, kind="internal", said=say("text", text="engine failed"))
        )
        with pytest.raises(openai.APIError, match="engine failed"):
            [chunk async for chunk in stream]


async def test_cancel_by_closing_the_stream() -> None:
    async with client() as (f, api):
        f.reply(lambda spec: items(spec.request_id, "ab", finish=None))
        stream = await api.chat.completions.create(model="m", messages=HELLO, stream=True)  # type: ignore[call-overload]
        async for _ in stream:
            break
        await stream.close()
        await until(lambda: len(f.core.ended()) == 1, "the cancel was noticed", 1.0)
        assert f.core.ended()[0].outcome == "cancelled"


async def test_api_key() -> None:
    config = Config(model=Model(name="m", engine="emulated"), server=Server(api_keys={"a": "sk-12345678"}))
    async with client(config, "sk-12345678") as (_, api):
        await api.completions.create(model="m", prompt="x")
    async with client(config, "sk-wrong") as (_, api):
        with pytest.raises(openai.AuthenticationError):
            await api.completions.create(model="m", prompt="x")
