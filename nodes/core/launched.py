"""One job that an engine batching by itself runs: what of its KV is in the arena by now, and what it was spared."""

from __future__ import annotations

from nodes.core.events import Computed
from nodes.core.sequence import Sequence
from nodes.engines.served import Job
from transfer.errors import EngineFailed
from transfer.terms import FinishReason


class Launched:
    """From Launch to JobOver. finish: its last output has come, and how it ended."""

    __slots__ = ("_cached", "_full", "_layers", "_num_final", "finish", "job", "sequence")

    def __init__(self, sequence: Sequence, job: Job, num_layers: int) -> None:
        self.sequence, self.job = sequence, job
        self.finish: FinishReason | None = None
        self._full = (1 << num_layers) - 1
        self._layers = [0] * (len(job.blocks) - job.save_from)  # bit set of layers saved, for each block to save
        self._num_final = job.save_from
        self._cached: int | None = None

    def saved(self, layer: int, first: int, count: int) -> None:
        """Raises EngineFailed for what the engine was not asked to save: the arena cannot be trusted then."""
        start = first - self.job.save_from
        if not (
            start >= 0 and count >= 0 and start + count <= len(self._layers) and 0 <= layer < self._full.bit_length()
        ):
            raise EngineFailed(
                f"the engine saved blocks {first}..{first + count} of layer {layer} of request {self.job.request_id}, "
                f"which has {len(self.job.blocks)} blocks of {self._full.bit_length()} layers to save from "
                f"{self.job.save_from} on; replace the instance"
            )
        for index in range(start, start + count):
            self._layers[index] |= 1 << layer
        while (
            self._num_final < len(self.job.blocks) and self._layers[self._num_final - self.job.save_from] == self._full
        ):
            self._num_final += 1

    @property
    def num_final_tokens(self) -> int:
        """Leading tokens whose KV is in the arena, in every layer."""
        return min(self._num_final * self.sequence.block_size, len(self.job.tokens) - 1)

    def told_cached(self, num_tokens: int | None) -> None:
        """Prompt tokens that the engine did not compute, by its own account; None: it keeps none."""
        if self._cached is None:
            self._cached = num_tokens

    def cached_prompt_tokens(self) -> int:
        return min(self._spared(), len(self.job.tokens) - self.job.num_output)

    def computed(self) -> Computed:
        """What the engine was spared counts as fetched, as far as it was, and then as cached."""
        sequence = self.sequence
        to_compute = len(self.job.tokens) - (self.job.sampling is None)
        spared = min(self._spared(), to_compute)
        fetched = min(sequence.fetched_blocks * sequence.block_size, spared)
        return Computed(
            request_id=sequence.request_id, generation=sequence.generation, computed_tokens=to_compute - spared,
            cached_tokens=spared - fetched, fetched_tokens=fetched,
        )  # fmt: skip

    def unfinished(self) -> str:
        """Why a job that ended without an error did not end well."""
        if self.job.sampling is None:
            return f"the engine saved KV of {self.num_final_tokens} tokens, not of all {len(self.job.tokens) - 1}"
        return "the engine ended the request before its last token"

    def _spared(self) -> int:
        return self.job.num_loaded if self._cached is None else self._cached
