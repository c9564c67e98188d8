"""Every message between the control plane and its nodes, by conversation. KV bytes travel apart (transfer/kv).

A message is a tagged MessagePack map; codec.py adds magic and version and refuses what is not listed in
MESSAGES. Requests carry (request_id, generation): a generation is minted by the handoff ledger each time a
request is placed, and whoever holds an older one is fenced.
"""

from __future__ import annotations

from transfer.profile import HardwareProfile, LatencyProfile
from transfer.terms import (
    FinishReason,
    InstanceId,
    KvLayout,
    ModelIdentity,
    RequestId,
    Role,
    SamplingParams,
    Struct,
    TokenLogprob,
)

PROTOCOL_VERSION = 1
CONTROL = "control"
"""The control plane's name on the wire."""


class Message(Struct, frozen=True, tag=True, kw_only=True):
    """Base of all messages; the tag is the class name."""


# --- membership: a node joins, reports, takes role orders, leaves -------------------------------------------


class Holding(Struct, frozen=True, array_like=True):
    """KV blocks held for one request there, 0 while it waits for some: the ledger compares them with its own."""

    request_id: RequestId
    generation: int
    num_blocks: int


class LoadReport(Struct, frozen=True):
    """An instance's own account of its load; reconciles what the scheduler charged at dispatch."""

    num_running: int = 0
    num_waiting: int = 0
    queued_prefill_tokens: int = 0
    num_blocks: int = 0
    free_blocks: int = 0
    cached_blocks: int = 0
    """Blocks nobody holds that still carry reusable KV; they count as free."""
    step_s: float = 0.0
    """Exponentially weighted mean of recent steps; 0.0 before the first."""
    num_preemptions: int = 0
    speed: float = 1.0
    """Measured / predicted step time; 1.0 means the declared LatencyProfile holds."""
    leaked_blocks: int = 0
    """Blocks referenced by nothing that is alive on the node: its own integrity check. Must read 0."""
    ssd_blocks: int = 0
    """kv_pool: blocks that can be read from its SSD tier, those also in DRAM included."""
    ssd_capacity_blocks: int = 0
    """kv_pool: how many its SSD tier may hold; 0: it has none."""
    unsettled: int = 0
    """Writes behind what was answered: an engine's stores to pools, a pool's puts and what may yet go to SSD."""


class Hello(Message, frozen=True):
    """Node -> control, first on every connection and again after control was lost."""

    protocol: int
    instance_id: InstanceId
    epoch: int
    """Random per life of the instance; a restarted node has another one."""
    role: Role
    model: ModelIdentity | None
    """None only for kv_pool."""
    layout: KvLayout | None
    engine: str
    """native, emulated or vllm; dram for a pool."""
    hardware: HardwareProfile
    latency: LatencyProfile | None
    num_blocks: int
    data_endpoint: str
    """Where this instance accepts KV: "tcp://host:port" or "inproc://name"."""
    host_id: str
    """Equal on two instances means shared memory works between them."""
    holdings: tuple[Holding, ...] = ()
    token_budget: int = 0
    """Most tokens one step computes; 0 for kv_pool."""


class Welcome(Message, frozen=True):
    """Control -> node. `control_epoch` differs after a restart: work of an older one must be dropped."""

    control_epoch: int
    role: Role
    heartbeat_s: float
    lease_s: float


class NotWelcome(Message, frozen=True):
    """Control -> node: refused for good (other version, model or layout). `reason` is a sentence."""

    reason: str


class Heartbeat(Message, frozen=True):
    epoch: int
    state: str
    load: LoadReport
    holdings: tuple[Holding, ...] = ()
    role: Role | None = None
    """The role it serves now, so that control can verify a switch; None: not told."""


class Goodbye(Message, frozen=True):
    """Node -> control: an orderly exit."""

    epoch: int
    reason: str


class RoleOrder(Message, frozen=True):
    """Control -> node: take this role. Only sent when drained; a node that is not idle refuses."""

    plan_id: str
    epoch: int
    role: Role


class RoleReport(Message, frozen=True):
    """Node -> control: the role it really has now. `ok` False says why in `detail`."""

    plan_id: str
    epoch: int
    role: Role
    ok: bool
    detail: str = ""


class PoolPeer(Struct, frozen=True):
    """weight: its share of new prefixes relative to the others, above 0, 1.0 when warm: a new node is ramped."""

    instance_id: InstanceId
    epoch: int
    data_endpoint: str
    host_id: str
    weight: float = 1.0


class PoolMap(Message, frozen=True):
    """Control -> engines: the pool nodes that accept puts, in order of instance id."""

    pools: tuple[PoolPeer, ...]


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
