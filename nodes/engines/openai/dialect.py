"""What one server understands and how it says tokens: found out once, then used for every request. No I/O.

All take /v1/completions. They differ in whether a prompt may be token ids, whether sampling beyond OpenAI's own
parameters is known, and whether token ids come back (vLLM, SGLang: token_ids; llama.cpp: beside log-probabilities).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from nodes.engines.answers import named
from nodes.engines.openai.carry import Carry
from nodes.engines.openai.text import Text
from nodes.engines.penalties import is_penalized, penalty_bias
from nodes.engines.served import Job, Output
from transfer.errors import JobFailed
from transfer.terms import FinishReason, SamplingParams, TokenIds, TokenLogprob

SEED_MASK = 0x7FFFFFFF
"""Servers differ in how large a seed may be; this much all of them take."""
TOKEN_PREFIX = "token_id:"
"""How vLLM and SGLang write a token's id where its text would stand."""


@dataclass(frozen=True, slots=True)
class Dialect:
    """by_ids: prompts go as token ids, else as text. extended: top_k, min_p and the like are known. exact: token ids
    come back; needs_logprobs: only beside log-probabilities. carry: how penalties of earlier output are kept."""

    by_ids: bool
    extended: bool
    exact: bool = False
    needs_logprobs: bool = False
    carry: Carry = Carry.LOST

    def body(self, job: Job, model: str, text: Text) -> dict[str, Any]:
        """One request. Raises JobFailed for what the server cannot be told, rather than to draw by other rules."""
        sampling = job.sampling
        if sampling is None:
            raise JobFailed("this engine keeps its KV to itself and can only serve whole requests")
        body: dict[str, Any] = {
            "model": model, "prompt": job.tokens if self.by_ids else text.decode(job.tokens), "stream": True,
            "max_tokens": sampling.max_tokens - job.num_output, "temperature": sampling.temperature,
            "top_p": sampling.top_p, "seed": (sampling.seed + job.num_output) & SEED_MASK,
            "presence_penalty": sampling.presence_penalty, "frequency_penalty": sampling.frequency_penalty,
        }  # fmt: skip
        if self.extended:
            body |= _extended(sampling, job.num_output)
        elif unknown := _unknown(sampling):
            raise JobFailed(f"this server does not know {unknown}; leave it out, or place the request elsewhere")
        if job.num_output and is_penalized(sampling):
            body |= self._carried(job.tokens[-job.num_output :], sampling)
        wanted = sampling.logprobs
        if wanted is not None or self.needs_logprobs:
            body["logprobs"] = max(1, wanted or 0) if self.needs_logprobs else wanted
        return body

    def _carried(self, output: TokenIds, sampling: SamplingParams) -> dict[str, Any]:
        if self.carry is Carry.LOST:
            raise JobFailed(
                "this server cannot go on with a request that has presence_penalty or frequency_penalty: it knows no "
                "logit_bias, by which they would count what was drawn before"
            )
        return {"logit_bias": penalty_bias(output, sampling)} if self.carry is Carry.BIAS else {}

    def learned(self, choice: dict[str, Any]) -> Dialect:
        """The same with what an answer to a probe shows."""
        if choice.get("token_ids"):
            return replace(self, exact=True)
        beside = _content(choice)
        exact = bool(beside) and all(isinstance(one.get("id"), int) for one in beside)
        return replace(self, exact=exact, needs_logprobs=exact)


PROBES = tuple(Dialect(by_ids, extended) for by_ids in (True, False) for extended in (True, False))
"""In the order in which they are tried."""


class Said(NamedTuple):
    ids: TokenIds
    logprobs: list[TokenLogprob] | None


class Reader:
    """One request's chunks to Outputs: cuts at its own stop tokens and length, and ends with the reason."""

    def __init__(self, dialect: Dialect, job: Job, text: Text, eos: tuple[int, ...]) -> None:
        sampling = job.sampling
        assert sampling is not None  # Dialect.body has refused it
        self._dialect, self._text, self._eos = dialect, text, eos
        self._num, self._most, self._least = job.num_output, sampling.max_tokens, sampling.min_tokens
        self._stops = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else eos)}
        self._logprobs = sampling.logprobs

    def take(self, chunk: dict[str, Any]) -> Output | None:
        """The next Output, if the chunk brings one. Raises JobFailed when the server gave the request up."""
        choices = chunk.get("choices")
        if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
            return None
        choice = choices[0]
        said, ending = self._said(choice), choice.get("finish_reason")
        ids, finish = self._cut(said.ids)
        if finish is None and ending is not None:
            if ending not in ("stop", "length", "eos_token", "stop_sequence", "eos"):
                raise JobFailed(f"the server ended the request early{named(ending)}")
            finish = FinishReason.LENGTH if ending == "length" else FinishReason.STOP
            if finish is FinishReason.STOP or not ids:
                ids = [*ids, self._eos[0] if self._eos else 0]  # servers swallow the token that they stop at
        self._num += len(ids)
        if not ids:
            return None
        return Output(tuple(ids), self._fitting(said.logprobs, len(ids)), finish)

    def _cut(self, ids: TokenIds) -> tuple[TokenIds, FinishReason | None]:
        for place, token in enumerate(ids, start=1):
            if token in self._stops and self._num + place > self._least:
                return ids[:place], FinishReason.STOP
            if self._num + place >= self._most:
                return ids[:place], FinishReason.LENGTH
        return ids, None

    def _fitting(self, found: list[TokenLogprob] | None, num: int) -> tuple[TokenLogprob, ...] | None:
        """One for each token; the one that the server swallowed, which clients are not shown, has none of its own."""
        if self._logprobs is None or found is None:
            return None
        return tuple((found + [TokenLogprob(logprob=0.0)] * num)[:num])

    def _said(self, choice: dict[str, Any]) -> Said:
        beside = _content(choice)
        if self._dialect.exact and not self._dialect.needs_logprobs:
            ids = [token for token in choice.get("token_ids") or () if isinstance(token, int)]
        elif self._dialect.exact:
            ids = [one["id"] for one in beside if isinstance(one.get("id"), int)]
        else:
            text = choice.get("text")
            ids = self._text.encode(text) if isinstance(text, str) and text else []
        if self._logprobs is None:
            return Said(ids, None)
        rows = [self._modern(one) for one in beside] if beside else self._classic(choice.get("logprobs"))
        return Said(ids, rows or None)

    def _modern(self, one: dict[str, Any]) -> TokenLogprob:
        """{"id", "logprob", "top_logprobs": [{"id", "logprob"}]}, as of chat completions."""
        tops = [top for top in one.get("top_logprobs") or () if isinstance(top, dict)][: self._logprobs]
        found = [(top.get("id"), top.get("logprob")) for top in tops]
        return _row(one.get("logprob"), found)

    def _classic(self, logprobs: Any) -> list[TokenLogprob]:
        """{"token_logprobs": [x], "top_logprobs": [{token: x}]}, as of completions."""
        if not isinstance(logprobs, dict):
            return []
        tops = logprobs.get("top_logprobs") or []
        rows = []
        for place, value in enumerate(logprobs.get("token_logprobs") or []):
            top = tops[place] if place < len(tops) and isinstance(tops[place], dict) else {}
            best = sorted(top.items(), key=lambda one: -one[1])[: self._logprobs]
            rows.append(_row(value, [(self._id(token), found) for token, found in best]))
        return rows

    def _id(self, token: str) -> int | None:
        number = token.removeprefix(TOKEN_PREFIX)
        return int(number) if number != token and number.isdigit() else self._text.id_of(token)


def _row(value: Any, tops: list[tuple[Any, Any]]) -> TokenLogprob:
    known = [(token, float(found)) for token, found in tops
             if isinstance(token, int) and isinstance(found, int | float)]  # fmt: skip
    return TokenLogprob(
        logprob=float(value) if isinstance(value, int | float) else 0.0,
        top_ids=tuple(token for token, _ in known), top_logprobs=tuple(found for _, found in known),
    )  # fmt: skip


def _content(choice: dict[str, Any]) -> list[dict[str, Any]]:
    logprobs = choice.get("logprobs")
    found = logprobs.get("content") if isinstance(logprobs, dict) else None
    return [one for one in found if isinstance(one, dict)] if isinstance(found, list) else []


def _extended(sampling: SamplingParams, num_output: int) -> dict[str, Any]:
    """Parameters beyond OpenAI's, and neutral values for those that servers set otherwise by default."""
    return {
        "top_k": sampling.top_k or -1, "min_p": sampling.min_p, "repetition_penalty": sampling.repetition_penalty,
        "repeat_penalty": sampling.repetition_penalty, "ignore_eos": sampling.ignore_eos,
        "min_tokens": max(0, sampling.min_tokens - num_output), "stop_token_ids": list(sampling.stop_token_ids),
        "return_token_ids": True, "return_tokens_as_token_ids": True,
    }  # fmt: skip


def _unknown(sampling: SamplingParams) -> str:
    """A parameter that asks for something and is not OpenAI's; stop tokens are ours to watch for."""
    neutral = SamplingParams(max_tokens=1)
    names = ("top_k", "min_p", "repetition_penalty", "ignore_eos", "min_tokens")
    return next((name for name in names if getattr(sampling, name) != getattr(neutral, name)), "")
