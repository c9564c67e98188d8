"""What the next step computes: one token of every running sequence, then prompts in chunks up to the budget.

Reads the roster and changes only what is planned of a sequence (in_step, started, num_pushed).
"""

from __future__ import annotations

from typing import NamedTuple

from nodes.core.events import Push, StepPlan, Work
from nodes.core.sequence import Roster, Sequence
from nodes.engines.engine import Chunk
from transfer.terms import RequestId


class InStep(NamedTuple):
    """One sequence of a step: the tokens it computes, and what its num_pushed was, to undo the plan."""

    sequence: Sequence
    num_tokens: int
    num_pushed: int


def plan_step(roster: Roster, token_budget: int, preempted: list[RequestId]) -> tuple[StepPlan, list[InStep]] | None:
    """The next step, or None when nothing can run. Block tables and histories in it are live lists.

    A sequence whose leading blocks are still arriving is left out beside decodes: they must not wait for a pool."""
    chunks: list[Chunk] = []
    in_step: list[InStep] = []
    for sequence in roster.running:
        tokens = sequence.tokens
        chunks.append(
            Chunk(sequence.request_id, tokens[-1:], len(tokens) - 1, sequence.table.blocks, sequence.sampling())
        )
        in_step.append(InStep(sequence, 1, sequence.num_pushed))
        sequence.in_step = True
    pushes: list[Push] = []
    started: list[RequestId] = []
    arriving: list[RequestId] = []
    num_prefill_tokens = 0
    left = token_budget - len(chunks)
    for sequence in roster.prefilling:
        if left <= 0:
            break
        if sequence.arriving_blocks:
            if roster.running:
                continue
            arriving.append(sequence.request_id)
        count = min(left, sequence.num_to_compute - sequence.num_computed)
        left -= count
        num_prefill_tokens += count
        chunks.append(_prefill_chunk(sequence, count))
        in_step.append(InStep(sequence, count, sequence.num_pushed))
        sequence.in_step = True
        if sequence.work is Work.PREFILL:
            _push_final_blocks(sequence, count, pushes)
        if not sequence.started:
            sequence.started = True
            started.append(sequence.request_id)
    if not chunks:
        return None
    return StepPlan(
        chunks=chunks, pushes=pushes, started=started, num_prefill_tokens=num_prefill_tokens, preempted=preempted,
        arriving=arriving,
    ), in_step  # fmt: skip


def _prefill_chunk(sequence: Sequence, count: int) -> Chunk:
    start = sequence.num_computed
    end = start + count
    draws = sequence.work is not Work.PREFILL and end == sequence.num_to_compute
    sampling = sequence.sampling() if draws else None
    return Chunk(sequence.request_id, sequence.tokens[start:end], start, sequence.table.blocks, sampling)


def _push_final_blocks(sequence: Sequence, count: int, pushes: list[Push]) -> None:
    """Blocks that this chunk fills, and at the end of the prompt also the partial one."""
    end = sequence.num_computed + count
    final = sequence.num_blocks_needed if end == sequence.num_to_compute else end // sequence.block_size
    if final > sequence.num_pushed:
        pushes.append(
            Push(
                request_id=sequence.request_id,
                generation=sequence.generation,
                first_block=sequence.num_pushed,
                count=final - sequence.num_pushed,
            )
        )
        sequence.num_pushed = final
