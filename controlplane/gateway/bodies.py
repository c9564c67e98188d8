"""The JSON that clients send, as typed structs, and what is wrong with it in a sentence that names the parameter.

Fields typed NoOp are accepted at values that change nothing, those typed Ignored at any; params.py checks the rest.
"""

from __future__ import annotations

import asyncio
import re
from typing import Any, TypeVar

import msgspec
from aiohttp import web

from controlplane.gateway.errors import ApiError, invalid
from controlplane.gateway.service import GATEWAY
from controlplane.settings import nearest
from controlplane.text import MAX_SHOWN

Ignored = Any
NoOp = Any


class Body(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    pass


class StreamOptions(Body, kw_only=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class Generation(Body, kw_only=True):
    """What chat and plain completions share, in the OpenAI API's and vLLM's names."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None

    top_k: int | None = None
    min_p: float | None = None
    min_tokens: int | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    repetition_penalty: float | None = None
    include_stop_str_in_output: bool | None = None
    return_token_ids: bool | None = None

    logit_bias: NoOp = None
    skip_special_tokens: NoOp = None
    spaces_between_special_tokens: NoOp = None

    user: Ignored = None
    metadata: Ignored = None
    store: Ignored = None
    service_tier: Ignored = None
    safety_identifier: Ignored = None
    prompt_cache_key: Ignored = None
    prompt_cache_retention: Ignored = None


class ContentPart(Body, kw_only=True):
    type: str
    text: str | None = None
    image_url: Any = None
    input_audio: Any = None
    file: Any = None
    refusal: Any = None


class ChatMessage(Body, kw_only=True):
    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    refusal: Ignored = None
    annotations: Ignored = None
    audio: NoOp = None
    tool_calls: NoOp = None
    function_call: NoOp = None
    tool_call_id: NoOp = None


class ChatBody(Generation, kw_only=True):
    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    tools: NoOp = None
    tool_choice: NoOp = None
    functions: NoOp = None
    function_call: NoOp = None
    response_format: NoOp = None
    modalities: NoOp = None
    audio: NoOp = None
    reasoning_effort: NoOp = None
    verbosity: NoOp = None
    web_search_options: NoOp = None
    parallel_tool_calls: Ignored = None
    prediction: Ignored = None


class CompletionBody(Generation, kw_only=True):
    prompt: str | list[Any]
    logprobs: int | None = None
    echo: NoOp = None
    suffix: NoOp = None
    best_of: int | None = None


class TokenizeBody(Body, kw_only=True):
    """Exactly one of prompt and messages."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeBody(Body, kw_only=True):
    model: str | None = None
    tokens: list[int]


B = TypeVar("B")
MAX_PATH_CHARS = 200
_UNKNOWN = re.compile(r"unknown field `(.*)`", re.DOTALL)
_MISSING = re.compile(r"missing required field `(.*)`")


def decoder(kind: type[B]) -> msgspec.json.Decoder[B]:
    """Build once for each body; decode with `read`."""
    return msgspec.json.Decoder(kind)


async def receive(request: web.Request) -> bytes:
    """The body's bytes. Raises HTTPRequestEntityTooLarge for more than limits.max_body_bytes, at once when that many
    are announced, and ApiError 408 when they are not here within limits.body_timeout_s."""
    limits = request.app[GATEWAY].config.limits
    announced, limit_s = request.content_length, limits.body_timeout_s
    if announced is not None and announced > limits.max_body_bytes:
        raise web.HTTPRequestEntityTooLarge(max_size=limits.max_body_bytes, actual_size=announced)
    try:
        async with asyncio.timeout(limit_s):
            return await request.read()
    except TimeoutError:
        message = f"the body did not arrive within {limit_s:g} s; send it faster, or raise limits.body_timeout_s"
        raise ApiError(408, message) from None


def read(decoder: msgspec.json.Decoder[B], data: bytes) -> B:
    """The body. Raises ApiError 400 for JSON that is malformed, of a wrong type, unknown or incomplete."""
    try:
        return decoder.decode(data)
    except msgspec.ValidationError as error:
        raise _explain(decoder.type, str(error)) from None
    except (msgspec.DecodeError, RecursionError) as error:
        raise invalid(f"the body is not valid JSON: {error}", code="invalid_json") from None


def _explain(kind: Any, sentence: str) -> ApiError:
    what, _, path = sentence.partition(" - at `$")
    path = path.strip("`.")
    if found := _UNKNOWN.search(what):
        unknown = found[1] if len(found[1]) <= MAX_SHOWN else f"{found[1][:MAX_SHOWN]}..."
        name = f"{path}.{unknown}" if path else unknown
        known = [field.encode_name for field in msgspec.structs.fields(kind)]
        hint = "" if path else f"; the nearest known one is {nearest(unknown, known)}"
        return invalid(f"parameter {name} is not supported{hint}", name, "unsupported_parameter")
    if found := _MISSING.search(what):
        name = f"{path}.{found[1]}" if path else found[1]
        return invalid(f"parameter {name} is missing", name, "missing_required_parameter")
    path, what = path[:MAX_PATH_CHARS], what[:MAX_PATH_CHARS]
    return invalid(f"parameter {path or 'body'} is wrong: {what[:1].lower()}{what[1:]}", path or None, "invalid_type")
