"""Finds how a backend of vLLM packs a block of its KV cache, by writing numbers through it and looking where they went.

On CPUs the order within a block depends on the instruction set (keys may be transposed or interleaved for matrix
units) and is not written down anywhere. A block that is no plain permutation of keys and values is refused.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from transfer.errors import InvalidValue

Write = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]
"""(key, value, cache, slots): key, value [num_tokens, num_heads, head_dim] into cache, as the backend's kernel does."""


def find_cells(
    write: Write, num_heads: int, block_size: int, head_dim: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Where K and V of a block are: two of [block_size * head_dim], int64; element t * head_dim + d is the cell of
    token t's component d among the 2 * block_size * head_dim cells that one head has in a block.

    Each element's number is written bit by bit, as zeros and ones, which any dtype holds exactly.
    Raises InvalidValue where a cell holds none of them, or heads differ.
    """
    half = block_size * head_dim
    slots = torch.arange(block_size, 2 * block_size)
    numbers = torch.arange(half).view(block_size, 1, head_dim).expand(block_size, num_heads, head_dim)

    def cells(keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        cache = torch.zeros((3, num_heads, block_size, 2 * head_dim), dtype=dtype)
        write(keys.to(dtype).contiguous(), values.to(dtype).contiguous(), cache, slots)
        if cache[0].any() or cache[2].any():
            raise InvalidValue("vLLM's backend writes a token outside its block; its KV cannot be moved")
        return cache[1].reshape(num_heads, 2 * half).round().long()

    ones, zeros = torch.ones_like(numbers), torch.zeros_like(numbers)
    is_key = cells(ones, zeros)
    found = torch.zeros_like(is_key)
    for bit in range(max(1, (half - 1).bit_length())):
        found += cells(numbers >> bit & 1, numbers >> bit & 1) << bit
    order = torch.where(is_key == 1, found, found + half)
    if (
        not torch.equal(order.sort(-1).values, torch.arange(2 * half).expand(num_heads, -1))
        or (order != order[0]).any()
    ):
        raise InvalidValue("vLLM's backend packs KV other than element by element; its KV cannot be moved")
    where = order[0].argsort()
    return where[:half], where[half:]
