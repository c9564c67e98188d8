"""Every message between the control plane and its nodes, by conversation. KV bytes travel apart (transfer/kv).

A message is a tagged MessagePack map; codec.py adds magic and version and refuses what is not listed in
MESSAGES. Requests carry (request_id, generation): a generation is minted by the handoff ledger each time a
request is placed, and whoever holds an older one is fenced.
"""

from __future__ import annotations

from transfer.terms import FinishReason, InstanceId, RequestId, SamplingParams, Struct, TokenLogprob
from transfer.wire.membership import (
    CONTROL,
    PROTOCOL_VERSION,
    Goodbye,
    Heartbeat,
    Hello,
    Holding,
    LoadReport,
    Message,
    NotWelcome,
    PoolMap,
    PoolPeer,
    RoleOrder,
    RoleReport,
    Welcome,
)

__all__ = [
    "CONTROL", "MESSAGES", "PROTOCOL_VERSION", "Abort", "CacheEvents", "CacheSnapshotWanted", "Goodbye", "Heartbeat",
    "Hello", "Holding", "KvPeer", "KvReceived", "KvSource", "LoadReport", "Message", "Migrate", "MigrateFailed",
    "NotWelcome", "PoolMap", "PoolPeer", "Prefill", "PrefillDone", "PrefillFailed", "PrefillStarted", "Released",
    "Replicate", "Replicated", "RequestLost", "Reserve", "ReserveRefused", "Reserved", "RoleOrder", "RoleReport",
    "StepOutput", "TokenItem", "Welcome",
]  # fmt: skip

# --- one request --------------------------------------------------------------------------------------------


class KvPeer(Struct, frozen=True):
    """Where KV goes to or comes from: one life of one instance."""

    instance_id: InstanceId
    epoch: int
    data_endpoint: str
    host_id: str


class KvSource(Struct, frozen=True):
    """Leading whole blocks [0, num_blocks) of the request can be fetched from this pool node."""

    peer: KvPeer
    num_blocks: int


class Reserve(Message, frozen=True):
    """Control -> decode (or mixed): hold blocks for this request.

    tokens: pack_tokens(prompt + output so far), of which the last `num_output` are output (> 0 on a resume).
    remote: True: KV of all tokens but the last arrives from a prefill instance; False: compute it here.
    source: where leading blocks of a prompt that is computed here can be fetched from.
    Idempotent by (request_id, generation).
    """

    request_id: RequestId
    generation: int
    tokens: bytes
    num_output: int
    sampling: SamplingParams
    remote: bool
    lease_s: float
    salt: str = ""
    priority: int = 0
    source: KvSource | None = None


class Reserved(Message, frozen=True):
    """Decode -> control. `have_tokens`: leading tokens whose KV it holds already (whole blocks)."""

    request_id: RequestId
    generation: int
    have_tokens: int
    free_blocks: int


class ReserveRefused(Message, frozen=True):
    """Decode -> control: nothing was held. retry: room may come; otherwise it never fits."""

    request_id: RequestId
    generation: int
    reason: str
    retry: bool
    free_blocks: int


class Prefill(Message, frozen=True):
    """Control -> prefill: make KV of tokens[:-1] and stream blocks from `have_tokens` on to `target`.

    The last token is left to decode, which computes it and draws the first output token: so the whole
    sampling state lives on one side. Idempotent by (request_id, generation).
    """

    request_id: RequestId
    generation: int
    tokens: bytes
    target: KvPeer
    have_tokens: int
    lease_s: float
    source: KvSource | None = None
    salt: str = ""
    priority: int = 0


class PrefillStarted(Message, frozen=True):
    """Whoever computes the prompt -> control: the first chunk entered a batch; ends the queue stage."""

    request_id: RequestId
    generation: int


class PrefillDone(Message, frozen=True):
    """Prefill -> control: KV acknowledged by the target, released here. Decode that had a source: first token drawn.

    cached, fetched and computed tokens add up to the prompt, less its last token where decode computes that.
    exposed_s: transfer time that compute did not hide. fetch_s: the pool fetch from start to end, 0.0 without one;
    fetch_exposed_s: the part of it that compute waited for.
    """

    request_id: RequestId
    generation: int
    computed_tokens: int
    cached_tokens: int
    fetched_tokens: int
    prefill_s: float
    transfer_s: float
    exposed_s: float
    transfer_bytes: int
    fetch_s: float = 0.0
    fetch_exposed_s: float = 0.0


class PrefillFailed(Message, frozen=True):
    """Prefill -> control: given up, its blocks are free. The request can be placed again."""

    request_id: RequestId
    generation: int
    reason: str


class KvReceived(Message, frozen=True):
    """Decode -> control: all KV of this generation is here and verified; the request runs here now."""

    request_id: RequestId
    generation: int


class RequestLost(Message, frozen=True):
    """Node -> control: this placement ended here without a result (lease over, KV corrupt, engine failed)."""

    request_id: RequestId
    generation: int
    reason: str


class TokenItem(Struct, frozen=True, array_like=True):
    """New output tokens of one request. `index` is the output index of the first of them.

    finish is set on the request's last item. cached_tokens is prompt tokens that were not computed
    anywhere for this placement when it ran locally; None when a prefill instance knows better.
    """

    request_id: RequestId
    generation: int
    index: int
    token_ids: tuple[int, ...]
    finish: FinishReason | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None
    cached_tokens: int | None = None


class StepOutput(Message, frozen=True):
    """Decode -> the gateway: ONE message a step with every request's tokens."""

    epoch: int
    items: tuple[TokenItem, ...]
    step_s: float = 0.0
    num_prefill_tokens: int = 0
    """Prompt tokens computed in the same step: tells interference from plain decode."""


class Abort(Message, frozen=True):
    """Control -> any node: drop this request if its generation is <= `generation`. Always answered by Released."""

    request_id: RequestId
    generation: int
    reason: str


class Released(Message, frozen=True):
    """Node -> control: no block is held for this request at or below this generation."""

    request_id: RequestId
    generation: int
    num_blocks: int


class Migrate(Message, frozen=True):
    """Control -> decode that runs it: pause the request, move its KV and tokens to `target`.

    The target holds a reservation of `target_generation`. On any failure the source resumes it and says so.
    """

    request_id: RequestId
    generation: int
    target: KvPeer
    target_generation: int
    have_tokens: int
    lease_s: float


class MigrateFailed(Message, frozen=True):
    """Source -> control: it still runs here under its old generation."""

    request_id: RequestId
    generation: int
    reason: str


# --- prefix cache and pool: what the directory is fed with --------------------------------------------------


class CacheEvents(Message, frozen=True):
    """Node -> control: whole blocks whose KV became or ceased to be reusable, by 32-byte block hash.

    stored: they are in memory now (an engine's, or a pool's DRAM). stored_ssd: they are now on a pool's SSD only.
    removed: not held in any tier any more. A hash changes tier by being named in the other list; it is in one at most.
    `seq` counts from 1 per epoch; a gap makes control ask for a snapshot. snapshot: the two lists of stored are all.
    """

    epoch: int
    seq: int
    stored: tuple[bytes, ...] = ()
    removed: tuple[bytes, ...] = ()
    snapshot: bool = False
    stored_ssd: tuple[bytes, ...] = ()


class CacheSnapshotWanted(Message, frozen=True):
    epoch: int


class Replicate(Message, frozen=True):
    """Control -> pool: copy these leading blocks of a hot prefix to another pool node, in the background, best effort.

    name: unique per order. fingerprint: root of the hashes' chain. Always answered by Replicated.
    """

    name: str
    epoch: int
    fingerprint: bytes
    hashes: tuple[bytes, ...]
    target: KvPeer


class Replicated(Message, frozen=True):
    """Pool -> control: `num_blocks` leading blocks are at the target now (0 and a sentence when none)."""

    name: str
    epoch: int
    num_blocks: int
    reason: str = ""


MESSAGES: tuple[type[Message], ...] = (
    Hello, Welcome, NotWelcome, Heartbeat, Goodbye, RoleOrder, RoleReport, PoolMap,
    Reserve, Reserved, ReserveRefused, Prefill, PrefillStarted, PrefillDone, PrefillFailed,
    KvReceived, RequestLost, StepOutput, Abort, Released, Migrate, MigrateFailed,
    CacheEvents, CacheSnapshotWanted, Replicate, Replicated,
)  # fmt: skip
