"""A server that speaks /v1/completions as vLLM, llama.cpp or a plain one does, scripted; and a model for it."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from aiohttp import web
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

VOCABULARY = 260
EOS = 259
KEY = "sk-right"


def make_model(directory: Path) -> Path:
    """A byte-level tokenizer with three merges, and what else identifies a model."""
    directory.mkdir(parents=True, exist_ok=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("t", "h"), ("th", "e"), ("Ġ", "the")]
    vocabulary = {token: number for number, token in enumerate([*alphabet, "th", "the", "Ġthe"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "vocab_size": VOCABULARY, "max_position_embeddings": 512, "eos_token_id": EOS, "num_hidden_layers": 2,
        "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 128,
        "model_type": "llama",
    }  # fmt: skip
    (directory / "config.json").write_text(json.dumps(config))
    marker = {"name": "tiny", "revision": "r", "tokenizer": "t"}
    (directory / "phaseplane.json").write_text(json.dumps(marker))
    return directory


@dataclass
class Script:
    """kind: "vllm", "llamacpp", "ids" (takes ids, gives text) or "plain" (text, and nothing beyond OpenAI's own).
    The first two know logit_bias, and llama.cpp counts prompts in penalties.

    tokens: what it draws, then the end. fault: "" or what goes wrong with a completion. bodies: what it was sent.
    """

    kind: str = "vllm"
    tokens: list[int] = field(default_factory=lambda: [40, 41, 42, 43, 44, 45, 46, 47])
    ends: bool = False
    fault: str = ""
    healthy: bool = True
    in_pieces: bool = False
    busy: int = 0
    key: str | None = None
    names: tuple[str, ...] = ("tiny-served",)
    gap_s: float = 0.0
    bodies: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    aborted: asyncio.Event = field(default_factory=asyncio.Event)
    num_open: int = 0
    tokenizer: Tokenizer | None = None


_KNOWN = {
    "model", "prompt", "stream", "max_tokens", "temperature", "top_p", "seed", "presence_penalty", "frequency_penalty",
    "logprobs",
}  # fmt: skip


@contextlib.asynccontextmanager
async def serving(script: Script, model: Path) -> AsyncIterator[str]:
    script.tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    app = web.Application()
    app.router.add_get("/health", partial(_health, script))
    app.router.add_get("/v1/models", partial(_models, script))
    app.router.add_post("/v1/completions", partial(_complete, script))
    app.router.add_post("/elsewhere", partial(_stolen, script))
    runner = web.AppRunner(app, handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def _health(script: Script, request: web.Request) -> web.Response:
    return web.json_response({}, status=200 if script.healthy else 503)


async def _models(script: Script, request: web.Request) -> web.Response:
    if (denied := _denied(script, request)) is not None:
        return denied
    listed = json.dumps({"data": [{"id": name, "max_model_len": 256} for name in script.names]}).encode()

    async def pieces() -> AsyncIterator[bytes]:
        for piece in (listed[:20], listed[20:]):
            yield piece
            await asyncio.sleep(0.02)

    return web.Response(body=pieces() if script.in_pieces else listed, content_type="application/json")


async def _stolen(script: Script, request: web.Request) -> web.Response:
    script.fault = "stolen"
    return web.Response()


def _denied(script: Script, request: web.Request) -> web.Response | None:
    said = request.headers.get("Authorization")
    script.keys.append(said)
    if script.key is None or said == f"Bearer {script.key}":
        return None
    return web.json_response({"error": {"message": "bad key"}}, status=401)


async def _complete(script: Script, request: web.Request) -> web.StreamResponse:
    if (denied := _denied(script, request)) is not None:
        return denied
    body = await request.json()
    script.bodies.append(body)
    if script.busy:
        return web.json_response({"error": {"message": "come back later"}}, status=script.busy)
    if script.fault == "redirect":
        raise web.HTTPTemporaryRedirect("/elsewhere")
    if script.fault == "refuse":
        return web.json_response({"error": {"message": "too long: a secret", "type": "BadRequestError"}}, status=400)
    if script.fault == "echo":
        return web.json_response({"detail": [{"input": body}]}, status=422)
    if script.kind == "plain" and (not isinstance(body["prompt"], str) or set(body) - _KNOWN):
        return web.json_response({"error": {"message": "unknown"}}, status=400)
    answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await answer.prepare(request)
    script.num_open += 1
    try:
        await _stream(script, body, answer)
    except (asyncio.CancelledError, ConnectionResetError):
        script.aborted.set()
        raise
    finally:
        script.num_open -= 1
    return answer


async def _stream(script: Script, body: dict[str, Any], answer: web.StreamResponse) -> None:
    async def say(choice: dict[str, Any]) -> None:
        await answer.write(b"data: " + json.dumps({"choices": [{"index": 0, **choice}]}).encode() + b"\n\n")

    await answer.write(b": ping\n\n")
    drawn = (_liked(script, body) or script.tokens)[: body["max_tokens"]]
    for place, token in enumerate(drawn):
        await asyncio.sleep(script.gap_s)
        while script.fault == "pings" and place == 1:
            await answer.write(b': ping\n\ndata: {"choices": []}\n\n')
            await asyncio.sleep(0.01)
        if script.fault == "break" and place == 1:
            await answer.write(b'data: {"error": {"message": "out of memory: a secret", "type": "server_error"}}\n\n')
            return
        await say(_choice(script, body, token))
    if script.fault != "silent":
        stopped = script.ends and len(drawn) < body["max_tokens"]
        last = {"token_ids": [EOS]} if stopped and script.kind == "vllm" else {}
        await say({"text": "", "finish_reason": "stop" if stopped else "length", **last})
    await answer.write(b"data: [DONE]\n\n")


def _liked(script: Script, body: dict[str, Any]) -> list[int]:
    """What it draws where logit_bias makes a token the likeliest."""
    scores = {int(token): bias for token, bias in body.get("logit_bias", {}).items()}
    if script.kind == "llamacpp":
        window = body["prompt"][-64:]
        scores = {token: bias - body["frequency_penalty"] * window.count(token) for token, bias in scores.items()}
    best = max(scores, key=lambda token: scores[token], default=0)
    return [best, *script.tokens] if script.kind in ("vllm", "llamacpp") and scores.get(best, 0) > 0 else []


def _choice(script: Script, body: dict[str, Any], token: int) -> dict[str, Any]:
    assert script.tokenizer is not None
    text = script.tokenizer.decode([token])
    found: dict[str, Any] = {"text": text, "finish_reason": None}
    if script.kind == "vllm" and body.get("return_token_ids"):
        found["token_ids"] = [token]
    if "logprobs" not in body:
        return found
    if script.kind == "llamacpp":
        tops = [{"id": token, "logprob": -0.5}, {"id": 7, "logprob": -1.5}][: body["logprobs"]]
        return {**found, "logprobs": {"content": [{"id": token, "logprob": -0.5, "top_logprobs": tops}]}}
    name = f"token_id:{token}" if body.get("return_tokens_as_token_ids") and script.kind == "vllm" else text
    return {**found, "logprobs": {"token_logprobs": [-0.5], "top_logprobs": [{name: -0.5, "th": -1.5}]}}
