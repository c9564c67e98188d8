"""Every setting of the scheduler core and its default. Where they come from is the shell's business."""

from __future__ import annotations

import difflib
from typing import Literal

import msgspec

from controlplane.core.policies.names import DEFAULT_POLICY, POLICY_NAMES
from transfer.errors import ConfigError
from transfer.terms import Slo, Struct

DEFAULT_CLASS = "default"


class CoreConfig(Struct, frozen=True):
    """Times in seconds. Part of the flight recorder's header, so that a replay decides with the same values.

    classes: objectives by traffic class; None: a class without objectives, shown apart. A request of a class
    that is not listed counts as default_class.
    """

    classes: dict[str, Slo | None] = msgspec.field(
        default_factory=lambda: {DEFAULT_CLASS: Slo(ttft_s=2.0, tpot_s=0.2), "batch": None}
    )
    default_class: str = DEFAULT_CLASS
    heartbeat_s: float = 1.0
    lease_s: float = 10.0
    """How long a leg may stand without a sign of life, and the grace before held blocks count as orphaned."""
    abort_retry_s: float = 1.0
    reserve_retry_s: float = 2.0
    """An unanswered Reserve is sent again after this, and given up after a lease."""

    policy: str = DEFAULT_POLICY
    """How requests are placed: one of policies/names.py."""
    colocate: Literal["auto", "never", "always"] = "auto"
    """Mixed instances: by prediction, only when there is no prefill and decode pair, or whenever there is one."""
    without_prefill: Literal["serve_on_decode", "refuse"] = "serve_on_decode"
    local_prefill_tokens: int = 64
    """Up to this many tokens without KV may be computed on the decode instance itself."""
    num_considered: int = 4
    """Prefill and decode instances that are weighed against each other in full."""
    num_explained: int = 8
    """Candidates that are kept of each decision for its why, the winner included."""
    prefill_backlog_s: float = 4.0
    """Beyond this predicted queue a prefill instance gets no more work; requests wait here, where they can move."""
    room_watermark: float = 0.01
    same_host_bytes_per_s: float = 8e9
    fetch_latency_s: float = 0.003
    """Of a fetch from a KV pool, before its first bytes. What fetches are measured to take corrects predictions, each
    pool's by itself."""
    ssd_bytes_per_s: float = 2e9
    """What a KV pool reads and verifies from its SSD tier."""

    replicas: int = 2
    """Pools that hold a hot prefix before no more copies of it are made; 1: none are."""
    hot_arrivals: int = 8
    """A prefix is hot from this many requests in hot_window_s on."""
    hot_window_s: float = 60.0
    """Counts of prefixes are halved after this."""
    replicate_blocks: int = 512
    """Most leading blocks of one copy."""
    max_replications: int = 2
    """Copies under way at a time in the fleet."""
    replicate_timeout_s: float = 30.0
    replicate_again_s: float = 60.0
    """How long a prefix rests after an order to copy it."""
    ramp_s: float = 60.0
    """A KV pool that joins others takes new prefixes with a weight that grows from 0.1 to 1.0 in this time."""

    max_queue: int = 2048
    """Requests waiting for a place; more are answered 429."""
    max_queue_s: float | None = None
    """Longest wait for a place before 503; None: the request's own timeout."""
    early_reject: Literal["never", "hopeless", "objective"] = "hopeless"
    """429 at arrival when the predicted TTFT exceeds the request's timeout (hopeless) or its objective."""
    max_retry_after_s: float = 60.0
    rejoin_grace_s: float = 10.0
    """How long requests wait while no instance of a needed role is ready, before 503."""
    max_resumes: int = 8
    suspect_after: int = 2
    """A request that was in the batch when this many engines failed runs alone from then on."""
    max_engine_failures: int = 3
    """A request whose engine fails this often while it runs ends with an error; above suspect_after."""

    max_migrations: int = 4
    """Running requests in motion at a time while an instance drains."""
    max_migration_attempts: int = 3
    migrate_timeout_s: float = 30.0
    drain_timeout_s: float = 600.0
    switch_timeout_s: float = 60.0
    max_role_orders: int = 4
    measure_s: float = 10.0
    """Window after a plan in which its effect is measured."""

    autopilot: Literal["off", "advise", "auto"] = "advise"
    """Role switches for goodput: never looked for, proposed, or made (autopilot.py)."""
    autopilot_every_s: float = 1.5
    autopilot_window_s: float = 60.0
    """Traffic it judges by; a sixth of it may be enough, and traffic_window_s is looked at too."""
    autopilot_rest_s: float = 15.0
    """After a plan, before it makes another."""
    autopilot_floor: int = 1
    """Prefill, decode and mixed instances it leaves where there are any."""
    autopilot_max_moves: int | None = None
    """Most role switches of one move; None: a third of the engines, rounded up."""
    pin_s: float = 3600.0
    """An operator's plan keeps the autopilot from changing roles for so long, unless it is released; 0: it does not."""

    traffic_window_s: float = 300.0
    min_traffic: int = 10
    """Fewer arrivals than this in the window: no prediction."""

    directory_blocks: int = 1_000_000
    forget_s: float = 60.0
    """How long a lost instance stays on display."""
    max_plans: int = 100


def check_config(config: CoreConfig) -> CoreConfig:
    """The same config. Raises ConfigError with a sentence when a value cannot work."""
    if config.policy not in POLICY_NAMES:
        nearest = difflib.get_close_matches(config.policy, POLICY_NAMES, n=1, cutoff=0.0)[0]
        raise ConfigError(
            f"policy {config.policy!r} is unknown; did you mean {nearest!r}? There are {', '.join(POLICY_NAMES)}"
        )
    if config.default_class not in config.classes:
        raise ConfigError(f"default_class {config.default_class!r} is not one of the classes {sorted(config.classes)}")
    for name in (
        "heartbeat_s", "lease_s", "abort_retry_s", "reserve_retry_s", "prefill_backlog_s", "max_queue", "max_resumes",
        "num_considered", "num_explained", "max_migrations", "migrate_timeout_s", "drain_timeout_s", "switch_timeout_s",
        "same_host_bytes_per_s", "directory_blocks", "max_plans", "measure_s", "traffic_window_s", "max_role_orders",
        "suspect_after", "ssd_bytes_per_s", "replicas", "hot_arrivals", "hot_window_s", "replicate_blocks",
        "max_replications", "replicate_timeout_s", "autopilot_every_s", "autopilot_window_s", "autopilot_floor",
    ):  # fmt: skip
        if not getattr(config, name) > 0:
            raise ConfigError(f"{name} must be above 0, got {getattr(config, name)}")
    for name in ("fetch_latency_s", "replicate_again_s", "ramp_s", "autopilot_rest_s", "pin_s"):
        if not getattr(config, name) >= 0:
            raise ConfigError(f"{name} must be at least 0, got {getattr(config, name)}")
    if config.autopilot_max_moves is not None and config.autopilot_max_moves < 1:
        raise ConfigError(f"autopilot_max_moves must be at least 1, got {config.autopilot_max_moves}")
    if config.lease_s < 2 * config.heartbeat_s:
        raise ConfigError(f"lease_s ({config.lease_s}) must be at least twice heartbeat_s ({config.heartbeat_s})")
    if config.max_engine_failures <= config.suspect_after:
        raise ConfigError(
            f"max_engine_failures ({config.max_engine_failures}) must be above suspect_after ({config.suspect_after})"
        )
    return config
