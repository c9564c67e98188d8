"""A scheduler core and a fleet that tests play themselves; everything between them and the client is real."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from controlplane.config import Config, Model
from controlplane.core.events import (
    ApplyWanted,
    Arrived,
    AutopilotReady,
    AutopilotWanted,
    ClassesReady,
    ClassesWanted,
    Effect,
    Ended,
    Event,
    Expect,
    Fail,
    Finished,
    FirstToken,
    HoldReady,
    HoldWanted,
    PlanReady,
    PlanRefused,
    PlanWanted,
    RequestSpec,
    Tick,
)
from controlplane.core.series import SeriesBook
from controlplane.gateway.app import build_app
from controlplane.gateway.live import LiveFeed
from controlplane.gateway.metrics import GatewayMetrics
from controlplane.gateway.service import Gateway, ServedModel
from controlplane.gateway.tokenizer import BYTE_EOS, ByteTokenizer
from controlplane.plane import Hooks, Plane, build
from transfer.api import ActionView, AuditRow, FleetState, Goodput, InstanceView, Plan, Prediction, RequestRecord
from transfer.autopilot import AutopilotSettings, AutopilotView, LookRow
from transfer.classes import ClassesView, ClassSetting
from transfer.said import say
from transfer.screens import KvDetail
from transfer.terms import FinishReason, Slo, TokenLogprob, unpack_tokens
from transfer.wire.messages import Message, StepOutput, TokenItem

Reply = Callable[[RequestSpec], list[TokenItem] | Fail | None]


@dataclass
class SilentEndpoint:
    """A wire with nobody on it."""

    identity: str = "control"
    address: str = "inproc://control"
    sent: list[tuple[str, Message]] = field(default_factory=list)

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    def send(self, peer: str, message: Message) -> None:
        self.sent.append((peer, message))


class FakeCore:
    """Places everything at once on an imaginary decode instance, under generation 1."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.on_arrived: Callable[[RequestSpec], None] = lambda spec: None
        self.fleet = fleet_state("prefill", "decode")
        self.specs: dict[str, RequestSpec] = {}
        self.refusal: tuple[int, str] | None = None

    def handle(self, event: Event, now: float) -> list[Effect]:
        if not isinstance(event, Tick):
            self.events.append(event)
        match event:
            case Arrived():
                self.specs[event.request.request_id] = event.request
                asyncio.get_running_loop().call_soon(self.on_arrived, event.request)
                return [Expect(request_id=event.request.request_id, generation=1)]
            case Ended():
                return [Finished(record=record_of(self.specs[event.request_id], event))]
            case PlanWanted() | ApplyWanted() | HoldWanted() if self.refusal is not None:
                return [self._refused(event.ask_id)]
            case PlanWanted() | ApplyWanted():
                return [PlanReady(ask_id=event.ask_id, plan=a_plan())]
            case HoldWanted():
                view = next(one for one in self.fleet.instances if one.id == event.instance_id)
                return [HoldReady(ask_id=event.ask_id, view=ActionView(instance=view, version=2, num_left=1))]
            case AutopilotWanted() | ClassesWanted() if self.refusal is not None:
                return [self._refused(event.ask_id)]
            case AutopilotWanted():
                return [AutopilotReady(ask_id=event.ask_id, view=self.autopilot(now))]
            case ClassesWanted():
                return [ClassesReady(ask_id=event.ask_id, view=self.classes())]
        return []

    def _refused(self, ask_id: str) -> PlanRefused:
        assert self.refusal is not None
        return PlanRefused(ask_id=ask_id, status=self.refusal[0], said=say("text", text=self.refusal[1]))

    def state(self, now: float) -> FleetState:
        return self.fleet

    def plans(self) -> list[Plan]:
        return [a_plan()]

    def plan(self, plan_id: str) -> Plan | None:
        return a_plan() if plan_id == "plan-1" else None

    def metrics(self) -> dict[str, float]:
        return {"placements_total": 3.0}

    def readings(self, now: float) -> dict[str, float]:
        return {"in_flight": float(self.fleet.in_flight), "instance.decode-1.kv_use": 0.5}

    def kv(self, now: float) -> KvDetail:
        return KvDetail(
            hits=self.fleet.kv, links=(), prefixes=(), caches=(), failures={}, orphaned_kv_blocks=0, handoff_bytes=7
        )

    def autopilot(self, now: float) -> AutopilotView:
        settings = AutopilotSettings(every_s=3.0, window_s=60.0, rest_s=15.0, floor=1, max_moves=None, pin_s=3600.0)
        return AutopilotView(mode="advise", rule="in one sentence", line="hold: no traffic", settings=settings)

    def classes(self) -> ClassesView:
        slo = Slo(ttft_s=2.0, tpot_s=0.2)
        return ClassesView(version=2, classes=(ClassSetting(name="default", slo=slo, configured=slo),))

    def of(self, kind: type[Event]) -> list[Event]:
        return [event for event in self.events if isinstance(event, kind)]

    def ended(self) -> list[Ended]:
        return [event for event in self.events if isinstance(event, Ended)]

    def first_tokens(self) -> list[FirstToken]:
        return [event for event in self.events if isinstance(event, FirstToken)]


@dataclass
class ListArchive:
    """History in lists."""

    records: list[RequestRecord] = field(default_factory=list)
    rows: list[AuditRow] = field(default_factory=list)
    looked: list[LookRow] = field(default_factory=list)

    async def requests(self, limit: int, outcome: str | None = None) -> list[RequestRecord]:
        chosen = [record for record in self.records if outcome in (None, record.outcome)]
        return chosen[::-1][:limit]

    async def request(self, request_id: str) -> RequestRecord | None:
        return next((record for record in self.records if record.request_id == request_id), None)

    async def audit(self, limit: int) -> list[AuditRow]:
        return self.rows[::-1][:limit]

    async def looks(self, since: float, limit: int) -> list[LookRow]:
        return [row for row in self.looked if row.ended_at >= since][::-1][:limit]


@dataclass
class Front:
    """One gateway on a real socket, with the test behind it."""

    client: TestClient[web.Request, web.Application]
    core: FakeCore
    plane: Plane
    gateway: Gateway
    archive: ListArchive
    endpoint: SilentEndpoint

    @property
    def url(self) -> str:
        return str(self.client.make_url("/"))

    def say(self, *items: TokenItem) -> None:
        """One decode step reaches the control plane."""
        self.plane.scheduler.on_message("d1", StepOutput(epoch=1, items=items))

    def reply(self, script: Reply) -> None:
        """Answer every request by script: items go out one a step."""

        def play(spec: RequestSpec) -> None:
            answer = script(spec)
            if isinstance(answer, Fail):
                self.plane.router.fail(answer)
            else:
                for item in answer or []:
                    self.say(item)

        self.core.on_arrived = play

    async def arrivals(self, count: int) -> list[RequestSpec]:
        """The first `count` requests that reached the core."""
        await until(lambda: len(self.core.specs) >= count)
        return list(self.core.specs.values())


@asynccontextmanager
async def front(config: Config | None = None) -> AsyncIterator[Front]:
    """A gateway for the emulated model called `m`."""
    config = config or Config(model=Model(name="m", engine="emulated", max_context=4096))
    core, archive, endpoint = FakeCore(), ListArchive(), SilentEndpoint()
    metrics = GatewayMetrics(config.served_name, config.core.classes, [config.served_name])

    def finished(record: RequestRecord) -> None:
        archive.records.append(record)
        metrics.finished(record)

    hooks = Hooks(on_finished=finished, on_audit=archive.rows.append, on_gap=metrics.gap)
    limits = config.limits
    plane = build(
        core, lambda **_: endpoint, hooks, max_streams=limits.max_in_flight, max_unread_tokens=limits.max_unread_tokens
    )
    await plane.start()
    now = asyncio.get_running_loop().time
    gateway = Gateway(
        config=config, models=tuple(
            ServedModel(model.name, name, ByteTokenizer(model.max_context or 4096), model.name)
            for name, model in config.served.items()
        ),
        router=plane.router, control=plane.scheduler, archive=archive, live=LiveFeed(plane.scheduler.state),
        series=SeriesBook(), metrics=metrics, now=now, started_s=now(),
    )  # fmt: skip
    server = TestServer(build_app(gateway))
    await server.start_server()
    client = TestClient(server)
    try:
        yield Front(client, core, plane, gateway, archive, endpoint)
        await until(lambda: len(plane.router) == 0, "every request ended")
        ids = [event.request_id for event in core.ended()]
        assert len(ids) == len(set(ids)) == len(core.specs), "each request ends exactly once"
    finally:
        gateway.live.close()
        await client.close()
        await plane.stop()


async def until(condition: Callable[[], bool], what: str = "the condition", timeout_s: float = 5.0) -> None:
    """Poll. Raises AssertionError after timeout_s."""
    deadline = asyncio.get_running_loop().time() + timeout_s
    while not condition():
        assert asyncio.get_running_loop().time() < deadline, f"{what} did not come true"
        await asyncio.sleep(0.005)


def items(
    request_id: str, *texts: str | bytes, finish: FinishReason | None = FinishReason.STOP, start: int = 0,
    generation: int = 1, logprobs: bool = False, cached: int | None = None,
) -> list[TokenItem]:  # fmt: skip
    """One item for each text, one token for each byte; with STOP the last one carries the end token too."""
    made: list[TokenItem] = []
    for place, text in enumerate(texts):
        token_ids = tuple(text.encode() if isinstance(text, str) else text)
        last = place == len(texts) - 1
        if last and finish is FinishReason.STOP:
            token_ids += (BYTE_EOS,)
        made.append(
            TokenItem(
                request_id=request_id, generation=generation, index=start, token_ids=token_ids,
                finish=finish if last else None, cached_tokens=cached,
                logprobs=tuple(a_logprob(token) for token in token_ids) if logprobs else None,
            )
        )  # fmt: skip
        start += len(token_ids)
    return made


def a_logprob(token: int) -> TokenLogprob:
    return TokenLogprob(logprob=-token / 256, top_ids=(token, 0), top_logprobs=(-token / 256, -9.0))


def prompt_text(spec: RequestSpec) -> str:
    return bytes(unpack_tokens(spec.tokens)).decode()


def fleet_state(*roles: str, state: str = "ready", version: int = 1) -> FleetState:
    views = tuple(
        InstanceView(id=f"{role}-{place}", role=role, state=state, hardware="H800", model="m", epoch=1, num_blocks=8)
        for place, role in enumerate(roles)
    )
    return FleetState(
        xpyd="1P1D", models=("m",), instances=views, goodput=Goodput(per_s=1.5), attainment=None,
        orphaned_kv_blocks=0, in_flight=0, version=version,
    )  # fmt: skip


def a_plan() -> Plan:
    return Plan(
        plan_id="plan-1",
        status="planned",
        base_version=1,
        before="2P1D",
        after="1P2D",
        steps=(),
        predicted=Prediction(),
    )


def record_of(spec: RequestSpec, ended: Ended) -> RequestRecord:
    return RequestRecord(
        request_id=spec.request_id, model=spec.model, traffic_class=spec.traffic_class, arrived_at=spec.arrived_at,
        outcome=ended.outcome, finish_reason=ended.finish_reason, prompt_tokens=len(spec.tokens) // 4,
        output_tokens=ended.output_tokens, cached_tokens=ended.cached_tokens or 0, ttft_s=ended.ttft_s,
        tpot_s=ended.tpot_s, e2e_s=ended.e2e_s, max_itl_s=ended.max_itl_s, good=ended.outcome == "ok",
    )  # fmt: skip
