"""What an engine that batches by itself promises: run whole requests, and move their KV through an arena of ours.

nodes/core/served.py decides what is admitted and which blocks a request has; the engine computes, in its own batches.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from transfer.kv.arena import KvArena
from transfer.profile import HardwareProfile, LatencyProfile
from transfer.terms import (
    FinishReason,
    KvLayout,
    ModelIdentity,
    RequestId,
    SamplingParams,
    TokenIds,
    TokenLogprob,
)


@dataclass(frozen=True, slots=True)
class Job:
    """One request for the engine. tokens: prompt and output so far, of which the last `num_output` are output.

    sampling None: only KV of tokens[:-1] is wanted. Otherwise sampling.max_tokens counts the output there is already.
    blocks: the request's table in the arena; it covers tokens[:-1], and is empty where the engine keeps KV to itself.
    num_loaded: leading tokens whose KV is in `blocks` (any number up to len(tokens) - 1): the engine copies it
    from there instead of computing, or computes where that fails. save_from: index into `blocks` from which on the
    engine writes KV of tokens[:-1] into them; len(blocks): none. salt: requests of different salts share no KV.
    """

    request_id: RequestId
    generation: int
    tokens: TokenIds
    num_output: int
    sampling: SamplingParams | None
    blocks: list[int]
    num_loaded: int
    save_from: int
    salt: str = ""
    priority: int = 0


@dataclass(frozen=True, slots=True)
class Output:
    """New output tokens of one request, one or more; none where only KV was wanted. finish is set on the last.

    cached_tokens: on the first, prompt tokens that the engine did not compute, those loaded included.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None = None
    finish: FinishReason | None = None
    cached_tokens: int | None = None


OnSaved = Callable[[int, int, int], None]
"""(layer, first, count): KV of that layer of blocks[first : first + count] is in the arena now. Called on the event
loop; once for every layer and every block from save_from on, in any order, before the last Output."""
OnStarted = Callable[[], None]
"""The engine has begun to compute the request; called at most once, before its first Output."""


@runtime_checkable
class ServedEngine(Protocol):
    """`run` may be called for many requests at once. Its generator ends after the Output with finish, raises
    JobFailed when this one request cannot be served (the sentence says why), EngineFailed when the engine is lost.
    `aclose` on it aborts the request; when it returns, or the generator ends in any way, the engine reads and writes
    none of its blocks any more.

    max_length: most tokens of one request that the engine takes, prompt and output.
    capacity_blocks: blocks of KV that the engine itself can hold for requests that run, of layout.block_size tokens.
    arena, num_blocks: memory of ours beside it through which KV comes and goes, and which serves as its prefix cache;
    shares_kv False: nothing comes and goes, the arena has one block and stays unused.
    """

    kind: str
    version: str
    """Of the engine; instances of other versions keep KV apart."""
    model: ModelIdentity
    layout: KvLayout
    arena: KvArena
    num_blocks: int
    max_length: int
    capacity_blocks: int
    shares_kv: bool
    hardware: HardwareProfile
    latency: LatencyProfile

    def run(self, job: Job, on_started: OnStarted, on_saved: OnSaved) -> AsyncGenerator[Output, None]: ...

    async def watch(self) -> None:
        """Returns never; raises EngineFailed when the engine is lost, also while no request runs."""

    async def close(self) -> None:
        """Idempotent. Ends the engine where we started it; leaves one we attached to as it is."""
