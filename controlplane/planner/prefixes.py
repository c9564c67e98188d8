"""How much of each prompt a cache without end would still have to compute, and how much of it nobody shares."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from controlplane.planner.charges import Floats
from transfer.errors import InvalidValue
from transfer.traces.request import TraceRequest


class Prefixes(NamedTuple):
    """Tokens, by request in the order of the trace. unseen: of the prompt, at least 1. own: in blocks that no other
    request has."""

    unseen: Floats
    own: Floats


class _Span:
    """A span of text after given text. num_held: its whole blocks that some earlier prompt had; users: prompts."""

    __slots__ = ("id", "num_held", "users")

    def __init__(self, id_: int) -> None:
        self.id, self.num_held, self.users = id_, 0, 0


def prefixes(trace: Sequence[TraceRequest], block_size: int) -> Prefixes:
    """trace: in order of arrival. Whole blocks alone are shared, and one token is always computed, as nodes do it."""
    spans: dict[tuple[int, int], _Span] = {}
    unseen, paths = np.empty(len(trace)), list[list[_Span]]()
    for index, request in enumerate(trace):
        path = _path(spans, request, block_size)
        paths.append(path)
        each = request.block_tokens // block_size
        whole, shareable = request.prompt_tokens // block_size, (request.prompt_tokens - 1) // block_size
        seen, unbroken = 0, True
        for place, span in enumerate(path):
            before = place * each
            if unbroken:
                found = min(each, shareable - before, span.num_held)
                seen += found
                unbroken = found == each
            span.num_held = max(span.num_held, min(each, whole - before))
            span.users += 1
        unseen[index] = request.prompt_tokens - seen * block_size
    own = np.empty(len(trace))
    for index, (request, path) in enumerate(zip(trace, paths, strict=True)):
        shared = sum(span.users > 1 for span in path)
        own[index] = max(0, request.prompt_tokens - shared * request.block_tokens)
    return Prefixes(unseen, own)


def _path(spans: dict[tuple[int, int], _Span], request: TraceRequest, block_size: int) -> list[_Span]:
    """Spans of the prompt that have a whole block."""
    if request.blocks and request.block_tokens % block_size:
        raise InvalidValue(
            f"a trace whose blocks are {request.block_tokens} tokens long cannot be bounded with KV blocks of "
            f"{block_size}; give a block size that divides {request.block_tokens}"
        )
    whole = request.prompt_tokens // block_size
    each, before = request.block_tokens // block_size if request.blocks else 1, 0
    path: list[_Span] = []
    for place, name in enumerate(request.blocks):
        if place * each >= whole:
            break
        span = spans.get((before, name))
        if span is None:
            span = spans[before, name] = _Span(len(spans) + 1)
        path.append(span)
        before = span.id
    return path
