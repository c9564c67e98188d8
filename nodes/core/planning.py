"""What the next step computes: one token of every running sequence, then prompts in chunks up to the budget.

Reads the roster and changes only what is planned of a sequence (in_step, started, num_pushed).
"""

from __future__ import annotations

from nodes.core.events import Push, StepPlan, StepSize, Work
from nodes.core.sequence import Roster, Sequence
from nodes.engines.engine import Chunk
from transfer.terms import RequestId

InStep = tuple[Sequence, int, int]
"""One sequence of a step, the tokens it computes, and what its num_pushed was, to undo the plan."""


def plan_step(
    roster: Roster, token_budget: int, preempted: list[RequestId], *, bare: bool = False
) -> tuple[StepPlan, list[InStep]] | None:
    """The next step, or None when nothing can run. Block tables and histories in it are live lists. bare: its size in
    place of its chunks.

    A sequence whose leading blocks are still arriving is left out beside decodes: they must not wait for a pool."""
    in_step: list[InStep] = []
    for sequence in roster.running:
        in_step.append((sequence, 1, sequence.num_pushed))
        sequence.in_step = True
    pushes: list[Push] = []
    started: list[RequestId] = []
    arriving: list[RequestId] = []
    num_prefill_tokens, num_running = 0, len(in_step)
    left = token_budget - num_running
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
        in_step.append((sequence, count, sequence.num_pushed))
        sequence.in_step = True
        if sequence.work is Work.PREFILL:
            _push_final_blocks(sequence, count, pushes)
        if not sequence.started:
            sequence.started = True
            started.append(sequence.request_id)
    if not in_step:
        return None
    chunks: list[Chunk] = []
    if not bare:
        chunks = [_decode_chunk(sequence) for sequence, _, _ in in_step[:num_running]]
        chunks += [_prefill_chunk(sequence, count) for sequence, count, _ in in_step[num_running:]]
    return StepPlan(
        chunks=chunks, pushes=pushes, started=started, num_prefill_tokens=num_prefill_tokens, preempted=preempted,
        arriving=arriving, size=step_size(in_step) if bare else None,
    ), in_step  # fmt: skip


def step_size(in_step: list[InStep]) -> StepSize:
    """As nodes/engines/prediction.py reads it off chunks."""
    tokens = context = pairs = 0
    for sequence, count, _ in in_step:
        start = sequence.num_computed
        total = start + count
        tokens += count
        context += total
        pairs += total if count == 1 else (total * (total + 1) - start * (start + 1)) // 2
    return StepSize(tokens, context, len(in_step), pairs)


def num_even_steps(roster: Roster, in_step: list[InStep]) -> int:
    """How many steps, the running one included, are sure to change nothing but lengths if nothing happens meanwhile:
    the same decodes, none of which finishes, needs a block or fills one, pauses or leaves. 0 where that is not sure."""
    running = roster.running
    if roster.prefilling or len(running) != len(in_step):
        return 0
    steps = 1 << 30
    for sequence in running:
        params = sequence.params
        if not sequence.in_step or sequence.pause_wanted or params is None or not sequence.reported_cached:
            return 0
        before = sequence.num_computed  # all tokens but the last
        steps = min(
            steps, params.max_tokens - sequence.num_output - 1, sequence.max_length - before - 2,
            len(sequence.table.blocks) * sequence.block_size - before - 1,
        )  # fmt: skip
    return max(0, steps)


def _decode_chunk(sequence: Sequence) -> Chunk:
    tokens = sequence.tokens
    return Chunk(sequence.request_id, tokens[-1:], len(tokens) - 1, sequence.table.blocks, sequence.sampling())


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
