"""The OpenAI endpoints over HTTP: shapes, defaults, parameters, logprobs, tenants, tokenize."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from gateway_calls import CHAT, MODEL, TEXT, events, post
from gateway_fakes import front, items, prompt_text

from controlplane.config import Config, Model, Server
from transfer.terms import FinishReason, unpack_tokens


async def test_a_completion_and_its_usage() -> None:
    async with front() as f:
        f.reply(lambda spec: items(spec.request_id, "Hé", "llo", cached=1))
        status, body, headers = await post(f, "/v1/completions", TEXT)
        assert status == 200
        assert body["object"] == "text_completion"
        assert body["choices"] == [{"index": 0, "text": "Héllo", "logprobs": None, "finish_reason": "stop"}]
        assert body["usage"] == {
            "prompt_tokens": 2,
            "completion_tokens": 7,
            "total_tokens": 9,
            "prompt_tokens_details": {"cached_tokens": 1},
        }
        assert headers["X-Request-Id"] == body["id"]


async def test_the_clients_own_request_id_is_not_used() -> None:
    async with front() as f:
        f.reply(lambda spec: items(spec.request_id, "a"))
        _, _, first = await post(f, "/v1/completions", TEXT, **{"X-Request-Id": "mine"})
        _, _, second = await post(f, "/v1/completions", TEXT, **{"X-Request-Id": "mine"})
        assert "mine" not in (first["X-Request-Id"], second["X-Request-Id"])
        assert first["X-Request-Id"] != second["X-Request-Id"]


async def test_a_plain_completion_without_max_tokens_is_short_and_fits_the_context() -> None:
    async with front() as f:
        f.reply(lambda spec: items(spec.request_id, "a"))
        for prompt in ("hi", "x" * 4090):
            assert (await post(f, "/v1/completions", {"model": "m", "prompt": prompt}))[0] == 200
        assert [spec.sampling.max_tokens for spec in await f.arrivals(2)] == [16, 6]


async def test_defaults_reach_the_scheduler() -> None:
    async with front() as f:
        f.reply(lambda spec: items(spec.request_id, "a"))
        await post(f, "/v1/chat/completions", CHAT)
        (spec,) = await f.arrivals(1)
        assert prompt_text(spec) == "user: hi\nassistant: "
        assert spec.sampling.max_tokens == 4096 - len(prompt_text(spec))
        assert (spec.sampling.temperature, spec.sampling.top_p, spec.sampling.logprobs) == (1.0, 1.0, None)
        assert (spec.model, spec.traffic_class, spec.salt, spec.tenant) == ("m", "default", "", "")


async def test_every_parameter_reaches_the_scheduler() -> None:
    async with front() as f:
        f.reply(lambda spec: items(spec.request_id, "a"))
        body = TEXT | {
            "max_tokens": 9, "temperature": 0, "top_p": 0.5, "top_k": 7, "min_p": 0.1, "min_tokens": 3, "seed": 42,
            "stop_token_ids": [5, 5, 6], "ignore_eos": True, "logprobs": 2, "presence_penalty": 1, "n": 2,
            "frequency_penalty": -1, "repetition_penalty": 1.2, "user": "u", "logit_bias": {}, "best_of": 2,
        }  # fmt: skip
        status, _, _ = await post(f, "/v1/completions", body, **{"x-phaseplane-class": "batch"})
        assert status == 200
        first, second = await f.arrivals(2)
        s = first.sampling
        assert (s.max_tokens, s.temperature, s.top_p, s.top_k, s.min_p, s.min_tokens) == (9, 0.0, 0.5, 7, 0.1, 3)
        assert (s.seed, s.stop_token_ids, s.ignore_eos, s.logprobs) == (42, (5, 6), True, 2)
        assert (s.presence_penalty, s.frequency_penalty, s.repetition_penalty) == (1.0, -1.0, 1.2)
        assert second.sampling.seed != 42
        assert first.traffic_class == "batch"


async def test_a_completion_stream_has_usage_only_when_asked() -> None:
    async with front() as f:
        f.reply(lambda spec: items(spec.request_id, "Hel", "lo"))
        plain = await events(f, "/v1/completions", TEXT)
        assert [event["choices"][0]["text"] for event in plain[:-1]] == ["Hel", "lo"]
        assert [event["choices"][0]["finish_reason"] for event in plain[:-1]] == [None, "stop"]
        assert plain[-1] == "[DONE]"
        assert not any("usage" in event for event in plain[:-1])
        asked = await events(f, "/v1/completions", TEXT | {"stream_options": {"include_usage": True}})
        assert asked[-2]["choices"] == []
        assert asked[-2]["usage"]["completion_tokens"] == 6
        assert [event["usage"] for event in asked[:-2]] == [None, None]
        always = await events(
            f, "/v1/completions", TEXT | {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
        )
        assert all(event["usage"]["prompt_tokens"] == 2 for event in always[:-1])


async def test_a_chat_stream_says_its_role_once_a_choice() -> None:
    async with front() as f:
        f.reply(lambda spec: items(spec.request_id, "a", "b"))
        chunks = (await events(f, "/v1/chat/completions", CHAT | {"n": 2}))[:-1]
        assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
        for index in (0, 1):
            deltas = [c["choices"][0]["delta"] for c in chunks if c["choices"][0]["index"] == index]
            assert deltas == [{"role": "assistant", "content": "a"}, {"content": "b"}]


async def test_many_prompts_with_many_choices_in_order() -> None:
    async with front() as f:
        f.reply(lambda spec: items(spec.request_id, prompt_text(spec).upper()))
        _, body, _ = await post(f, "/v1/completions", TEXT | {"prompt": ["ab", "c"], "n": 2})
        assert [(choice["index"], choice["text"]) for choice in body["choices"]] == [
            (0, "AB"), (1, "AB"), (2, "C"), (3, "C"),
        ]  # fmt: skip
        assert body["usage"]["prompt_tokens"] == 3
        assert body["usage"]["completion_tokens"] == 3 + 3 + 2 + 2


@pytest.mark.parametrize(("prompt", "expected"), [([104, 105], [[104, 105]]), ([[104], [105, 1]], [[104], [105, 1]])])
async def test_token_prompts(prompt: list[Any], expected: list[list[int]]) -> None:
    async with front() as f:
        f.reply(lambda spec: items(spec.request_id, "a"))
        status, _, _ = await post(f, "/v1/completions", TEXT | {"prompt": prompt})
        assert status == 200
        assert [unpack_tokens(spec.tokens) for spec in f.core.specs.values()] == expected


async def test_chat_content_parts_and_developer_role() -> None:
    async with front() as f:
        f.reply(lambda spec: items(spec.request_id, "a"))
        parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
        messages = [{"role": "developer", "content": "rules"}, {"role": "user", "content": parts, "name": "x"}]
        await post(f, "/v1/chat/completions", {"model": "m", "messages": messages})
        (spec,) = await f.arrivals(1)
        assert prompt_text(spec) == "system: rules\nuser: ab\nassistant: "


async def test_a_stop_string_across_tokens_and_characters() -> None:
    async with front() as f:
        raw = "x中文y".encode()
        f.reply(lambda spec: items(spec.request_id, *(bytes([byte]) for byte in raw), finish=FinishReason.LENGTH))
        _, body, _ = await post(f, "/v1/completions", TEXT | {"stop": ["中文"]})
        assert body["choices"][0] == {"index": 0, "text": "x", "logprobs": None, "finish_reason": "stop"}
        assert body["usage"]["completion_tokens"] == 7
        streamed = await events(f, "/v1/completions", TEXT | {"stop": "文y"})
        assert [event["choices"][0]["text"] for event in streamed[:-1]] == ["x", "中", ""]
        assert [ended.by_node for ended in f.core.ended()] == [False, True]


async def test_logprobs_in_both_forms_from_the_first_token_on() -> None:
    async with front() as f:
        f.reply(lambda spec: items(spec.request_id, "é", "b", finish=FinishReason.LENGTH, logprobs=True))
        _, chat, _ = await post(f, "/v1/chat/completions", CHAT | {"logprobs": True, "top_logprobs": 2})
        content = chat["choices"][0]["logprobs"]["content"]
        assert [entry["token"] for entry in content] == ["\\xc3", "\\xa9", "b"]
        assert bytes(byte for entry in content for byte in entry["bytes"]).decode() == "éb"
        assert content[2]["logprob"] == -98 / 256
        assert [top["token"] for top in content[2]["top_logprobs"]] == ["b", "\x00"]
        _, text, _ = await post(f, "/v1/completions", TEXT | {"logprobs": 2})
        logprobs = text["choices"][0]["logprobs"]
        assert logprobs["tokens"] == ["bytes:\\xc3", "bytes:\\xa9", "b"]
        assert len(logprobs["token_logprobs"]) == len(logprobs["text_offset"]) == 3
        assert logprobs["top_logprobs"][2] == {"b": -98 / 256, "\x00": -9.0}
        chunks = (await events(f, "/v1/chat/completions", CHAT | {"logprobs": True}))[:-1]
        assert sum(len(chunk["choices"][0]["logprobs"]["content"]) for chunk in chunks) == 3


async def test_api_keys_and_tenants() -> None:
    keys = {"alice": "sk-alice-1", "bob": "sk-bob-22"}
    async with front(Config(model=MODEL, server=Server(api_keys=keys))) as f:
        f.reply(lambda spec: items(spec.request_id, "a"))
        for headers in ({}, {"Authorization": "Bearer sk-wrong"}, {"Authorization": "Basic sk-alice-1"}):
            status, answer, found = await post(f, "/v1/completions", TEXT, **headers)
            assert (status, answer["error"]["type"]) == (401, "authentication_error")
            assert found["WWW-Authenticate"] == "Bearer"
        for path in ("/v1/fleet", "/metrics", "/v1/models", "/v1/plans"):
            async with f.client.get(path) as response:
                assert response.status == 401, path
        for path in ("/healthz", "/readyz"):
            async with f.client.get(path) as response:
                assert response.status == 200, path
        for tenant, key in keys.items():
            status, _, _ = await post(f, "/v1/completions", TEXT, Authorization=f"Bearer {key}")
            assert status == 200
            assert [*f.core.specs.values()][-1].tenant == tenant
        alice, bob = f.core.specs.values()
        assert len({alice.salt, bob.salt, ""}) == 3
        assert not any(key in alice.salt for key in keys.values())


async def test_tokenize_and_detokenize() -> None:
    async with front() as f:
        _, body, _ = await post(f, "/tokenize", {"model": "m", "prompt": "hé", "return_token_strs": True})
        assert body == {
            "count": 3, "max_model_len": 4096, "tokens": list("hé".encode()), "token_strs": ["h", "\ufffd", "\ufffd"],
        }  # fmt: skip
        _, back, _ = await post(f, "/detokenize", {"model": "m", "tokens": body["tokens"]})
        assert back == {"prompt": "hé"}
        _, chat, _ = await post(f, "/tokenize", {"messages": CHAT["messages"]})
        assert bytes(chat["tokens"]).decode() == "user: hi\nassistant: "
        for path, wrong in (("/tokenize", {}), ("/detokenize", {"tokens": [999]}), ("/tokenize", {"prompt": 1})):
            assert (await post(f, path, wrong))[0] == 400


async def test_long_prompts_do_not_hold_up_the_loop() -> None:
    config = Config(model=Model(name="m", engine="emulated", max_context=2_000_000))
    async with front(config) as f:
        threads = list[str]()
        real = f.gateway.models[0].tokenizer.encode

        def encode(text: str, add_special_tokens: bool) -> list[int]:
            threads.append(threading.current_thread().name)
            return real(text, add_special_tokens)

        f.gateway.models[0].tokenizer.encode = encode  # type: ignore[method-assign]
        f.reply(lambda spec: items(spec.request_id, "a"))
        assert (await post(f, "/v1/completions", TEXT | {"prompt": "y" * 1_000_000}))[0] == 200
        assert (await post(f, "/v1/completions", TEXT))[0] == 200
        assert threads[0] != "MainThread"
        assert threads[1] == "MainThread"


async def test_an_unexpected_failure_is_a_500_in_openais_shape(caplog: pytest.LogCaptureFixture) -> None:
    async with front() as f:
        f.gateway.archive.requests = None  # type: ignore[method-assign,assignment]
        async with f.client.get("/v1/requests") as response:
            assert response.status == 500
            assert (await response.json())["error"]["type"] == "server_error"
    assert "TypeError" in caplog.text
