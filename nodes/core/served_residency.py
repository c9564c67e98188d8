"""Which sequences may be with an engine that batches by itself: bounded by the arena beside it and its own KV memory.

The arena holds what goes in and out: KV of a prompt, while its request is here. Output needs none of it.
"""

from __future__ import annotations

from nodes.core.events import SequenceSpec, Work
from nodes.core.residency import BatchConfig, Residency
from nodes.core.sequence import ACTIVE, Sequence, State
from transfer.errors import InvalidValue

HEADROOM_TOKENS = 256
"""Output to come that a request is charged for at most: longer ones are charged as they grow, and where they outgrow
the engine's memory the engine preempts by itself."""


class ServedConfig(BatchConfig, frozen=True):
    """num_blocks: of the arena. capacity_blocks, shares_kv: as ServedEngine has them. num_layers: of the KV layout."""

    capacity_blocks: int = 1
    num_layers: int = 1
    shares_kv: bool = True

    @property
    def max_length(self) -> int:
        return min(self.max_context, self.capacity_blocks * self.block_size)

    def checked(self) -> ServedConfig:
        super().checked()
        if self.capacity_blocks < 1 or self.num_layers < 1:
            raise InvalidValue(
                f"an engine needs KV memory of at least one block and a layer, got {self.capacity_blocks} blocks and "
                f"{self.num_layers} layers"
            )
        return self


class ServedResidency(Residency):
    """Blocks of the arena for tokens[:-1], as the sequence came; none where the engine keeps its KV to itself."""

    config: ServedConfig

    @property
    def num_blocks(self) -> int:
        capacity = self.config.capacity_blocks
        return min(self.pool.num_blocks, capacity) if self.config.shares_kv else capacity

    @property
    def num_free(self) -> int:
        free = max(0, self.config.capacity_blocks - self._charged())
        return min(self.pool.num_free, free) if self.config.shares_kv else free

    def never_fits(self, spec: SequenceSpec) -> str | None:
        config, num_tokens = self.config, len(spec.tokens)
        if not config.shares_kv and spec.work is not Work.LOCAL:
            return "this instance's engine keeps its KV to itself: it serves whole requests only"
        if config.shares_kv and num_tokens - 1 > config.num_blocks * config.block_size:
            return (
                f"KV of {num_tokens - 1} tokens does not fit into the {config.num_blocks} KV blocks of "
                f"{config.block_size} beside the engine"
            )
        if spec.work is Work.PREFILL and num_tokens > config.max_length:
            return f"{num_tokens} tokens are more than the {config.max_length} of one request that the engine takes"
        return super().never_fits(spec)

    def admit(self, sequence: Sequence) -> str | None:
        free, wanted = self.config.capacity_blocks - self._charged(), self._charge(sequence)
        if wanted > free:
            return f"needs {wanted} KV blocks of the engine, {max(0, free)} are free"
        return super().admit(sequence)

    def staged_blocks(self, sequence: Sequence) -> int:
        """Blocks of the arena that its job covers: KV of all tokens but the last."""
        return -(-(len(sequence.tokens) - 1) // self.config.block_size) if self.config.shares_kv else 0

    def _needs(self, sequence: Sequence) -> tuple[int, int]:
        return self.staged_blocks(sequence), 0

    def _charged(self) -> int:
        """Blocks of the engine that all who are with it, or are sure to come, take."""
        by_state = self._roster.by_state
        return sum(self._charge(one) for state in (*ACTIVE, State.LEAVING) for one in by_state[state])

    def _charge(self, sequence: Sequence) -> int:
        length = len(sequence.tokens)
        if sequence.params is not None:
            length += min(HEADROOM_TOKENS, max(0, sequence.params.max_tokens - sequence.num_output))
        return min(-(-length // self.config.block_size), self.config.capacity_blocks)
