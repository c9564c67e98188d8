"""Copies KV between vLLM's paged cache and arena blocks, layer by layer. Runs inside vLLM; needs torch only.

The arena's order is [block, token, head, component], K and V apart. vLLM's blocks hold all of one head together, on
CPUs in an order that probe.py finds. On CUDA both ways go through pinned memory on a stream of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from transfer.terms import KvLayout

_SAME_SIZE = {2: torch.int16, 4: torch.int32}
"""numpy has no bfloat16; moving bits needs none."""
TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens [first, last) of one request: `source` is its table in vLLM's cache, `arena` its table in the arena.

    `first` is at a block boundary of the arena when saving, of vLLM's cache when loading.
    """

    source: Sequence[int]
    arena: Sequence[int]
    first: int
    last: int


class Cache(Protocol):
    """One layer of vLLM's cache, read and written in whole blocks as [num_blocks * block_size, num_heads, head_dim]."""

    def read(self, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]: ...

    def write(self, blocks: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None: ...


class PackedCache:
    """[num_blocks, num_heads, block_size, 2 * head_dim] on the CPU, a head's cells in find_cells' order.

    numpy picks the cells: torch's index_select along the last dimension takes 16 times as long.
    """

    def __init__(self, cache: torch.Tensor, cells: tuple[torch.Tensor, torch.Tensor]) -> None:
        self._num_heads, self._block_size, self._head_dim = cache.shape[1], cache.shape[2], cache.shape[3] // 2
        self._flat = cache.view(_SAME_SIZE[cache.element_size()]).view(cache.shape[0], self._num_heads, -1)
        self._dtype = cache.dtype
        self._cells = torch.cat(cells).numpy()
        self._places = self._cells.argsort()

    def read(self, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        halves = torch.from_numpy(self._flat[blocks].numpy().take(self._cells, axis=2)).view(self._dtype)
        halves = halves.view(len(blocks), self._num_heads, 2, self._block_size, self._head_dim).permute(2, 0, 3, 1, 4)
        keys, values = halves.reshape(2, -1, self._num_heads, self._head_dim)
        return keys, values

    def write(self, blocks: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        shape = (2, len(blocks), self._block_size, self._num_heads, self._head_dim)
        halves = torch.stack((keys, values)).view(shape).permute(1, 3, 0, 2, 4)
        flat = halves.reshape(len(blocks), self._num_heads, -1).view(self._flat.dtype).numpy()
        self._flat.index_copy_(0, blocks, torch.from_numpy(flat.take(self._places, axis=2)))


class PlainCache:
    """[num_blocks, num_heads, block_size, 2 * head_dim] of any strides, K in front of V: vLLM's order on GPUs."""

    def __init__(self, cache: torch.Tensor) -> None:
        self._cache = cache.transpose(1, 2)
        self._head_dim = cache.shape[3] // 2

    def read(self, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        found = self._cache[blocks].flatten(0, 1)
        return found[..., : self._head_dim], found[..., self._head_dim :]

    def write(self, blocks: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        both = torch.cat((keys, values), -1)
        self._cache[blocks] = both.view(len(blocks), -1, *both.shape[1:])


class ArenaTensor:
    """One worker's heads of the arena: [num_layers, 2, num_blocks, block_size, num_heads, head_dim], with the strides
    of a memory that holds all of the model's."""

    def __init__(self, memory: memoryview, layout: KvLayout, num_blocks: int, heads: range) -> None:
        shape = (layout.num_layers, 2, num_blocks, layout.block_size, layout.num_kv_heads, layout.head_dim)
        self.layout = layout
        whole = torch.frombuffer(memory, dtype=TORCH_DTYPES[layout.dtype]).view(shape)
        self.tensor = whole[..., heads.start : heads.stop, :]

    def read(self, layer: int, blocks: Sequence[int], skip: int, count: int) -> torch.Tensor:
        """`count` tokens after the first `skip` of these blocks: [2, count, num_heads, head_dim]."""
        ids = torch.tensor(blocks)
        # K and V apart: along another than the first dimension torch selects slices of heads 18 times as slowly.
        found = torch.stack([half.index_select(0, ids) for half in self.tensor[layer]])
        return found.flatten(1, 2)[:, skip : skip + count]

    def write(self, layer: int, blocks: Sequence[int], keys: torch.Tensor, values: torch.Tensor) -> None:
        """Tokens from the start of these blocks on. Of a block that they do not fill the rest stays."""
        size = self.layout.block_size
        whole, rest = divmod(len(keys), size)
        ids = torch.tensor(blocks[:whole], dtype=torch.int64)
        for half, tokens in zip(self.tensor[layer], (keys, values), strict=True):
            if whole:
                half.index_copy_(0, ids, tokens[: whole * size].reshape(whole, size, *tokens.shape[1:]))
            if rest:
                half[blocks[whole], :rest] = tokens[whole * size :]


def read_span(cache: Cache, span: Span, block_size: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of the span's tokens out of vLLM's cache: [num_tokens, num_heads, head_dim] each."""
    first, last = span.first // block_size, -(-span.last // block_size)
    keys, values = cache.read(torch.tensor(span.source[first:last], device=device))
    skip, count = span.first - first * block_size, span.last - span.first
    return keys[skip : skip + count], values[skip : skip + count]


def write_span(cache: Cache, span: Span, block_size: int, halves: torch.Tensor) -> None:
    """The span's tokens, [2, num_tokens, num_heads, head_dim], into vLLM's cache; what follows in its last block is
    zeroed."""
    first, last = span.first // block_size, -(-span.last // block_size)
    missing = (last - first) * block_size - halves.shape[1]
    if missing:
        halves = torch.nn.functional.pad(halves, (0, 0, 0, 0, 0, missing))
    cache.write(torch.tensor(span.source[first:last], device=halves.device), halves[0], halves[1])


def arena_span(span: Span, block_size: int) -> tuple[Sequence[int], int]:
    """The span's blocks in the arena and the tokens before it in the first of them."""
    first, last = span.first // block_size, -(-span.last // block_size)
    return span.arena[first:last], span.first - first * block_size
