"""The OpenAI endpoints over HTTP: shapes, errors before and after the first byte, bounds, disconnects."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import pytest
from gateway_fakes import Front, front, items, prompt_text, until

from controlplane.config import Config, Limits, Model, Server
from controlplane.core.events import Fail
from controlplane.gateway.errors import ApiError
from transfer.errors import PeerLost
from transfer.terms import FinishReason, unpack_tokens

MODEL = Model(name="m", engine="emulated", max_context=4096)
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
TEXT = {"model": "m", "prompt": "hi"}


async def post(f: Front, path: str, body: Any, **headers: str) -> tuple[int, Any, Mapping[str, str]]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with f.client.post(path, data=data, headers=headers) as response:
        return response.status, await response.json(), response.headers


async def events(f: Front, path: str, body: dict[str, Any]) -> list[Any]:
    """Every data line of a stream; [DONE] as it is."""
    async with f.client.post(path, json=body | {"stream": True}) as response:
        assert response.status == 200
        assert response.content_type == "text/event-stream"
        text = (await response.read()).decode()
    assert text.endswith("\n\n")
    lines = [event.removeprefix("data: ") for event in text.removesuffix("\n\n").split("\n\n")]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


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


BAD = [
    (b"{", "valid JSON", None),
    (b"\xff", "valid JSON", None),
    (b"[]", "body is wrong", None),
    (b"", "valid JSON", None),
    (b'{"prompt": ' + b"[" * 5000, "valid JSON", None),
    ({"model": "m"}, "prompt is missing", "prompt"),
    (TEXT | {"max_tokens": "9"}, "max_tokens is wrong", "max_tokens"),
    (TEXT | {"max_tokens": 0}, "max_tokens must be at least 1", "max_tokens"),
    (TEXT | {"max_tokens": 5000}, "context is 4096", "max_tokens"),
    (TEXT | {"prompt": "x" * 4096}, "context is 4096", "prompt"),
    (TEXT | {"prompt": ["ok", "x" * 5000]}, "context is 4096", "prompt"),
    (TEXT | {"temperature": -1}, "temperature must be at least 0", "temperature"),
    (TEXT | {"top_p": 0}, "top_p must be above 0", "top_p"),
    (TEXT | {"n": 0}, "n must be at least 1", "n"),
    (TEXT | {"n": 65}, "over the limit of 64", "n"),
    (TEXT | {"min_tokens": 9, "max_tokens": 3}, "min_tokens 9 is over", "min_tokens"),
    (TEXT | {"stop": [""]}, "1 to 256 characters", "stop"),
    (TEXT | {"stop": ["x"] * 17}, "16 strings", "stop"),
    (TEXT | {"stop_token_ids": [257]}, "outside 0..256", "stop_token_ids"),
    (TEXT | {"logprobs": 21}, "at most 20", "logprobs"),
    (TEXT | {"logprobs": 10**400}, "at most 20", "logprobs"),
    (TEXT | {"min_tokens": 10**400}, "is over max_tokens", "min_tokens"),
    (TEXT | {"repetition_penalty": 1e-40}, "repetition_penalty must be at least 0.01", "repetition_penalty"),
    (TEXT | {"logit_bias": {"5": 1}}, "logit_bias is not supported", "logit_bias"),
    (TEXT | {"echo": True}, "echo is not supported", "echo"),
    (TEXT | {"best_of": 3}, "best_of 3 is not supported", "best_of"),
    (TEXT | {"temprature": 1}, "nearest known one is temperature", "temprature"),
    (TEXT | {"priority": 1}, "priority is not supported", "priority"),
    (TEXT | {"kv_transfer_params": {}}, "kv_transfer_params is not supported", "kv_transfer_params"),
    (TEXT | {"stream_options": {"include_usage": True}}, "stream: true", "stream_options"),
    (TEXT | {"prompt": ""}, "no tokens", "prompt"),
    (TEXT | {"prompt": []}, "prompt is empty", "prompt"),
    (TEXT | {"prompt": [1, "a"]}, "prompt must be text", "prompt"),
    (TEXT | {"prompt": [[1], []]}, "prompt must be text", "prompt"),
    (TEXT | {"prompt": [True]}, "prompt must be text", "prompt"),
    (TEXT | {"prompt": [999]}, "outside 0..256", "prompt"),
]
BAD_CHAT = [
    (CHAT | {"messages": []}, "messages is empty", "messages"),
    (CHAT | {"tools": [{"type": "function"}]}, "tools is not supported", "tools"),
    (CHAT | {"response_format": {"type": "json_object"}}, "response_format is not supported", "response_format"),
    (CHAT | {"top_logprobs": 2}, "logprobs: true", "top_logprobs"),
    (CHAT | {"messages": [{"role": "user"}]}, "content is missing", "messages[0].content"),
    (CHAT | {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "text only", None),
    (CHAT | {"messages": [{"role": "user", "content": "x", "what": 1}]}, "what is not supported", "messages[0].what"),
    (CHAT | {"messages": [{"role": "user", "content": 5}]}, "messages[0].content is wrong", "messages[0].content"),
    (CHAT | {"chat_template_kwargs": {"messages": 1}}, "may not set messages", "messages"),
]


@pytest.mark.parametrize(
    ("path", "body", "sentence", "param"),
    [("/v1/completions", *row) for row in BAD] + [("/v1/chat/completions", *row) for row in BAD_CHAT],
)
async def test_bad_input_is_a_400_that_names_the_parameter_before_any_work(
    path: str, body: Any, sentence: str, param: str | None
) -> None:
    async with front() as f:
        status, answer, _ = await post(f, path, body)
        assert status == 400, answer
        assert sentence in answer["error"]["message"]
        assert answer["error"]["type"] == "invalid_request_error"
        if param is not None:
            assert answer["error"]["param"] == param
        assert not f.core.specs


async def test_a_body_in_a_broken_encoding_is_a_400() -> None:
    async with front() as f, f.client.post(
        "/v1/completions", data=b"no gzip", headers={"Content-Encoding": "gzip"}
    ) as response:  # fmt: skip
        assert response.status == 400
        assert "encoding" in (await response.json())["error"]["message"]


async def test_unknown_model_class_path_and_method() -> None:
    async with front() as f:
        status, answer, _ = await post(f, "/v1/completions", TEXT | {"model": "gpt-4"})
        assert (status, answer["error"]["code"], answer["error"]["param"]) == (404, "model_not_found", "model")
        status, answer, _ = await post(f, "/v1/completions", TEXT, **{"x-phaseplane-class": "batsch"})
        assert status == 400
        assert "did you mean batch?" in answer["error"]["message"]
        status, answer, _ = await post(f, "/v1/nothing", {})
        assert (status, answer["error"]["code"]) == (404, "not_found")
        async with f.client.get("/v1/completions") as response:
            assert response.status == 405
            assert response.headers["Allow"] == "POST"
            assert "takes POST" in (await response.json())["error"]["message"]


async def test_a_body_over_the_limit_is_refused() -> None:
    async with front(Config(model=MODEL, limits=Limits(max_body_bytes=2000))) as f:
        status, answer, _ = await post(f, "/v1/completions", TEXT | {"prompt": "x" * 3000})
        assert status == 413
        assert "2000 bytes" in answer["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_refusal_before_the_first_byte_is_an_http_error_with_retry_after(stream: bool) -> None:
    async with front() as f:
        f.reply(
            lambda spec: Fail(
                request_id=spec.request_id, status=429, kind="overloaded", message="busy", retry_after_s=2.2
            )
        )
        status, answer, headers = await post(f, "/v1/completions", TEXT | {"stream": stream, "n": 3})
        assert (status, answer["error"]["message"], answer["error"]["type"]) == (429, "busy", "rate_limit_error")
        assert headers["Retry-After"] == "3"
        assert [ended.outcome for ended in f.core.ended()] == ["rejected"] * 3


async def test_an_error_after_the_first_byte_is_an_event_and_the_end() -> None:
    async with front() as f:
        task = asyncio.create_task(events(f, "/v1/completions", TEXT))
        (spec,) = await f.arrivals(1)
        f.say(*items(spec.request_id, "abc", finish=None))
        await until(lambda: bool(f.core.first_tokens()))
        f.plane.router.fail(Fail(request_id=spec.request_id, status=500, kind="internal", message="engine failed"))
        first, last = await task
        assert first["choices"][0]["text"] == "abc"
        assert last["error"]["message"] == "engine failed"
        assert [(ended.outcome, ended.output_tokens) for ended in f.core.ended()] == [("error", 3)]


async def test_too_many_in_flight_and_a_scheduler_that_has_ended() -> None:
    async with front(Config(model=MODEL, limits=Limits(max_in_flight=2))) as f:
        status, answer, headers = await post(f, "/v1/completions", TEXT | {"n": 3})
        assert (status, answer["error"]["code"]) == (429, "overloaded")
        assert "Retry-After" in headers

        def gone(event: object) -> None:
            raise PeerLost("actor scheduler has ended")

        real, f.gateway.control.post = f.gateway.control.post, gone  # type: ignore[method-assign]
        status, answer, _ = await post(f, "/v1/completions", TEXT)
        f.gateway.control.post = real  # type: ignore[method-assign]
        assert status == 503
        assert len(f.plane.router) == 0
        f.core.events.clear()


async def test_a_stopping_server_ends_streams_and_takes_no_more() -> None:
    async with front() as f:
        streaming = asyncio.create_task(events(f, "/v1/completions", TEXT))
        waiting = asyncio.create_task(post(f, "/v1/completions", TEXT))
        first, _ = await f.arrivals(2)
        f.say(*items(first.request_id, "a", finish=None))
        await until(lambda: bool(f.core.first_tokens()))
        f.gateway.stopping = True
        f.plane.router.fail_all(ApiError(503, "the server is stopping", retry_after_s=1.0))
        assert "stopping" in (await streaming)[-1]["error"]["message"]
        assert (await waiting)[0] == 503
        assert (await post(f, "/v1/completions", TEXT))[0] == 503


@pytest.mark.parametrize("body", [TEXT, TEXT | {"stream": True}, TEXT | {"n": 3}], ids=["whole", "stream", "n=3"])
async def test_a_disconnect_during_silent_prefill_is_noticed_within_a_second(body: dict[str, Any]) -> None:
    async with front() as f:
        task = asyncio.create_task(post(f, "/v1/completions", body))
        num = body.get("n", 1)
        await f.arrivals(num)
        task.cancel()
        await until(lambda: len(f.core.ended()) == num, "the disconnect was noticed", 1.0)
        assert {(ended.outcome, ended.by_node) for ended in f.core.ended()} == {("cancelled", False)}


async def test_a_disconnect_in_the_middle_of_a_stream() -> None:
    async with front() as f:
        opening = asyncio.ensure_future(f.client.post("/v1/completions", json=TEXT | {"stream": True}))
        (spec,) = await f.arrivals(1)
        f.say(*items(spec.request_id, "abc", finish=None))
        response = await opening
        assert b"abc" in await response.content.readany()
        response.close()
        await until(lambda: len(f.core.ended()) == 1, "the disconnect was noticed", 1.0)
        assert (f.core.ended()[0].outcome, f.core.ended()[0].output_tokens) == ("cancelled", 3)


async def test_a_client_that_does_not_read_its_stream_is_cut_off() -> None:
    async with front(Config(model=MODEL, limits=Limits(max_unread_tokens=64))) as f:
        reader, writer = await asyncio.open_connection(f.client.host, f.client.port, limit=1024)
        body = json.dumps(TEXT | {"stream": True}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        (spec,) = await f.arrivals(1)
        for place in range(100_000):
            f.say(*items(spec.request_id, "x", finish=None, start=place))
            if place % 16 == 0:
                await asyncio.sleep(0)
            if f.core.ended():
                break
        (ended,) = f.core.ended()
        assert ended.outcome == "cancelled"
        assert "does not read" in (ended.error or "")
        writer.close()
        assert reader.exception() is None or isinstance(reader.exception(), ConnectionError)


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
        real = f.gateway.tokenizer.encode

        def encode(text: str, add_special_tokens: bool) -> list[int]:
            import threading

            threads.append(threading.current_thread().name)
            return real(text, add_special_tokens)

        f.gateway.tokenizer.encode = encode  # type: ignore[method-assign]
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
