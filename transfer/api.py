"""The JSON the control plane serves outside the OpenAI API, and the ui reads. Plain structs, no behaviour.

Paths: GET /v1/fleet (FleetState), GET /v1/live (SSE of LiveFrame), POST /v1/plans (PlanRequest -> Plan),
GET /v1/plans, GET /v1/plans/{id}, POST /v1/plans/{id}/apply (ApplyRequest -> Plan), POST /v1/plans/{id}/undo
(ApplyRequest -> Plan: the inverse plan, applied), GET /v1/requests, GET /v1/requests/{id} (RequestRecord),
GET /v1/audit (AuditRow). Errors are {"error": {"message", "type", "param", "code"}} as in the OpenAI API.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from transfer.terms import Slo, Struct

PlanStatus = Literal["planned", "applying", "done", "failed", "undone"]
StepStatus = Literal["pending", "draining", "switching", "verifying", "done", "failed", "rolled_back"]
Outcome = Literal["ok", "cancelled", "rejected", "timed_out", "error"]
KvWay = Literal["compute", "fetch", "both"]
"""Where a prompt's KV that is not on the instance comes from: computed, fetched but for less than a block, or the front
fetched while the rest is computed."""

MAX_VERSION = (1 << 63) - 1
"""What the journal's integers hold."""
MAX_NAME_CHARS = 256


class Goodput(Struct, frozen=True):
    """Good requests per second by completion time over the window. per_dollar: good requests a dollar."""

    per_s: float = 0.0
    per_gpu: float = 0.0
    window_s: float = 60.0
    tokens_per_s: float = 0.0
    throughput_per_s: float = 0.0
    per_dollar: float | None = None
    cost_per_good: float | None = None
    """None stands for infinite: no good request in the window."""


class Quantiles(Struct, frozen=True):
    """From base-2 exponential buckets of scale 5; None without samples."""

    p50: float | None = None
    p90: float | None = None
    p99: float | None = None


class ClassView(Struct, frozen=True):
    """One traffic class: explicit counters since start, and percentiles over the window."""

    name: str
    slo: Slo | None
    good: int
    total: int
    attainment: float | None
    ttft_s: Quantiles
    tpot_s: Quantiles
    doomed: int = 0


class InstanceView(Struct, frozen=True):
    id: str
    role: str
    state: str
    hardware: str
    model: str
    epoch: int
    host: str = ""
    engine: str = ""
    num_gpus: int = 1
    price_per_hour: float = 0.0
    num_running: int = 0
    num_waiting: int = 0
    queued_prefill_tokens: int = 0
    num_blocks: int = 0
    free_blocks: int = 0
    cached_blocks: int = 0
    kv_use: float = 0.0
    step_s: float = 0.0
    num_preemptions: int = 0
    ssd_blocks: int = 0
    """kv_pool: readable from its SSD tier, of ssd_capacity_blocks."""
    ssd_capacity_blocks: int = 0
    unsettled: int = 0
    """Stores to pools that wait or run on an engine; blocks of a kv_pool that are being put or may yet go to SSD."""
    last_seen_s: float = 0.0
    """Seconds since its last word."""


class KvView(Struct, frozen=True):
    """Prefix hits since start, in tokens of first placements. Hit rate of a tier: its tokens / looked_up_tokens."""

    looked_up_tokens: int = 0
    device_tokens: int = 0
    """Found in the cache of the instance that made the prompt's KV."""
    pool_dram_tokens: int = 0
    pool_ssd_tokens: int = 0
    """Fetched from a pool's memory, from its SSD."""
    useful_tokens: int = 0
    """Of those fetched: compute waited less for them than computing them would have taken, by prediction."""
    replicated_blocks: int = 0
    """Of hot prefixes, copied to another pool."""


class FleetState(Struct, frozen=True):
    """What `phaseplane status --json` prints. version: bumped by every change of membership, role or plan."""

    xpyd: str
    models: tuple[str, ...]
    instances: tuple[InstanceView, ...]
    goodput: Goodput
    attainment: float | None
    orphaned_kv_blocks: int
    in_flight: int
    version: int
    classes: tuple[ClassView, ...] = ()
    stages_s: dict[str, float] = {}
    """Critical-path seconds by stage among requests that missed, over the window."""
    bottleneck: str | None = None
    verdict: str = ""
    """One sentence for an operator: are objectives met, what is degraded."""
    uptime_s: float = 0.0
    kv: KvView = KvView()


class LiveFrame(Struct, frozen=True):
    """One event of GET /v1/live; the SSE id is `seq`. kind snapshot: `state` is whole; delta: only what changed.

    changed: FleetState fields by name, instances by id under "instances"; gone: ids that left.
    """

    seq: int
    kind: Literal["snapshot", "delta"]
    state: FleetState | None = None
    changed: dict[str, object] = {}
    gone: tuple[str, ...] = ()


class PlanRequest(Struct, frozen=True):
    """Ask for a plan. Exactly one of `xpyd` ("1P2D") and `moves` (instance id -> role)."""

    xpyd: str | None = None
    moves: dict[str, str] | None = None


class PlanStep(Struct, frozen=True):
    instance_id: str
    from_role: str
    to_role: str
    status: StepStatus = "pending"
    num_migrated: int = 0
    detail: str = ""


class Prediction(Struct, frozen=True):
    """Predicted or measured effect of a plan. Low and high bound an 80 % interval; None: not enough traffic."""

    duration_s: float | None = None
    goodput_per_s: float | None = None
    goodput_low: float | None = None
    goodput_high: float | None = None
    ttft_p50_s: float | None = None
    tpot_p50_s: float | None = None
    basis: str = ""


class Plan(Struct, frozen=True):
    plan_id: str
    status: PlanStatus
    base_version: int
    before: str
    after: str
    steps: tuple[PlanStep, ...]
    predicted: Prediction
    measured: Prediction | None = None
    risks: tuple[str, ...] = ()
    failed: str | None = None
    undo_of: str | None = None


class ApplyRequest(Struct, frozen=True):
    """base_version: the fleet version the caller saw; another one is refused with 409."""

    base_version: Annotated[int, msgspec.Meta(ge=0, le=MAX_VERSION)]
    idempotency_key: Annotated[str, msgspec.Meta(max_length=MAX_NAME_CHARS)] = ""
    actor: Annotated[str, msgspec.Meta(max_length=MAX_NAME_CHARS)] = "operator"


class AuditRow(Struct, frozen=True):
    """at_s: Unix time."""

    at_s: float
    actor: str
    action: str
    subject: str
    detail: str = ""
    predicted: Prediction | None = None
    measured: Prediction | None = None


class CandidateView(Struct, frozen=True):
    """One placement that was considered. chosen marks the winner; reason says why another one lost."""

    prefill: str | None
    decode: str
    ttft_s: float
    tpot_s: float
    cached_tokens: int
    queue_s: float
    prefill_s: float
    transfer_s: float
    kv_source: str | None = None
    chosen: bool = False
    reason: str = ""
    kv_way: KvWay = "compute"
    fetched_blocks: int = 0
    """To be fetched from kv_source, those on the instance already left out; fetch_s: predicted for them."""
    fetch_s: float = 0.0


class RequestRecord(Struct, frozen=True):
    """One finished request. Times in seconds; arrived_at is Unix time. stages_s adds up to ttft_s."""

    request_id: str
    model: str
    traffic_class: str
    arrived_at: float
    outcome: Outcome
    finish_reason: str | None
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    ttft_s: float | None
    tpot_s: float | None
    e2e_s: float
    max_itl_s: float | None
    good: bool | None
    """None: its class has no objectives."""
    stages_s: dict[str, float] = {}
    prefill: str | None = None
    decode: str | None = None
    kv_source: str | None = None
    num_resumes: int = 0
    num_migrations: int = 0
    why: tuple[CandidateView, ...] = ()
    error: str | None = None
    fetched_tokens: int = 0
    """Of cached_tokens: fetched from kv_source."""
