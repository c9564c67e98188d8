"""GET /v1/models, POST /tokenize and /detokenize (in vLLM's shape)."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from controlplane.gateway import tokenizer as text
from controlplane.gateway.bodies import ChatBody, DetokenizeBody, TokenizeBody, decoder, read, receive
from controlplane.gateway.errors import ApiError, invalid
from controlplane.gateway.generate import json_response, model_of
from controlplane.gateway.openai_chat import render
from controlplane.gateway.service import GATEWAY, Gateway, ServedModel

_tokenize = decoder(TokenizeBody)
_detokenize = decoder(DetokenizeBody)


async def list_models(request: web.Request) -> web.StreamResponse:
    gateway = request.app[GATEWAY]
    return json_response({"object": "list", "data": [_card(gateway, model) for model in gateway.models]})


async def get_model(request: web.Request) -> web.StreamResponse:
    gateway = request.app[GATEWAY]
    return json_response(_card(gateway, model_of(gateway, request.match_info["model"])))


async def tokenize(request: web.Request) -> web.StreamResponse:
    gateway = request.app[GATEWAY]
    body = read(_tokenize, await receive(request))
    tokenizer = model_of(gateway, body.model).tokenizer
    if (body.prompt is None) == (body.messages is None):
        raise invalid("send exactly one of prompt and messages", "prompt")
    if body.messages is not None:
        if body.add_generation_prompt is False:
            raise invalid("add_generation_prompt false is not supported; leave it out", "add_generation_prompt")
        chat = ChatBody(model="", messages=body.messages, chat_template_kwargs=body.chat_template_kwargs)
        prompt, special = render(tokenizer, chat), bool(body.add_special_tokens)
    else:
        prompt, special = body.prompt or "", body.add_special_tokens is not False
    tokens = await text.encode(tokenizer, prompt, special)
    answer: dict[str, Any] = {
        "count": len(tokens), "max_model_len": tokenizer.max_context, "tokens": tokens, "token_strs": None,
    }  # fmt: skip
    if body.return_token_strs:
        answer["token_strs"] = [tokenizer.token_bytes(token).decode("utf-8", "replace") for token in tokens]
    return json_response(answer)


async def detokenize(request: web.Request) -> web.StreamResponse:
    gateway = request.app[GATEWAY]
    body = read(_detokenize, await receive(request))
    tokenizer = model_of(gateway, body.model).tokenizer
    if any(not 0 <= token < tokenizer.vocab_size for token in body.tokens):
        raise ApiError(400, f"tokens holds an id outside 0..{tokenizer.vocab_size - 1}", param="tokens")
    return json_response({"prompt": tokenizer.decode(body.tokens, skip_special_tokens=False)})


def _card(gateway: Gateway, model: ServedModel) -> dict[str, Any]:
    return {
        "id": model.served_name, "object": "model", "created": gateway.created, "owned_by": "phaseplane",
        "root": model.root, "parent": None, "max_model_len": model.tokenizer.max_context,
    }  # fmt: skip
