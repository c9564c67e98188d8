"""The JSON the control plane serves outside the OpenAI API, and the ui reads. Plain structs, no behaviour.

Paths: GET /v1/fleet (FleetState), GET /v1/live (SSE of LiveFrame), POST /v1/plans (PlanRequest -> Plan),
GET /v1/plans, GET /v1/plans/{id}, POST /v1/plans/{id}/apply and /undo (ApplyRequest -> Plan; the inverse one, applied),
GET /v1/requests, GET /v1/requests/{id} (RequestRecord), GET /v1/audit (AuditRow), GET and PUT /v1/autopilot
(AutopilotRequest -> AutopilotView), POST /v1/autopilot/pins (PinRequest), DELETE /v1/autopilot/pins/{subject}, GET
/v1/autopilot/looks (LookRow; autopilot.py has all of these), POST /v1/instances/{id}/cordon, /drain and /resume
(ApplyRequest -> ActionView); those of screens.py and classes.py. Beside a sentence of the fleet stands what it says as
code and values (said.py). Errors are {"error": {"message", "type", "param", "code"}} as in the OpenAI API.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from transfer.autopilot import MAX_NAME_CHARS, AutopilotMode
from transfer.said import Said
from transfer.terms import Slo, Struct

PlanStatus = Literal["planned", "applying", "done", "failed", "undone"]
StepStatus = Literal["pending", "draining", "switching", "verifying", "done", "failed", "rolled_back"]
Outcome = Literal["ok", "cancelled", "rejected", "timed_out", "error"]
HoldAction = Literal["cordon", "drain", "resume"]
KvWay = Literal["compute", "fetch", "both"]
"""Where a prompt's KV that is not on the instance comes from: computed, fetched but for less than a block, or the front
fetched while the rest is computed."""

MAX_VERSION = (1 << 63) - 1
"""What the journal's integers hold."""


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
    recent_good: int = 0
    """Of the window, as recent_total (those that count) and recent_per_s (goodput)."""
    recent_total: int = 0
    recent_per_s: float = 0.0
    judged_for_s: float | None = None
    """Seconds since its objectives were changed while the fleet ran: counters, attainment and goodput begin there."""


class ModelView(Struct, frozen=True):
    """One model, of all classes: what ClassView has of one."""

    name: str
    good: int = 0
    total: int = 0
    attainment: float | None = None
    ttft_s: Quantiles = Quantiles()
    tpot_s: Quantiles = Quantiles()
    recent_good: int = 0
    recent_total: int = 0
    recent_per_s: float = 0.0


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
    """Seconds since its last word. tpot_p50_s: median TPOT of what ended on it in the last 60 s."""
    tpot_p50_s: float | None = None
    provenance: str = ""
    """Of its latency profile: preset, measured or fitted; "" for a kv_pool. latency_error: relative median error of
    predicted step times, None where nobody measured it; speed: what its steps take of late over what is predicted."""
    latency_error: float | None = None
    speed: float = 1.0


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
    missed_by: dict[str, int] = {}
    """How many requests of the window were over each objective (ttft, tpot, e2e), the most first."""
    stages_s: dict[str, float] = {}
    """Critical-path seconds by stage among requests that missed, over the window."""
    bottleneck: str | None = None
    verdict: str = ""
    """One sentence for an operator: are objectives met, what is degraded."""
    uptime_s: float = 0.0
    kv: KvView = KvView()
    autopilot: AutopilotMode = "off"
    advice: str = ""
    """What the autopilot would do or did at its last look, and why."""
    advice_said: Said | None = None
    recent_attainment: float | None = None
    """Attainment over the window of `goodput`; None while nothing that counts ended in it."""
    goodput_10s: Goodput = Goodput(window_s=10.0)
    by_model: tuple[ModelView, ...] = ()
    """Where there are several: which of them misses."""
    queue_depth: int = 0
    """Requests that wait for a place on an instance. queue_late: of these, past an objective already."""
    queue_late: int = 0
    notice: str = ""
    """Why something looks wrong that is meant so, and what to do; empty at most times."""
    notice_said: Said | None = None


Scalar = str | int | float | None


class LiveFrame(Struct, frozen=True, omit_defaults=True):
    """One event of GET /v1/live; the SSE id is `seq`. kind snapshot: `state` is whole; delta: only what changed.

    changed: new values of FleetState fields by name. When instances came or went, `instances` is in it, whole.
    Otherwise ids names the instances that changed and columns has, by field of InstanceView, one value for each of ids;
    a field that changed for none of them is left out. at_s: Unix time at which the state was taken.
    """

    seq: int
    kind: Literal["snapshot", "delta"]
    at_s: float = 0.0
    state: FleetState | None = None
    changed: dict[str, object] = {}
    ids: tuple[str, ...] = ()
    columns: dict[str, tuple[Scalar, ...]] = {}


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
    said: Said | None = None


class Prediction(Struct, frozen=True):
    """Predicted or measured effect of a plan. Low and high bound an 80 % interval; None: not enough traffic."""

    duration_s: float | None = None
    goodput_per_s: float | None = None
    goodput_low: float | None = None
    goodput_high: float | None = None
    ttft_p50_s: float | None = None
    tpot_p50_s: float | None = None
    basis: str = ""
    said: Said | None = None
    """The basis."""
    attainment: float | None = None
    """Share of the requests with objectives that are good."""
    goodput_per_gpu: float | None = None
    goodput_per_dollar: float | None = None


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
    risks_said: tuple[Said, ...] = ()
    failed_said: Said | None = None


class ApplyRequest(Struct, frozen=True):
    """base_version: the fleet version the caller saw; another one is refused with 409."""

    base_version: Annotated[int, msgspec.Meta(ge=0, le=MAX_VERSION)]
    idempotency_key: Annotated[str, msgspec.Meta(max_length=MAX_NAME_CHARS)] = ""
    actor: Annotated[str, msgspec.Meta(max_length=MAX_NAME_CHARS)] = "operator"


class ActionView(Struct, frozen=True):
    """What an instance is after cordon, drain or resume, and the fleet's version. num_left: requests it still has."""

    instance: InstanceView
    version: int
    num_left: int = 0


class AuditRow(Struct, frozen=True):
    """at_s: Unix time."""

    at_s: float
    actor: str
    action: str
    subject: str
    detail: str = ""
    said: Said | None = None
    """The detail."""
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
    said: tuple[Said, ...] = ()
    """The reason."""
    kv_way: KvWay = "compute"
    fetched_blocks: int = 0
    """To be fetched from kv_source, those on the instance already left out; fetch_s: predicted for them."""
    fetch_s: float = 0.0
    provenance: str = ""
    """Where the least certain of its step times comes from: fitted, measured, preset, or extrapolated, beyond the steps
    that were measured. error: the larger relative median error of its step times, None where nobody measured one."""
    error: float | None = None


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
    num_replaced: int = 0
    why: tuple[CandidateView, ...] = ()
    error: str | None = None
    error_said: Said | None = None
    """error, for other languages; in it an engine's own words are as they were."""
    missed_by_s: dict[str, float] = {}
    """Objectives that it missed (ttft, tpot, e2e), each with the seconds above it."""
    fetched_tokens: int = 0
    """Of cached_tokens: fetched from kv_source."""
