"""A typed body to a checked request: sampling, stop strings, logprobs, counts. Tokenises nothing, starts nothing."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from controlplane.gateway.bodies import ChatBody, ChatMessage, CompletionBody, Generation
from controlplane.gateway.errors import ApiError, invalid
from controlplane.text import shown
from transfer.terms import SamplingParams, TokenIds

COMPLETION_MAX_TOKENS = 16
"""What the OpenAI API makes of a plain completion that names no max_tokens; a chat may use the rest of the context."""
MAX_STOPS = 16
MAX_STOP_CHARS = 256
MAX_STOP_TOKEN_IDS = 64
MAX_LOGPROBS = 20
MIN_REPETITION_PENALTY = 0.01
"""Logits are divided by it: far smaller ones make them infinite, which an engine must take for its own failure."""
MAX_SHOWN_CHARS = 40
_SEED_MASK = (1 << 63) - 1
_SEED_STRIDE = 0x9E3779B97F4A7C15

_NO_OPS: dict[str, tuple[Any, ...]] = {
    "logit_bias": ({},), "skip_special_tokens": (True,), "spaces_between_special_tokens": (True, False),
    "tools": ([],), "tool_choice": ("none", "auto"), "functions": ([],), "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},), "modalities": (["text"],), "audio": (), "reasoning_effort": ("none",),
    "verbosity": ("medium",), "web_search_options": (), "echo": (False,), "suffix": ("",),
}  # fmt: skip
"""Parameters that would change the answer and are not served, with the values that change nothing."""
_ROLES = ("system", "developer", "user", "assistant", "tool")
_MESSAGE_NO_OPS = ("audio", "tool_calls", "function_call", "tool_call_id")


@dataclass(frozen=True, slots=True)
class Wanted:
    """One call, checked, before its prompts are known. sampling: of the first choice; max_tokens is filled in later."""

    sampling: SamplingParams
    max_tokens: int | None
    usual_tokens: float
    """Most tokens of an answer whose length was not asked for."""
    n: int
    stops: tuple[str, ...]
    include_stop: bool
    stream: bool
    include_usage: bool
    continuous_usage: bool
    token_ids: bool
    """Choices carry the ids of their tokens too, the hidden stop token included."""

    def sampling_for(self, choice: int, num_prompt_tokens: int, max_context: int) -> SamplingParams:
        """Choice 0 has the seed that was asked for; others another one each. Raises ApiError over the context."""
        room = max_context - num_prompt_tokens
        max_tokens = int(min(room, self.usual_tokens)) if self.max_tokens is None else self.max_tokens
        if room < 1 or max_tokens > room:
            asked = "at least 1" if self.max_tokens is None else str(self.max_tokens)
            raise invalid(
                f"the model's context is {max_context} tokens, but the prompt has {num_prompt_tokens} and the answer "
                f"wants {asked}; shorten the prompt or ask for fewer",
                "max_tokens" if self.max_tokens is not None and room >= 1 else "prompt", "context_length_exceeded",
            )  # fmt: skip
        if self.sampling.min_tokens > max_tokens:
            raise invalid(f"min_tokens {self.sampling.min_tokens} is over max_tokens {max_tokens}", "min_tokens")
        seed = (self.sampling.seed + choice * _SEED_STRIDE) & _SEED_MASK
        return msgspec.structs.replace(self.sampling, max_tokens=max_tokens, seed=seed)


def check(body: Generation, vocab_size: int) -> Wanted:
    """Everything that needs no tokenizer. Raises ApiError 400 naming the parameter."""
    _refuse_unsupported(body)
    options = body.stream_options
    if options is not None and not body.stream:
        raise invalid("stream_options is only allowed with stream: true", "stream_options")
    max_tokens = body.max_tokens
    if isinstance(body, ChatBody) and body.max_completion_tokens is not None:
        max_tokens = body.max_completion_tokens
    if max_tokens is not None:
        _within("max_tokens", max_tokens, 1, math.inf)
    n = 1 if body.n is None else body.n
    _within("n", n, 1, math.inf)
    if isinstance(body, CompletionBody) and body.best_of not in (None, n):
        raise invalid(f"best_of {body.best_of} is not supported; leave it out or make it equal to n", "best_of")
    return Wanted(
        sampling=_sampling(body, vocab_size),
        max_tokens=max_tokens,
        usual_tokens=COMPLETION_MAX_TOKENS if isinstance(body, CompletionBody) else math.inf,
        n=n,
        stops=_stops(body.stop),
        include_stop=bool(body.include_stop_str_in_output),
        stream=bool(body.stream),
        include_usage=bool(options and options.include_usage),
        continuous_usage=bool(options and options.include_usage and options.continuous_usage_stats),
        token_ids=bool(body.return_token_ids),
    )


def chat_messages(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """As chat templates want them: text parts joined. Raises ApiError 400 for what is not text."""
    if not messages:
        raise invalid("messages is empty; send at least one", "messages")
    return [_message(message, f"messages[{place}]") for place, message in enumerate(messages)]


def completion_prompts(prompt: str | list[Any], vocab_size: int) -> list[str | TokenIds]:
    """One text or id list for each prompt. Raises ApiError 400 for any other nesting or an id out of range."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise invalid("prompt is empty; send text or token ids", "prompt")
    if all(isinstance(entry, str) for entry in prompt):
        return list(prompt)
    if all(type(entry) is int for entry in prompt):
        prompt = [prompt]
    for entry in prompt:
        if not isinstance(entry, list) or not entry or not all(type(token) is int for token in entry):
            raise invalid("prompt must be text, a list of texts, a list of token ids or a list of such lists", "prompt")
        if not (min(entry) >= 0 and max(entry) < vocab_size):
            raise invalid(f"prompt holds a token id outside 0..{vocab_size - 1}", "prompt")
    return list(prompt)


def _refuse_unsupported(body: Generation) -> None:
    for name, harmless in _NO_OPS.items():
        value = getattr(body, name, None)
        if value is not None and value not in harmless:
            raise _unsupported(name)


def _unsupported(name: str) -> ApiError:
    return invalid(f"parameter {name} is not supported by this server; leave it out", name, "unsupported_parameter")


def _sampling(body: Generation, vocab_size: int) -> SamplingParams:
    stop_ids = tuple(dict.fromkeys(body.stop_token_ids or ()))
    if len(stop_ids) > MAX_STOP_TOKEN_IDS:
        raise invalid(f"stop_token_ids may hold {MAX_STOP_TOKEN_IDS} ids, got {len(stop_ids)}", "stop_token_ids")
    if any(not 0 <= token < vocab_size for token in stop_ids):
        raise invalid(f"stop_token_ids holds an id outside 0..{vocab_size - 1}", "stop_token_ids")
    seed = random.getrandbits(63) if body.seed is None else body.seed & _SEED_MASK
    return SamplingParams(
        max_tokens=0,
        seed=seed,
        temperature=_number(body, "temperature", 1.0, 0.0, 100.0),
        top_p=_number(body, "top_p", 1.0, 0.0, 1.0, above=True),
        top_k=_top_k(body.top_k, vocab_size),
        min_p=_number(body, "min_p", 0.0, 0.0, 1.0),
        min_tokens=_min_tokens(body.min_tokens),
        stop_token_ids=stop_ids,
        ignore_eos=bool(body.ignore_eos),
        logprobs=_logprobs(body),
        presence_penalty=_number(body, "presence_penalty", 0.0, -2.0, 2.0),
        frequency_penalty=_number(body, "frequency_penalty", 0.0, -2.0, 2.0),
        repetition_penalty=_number(body, "repetition_penalty", 1.0, MIN_REPETITION_PENALTY, 100.0),
    )


def _min_tokens(value: int | None) -> int:
    _within("min_tokens", value or 0, 0, math.inf)
    return value or 0


def _top_k(value: int | None, vocab_size: int) -> int:
    if value is None or value == -1:
        return 0
    _within("top_k", value, 0, math.inf)
    return min(value, vocab_size)


def _logprobs(body: Generation) -> int | None:
    if isinstance(body, ChatBody):
        if body.top_logprobs is not None and not body.logprobs:
            raise invalid("top_logprobs is only allowed with logprobs: true", "top_logprobs")
        wanted, name = (body.top_logprobs or 0) if body.logprobs else None, "top_logprobs"
    else:
        wanted, name = body.logprobs if isinstance(body, CompletionBody) else None, "logprobs"
    if wanted is not None:
        _within(name, wanted, 0, MAX_LOGPROBS)
    return wanted


def _stops(stop: str | list[str] | None) -> tuple[str, ...]:
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if len(stops) > MAX_STOPS:
        raise invalid(f"stop may hold {MAX_STOPS} strings, got {len(stops)}", "stop")
    if any(not 1 <= len(text) <= MAX_STOP_CHARS for text in stops):
        raise invalid(f"each stop string must have 1 to {MAX_STOP_CHARS} characters", "stop")
    return stops


def _number(body: Generation, name: str, default: float, low: float, high: float, *, above: bool = False) -> float:
    value = getattr(body, name)
    if value is None:
        return default
    _within(name, value, low, high, above=above)
    return float(value)


def _within(name: str, value: float, low: float, high: float, *, above: bool = False) -> None:
    """Raises ApiError 400 unless low <= value <= high (low < value when `above`); NaN never is."""
    if (low < value if above else low <= value) and value <= high:
        return
    limit = f"above {low:g}" if above else f"at least {low:g}"
    limit += "" if math.isinf(high) else f" and at most {high:g}"
    got = f"{value:g}" if isinstance(value, float) else str(value)[:MAX_SHOWN_CHARS]  # an int may be too large for g
    raise invalid(f"{name} must be {limit}, got {got}", name)


def _message(message: ChatMessage, path: str) -> dict[str, Any]:
    for name in _MESSAGE_NO_OPS:
        if getattr(message, name) not in (None, []):
            raise _unsupported(f"{path}.{name}")
    if message.role not in _ROLES:
        raise invalid(f"{path}.role must be one of {', '.join(_ROLES)}, got {shown(message.role)}", f"{path}.role")
    content = message.content
    if content is None:
        raise invalid(f"{path}.content is missing; send text", f"{path}.content")
    if not isinstance(content, str):
        for place, part in enumerate(content):
            if part.type != "text" or part.text is None:
                name = f"{path}.content[{place}]"
                raise invalid(f"{name} is of type {shown(part.type)}; this server takes text only", name)
        content = "".join(part.text or "" for part in content)
    # Templates know "system"; OpenAI renamed it.
    return {"role": "system" if message.role == "developer" else message.role, "content": content}
