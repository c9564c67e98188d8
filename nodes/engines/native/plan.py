"""Turns a step's chunks into the index tensors that every layer reuses. It computes no attention.

Row order inside a step: chunks of several tokens first, then single tokens sorted by context length, so that
each kind is one slice. Single tokens of similar length form a group that is attended to in one call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from nodes.engines.engine import Chunk, StepBatch
from transfer.errors import InvalidValue

_GROUP_SLACK_TOKENS = 64
_GROUP_RATIO = 1.25
"""A group's longest context is at most this times its shortest, plus the slack: bounds the padding computed."""


@dataclass(frozen=True, slots=True)
class KvSpan:
    """Where the KV of one sequence's first `num_tokens` positions lies.

    first_slot: where it starts, if its blocks follow one another; else None and `index` [2 * num_blocks]
    names the K blocks, then the V blocks, as rows of LayerKv.halves.
    """

    num_tokens: int
    first_slot: int | None
    index: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class ChunkSpan:
    """Rows [first_row, first_row + num_rows) are consecutive positions from `start` of one sequence."""

    first_row: int
    num_rows: int
    start: int
    kv: KvSpan


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Rows [first_row, first_row + num_rows) are single tokens of as many sequences.

    One sequence: `single`. Several: index [2 * num_rows * num_blocks] as in KvSpan, padded with each
    sequence's first block; mask [num_rows, 1, 1, num_blocks * block_size] is -inf on padding; stale [any]
    names all gathered rows past a sequence's end, to be zeroed: an earlier owner may have left a NaN there.
    """

    first_row: int
    num_rows: int
    single: KvSpan | None = None
    index: torch.Tensor | None = None
    mask: torch.Tensor | None = None
    stale: torch.Tensor | None = None
    num_blocks: int = 0


@dataclass(frozen=True, slots=True)
class StepPlan:
    """tokens, positions, slots: [num_rows]. sampled holds the chunks to sample; logit_rows their last rows."""

    tokens: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    chunks: list[ChunkSpan]
    groups: list[DecodeGroup]
    sampled: list[Chunk]
    logit_rows: torch.Tensor


@dataclass(frozen=True, slots=True)
class Limits:
    """What a step's chunks must keep to."""

    num_blocks: int
    block_size: int
    vocab_size: int
    max_context: int


def check_batch(batch: StepBatch, limits: Limits) -> None:
    """Raises InvalidValue when a chunk reaches outside the arena, the vocabulary or the context."""
    if not batch.chunks:
        raise InvalidValue("a step needs at least one chunk")
    for chunk in batch.chunks:
        end = chunk.start + len(chunk.tokens)
        where = f"chunk {chunk.start}..{end} of request {chunk.request_id}"
        if not chunk.tokens or chunk.start < 0:
            raise InvalidValue(f"{where} holds no tokens")
        if end > limits.max_context:
            raise InvalidValue(f"{where} exceeds the context of {limits.max_context} tokens")
        if end > len(chunk.block_table) * limits.block_size:
            raise InvalidValue(f"{where} does not fit in its {len(chunk.block_table)} blocks of {limits.block_size}")
        if min(chunk.block_table) < 0 or max(chunk.block_table) >= limits.num_blocks:
            raise InvalidValue(f"{where} names a block outside 0..{limits.num_blocks - 1}")
        if min(chunk.tokens) < 0 or max(chunk.tokens) >= limits.vocab_size:
            raise InvalidValue(f"{where} names a token outside 0..{limits.vocab_size - 1}")


def plan_step(batch: StepBatch, limits: Limits, dtype: torch.dtype, device: torch.device) -> StepPlan:
    """`batch` has passed check_batch. `dtype` is that of the masks."""
    size = limits.block_size
    many = [chunk for chunk in batch.chunks if len(chunk.tokens) > 1]
    single = sorted((chunk for chunk in batch.chunks if len(chunk.tokens) == 1), key=lambda chunk: chunk.start)
    tokens: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    spans: list[ChunkSpan] = []
    sampled: list[Chunk] = []
    logit_rows: list[int] = []
    for chunk in many + single:
        first, end = len(tokens), chunk.start + len(chunk.tokens)
        tokens += chunk.tokens
        positions += range(chunk.start, end)
        table = chunk.block_table
        slots += [table[position // size] * size + position % size for position in range(chunk.start, end)]
        if len(chunk.tokens) > 1:
            kv = _span(table, end, limits, device)
            spans.append(ChunkSpan(first_row=first, num_rows=len(chunk.tokens), start=chunk.start, kv=kv))
        if chunk.sampling is not None:
            sampled.append(chunk)
            logit_rows.append(len(tokens) - 1)
    return StepPlan(
        tokens=torch.tensor(tokens, device=device),
        positions=torch.tensor(positions, device=device),
        slots=torch.tensor(slots, device=device),
        chunks=spans,
        groups=_groups(single, len(tokens) - len(single), limits, dtype, device),
        sampled=sampled,
        logit_rows=torch.tensor(logit_rows, dtype=torch.int64, device=device),
    )


def _groups(
    single: Sequence[Chunk], first_row: int, limits: Limits, dtype: torch.dtype, device: torch.device
) -> list[DecodeGroup]:
    """`single` is sorted by context length."""
    groups: list[DecodeGroup] = []
    begin = 0
    while begin < len(single):
        longest = _GROUP_RATIO * single[begin].start + _GROUP_SLACK_TOKENS
        end = begin + 1
        while end < len(single) and single[end].start <= longest:
            end += 1
        groups.append(_group(single[begin:end], first_row + begin, limits, dtype, device))
        begin = end
    return groups


def _group(
    members: Sequence[Chunk], first_row: int, limits: Limits, dtype: torch.dtype, device: torch.device
) -> DecodeGroup:
    if len(members) == 1:
        kv = _span(members[0].block_table, members[0].start + 1, limits, device)
        return DecodeGroup(first_row=first_row, num_rows=1, single=kv)
    size = limits.block_size
    num_blocks = (members[-1].start + size) // size
    width = num_blocks * size
    blocks: list[int] = []
    stale: list[int] = []
    for row, chunk in enumerate(members):
        used = (chunk.start + size) // size
        blocks += chunk.block_table[:used]
        blocks += chunk.block_table[:1] * (num_blocks - used)
        stale += range(row * width + chunk.start + 1, (row + 1) * width)
    lengths = torch.tensor([chunk.start + 1 for chunk in members], device=device)
    padding = torch.arange(width, device=device) >= lengths[:, None]
    mask = torch.zeros(len(members), width, dtype=dtype, device=device).masked_fill_(padding, float("-inf"))
    stale += [slot + len(members) * width for slot in stale]
    return DecodeGroup(
        first_row=first_row,
        num_rows=len(members),
        index=_both_halves(blocks, limits, device),
        mask=mask[:, None, None],
        stale=torch.tensor(stale, dtype=torch.int64, device=device),
        num_blocks=num_blocks,
    )


def _span(table: list[int], num_tokens: int, limits: Limits, device: torch.device) -> KvSpan:
    size = limits.block_size
    blocks = table[: -(-num_tokens // size)]
    first = blocks[0]
    if blocks == list(range(first, first + len(blocks))):
        return KvSpan(num_tokens=num_tokens, first_slot=first * size, index=None)
    return KvSpan(num_tokens=num_tokens, first_slot=None, index=_both_halves(blocks, limits, device))


def _both_halves(blocks: list[int], limits: Limits, device: torch.device) -> torch.Tensor:
    """[2 * len(blocks)]: rows of LayerKv.halves."""
    index = torch.tensor(blocks, device=device)
    return torch.cat((index, index + limits.num_blocks))
