"""How an instance sends and receives KV, whatever the link: the protocol the roles are written against.

Push: a sender offers a run of a request's blocks, the receiver grants block ids of its own, layers stream
as they are computed, a trailer commits, an acknowledgement ends it. Fetch: leading blocks by hash from a pool.
Implementations: links/tcp.py (with shared memory on one host) and links/inproc.py (virtual time, faults).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from enum import StrEnum
from typing import Protocol

from transfer.terms import InstanceId, RequestId, Struct
from transfer.wire.messages import KvPeer

OnFetched = Callable[[int, int], None]


class KvKind(StrEnum):
    HANDOFF = "handoff"
    MIGRATION = "migration"
    STORE = "store"


class KvOffer(Struct, frozen=True):
    """What a sender wants to push. Blocks are numbered by their index in the request's block table.

    fingerprint: terms.kv_fingerprint of the sender: model, tokenizer, dtype, layout, RoPE, tenant salt.
    hashes: chained block hashes of the offered blocks; required for STORE, empty otherwise.
    target_epoch: the receiver's life the sender was told about; another life refuses.
    user: STORE only: the request whose KV this is, which may put it in parts and from several instances; by default
    request_id, which names this push alone.
    """

    kind: KvKind
    request_id: RequestId
    generation: int
    source: InstanceId
    source_epoch: int
    target_epoch: int
    fingerprint: bytes
    first_block: int
    num_blocks: int
    hashes: tuple[bytes, ...] = ()
    user: RequestId = ""


class KvTrailer(Struct, frozen=True):
    """What commits a push. num_tokens: leading tokens of the request whose KV is now complete.

    tokens, num_output: MIGRATION only, pack_tokens(prompt + output so far), of which num_output are output.
    """

    num_tokens: int
    tokens: bytes = b""
    num_output: int = 0


class KvFetch(Struct, frozen=True):
    """A request to a pool: the KV of the leading `hashes`, in order, as many as it has."""

    request_id: RequestId
    target_epoch: int
    fingerprint: bytes
    hashes: tuple[bytes, ...]


class KvAskKind(StrEnum):
    LOOKUP = "lookup"
    """How many leading `hashes` are here, in any tier."""
    PIN = "pin"
    """Keep the leading `hashes` that are here, in any tier, from eviction for ttl_s; repeated: its time starts anew."""
    UNPIN = "unpin"
    """End the pin called `name`. Idempotent."""
    STATS = "stats"
    """Counters and sizes of the store."""


class KvAsk(Struct, frozen=True):
    """A question to a pool that moves no KV. name: of a pin, unique to its owner (`source/name`)."""

    kind: KvAskKind
    source: InstanceId
    target_epoch: int
    """0: whatever life answers (a client that has not met it yet)."""
    fingerprint: bytes = b""
    hashes: tuple[bytes, ...] = ()
    name: str = ""
    ttl_s: float = 0.0


class KvAnswer(Struct, frozen=True):
    """num_blocks: leading hashes found or pinned. stats: STATS only, names as in docs/kv.md. epoch: who answered."""

    epoch: int
    num_blocks: int = 0
    stats: dict[str, float] = {}


class SendStats(Struct, frozen=True):
    """num_bytes: KV bytes sent. transfer_s: open to acknowledgement. exposed_s: commit to acknowledgement."""

    num_bytes: int
    transfer_s: float
    exposed_s: float


class KvDelegate(Protocol):
    """The role behind a port. Called on the event loop, never concurrently; must not block.

    Between a grant and kv_arrived, kv_failed or KvPort.revoke the port may write the granted blocks; after
    any of them it never does, so only then may the role free them.
    """

    def kv_offered(self, offer: KvOffer) -> Sequence[int]:
        """Block ids (len == offer.num_blocks) to receive into. Raises Refused with a sentence to decline.
        For STORE an id of -1 means "already here, skip it"."""

    def kv_progress(self, offer: KvOffer) -> None:
        """KV of this push is arriving (about once a second while it does): its lease may start anew."""

    def kv_arrived(self, offer: KvOffer, trailer: KvTrailer) -> None:
        """Every offered slab was received and its checksum verified. Raises Refused to nack; no kv_failed then."""

    def kv_failed(self, offer: KvOffer, reason: str) -> None:
        """The push ended without a commit; called exactly once, not after revoke."""

    def kv_wanted(self, fetch: KvFetch) -> Sequence[int] | Awaitable[Sequence[int]]:
        """Block ids for the leading hashes found here (maybe empty), pinned until kv_served.

        An awaitable (blocks come from SSD first) is awaited by the port; when the fetch ends before, it is cancelled,
        and kv_served follows all the same, once, after the awaitable has ended."""

    def kv_served(self, fetch: KvFetch) -> None:
        """The fetch ended, well or badly: unpin."""

    def kv_asked(self, ask: KvAsk) -> KvAnswer:
        """Answer a question. Raises Refused with a sentence: engines' roles refuse all."""


class KvSender(Protocol):
    """One push in progress. The caller keeps the source blocks until commit returns, or abort has returned."""

    def push(self, layer: int, first_block: int, count: int) -> None:
        """Queue `count` blocks of `layer` from request block index `first_block`; what was queued before is left out.
        Thread-safe, never blocks (it only refers to the blocks' memory, which is bounded by the arena)."""

    async def commit(self, trailer: KvTrailer, timeout_s: float) -> SendStats:
        """Send what is queued, then the trailer; wait for the acknowledgement. Every (layer, block) offered
        must have been pushed. Raises KvTransferFailed (refused, lost, deadline) or KvCorrupt."""

    def abort(self, reason: str) -> None:
        """Give up: the source blocks are not read after this returns. Idempotent."""


class KvPort(Protocol):
    """An instance's door for KV. Idempotency is the role's: a repeated offer meets its generation check."""

    @property
    def endpoint(self) -> str:
        """Where peers connect, for example tcp://127.0.0.1:41233; known after start."""

    async def start(self) -> None: ...

    async def open(self, peer: KvPeer, offer: KvOffer, blocks: Sequence[int], timeout_s: float) -> KvSender:
        """Connect if needed, offer, and wait for the grant. `blocks`: the sender's block ids, one for each
        offered block. Raises KvTransferFailed with the receiver's sentence when it refuses."""

    async def fetch(
        self, peer: KvPeer, fetch: KvFetch, blocks: Sequence[int], timeout_s: float, on_layer: OnFetched | None = None
    ) -> int:
        """Fetch leading blocks into `blocks`; returns how many were received and verified. Never raises for a
        miss; raises KvTransferFailed when the peer is lost or late and KvCorrupt when what came does not match its
        checksum, with none of the blocks to be trusted. on_layer(layer, num_blocks) is called on the event loop, in
        order of layers, when all `num_blocks` blocks of a layer are in place and verified; with layer -1 first,
        as soon as it is known how many blocks will come (> 0)."""

    async def ask(self, peer: KvPeer, ask: KvAsk, timeout_s: float) -> KvAnswer:
        """Put a question to a pool. Raises KvTransferFailed with its sentence when it refuses, is lost or late."""

    def revoke(self, request_id: RequestId, generation: int) -> None:
        """Stop writing into blocks granted to this request up to this generation."""

    async def close(self) -> None: ...
