"""What every engine promises: run one step of a batch over paged KV, and lend its block memory.

The batching core decides what a step holds; an engine only computes. One step at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from transfer.kv.arena import KvArena
from transfer.profile import HardwareProfile, LatencyProfile
from transfer.terms import KvLayout, ModelIdentity, RequestId, SamplingParams, TokenIds, TokenLogprob


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to draw the one token that follows a chunk.

    `history` is prompt + output so far (a live list: do not keep it), of which the last `num_output`
    are output. `num_output` is also the index of the token to draw: its random number depends on
    (params.seed, num_output) alone. `banned` ids may not be drawn (eos and stop ids below min_tokens).
    """

    params: SamplingParams
    history: Sequence[int]
    num_output: int
    banned: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive tokens of one sequence to compute in this step.

    KV of positions 0..start-1 is in `block_table` already; positions start..start+len(tokens)-1 are
    written by this step. `block_table` holds block ids and covers start+len(tokens) tokens.
    `sampling` None: only KV is wanted, no logits.
    """

    request_id: RequestId
    tokens: TokenIds
    start: int
    block_table: list[int]
    sampling: Sampling | None = None


@dataclass(frozen=True, slots=True)
class StepBatch:
    """All chunks of one step; decodes are chunks of one token. At least one chunk."""

    chunks: list[Chunk]

    @property
    def num_tokens(self) -> int:
        return sum(len(chunk.tokens) for chunk in self.chunks)


@dataclass(frozen=True, slots=True)
class Sampled:
    token_id: int
    logprob: TokenLogprob | None = None


@dataclass(frozen=True, slots=True)
class StepResult:
    """`sampled` has one entry for each chunk with sampling. `duration_s` is the engine's own time, `waited_s` the part
    of it that it stood still for KV on its way (LayerGate)."""

    sampled: dict[RequestId, Sampled] = field(default_factory=dict)
    duration_s: float = 0.0
    waited_s: float = 0.0


OnLayer = Callable[[int], None]
"""Called once a layer, in order, when that layer's KV of every chunk in the step is in the arena.
May be called from the engine's own thread: it must not block and must be thread-safe."""


class LayerGate(Protocol):
    """What a step passes before it reads a layer: KV of earlier positions may still be on its way into the arena.

    An engine asks once a layer, in order, after the layer's own KV is written or before, always before it calls
    on_layer, and for every layer, so that the end of a step proves that all has arrived. Both forms return when the
    layer is in place and verified, and raise StepAbandoned when it will not come; neither waits for ever.
    """

    def wait(self, layer: int) -> None:
        """Block the engine's own thread."""

    async def ready(self, layer: int) -> None:
        """The same on the event loop."""

    def due(self, layer: int, num_layers: int) -> float:
        """When an emulated link has brought `layer` of a model of `num_layers`, in the loop's time; in the past where
        links are real."""


class Engine(Protocol):
    """Idempotency: `step` with the same chunk writes the same KV (a retry is harmless).

    `close` is idempotent. A failed step raises EngineFailed; the instance is then replaced. A step whose gate raises
    StepAbandoned raises that: it has sampled nothing, and the KV it was to write is undefined.
    """

    kind: str
    model: ModelIdentity
    layout: KvLayout
    arena: KvArena
    num_blocks: int
    hardware: HardwareProfile
    latency: LatencyProfile

    async def step(
        self, batch: StepBatch, on_layer: OnLayer | None = None, before_layer: LayerGate | None = None
    ) -> StepResult: ...

    def handoff_s(self, num_tokens: int) -> float:
        """Seconds an emulated link needs for this much KV; 0.0 where the link is real."""

    async def close(self) -> None: ...
