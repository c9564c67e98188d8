"""Copies between a packed cache and an arena, and how the packing is found."""

from __future__ import annotations

import pytest
import torch

from nodes.engines.vllm.mover import (
    ArenaTensor,
    Cache,
    PackedCache,
    PlainCache,
    Span,
    arena_span,
    read_span,
    write_span,
)
from nodes.engines.vllm.probe import Write, find_cells
from transfer.errors import InvalidValue
from transfer.kv.arena import HostArena
from transfer.terms import KvLayout

HEADS, SIZE, DIM, BLOCKS = 2, 8, 4, 6


def writer(order: torch.Tensor) -> Write:
    """A backend that keeps a head's K and V of a block in `order`."""

    def write(keys: torch.Tensor, values: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
        block = int(slots[0]) // SIZE
        for head in range(HEADS):
            plain = torch.cat((keys[:, head].reshape(-1), values[:, head].reshape(-1)))
            cache[block, head].view(-1)[order] = plain

    return write


def packed(order: torch.Tensor, dtype: torch.dtype = torch.bfloat16) -> Cache:
    cells = find_cells(writer(order), HEADS, SIZE, DIM, dtype)
    return PackedCache(torch.zeros(BLOCKS, HEADS, SIZE, 2 * DIM, dtype=dtype), cells)


def plain(_: torch.Tensor) -> Cache:
    return PlainCache(torch.zeros(BLOCKS, SIZE, HEADS, 2 * DIM, dtype=torch.bfloat16).transpose(1, 2))


ORDERS = {
    "plain": torch.arange(2 * SIZE * DIM),
    "keys transposed": torch.cat((torch.arange(32).view(DIM, SIZE).T.reshape(-1), 32 + torch.arange(32))),
    "shuffled": torch.randperm(2 * SIZE * DIM, generator=torch.Generator().manual_seed(3)),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
def test_the_packing_is_found(order: torch.Tensor, dtype: torch.dtype) -> None:
    keys, values = find_cells(writer(order), HEADS, SIZE, DIM, dtype)
    assert torch.equal(torch.cat((keys, values)), order)


def test_what_is_no_permutation_is_refused() -> None:
    def halves_precision(keys: torch.Tensor, values: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
        cache[1].view(HEADS, -1)[:, : SIZE * DIM] = ((keys + values) / 2).transpose(0, 1).reshape(HEADS, -1)

    def spills(keys: torch.Tensor, values: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
        cache[:2] = 1

    with pytest.raises(InvalidValue, match="element by element"):
        find_cells(halves_precision, HEADS, SIZE, DIM, torch.float32)
    with pytest.raises(InvalidValue, match="outside its block"):
        find_cells(spills, HEADS, SIZE, DIM, torch.float32)


@pytest.mark.parametrize("make", [lambda: packed(ORDERS["shuffled"]), lambda: plain(torch.empty(0))])
@pytest.mark.parametrize("arena_size", [SIZE, SIZE // 2])
@pytest.mark.parametrize("num_tokens", [5, 16, 19])
def test_kv_survives_the_way_through_the_arena(make: object, arena_size: int, num_tokens: int) -> None:
    assert callable(make)
    source, target = make(), make()
    tokens = torch.randn(2, num_tokens, HEADS, DIM).bfloat16()
    table, ids = [4, 1, 3], [7, 0, 5, 2, 6, 1]
    write_span(source, Span(table, (), 0, num_tokens), SIZE, tokens)
    layout = KvLayout(
        num_layers=1, num_kv_heads=HEADS, head_dim=DIM, block_size=arena_size, dtype="bfloat16", rope="none"
    )
    host = HostArena(layout, 8)
    arena = ArenaTensor(host.buffer, layout, 8, range(HEADS))
    first = arena_size if num_tokens > arena_size else 0
    for start, last in ((0, first), (first, num_tokens)):
        if last > start:
            span = Span(table, ids, start, last)
            blocks, _ = arena_span(span, arena_size)
            arena.write(0, blocks, *read_span(source, span, SIZE, torch.device("cpu")))
    assert bytes(host.views(0, ids[0], 1)[0][: HEADS * DIM * 2]) == tokens[0, 0].view(torch.int16).numpy().tobytes()
    back = Span([2, 5, 0], ids, 0, num_tokens)
    blocks, skip = arena_span(back, arena_size)
    write_span(target, back, SIZE, arena.read(0, blocks, skip, num_tokens))
    found = read_span(target, back, SIZE, torch.device("cpu"))
    assert torch.equal(torch.stack(found), tokens)


def test_a_load_that_begins_within_a_table_leaves_the_blocks_before_alone() -> None:
    cache = packed(ORDERS["keys transposed"])
    tokens = torch.randn(2, 20, HEADS, DIM).bfloat16()
    write_span(cache, Span([0, 1, 2], (), 0, 20), SIZE, tokens)
    write_span(cache, Span([0, 1, 2], (), 8, 20), SIZE, tokens[:, 8:] * 2)
    keys, values = read_span(cache, Span([0, 1, 2], (), 0, 20), SIZE, torch.device("cpu"))
    assert torch.equal(keys[:8], tokens[0, :8])
    assert torch.equal(values[8:], tokens[1, 8:] * 2)
