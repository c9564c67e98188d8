"""Every setting of the control plane, its default and what it must satisfy. Reading them is settings.py."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import msgspec

from controlplane import settings
from controlplane.core.config import DEFAULT_CLASS, CoreConfig, check_config
from transfer.errors import ConfigError
from transfer.hosts import is_loopback
from transfer.terms import Slo, Struct

PREFIX = "PHASEPLANE_"
FOREIGN_SECTIONS = (
    "up", "client", "status", "rebalance", "undo", "pull", "chat", "bench", "doctor", "why", "keys",
    "bench_prefix", "bench_kv", "kvpool", "kvpool_stats", "autopilot", "pin", "unpin", "simulate",
    "validate", "calibrate", "plan", "cordon", "drain", "resume", "top", "console",
    "objectives", "series",
)  # fmt: skip
"""Sections of the same file that other programs read."""
ALIASES = {
    "host": "server.host",
    "port": "server.port",
    "wire_host": "server.wire_host",
    "wire_port": "server.wire_port",
    "ready_file": "server.ready_file",
    "parent_pid": "server.parent_pid",
    "model": "model.name",
    "served_name": "model.served_name",
    "engine": "model.engine",
    "state": "history.directory",
}
"""Short names: --port and PHASEPLANE_PORT are server.port."""
EMULATED_MAX_CONTEXT = 131072

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class Server(Struct, frozen=True):
    """Where to listen. api_keys: tenant -> secret; KV is shared within a tenant only. Port 0 picks a free one."""

    host: str = "127.0.0.1"
    port: int = 8000
    wire_host: str = "127.0.0.1"
    wire_port: int = 8001
    api_keys: dict[str, str] = {}
    allowed_hosts: tuple[str, ...] = ()
    """Names of this server, without port, that requests may give beside its loopback ones while it asks for no key."""
    curve_key_file: str | None = None
    """Key pair of the node port (`phaseplane keys` makes it); required when wire_host is not loopback."""
    curve_allowed: tuple[str, ...] | None = None
    """Public keys of the nodes let in; None lets in whoever knows the control plane's public key."""
    ready_file: str | None = None
    """Written when requests can be served, removed at exit."""
    shutdown_s: float = 5.0
    """How long clients have to take their terminal event when the server stops."""
    parent_pid: int | None = None
    """Stop when that process ends."""
    liveness_s: float = 3.0
    """A node is lost after this long without a word."""
    seed: int = 0
    """Of every drawn scheduling decision, so that a recorded run replays."""


class Model(Struct, frozen=True):
    """What is served: a pulled model's name or a directory. emulated: byte-level text, `name` is only a name."""

    name: str = "smollm2-135m"
    served_name: str | None = None
    engine: Literal["native", "emulated"] = "native"
    max_context: int | None = None
    """Shortens the model's own context; emulated models have 131072."""


class Limits(Struct, frozen=True):
    max_body_bytes: int = 16 << 20
    max_connections: int = 8192
    """Open connections of clients; more are answered 503 and closed. The process needs that many file descriptors."""
    header_timeout_s: float = 10.0
    """From the first byte of a request to the end of its header; later it is answered 408."""
    body_timeout_s: float = 30.0
    """For the whole body of a request; later it is answered 408."""
    idle_timeout_s: float = 75.0
    """A connection on which no request is in progress is closed after this."""
    read_timeout_s: float = 60.0
    """How long a client may leave a full connection unread before it is cut off."""
    request_timeout_s: float = 600.0
    max_in_flight: int = 4096
    """Choices in progress; more are answered 429."""
    max_choices: int = 64
    """n times the number of prompts of one call."""
    max_unread_tokens: int = 4096
    """Of one stream: a client that does not read is cancelled beyond it."""


class History(Struct, frozen=True):
    directory: str | None = None
    """Default: ~/.local/state/phaseplane."""
    max_rows: int = 1_000_000
    max_age_days: float = 30.0
    flight_recorder: bool = True
    """Journal of everything the scheduler heard; it holds prompts as token ids and is readable by its owner only."""
    flight_file_bytes: int = 64 << 20
    flight_files: int = 4


class TrafficClass(Struct, frozen=True):
    """Objectives in seconds; none at all: served, shown apart, never counted as good."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None


class Config(Struct, frozen=True):
    """models: more models beside `model`, by the names clients use; each instance serves one of them.
    classes: objectives by traffic class; a request names its class in the header x-phaseplane-class.

    Naming any class replaces the ones set by default.
    """

    server: Server = Server()
    model: Model = Model()
    models: dict[str, Model] = {}
    limits: Limits = Limits()
    history: History = History()
    scheduler: CoreConfig = CoreConfig()
    classes: dict[str, TrafficClass] = msgspec.field(
        default_factory=lambda: {DEFAULT_CLASS: TrafficClass(ttft_s=2.0, tpot_s=0.2), "batch": TrafficClass()}
    )

    @property
    def served_name(self) -> str:
        """The model id clients use."""
        return self.model.served_name or Path(self.model.name).name

    @property
    def served(self) -> dict[str, Model]:
        """Every model by the id clients use, `model` first."""
        return {self.served_name: self.model, **self.models}

    @property
    def core(self) -> CoreConfig:
        """The scheduler core's settings, with the traffic classes in them."""
        slos = {name: _slo(name, traffic_class) for name, traffic_class in self.classes.items()}
        slos.setdefault(self.scheduler.default_class, None)
        return msgspec.structs.replace(self.scheduler, classes=slos)

    @property
    def state_dir(self) -> Path:
        """Where history and the flight recorder live; not created here."""
        chosen = self.history.directory
        return Path(chosen).expanduser() if chosen else Path.home() / ".local" / "state" / "phaseplane"


def load_config(file: Path | None, environ: Mapping[str, str], overrides: Mapping[str, str]) -> Config:
    """Read and check. overrides: dotted key -> text. Raises ConfigError, one sentence."""
    config = settings.load(Config, file, environ, PREFIX, overrides, FOREIGN_SECTIONS, ALIASES)
    _check(config)
    return config


def _check(config: Config) -> None:
    server, limits, history = config.server, config.limits, config.history
    for key, port in (("server.port", server.port), ("server.wire_port", server.wire_port)):
        if not 0 <= port <= 65535:
            raise ConfigError(f"{key} must be from 0 to 65535, got {port}")
    if not is_loopback(server.host) and not server.api_keys:
        raise ConfigError(f"server.host {server.host} is reachable by others: set server.api_keys, or use 127.0.0.1")
    if not is_loopback(server.wire_host) and server.curve_key_file is None:
        raise ConfigError(
            f"server.wire_host {server.wire_host} is reachable by others: set server.curve_key_file, or use 127.0.0.1"
        )
    if any(len(secret) < 8 for secret in server.api_keys.values()):
        raise ConfigError("a secret in server.api_keys is shorter than 8 characters; choose longer ones")
    positive = {
        "limits.max_connections": limits.max_connections, "limits.header_timeout_s": limits.header_timeout_s,
        "limits.body_timeout_s": limits.body_timeout_s, "limits.idle_timeout_s": limits.idle_timeout_s,
        "limits.read_timeout_s": limits.read_timeout_s, "server.shutdown_s": server.shutdown_s,
        "limits.max_body_bytes": limits.max_body_bytes,
        "limits.request_timeout_s": limits.request_timeout_s, "limits.max_in_flight": limits.max_in_flight,
        "limits.max_choices": limits.max_choices, "limits.max_unread_tokens": limits.max_unread_tokens,
        "history.max_rows": history.max_rows, "history.max_age_days": history.max_age_days,
        "history.flight_file_bytes": history.flight_file_bytes, "history.flight_files": history.flight_files,
        "model.max_context": 1 if config.model.max_context is None else config.model.max_context,
    }  # fmt: skip
    for key, value in positive.items():
        if not value > 0:
            raise ConfigError(f"{key} must be above 0, got {value}")
    if server.liveness_s < 2 * config.scheduler.heartbeat_s:
        raise ConfigError("server.liveness_s must be at least twice scheduler.heartbeat_s")
    if config.scheduler.classes != CoreConfig().classes:
        raise ConfigError("set traffic classes in [classes], not in scheduler.classes")
    for name, model in config.models.items():
        if not _NAME.fullmatch(name) or name == config.served_name or model.served_name not in (None, name):
            raise ConfigError(f"[models.{name}] must have a name of letters, digits, dots, dashes and underscores that "
                              "no other model has; clients use it, so leave served_name out")  # fmt: skip
        if model.max_context is not None and not model.max_context > 0:
            raise ConfigError(f"models.{name}.max_context must be above 0, got {model.max_context}")
    nodes = [Path(model.name).name for model in config.served.values()]
    if len(set(nodes)) < len(nodes):
        raise ConfigError("two of the models in [model] and [models] are the same; serve each of them once")
    for name in config.classes:
        if not _NAME.fullmatch(name):
            raise ConfigError(f"traffic class {name!r} must be of letters, digits, dots, dashes and underscores")
    try:
        check_config(config.core)
    except ConfigError as error:
        raise ConfigError(f"scheduler.{error}") from None


def _slo(name: str, traffic_class: TrafficClass) -> Slo | None:
    objectives = (traffic_class.ttft_s, traffic_class.tpot_s, traffic_class.e2e_s)
    if objectives == (None, None, None):
        return None
    if traffic_class.ttft_s is None or traffic_class.tpot_s is None:
        raise ConfigError(f"traffic class {name} needs both ttft_s and tpot_s, or no objective at all")
    if not all(objective is None or objective > 0 for objective in objectives):
        raise ConfigError(f"the objectives of traffic class {name} must be above 0 seconds")
    return Slo(ttft_s=traffic_class.ttft_s, tpot_s=traffic_class.tpot_s, e2e_s=traffic_class.e2e_s)
