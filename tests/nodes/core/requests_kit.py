"""Requests for tests of an instance's cores, and their right answers.

KV of a position is a digest of every token up to it, and the next token comes of the last one.
"""

from __future__ import annotations

import hashlib

from nodes.core.events import (
    Add,
    SequenceSpec,
    Work,
)
from nodes.core.residency import BatchConfig
from transfer.terms import FinishReason, SamplingParams

ROOT = b"r" * 32
EOS = 0
VOCAB = 7
PROMPT = [1, 2, 3, 4, 5, 6, 1, 2, 3, 4]
PREFIXES = ([], [1, 2, 3, 4], [1, 2, 3, 4, 5, 6, 1, 2], [5, 5, 5, 5, 5, 5])
"""Of random prompts: short ones that begin alike."""
ROOTS = (ROOT, b"t" * 32)


def config(**changes: object) -> BatchConfig:
    base = {
        "num_blocks": 16, "block_size": 4, "max_context": 48, "token_budget": 16, "max_running": 8,
        "max_waiting": 8, "eos_token_ids": (EOS,), "watermark": 0.0,
    }  # fmt: skip
    return BatchConfig(**{**base, **changes})


def params(max_tokens: int = 8, **changes: object) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, **{"ignore_eos": True, **changes})


def spec(request_id: str, tokens: list[int], work: Work = Work.LOCAL, **changes: object) -> SequenceSpec:
    base = {
        "request_id": request_id, "generation": 1, "work": work, "tokens": tokens, "num_output": 0,
        "sampling": None if work is Work.PREFILL else params(), "root": ROOT, "lease_s": 10.0,
    }  # fmt: skip
    return SequenceSpec(**{**base, **changes})


def only(effects: list, kind: type):
    found = [effect for effect in effects if isinstance(effect, kind)]
    assert len(found) == 1, effects
    return found[0]


def none_of(effects: list, kind: type) -> bool:
    return not any(isinstance(effect, kind) for effect in effects)


def add(one) -> Add:
    return Add(spec=one)


def prefill(request_id: str = "p", tokens: list[int] | None = None, **changes: object):
    return spec(request_id, tokens or PROMPT, Work.PREFILL, **changes)


def receive(request_id: str = "r", tokens: list[int] | None = None, **changes: object):
    return spec(request_id, tokens or PROMPT, Work.RECEIVE, **changes)


def digests(tokens: list[int], root: bytes = ROOT) -> list[bytes]:
    """KV of every position: [len(tokens)] digests, each of all tokens up to and with its own."""
    state, out = root, []
    for token in tokens:
        state = hashlib.blake2b(state + bytes([token]), digest_size=8).digest()
        out.append(state)
    return out


def next_token(state: bytes, banned: tuple[int, ...] = ()) -> int:
    allowed = [token for token in range(VOCAB) if token not in banned]
    return allowed[state[0] % len(allowed)]


def reference(one: SequenceSpec, max_length: int) -> tuple[list[int], FinishReason]:
    """All output tokens of the request and why it ends, computed without batching, blocks or chunks."""
    assert one.sampling is not None
    p, stops = one.sampling, set(one.sampling.stop_token_ids)
    if not p.ignore_eos:
        stops.add(EOS)
    tokens = one.tokens[: len(one.tokens) - one.num_output]
    output: list[int] = []
    while True:
        banned = tuple(stops) if len(output) < p.min_tokens else ()
        token = next_token(digests(tokens + output, one.root)[-1], banned)
        output.append(token)
        if token in stops and len(output) > p.min_tokens:
            return output, FinishReason.STOP
        if len(output) >= p.max_tokens or len(tokens) + len(output) >= max_length:
            return output, FinishReason.LENGTH
