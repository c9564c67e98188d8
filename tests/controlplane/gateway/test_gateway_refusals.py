"""What the gateway refuses before any work: a status, a sentence, the parameter, in OpenAI's shape."""

from __future__ import annotations

import json
from typing import Any

import pytest
from gateway_calls import CHAT, MODEL, TEXT, post
from gateway_fakes import front

from controlplane.config import Config, Limits
from controlplane.core.events import Fail
from transfer.said import say

BUSY = say("text", text="busy")

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
    (
        CHAT | {"messages": [{"role": "alien", "content": "x"}]},
        "must be one of system, developer, user, assistant, tool, got 'alien'",
        "messages[0].role",
    ),
    (CHAT | {"messages": [{"role": "", "content": "x"}]}, "must be one of", "messages[0].role"),
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


LONG = "x" * 1_000_000


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", TEXT | {"model": LONG}),
        ("/v1/completions", TEXT | {LONG: 1}),
        ("/v1/completions", TEXT | {"a\nb" + LONG: 1}),
        ("/v1/completions", TEXT | {"stream_options": {LONG: 1}}),
        ("/v1/chat/completions", CHAT | {"messages": [{"role": LONG, "content": "x"}]}),
        ("/v1/chat/completions", CHAT | {"messages": [{"role": "user", "content": [{"type": LONG}]}]}),
        ("/v1/chat/completions", CHAT | {"chat_template_kwargs": {"messages": LONG}}),
        ("/v1/plans/plan-1/apply", {"base_version": 1, "idempotency_key": LONG}),
        ("/v1/plans/plan-1/undo", {"base_version": 1, "actor": LONG}),
    ],
)
async def test_no_answer_repeats_at_length_what_was_sent(path: str, body: dict[str, Any]) -> None:
    async with front() as f:
        status, answer, _ = await post(f, path, body)
        assert status in (400, 404)
        assert answer["error"]["type"] in ("invalid_request_error", "not_found_error")
        assert len(json.dumps(answer)) < 600
        assert not f.core.events


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
            lambda spec: Fail(request_id=spec.request_id, status=429, kind="overloaded", said=BUSY, retry_after_s=2.2)
        )
        status, answer, headers = await post(f, "/v1/completions", TEXT | {"stream": stream, "n": 3})
        assert (status, answer["error"]["message"], answer["error"]["type"]) == (429, "busy", "rate_limit_error")
        assert headers["Retry-After"] == "3"
        assert [ended.outcome for ended in f.core.ended()] == ["rejected"] * 3
