"""What HTTP handlers work with: one Gateway object under a typed key, and the protocols of what is behind it."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from aiohttp import web

from controlplane.config import Config
from controlplane.core.events import ApplyWanted, AutopilotWanted, ClassesWanted, Event, HoldWanted, PlanWanted
from controlplane.core.series import SeriesBook
from controlplane.gateway.live import LiveFeed
from controlplane.gateway.metrics import GatewayMetrics
from controlplane.gateway.streams import TokenRouter
from controlplane.gateway.tokenizer import TextTokenizer
from transfer.api import ActionView, AuditRow, FleetState, Plan, RequestRecord
from transfer.autopilot import AutopilotView, LookRow
from transfer.classes import ClassesView
from transfer.screens import KvDetail


class Control(Protocol):
    """The scheduler as handlers see it; actors/scheduler.py is the real one."""

    def post(self, event: Event) -> None:
        """Hand over one event; never blocks."""

    def state(self) -> FleetState: ...

    def counters(self) -> dict[str, float]:
        """The core's own numbers for /metrics, by name."""

    def plans(self) -> list[Plan]: ...

    def plan(self, plan_id: str) -> Plan | None: ...

    async def ask(self, event: PlanWanted | ApplyWanted) -> Plan:
        """Raises ApiError with the core's refusal, or 504 when it does not answer in time."""

    def autopilot(self) -> AutopilotView: ...

    async def steer(self, event: AutopilotWanted) -> AutopilotView:
        """As ask."""

    async def hold(self, event: HoldWanted) -> ActionView:
        """As ask."""

    def classes(self) -> ClassesView: ...

    async def set_classes(self, event: ClassesWanted) -> ClassesView:
        """As ask."""

    def kv(self) -> KvDetail: ...


class Archive(Protocol):
    """Finished requests and the audit log; history/store.py is the real one."""

    async def requests(self, limit: int, outcome: str | None = None) -> list[RequestRecord]:
        """The newest first."""

    async def request(self, request_id: str) -> RequestRecord | None: ...

    async def audit(self, limit: int) -> list[AuditRow]:
        """The newest first."""

    async def looks(self, since: float, limit: int) -> list[LookRow]:
        """Those that ended after `since` (Unix time), the newest first."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """name: as nodes know the model; served_name: as clients do; root: what it was configured as."""

    name: str
    served_name: str
    tokenizer: TextTokenizer
    root: str


@dataclass
class Gateway:
    """All that handlers share. now: loop time, seconds; started_s in the same. models: the first one is served to who
    names none."""

    config: Config
    models: tuple[ServedModel, ...]
    router: TokenRouter
    control: Control
    archive: Archive
    live: LiveFeed
    series: SeriesBook
    metrics: GatewayMetrics
    now: Callable[[], float]
    created: int = field(default_factory=lambda: int(time.time()))
    stopping: bool = False
    started_s: float = 0.0
    _prefix: str = field(default_factory=lambda: os.urandom(6).hex())
    _counter: itertools.count[int] = field(default_factory=itertools.count)

    def mint_id(self, kind: str) -> str:
        """A request id that no other process or call has, for example cmpl-9f86d081884c-00002a."""
        return f"{kind}-{self._prefix}-{next(self._counter):06x}"


GATEWAY = web.AppKey("gateway", Gateway)
TENANT = web.RequestKey("tenant", str)
"""Key of a request under which the authenticated tenant's name stands; absent without API keys."""
