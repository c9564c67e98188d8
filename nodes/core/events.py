"""What enters and leaves the batching core of one instance. Plain values; the shell (a role) performs effects.

A step is pulled: the shell calls `BatchCore.next_step(now)` when the engine is free, runs the plan and
returns a `StepDone` event. Between the two the core accepts every other event.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from nodes.core.blocks import BlockKey
from nodes.engines.engine import Chunk, Sampled
from transfer.terms import FinishReason, RequestId, SamplingParams, Struct, TokenIds, TokenLogprob


class Work(StrEnum):
    """What an instance does for one request."""

    PREFILL = "prefill"
    """Make KV of tokens[:-1] and keep it until Handed; never draws a token."""
    RECEIVE = "receive"
    """Hold blocks; KV of tokens[:-1] arrives from outside; generate after KvReady."""
    LOCAL = "local"
    """Compute the prompt here, then generate."""


class SequenceSpec(Struct, frozen=True):
    """One request as this instance got it. tokens: prompt + output so far, the last num_output are output."""

    request_id: RequestId
    generation: int
    work: Work
    tokens: TokenIds
    num_output: int
    sampling: SamplingParams | None
    root: bytes
    """Root of the block hash chain (terms.kv_fingerprint with the tenant's salt)."""
    lease_s: float
    priority: int = 0
    """Lower is served first, preempted last."""
    fetch_blocks: int = 0
    """Leading whole blocks the shell will fetch from a pool before computing (0: none, as always in RECEIVE work)."""
    salt: str = ""
    """The tenant's, which `root` has in it already; for engines with a prefix cache of their own."""
    keys: tuple[BlockKey, ...] = ()
    """Of its leading whole blocks, when somebody knows them already (a simulator, which has no tokens to hash)."""


# --- events -------------------------------------------------------------------------------------------------


class Event(Struct, frozen=True, tag=True):
    pass


class Add(Event, frozen=True):
    spec: SequenceSpec


class KvReady(Event, frozen=True):
    """All KV of a RECEIVE sequence is in its blocks. tokens, num_output: newer ones after a migration, which must
    continue the reserved ones; Gone(lost) when they do not or are more than the blocks held (see Grow)."""

    request_id: RequestId
    generation: int
    tokens: TokenIds | None = None
    num_output: int = 0


class Grow(Event, frozen=True):
    """A migration offers more KV than its RECEIVE reservation has blocks for (the request ran on at its source): make
    the table `num_blocks` long before the grant. Answered by Grown, or by Gone(lost) when there is no room."""

    request_id: RequestId
    generation: int
    num_blocks: int


class Arriving(Event, frozen=True):
    """`num_blocks` leading blocks of a FETCHING sequence, those it had included, are on their way from a pool layer by
    layer: it may compute the rest meanwhile. The role holds back every layer of a step with such a sequence
    (StepPlan.arriving) until that layer has arrived, so StepDone proves that all of it has. Fetched follows."""

    request_id: RequestId
    generation: int
    num_blocks: int


class Fetched(Event, frozen=True):
    """The pool fetch of a sequence ended with `num_blocks` leading blocks valid (0: compute all). Fewer than
    were Arriving: what was computed beside it is thrown away; the step it is in, if any, ends with StepUndone."""

    request_id: RequestId
    generation: int
    num_blocks: int


class StepDone(Event, frozen=True):
    """quiet: of decodes that run on no Emit is wanted; who is not in `sampled` drew a token that ends nothing."""

    sampled: dict[RequestId, Sampled]
    duration_s: float
    quiet: bool = False


class StepUndone(Event, frozen=True):
    """The step was abandoned before it sampled: what was Arriving for `failed` will not come. The KV it was to write is
    undefined; the next steps compute it again. A failed sequence computes again after its Fetched."""

    failed: tuple[RequestId, ...]


class Handed(Event, frozen=True):
    """The receiver acknowledged (PREFILL handed off, or a paused decode migrated): release its blocks."""

    request_id: RequestId
    generation: int


class Drop(Event, frozen=True):
    """Abort, lease over, failure: forget the request up to this generation, in whatever state. The role has stopped
    its transfers before (revoke, abort, fetch cancelled): unless the running step writes them, blocks are free at once.
    """

    request_id: RequestId
    generation: int
    reason: str


class Pause(Event, frozen=True):
    """Stop stepping a running sequence (a migration starts) at the next step boundary; answered by Paused."""

    request_id: RequestId
    generation: int


class Resume(Event, frozen=True):
    """The migration failed: run it again."""

    request_id: RequestId
    generation: int


class Renew(Event, frozen=True):
    """KV is moving for this request: its lease starts anew."""

    request_id: RequestId
    generation: int


class Pin(Event, frozen=True):
    """Keep the cached blocks of these hashes as they are, to copy them to a pool, until Unpin or for lease_s at most.
    `name` is the caller's, unique among live pins; answered by Pinned."""

    name: str
    hashes: tuple[bytes, ...]
    lease_s: float


class Unpin(Event, frozen=True):
    """Idempotent."""

    name: str


class Tick(Event, frozen=True):
    """Time passed: leases are checked."""


# --- effects ------------------------------------------------------------------------------------------------


class Effect(Struct, frozen=True, tag=True):
    pass


class Admitted(Effect, frozen=True):
    """The sequence holds `blocks`, its whole table so far. have_blocks: leading ones whose KV is valid."""

    request_id: RequestId
    generation: int
    blocks: list[int]
    have_blocks: int
    free_blocks: int


class Grown(Effect, frozen=True):
    """Answers Grow: `blocks` is the whole table now, at least as long as asked."""

    request_id: RequestId
    generation: int
    blocks: list[int]


class NotAdmitted(Effect, frozen=True):
    request_id: RequestId
    generation: int
    reason: str
    retry: bool
    free_blocks: int


class Emit(Effect, frozen=True):
    """New output of one request; `index` is the output index of the first token."""

    request_id: RequestId
    generation: int
    index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None
    finish: FinishReason | None
    cached_tokens: int | None


class Computed(Effect, frozen=True):
    """A PREFILL sequence has KV of all tokens but the last; its blocks stay until Handed or Drop. A LOCAL one has KV of
    all; its first Emit follows."""

    request_id: RequestId
    generation: int
    computed_tokens: int
    cached_tokens: int
    fetched_tokens: int


class Gone(Effect, frozen=True):
    """No block is held any more for the request at or below this generation. Answers Drop and Handed, always,
    also for requests never seen. finished and lost ones get it too (lost: the reason says why). On a lost one the role
    stops what still reads or writes its blocks as it performs this effect, before it handles another event."""

    request_id: RequestId
    generation: int
    num_blocks: int
    lost: str | None = None


class Paused(Effect, frozen=True):
    """The sequence does not step; its KV of tokens[:-1] is complete in `blocks`."""

    request_id: RequestId
    generation: int
    tokens: TokenIds
    num_output: int
    blocks: list[int]


class CannotPause(Effect, frozen=True):
    request_id: RequestId
    generation: int
    reason: str


class Cached(Effect, frozen=True):
    """Whole blocks became reusable (stored: hash -> block id) or ceased to be (removed); no hash is in both."""

    stored: dict[bytes, int]
    removed: tuple[bytes, ...]


class Pinned(Effect, frozen=True):
    """blocks: where the leading hashes are, as many as are still here, in order."""

    name: str
    blocks: list[int]


class Unpinned(Effect, frozen=True):
    """A pin's lease is over: do not read its blocks any more."""

    name: str


class HandsChanged(Effect, frozen=True):
    """These blocks got a new owner whose bytes will differ: bump their arena generation BEFORE the next step."""

    blocks: list[int]


# --- a step -------------------------------------------------------------------------------------------------


class Push(Struct, frozen=True):
    """After this step, blocks [first_block, first_block + count) of the request's table are final: stream them.
    Consecutive pushes of a request cover every block of tokens[:-1] once, the partial last one included."""

    request_id: RequestId
    generation: int
    first_block: int
    count: int


class StepSize(NamedTuple):
    """What LatencyProfile.step_s wants to know of a step: for whoever takes its time without computing it."""

    num_new_tokens: int
    context_tokens: int
    batch: int
    attention_pairs: int


class StepPlan(Struct, frozen=True):
    """What to run now. started: PREFILL and LOCAL requests whose first chunk is in this step. arriving: requests in it
    whose leading blocks are still on their way, see Arriving."""

    chunks: list[Chunk]
    pushes: list[Push]
    started: list[RequestId]
    num_prefill_tokens: int
    preempted: list[RequestId]
    arriving: list[RequestId]
    size: StepSize | None = None
    """Instead of chunks, where only the time of the step is wanted."""
