"""One job as a /v1/completions request of vLLM and the answer's chunks as our outputs. Pure: bytes in, values out."""

from __future__ import annotations

from typing import Any

import msgspec

from nodes.engines.answers import named
from nodes.engines.penalties import is_penalized, penalty_bias
from nodes.engines.served import Job, Output
from nodes.engines.vllm.plan import PARAMS
from transfer.errors import JobFailed
from transfer.terms import FinishReason, SamplingParams, TokenLogprob

MAX_LINE_BYTES = 4 << 20
"""vLLM repeats the prompt's ids in the first chunk."""
TOKEN_ID = "token_id:"
_SEED_STEP, _SEED_SPACE = 0x9E3779B97F4A7C15, 1 << 63
_FINISHES = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}


class _Logprobs(msgspec.Struct):
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float] | None] | None = None


class _Choice(msgspec.Struct):
    token_ids: list[int] | None = None
    finish_reason: str | None = None
    logprobs: _Logprobs | None = None


class _Error(msgspec.Struct):
    """Its message may repeat the prompt, so it is not read."""

    type: Any = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    error: _Error | None = None


_chunks = msgspec.json.Decoder(_Chunk)


class SseParser:
    """Server-sent events as they arrive, the data of whole ones out."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Raises JobFailed for a line over MAX_LINE_BYTES."""
        self._buffer += data
        *lines, rest = self._buffer.split(b"\n")
        if len(rest) > MAX_LINE_BYTES:
            raise JobFailed(f"vLLM sent a line of over {MAX_LINE_BYTES} bytes; it is not a stream of completions")
        self._buffer = bytearray(rest)
        return [bytes(line[5:].strip()) for line in lines if line.startswith(b"data:")]


def request_body(job: Job, ticket: dict[str, int], model: str, eos_token_ids: tuple[int, ...]) -> dict[str, Any]:
    """The request of a job. ticket: what the connector is to know of it (plan.Ticket)."""
    body: dict[str, Any] = {
        "model": model, "stream": True, "return_token_ids": True, "skip_special_tokens": False,
        "add_special_tokens": False, "kv_transfer_params": {PARAMS: ticket},
    }  # fmt: skip
    if job.salt:
        body["cache_salt"] = job.salt
    if job.priority:
        body["priority"] = job.priority
    if job.sampling is None:
        return body | {"prompt": job.tokens[:-1], "max_tokens": 1, "temperature": 0.0, "ignore_eos": True}
    return body | {"prompt": job.tokens} | _sampling(job.sampling, job, eos_token_ids)


def read_output(data: bytes, num_logprobs: int | None) -> Output | None:
    """What one event's data says; None for one that says nothing of tokens. Raises JobFailed where it is an error."""
    if data == b"[DONE]":
        return None
    try:
        chunk = _chunks.decode(data)
    except msgspec.DecodeError as error:
        raise JobFailed(f"vLLM answered with what is not a completion chunk: {error}") from None
    if chunk.error is not None:
        raise JobFailed(f"vLLM gave the request up{named(chunk.error.type)}")
    if not chunk.choices:
        return None
    choice = chunk.choices[0]
    finish = None
    if choice.finish_reason is not None:
        finish = _FINISHES.get(choice.finish_reason)
        if finish is None:
            raise JobFailed(f"vLLM ended the request{named(choice.finish_reason)}")
    if choice.token_ids is None:
        raise JobFailed("vLLM sent no token ids; it does not know return_token_ids: use 0.32 or later")
    logprobs = None if num_logprobs is None else _logprobs(choice, num_logprobs)
    if not choice.token_ids and finish is None:
        return None
    return Output(tuple(choice.token_ids), logprobs, finish)


def read_error(status: int, body: bytes) -> str:
    """What an HTTP error of vLLM says."""
    try:
        error = _chunks.decode(body).error
    except msgspec.DecodeError:
        error = None
    return f"vLLM refused the request with {status}{named(error.type if error is not None else None)}"


def _sampling(sampling: SamplingParams, job: Job, eos_token_ids: tuple[int, ...]) -> dict[str, Any]:
    """One to one, but for output that there is already (of a request that goes on here): vLLM takes it for prompt.

    Its count is taken off the limits, its penalties are put on as a bias, and the seed moves on with it.
    """
    stops = sampling.stop_token_ids if sampling.ignore_eos else (*sampling.stop_token_ids, *eos_token_ids)
    body: dict[str, Any] = {
        "max_tokens": max(1, sampling.max_tokens - job.num_output),
        "min_tokens": max(0, sampling.min_tokens - job.num_output),
        "seed": (sampling.seed + job.num_output * _SEED_STEP) % _SEED_SPACE,
        "temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k, "min_p": sampling.min_p,
        "stop_token_ids": list(dict.fromkeys(stops)), "ignore_eos": sampling.ignore_eos,
        "presence_penalty": sampling.presence_penalty, "frequency_penalty": sampling.frequency_penalty,
        "repetition_penalty": sampling.repetition_penalty,
    }  # fmt: skip
    if sampling.logprobs is not None:
        body |= {"logprobs": sampling.logprobs, "return_tokens_as_token_ids": True}
    if job.num_output and is_penalized(sampling):
        body["logit_bias"] = penalty_bias(job.tokens[-job.num_output :], sampling)
    return body


def _logprobs(choice: _Choice, count: int) -> tuple[TokenLogprob, ...]:
    found, ids = choice.logprobs or _Logprobs(), choice.token_ids or []
    tops = found.top_logprobs or [None] * len(ids)
    if len(found.token_logprobs) != len(ids) or len(tops) != len(ids):
        raise JobFailed(f"vLLM sent {len(found.token_logprobs)} logprobs for {len(ids)} tokens")
    return tuple(_logprob(own, top or {}, count) for own, top in zip(found.token_logprobs, tops, strict=True))


def _logprob(own: float | None, top: dict[str, float], count: int) -> TokenLogprob:
    if own is None or not all(name.startswith(TOKEN_ID) for name in top):
        raise JobFailed("vLLM sent logprobs without token ids; it does not know return_tokens_as_token_ids")
    best = sorted(top.items(), key=lambda one: -one[1])[:count]
    return TokenLogprob(
        logprob=own,
        top_ids=tuple(int(name.removeprefix(TOKEN_ID)) for name, _ in best),
        top_logprobs=tuple(value for _, value in best),
    )
