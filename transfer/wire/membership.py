"""What a node and the control plane say about the node itself: it joins, reports, takes role orders, leaves.

A part of messages.py, which describes them all; users import from there.
"""

from __future__ import annotations

from transfer.profile import HardwareProfile, LatencyProfile
from transfer.terms import InstanceId, KvLayout, ModelIdentity, RequestId, Role, Struct

PROTOCOL_VERSION = 1
CONTROL = "control"
"""The control plane's name on the wire."""


class Message(Struct, frozen=True, tag=True, kw_only=True):
    """Base of all messages; the tag is the class name."""


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
    """native, emulated, vllm or openai; dram for a pool."""
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
    engine_version: str = ""
    """Of a served engine; members of one model that share KV and serve by the same engine have the same."""
    shares_kv: bool = True
    """False: its engine keeps KV to itself. It serves whole requests only (mixed), and its layout binds nobody."""
    moves: bool = True
    """False: it cannot pause a request that runs and push its KV; a drain places its requests anew instead."""


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
