"""How much of each prompt a cache without end would still have to compute, and how much of it nobody shares."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from controlplane.planner.charges import Floats
from transfer.errors import InvalidValue
from transfer.said import say
from transfer.traces.request import TraceRequest


class Prefixes(NamedTuple):
    """Tokens, by request in the order of the trace. unseen: of the prompt, at least 1. own: in blocks that no other
    request has."""

    unseen: Floats
    own: Floats


def prefixes(trace: Sequence[TraceRequest], block_size: int) -> Prefixes:
    """trace: in order of arrival. Whole blocks alone are shared, and one token is always computed, as nodes do it."""
    spans = _Spans()
    held, users = spans.num_held, spans.num_users
    unseen, paths = np.empty(len(trace)), list[list[int]]()
    for index, request in enumerate(trace):
        path = spans.path(request, block_size)
        paths.append(path)
        each = request.block_tokens // block_size
        whole, shareable = request.prompt_tokens // block_size, (request.prompt_tokens - 1) // block_size
        seen = 0
        for span in path:
            found = min(each, shareable - seen, held[span])
            seen += found
            if found < each:
                break
        for span in path[:-1]:
            held[span] = each
            users[span] += 1
        if path:
            last = path[-1]
            held[last] = max(held[last], min(each, whole - (len(path) - 1) * each))
            users[last] += 1
        unseen[index] = request.prompt_tokens - seen * block_size
    own = np.empty(len(trace))
    for index, (request, path) in enumerate(zip(trace, paths, strict=True)):
        shared = sum([users[span] > 1 for span in path])
        own[index] = max(0, request.prompt_tokens - shared * request.block_tokens)
    return Prefixes(unseen, own)


class _Spans:
    """Numbers each span of text after given text, from 1 on. num_held: its whole blocks that some earlier prompt had;
    num_users: prompts with it."""

    def __init__(self) -> None:
        self.num_held, self.num_users = [0], [0]
        self._usual: dict[int, tuple[int, int]] = {}
        """By its name alone, after what it was found first: traces name most spans so that they are in one place."""
        self._others: dict[tuple[int, int], int] = {}

    def path(self, request: TraceRequest, block_size: int) -> list[int]:
        """Spans of the prompt that have a whole block."""
        if not request.blocks:
            return []
        if request.block_tokens % block_size:
            raise InvalidValue(say("planner.blocks", num=request.block_tokens, size=block_size))
        whole, each = request.prompt_tokens // block_size, request.block_tokens // block_size
        usual, before, found = self._usual, 0, list[int]()
        for name in request.blocks[: -(-whole // each)]:
            after, span = usual.get(name, _NOWHERE)
            if after != before:
                span = self._elsewhere(before, name)
            found.append(span)
            before = span
        return found

    def _elsewhere(self, before: int, name: int) -> int:
        """A span that is new, or after something else than at first."""
        span = self._others.get((before, name))
        if span is None:
            span = len(self.num_held)
            self.num_held.append(0)
            self.num_users.append(0)
            if name in self._usual:
                self._others[before, name] = span
            else:
                self._usual[name] = (before, span)
        return span


_NOWHERE = (-1, 0)
