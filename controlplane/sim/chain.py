"""Block hashes of requests without text: chained from the ids that a trace gives to spans of its prompts."""

from __future__ import annotations

import hashlib

from nodes.core.blocks import BlockKey
from transfer.errors import InvalidValue
from transfer.terms import RequestId
from transfer.traces.request import TraceRequest


class Chain:
    """Equal ids after equal ids give equal hashes, whatever request they are in. Remembers every span it has hashed."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._keys: dict[tuple[bytes, int], tuple[BlockKey, ...]] = {}

    def keys(self, request_id: RequestId, request: TraceRequest) -> tuple[BlockKey, ...]:
        """Keys of the whole blocks of the prompt. What no id covers is the request's own.

        Raises InvalidValue when the trace's spans are not whole blocks."""
        size = self._block_size
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
                keys = self._keys.get((before, span))
                if keys is None:
                    keys = self._keys[before, span] = _chained(before, b"%d" % span, num_each)
                found.extend(keys)
                before = keys[-1].digest
        if len(found) < wanted:
            found.extend(_chained(before, b"own\0" + request_id.encode(), wanted - len(found)))
        return tuple(found[:wanted])


def _chained(before: bytes, name: bytes, count: int) -> tuple[BlockKey, ...]:
    keys: list[BlockKey] = []
    for index in range(count):
        before = hashlib.sha256(before + b"%d\0" % index + name).digest()
        keys.append(BlockKey(before, b""))
    return tuple(keys)
