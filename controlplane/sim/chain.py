"""Block hashes of requests without text: chained from the ids that a trace gives to spans of its prompts."""

from __future__ import annotations

import hashlib

from nodes.core.blocks import BlockKey
from transfer.errors import InvalidValue
from transfer.terms import RequestId
from transfer.traces.request import TraceRequest

_NOWHERE: tuple[None, list[BlockKey]] = (None, [])


class Chain:
    """Equal ids after equal ids give equal hashes, whatever request they are in. Remembers every span it has hashed."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._usual: dict[int, tuple[bytes, list[BlockKey]]] = {}
        """By span alone, where it first was: traces number their spans so that most are in one place only."""
        self._keys: dict[tuple[bytes, int], list[BlockKey]] = {}
        """The others."""

    def keys(self, request_id: RequestId, request: TraceRequest) -> tuple[BlockKey, ...]:
        """Keys of the whole blocks of the prompt. What no id covers is the request's own.

        Raises InvalidValue when the trace's spans are not whole blocks."""
        size, usual = self._block_size, self._usual
        wanted = request.prompt_tokens // size
        found: list[BlockKey] = []
        before = b""
        if request.blocks:
            if request.block_tokens % size:
                raise InvalidValue(
                    f"a trace whose blocks are {request.block_tokens} tokens long cannot be simulated with KV blocks "
                    f"of {size}; give a block size that divides {request.block_tokens}"
                )
            num_each = request.block_tokens // size
            for span in request.blocks:
                if len(found) >= wanted:
                    break
                after, keys = usual.get(span, _NOWHERE)
                if after != before:
                    keys = self._elsewhere(before, span, num_each)
                found += keys
                before = keys[-1][0]
        if len(found) < wanted:
            found += _chained(before, b"own\0" + request_id.encode(), wanted - len(found))
        return tuple(found[:wanted])

    def _elsewhere(self, before: bytes, span: int, count: int) -> list[BlockKey]:
        """Keys of a span that is new, or known after something else only."""
        keys = self._keys.get((before, span))
        if keys is None:
            keys = _chained(before, b"%d" % span, count)
            if span in self._usual:
                self._keys[before, span] = keys
            else:
                self._usual[span] = (before, keys)
        return keys


def _chained(before: bytes, name: bytes, count: int) -> list[BlockKey]:
    keys: list[BlockKey] = []
    for index in range(count):
        before = hashlib.sha256(before + b"%d\0" % index + name).digest()
        keys.append(tuple.__new__(BlockKey, (before, b"")))
    return keys
