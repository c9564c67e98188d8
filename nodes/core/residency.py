"""Which sequences of one instance hold blocks: admission, growth, preemption, and what enters the prefix cache.

Decides by the pool and the roster alone; batching.py says it in effects.
"""

from __future__ import annotations

from math import ceil

from nodes.core.blocks import BlockPool
from nodes.core.events import SequenceSpec, Work
from nodes.core.sequence import Roster, Sequence, State
from transfer.errors import InvalidValue
from transfer.terms import RequestId, Struct, TokenIds


class BatchConfig(Struct, frozen=True):
    """Sizes of one instance's batching. Raises InvalidValue when they cannot work together (see checked).

    max_context: most tokens, prompt and output, of one request. token_budget: most tokens one step computes.
    max_running: most sequences admitted at once; each may need one token a step, so at most token_budget.
    max_waiting: longest queue of prefill work. watermark: share of all blocks that admission of a sequence that
    will grow leaves free.
    """

    num_blocks: int
    block_size: int
    max_context: int
    token_budget: int = 2048
    max_running: int = 256
    max_waiting: int = 1024
    eos_token_ids: tuple[int, ...] = ()
    watermark: float = 0.01
    prefix_cache: bool = True
    contiguous: bool = True
    """Look for long runs of blocks; of no use where no KV is moved."""

    @property
    def max_length(self) -> int:
        """Most tokens one request can have here: the context, or what the arena holds if that is less."""
        return min(self.max_context, self.num_blocks * self.block_size)

    @property
    def watermark_blocks(self) -> int:
        return ceil(self.num_blocks * self.watermark)

    def checked(self) -> BatchConfig:
        for name in ("num_blocks", "block_size", "max_context", "token_budget", "max_running", "max_waiting"):
            if getattr(self, name) < 1:
                raise InvalidValue(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.token_budget < self.max_running:
            raise InvalidValue(
                f"token_budget ({self.token_budget}) must be at least max_running ({self.max_running}): "
                "every running request takes one token a step; raise one or lower the other"
            )
        if not 0.0 <= self.watermark < 1.0:
            raise InvalidValue(f"watermark must be a share from 0 to below 1, got {self.watermark}")
        return self


class Residency:
    """Gives blocks to sequences and takes them back. A sequence holds all blocks it needs, or none."""

    def __init__(self, config: BatchConfig, roster: Roster) -> None:
        self.config, self._roster = config, roster
        self.pool = BlockPool(config.num_blocks, prefix_cache=config.prefix_cache, contiguous=config.contiguous)
        self.num_preemptions = 0
        self.preempted: list[RequestId] = []
        """Requests preempted since the last step was planned."""

    @property
    def num_blocks(self) -> int:
        return self.pool.num_blocks

    @property
    def num_free(self) -> int:
        """Blocks that can be given out now."""
        return self.pool.num_free

    def never_fits(self, spec: SequenceSpec) -> str | None:
        """Why this work can never run here, in a sentence; None when it can."""
        config, num_tokens = self.config, len(spec.tokens)
        if num_tokens == 0:
            return "a request needs at least one token, got none"
        if spec.work is Work.PREFILL:
            fits = num_tokens < config.max_context and num_tokens - 1 <= config.num_blocks * config.block_size
        elif spec.sampling is None:
            return f"{spec.work} work needs sampling parameters, got none"
        elif spec.num_output >= spec.sampling.max_tokens:
            return f"the request has all of its {spec.sampling.max_tokens} output tokens already"
        else:
            fits = num_tokens < config.max_length
        if fits:
            return None
        return (
            f"{num_tokens} tokens leave no room to generate: this instance holds at most {config.max_length} tokens of "
            f"one request (context {config.max_context}, {config.num_blocks} KV blocks of {config.block_size})"
        )

    def admit(self, sequence: Sequence) -> str | None:
        """Give a sequence its blocks, cached ones first. Returns why not, in a sentence, when there is no room now."""
        config, pool = self.config, self.pool
        if self._roster.num_active >= config.max_running:
            return f"{config.max_running} requests run here already, the most this instance takes (max_running)"
        hits = pool.match(sequence.leading_keys(sequence.num_shareable_blocks)) if config.prefix_cache else []
        needed, growth = self._needs(sequence)
        wanted = needed - len(hits)
        grows = growth > 0 and pool.num_referenced > 0
        spare = config.watermark_blocks if grows else 0
        if pool.room_beside(hits) < wanted + spare:
            return f"needs {wanted + spare} free KV blocks ({spare} of them to grow), {pool.room_beside(hits)} are free"
        pool.share(sequence.table, hits)
        pool.extend(sequence.table, wanted, growth)
        sequence.num_committed = sequence.num_pushed = len(hits)
        sequence.num_computed = len(hits) * config.block_size
        if not sequence.admitted:
            sequence.have_blocks = len(hits)
        return None

    def cannot_take_over(self, sequence: Sequence, tokens: TokenIds) -> str | None:
        """Why a reservation cannot go on with these newer tokens of a migrated request; None when it can."""
        if tokens[: len(sequence.tokens)] != sequence.tokens:
            return f"the {len(tokens)} tokens that arrived do not continue the {len(sequence.tokens)} reserved ones"
        if len(tokens) >= self.config.max_length:
            return f"{len(tokens)} tokens arrived, this instance holds at most {self.config.max_length} of one request"
        num_held = len(sequence.table.blocks) * self.config.block_size
        if len(tokens) - 1 > num_held:
            return f"KV of {len(tokens) - 1} tokens cannot have arrived in blocks for {num_held}"
        return None

    def commit(self, sequence: Sequence) -> None:
        """Make every whole block that is computed findable in the prefix cache."""
        if not self.config.prefix_cache:
            return
        first, last = sequence.num_committed, sequence.num_computed // self.config.block_size
        if first < last:
            self.pool.commit_all(sequence.table.blocks[first:last], sequence.keys_between(first, last))
            sequence.num_committed = last

    def grow_running(self) -> None:
        """Give every running sequence the block its last token, which alone is not computed, needs. Where none is free
        the sequence of highest rank gives all of its blocks up, maybe the one that asks. Only between steps: a victim
        must not be in one."""
        size = self.config.block_size
        needy = [one for one in self._roster.running if one.num_computed >= len(one.table.blocks) * size]
        for sequence in needy:
            count = sequence.num_blocks_needed - len(sequence.table.blocks)
            while sequence.state is State.RUNNING and not self.pool.extend(
                sequence.table, count, sequence.growth_blocks
            ):
                self._preempt(self._victim())

    def _needs(self, sequence: Sequence) -> tuple[int, int]:
        """Blocks it must have to be admitted, and those that it may want later."""
        return sequence.num_blocks_needed, sequence.growth_blocks

    def _victim(self) -> Sequence:
        """Prefill work never: it holds only what it was admitted with, and its KV may be on its way already. Nor whose
        blocks a fetch still writes."""
        victim = self._roster.running[-1]
        for sequence in reversed(self._roster.prefilling):
            if sequence.work is not Work.PREFILL and not sequence.arriving_blocks:
                return max(victim, sequence, key=lambda one: one.rank)
        return victim

    def _preempt(self, victim: Sequence) -> None:
        self._roster.move(victim, "preempt")
        self.pool.release(victim.table)
        victim.restart()
        self.num_preemptions += 1
        self.preempted.append(victim.request_id)
