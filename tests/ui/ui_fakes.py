"""A control plane that answers like the real one from prepared values, in a thread of its own."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
from aiohttp import web

from transfer.api import (
    ActionView,
    AuditRow,
    CandidateView,
    ClassView,
    FleetState,
    Goodput,
    InstanceView,
    KvView,
    LiveFrame,
    Plan,
    PlanStep,
    Prediction,
    Quantiles,
    RequestRecord,
)
from transfer.autopilot import AutopilotSettings, AutopilotView, Evaluation, LookRow, PinView, ScoredMove, ScoreView
from transfer.classes import ClassesView, ClassSetting, PriceView
from transfer.screens import CacheView, Column, KvDetail, LinkView, PrefixView, SeriesView
from transfer.terms import Slo


def a_fleet(**changes: Any) -> FleetState:
    instances = tuple(
        InstanceView(id=f"cpu-{i}", role=role, state="ready", hardware="CPU", model="tiny", epoch=7)
        for i, role in enumerate(("prefill", "decode"))
    )
    fleet = FleetState(
        xpyd="1P1D",
        models=("tiny",),
        instances=instances,
        goodput=Goodput(per_s=1.5, per_gpu=0.75),
        attainment=0.9,
        orphaned_kv_blocks=0,
        in_flight=3,
        version=4,
        classes=(
            ClassView(
                name="default",
                slo=Slo(ttft_s=2.0, tpot_s=0.2),
                good=9,
                total=10,
                attainment=0.9,
                ttft_s=Quantiles(p50=0.1, p90=0.2, p99=0.3),
                tpot_s=Quantiles(),
            ),
        ),
        verdict="Objectives are met.",
    )
    return msgspec.structs.replace(fleet, **changes)


def a_plan(status: str = "planned", **changes: Any) -> Plan:
    step = PlanStep(instance_id="cpu-0", from_role="prefill", to_role="decode")
    plan = Plan(
        plan_id="plan-1",
        status="planned",
        base_version=4,
        before="2P1D",
        after="1P2D",
        steps=(step,),
        predicted=Prediction(duration_s=1.0, goodput_per_s=2.0, goodput_low=1.0, goodput_high=3.0, basis="60 s"),
        risks=("prefill queue grows",),
    )
    return msgspec.structs.replace(plan, status=status, **changes)


def a_record() -> RequestRecord:
    chosen = CandidateView(
        prefill="cpu-0", decode="cpu-1", ttft_s=0.2, tpot_s=0.02, cached_tokens=16, queue_s=0.05, prefill_s=0.1,
        transfer_s=0.01, chosen=True,
    )  # fmt: skip
    other = msgspec.structs.replace(chosen, decode="cpu-2", chosen=False, reason="its KV is full")
    return RequestRecord(
        request_id="cmpl-1", model="tiny", traffic_class="default", arrived_at=0.0, outcome="ok", finish_reason="stop",
        prompt_tokens=20, output_tokens=5, cached_tokens=16, ttft_s=0.2, tpot_s=0.02, e2e_s=0.3, max_itl_s=0.03,
        good=True, stages_s={"queue": 0.05, "prefill": 0.15}, prefill="cpu-0", decode="cpu-1", why=(chosen, other),
    )  # fmt: skip


def a_kv_detail() -> KvDetail:
    link = LinkView(prefill="cpu-0", decode="cpu-1", num_transfers=3, num_bytes=3000, busy_s=0.3, exposed_s=0.1,
                    bytes_per_s=50.0, utilisation=0.01)  # fmt: skip
    prefix = PrefixView(name="9f86d081884c", num_tokens=96, num_blocks=6, num_hits=3, holders=("cpu-0",), last_hit_s=2)
    cache = CacheView(id="cpu-0", role="prefill", num_blocks=100, used_blocks=40, cached_blocks=20, free_blocks=60,
                      ssd_blocks=0, ssd_capacity_blocks=0, num_evicted=5, num_preemptions=0)  # fmt: skip
    return KvDetail(
        hits=KvView(looked_up_tokens=100, device_tokens=40), links=(link,), prefixes=(prefix,), caches=(cache,),
        failures={"prefills_failed": 1}, orphaned_kv_blocks=0, handoff_bytes=3000,
    )  # fmt: skip


def an_autopilot(**changes: Any) -> AutopilotView:
    line = "move n3 P->D: +18 %, 80 % interval 12 to 23, about 6 s"
    look = Evaluation(ago_s=2.0, model="tiny", code="advise", line=line, moves={"n3": "decode"}, gain=0.18)
    view = AutopilotView(
        mode="advise", rule="every 3 s it asks", line=line, evaluations=(look,), shown=look,
        settings=AutopilotSettings(every_s=3.0, window_s=60.0, rest_s=15.0, floor=1, max_moves=None, pin_s=3600.0),
        pins=(PinView(subject="cpu-0", who="alice", left_s=90.0, why="a test"),),
        score=ScoreView(num=1, bias=-0.02, error=0.09, moves=(
            ScoredMove(plan_id="plan-1", actor="autopilot", change="2P1D to 1P2D", predicted=0.9, expected=0.88,
                       measured=0.86, num_requests=40),)),
    )  # fmt: skip
    return msgspec.structs.replace(view, **changes)


@dataclass
class Fake:
    """What the fake answers with, and what it was asked."""

    fleet: FleetState = field(default_factory=a_fleet)
    plans: list[Plan] = field(default_factory=lambda: [a_plan()])
    """GET /v1/plans/{id} answers the first and then forgets it, but keeps the last."""
    record: RequestRecord = field(default_factory=a_record)
    autopilot: AutopilotView = field(default_factory=an_autopilot)
    looks: list[LookRow] = field(default_factory=list)
    deltas: tuple[LiveFrame, ...] = ()
    series: SeriesView = field(
        default_factory=lambda: SeriesView(step_s=1.0, times=(100, 101), series={"kv_use": Column(last=(0.5, None))})
    )
    series_names: tuple[str, ...] = ()
    """Answered where no names are asked for."""
    plan_refusal: str = ""
    web_status: int = 0
    """Every answer is a page of this status, as of a server that is no fleet."""
    apply_status: int = 200
    api_key: str | None = None
    max_model_len: int = 4096
    first_delay_s: float = 0.0
    gap_s: float = 0.0
    pieces: tuple[str, ...] = ("ab", "cd", "ef")
    statuses: dict[int, int] = field(default_factory=dict)
    """HTTP status by order of arrival, where it is not 200."""
    texts: dict[int, tuple[str, ...]] = field(default_factory=dict)
    broken: set[int] = field(default_factory=set)
    """Streams that end with an error event after their first piece."""
    silent: set[int] = field(default_factory=set)
    """Streams that never say a word."""
    truncated: set[int] = field(default_factory=set)
    """Streams that end after their first piece as if that were all."""
    url: str = ""
    asked: list[tuple[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    num_closed_by_client: int = 0
    _arrivals: int = 0

    def app(self) -> web.Application:
        app = web.Application(middlewares=[self._guard])
        app.add_routes(
            [
                web.get("/v1/fleet", self._fleet),
                web.get("/readyz", self._ready),
                web.get("/v1/models", self._models),
                web.post("/tokenize", self._tokenize),
                web.post("/v1/plans", self._plan),
                web.get("/v1/plans/{id}", self._get_plan),
                web.post("/v1/plans/{id}/apply", self._apply),
                web.post("/v1/plans/{id}/undo", self._undo),
                web.get("/v1/plans", self._plans),
                web.get("/v1/requests", self._records),
                web.get("/v1/requests/{id}", self._record),
                web.get("/v1/audit", self._audit),
                web.post("/v1/instances/{id}/{action}", self._hold),
                web.get("/v1/series", self._series),
                web.get("/v1/kv", self._kv),
                web.get("/v1/live", self._live),
                web.get("/v1/classes", self._classes),
                web.put("/v1/classes", self._set_classes),
                web.get("/v1/autopilot", self._autopilot),
                web.put("/v1/autopilot", self._autopilot),
                web.get("/v1/autopilot/looks", self._looks),
                web.post("/v1/autopilot/pins", self._autopilot),
                web.delete("/v1/autopilot/pins/{subject}", self._unpin),
                web.post("/v1/completions", self._complete),
                web.post("/v1/chat/completions", self._complete),
            ]
        )
        return app

    @web.middleware
    async def _guard(self, request: web.Request, handler: Any) -> web.StreamResponse:
        if self.api_key is not None and request.headers.get("Authorization") != f"Bearer {self.api_key}":
            return problem(401, "this fleet wants an API key")
        if self.web_status:
            return web.Response(status=self.web_status, text="<html>hello</html>", headers={"Location": "/elsewhere"})
        body = await request.json() if request.can_read_body else None
        self.asked.append((f"{request.method} {request.path}", body))
        self.headers.append(dict(request.headers))
        return await handler(request)

    async def _fleet(self, _: web.Request) -> web.Response:
        return answer(self.fleet)

    async def _ready(self, _: web.Request) -> web.Response:
        return answer({"ready": True})

    async def _models(self, _: web.Request) -> web.Response:
        return answer({"object": "list", "data": [{"id": name, "object": "model"} for name in self.fleet.models]})

    async def _tokenize(self, request: web.Request) -> web.Response:
        tokens = list((await request.json())["prompt"].encode())
        return answer({"count": len(tokens), "max_model_len": self.max_model_len, "tokens": tokens})

    async def _plan(self, _: web.Request) -> web.Response:
        if self.plan_refusal:
            return problem(400, self.plan_refusal)
        return answer(self.plans[0])

    async def _get_plan(self, _: web.Request) -> web.Response:
        return answer(self.plans.pop(0) if len(self.plans) > 1 else self.plans[0])

    async def _apply(self, request: web.Request) -> web.Response:
        if self.apply_status != 200:
            return problem(self.apply_status, "the fleet changed since the plan was made")
        return answer(a_plan("applying", plan_id=request.match_info["id"]))

    async def _undo(self, request: web.Request) -> web.Response:
        return answer(a_plan("applying", plan_id="plan-2", undo_of=request.match_info["id"]))

    async def _plans(self, _: web.Request) -> web.Response:
        return answer({"plans": self.plans})

    async def _records(self, _: web.Request) -> web.Response:
        return answer({"requests": [self.record]})

    async def _audit(self, _: web.Request) -> web.Response:
        row = AuditRow(at_s=100.0, actor="alice", action="apply", subject="plan-1", predicted=self.plans[0].predicted)
        return answer({"audit": [row]})

    async def _hold(self, request: web.Request) -> web.Response:
        if self.apply_status != 200:
            return problem(self.apply_status, "cpu-1 is the last ready decode instance of tiny")
        state = {"cordon": "cordoned", "drain": "draining", "resume": "ready"}[request.match_info["action"]]
        one = next(one for one in self.fleet.instances if one.id == request.match_info["id"])
        return answer(ActionView(instance=msgspec.structs.replace(one, state=state), version=5, num_left=2))

    async def _series(self, request: web.Request) -> web.Response:
        self.asked[-1] = (f"GET {request.path_qs}", None)
        return answer(self.series if "names" in request.query else SeriesView(step_s=1.0, names=self.series_names))

    async def _kv(self, _: web.Request) -> web.Response:
        return answer(a_kv_detail())

    async def _live(self, request: web.Request) -> web.StreamResponse:
        """A snapshot, `deltas` and the end of the stream."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for frame in (LiveFrame(seq=1, kind="snapshot", state=self.fleet), *self.deltas):
            await response.write(b"id: %d\ndata: %s\n\n" % (frame.seq, msgspec.json.encode(frame)))
        return response

    async def _autopilot(self, _: web.Request) -> web.Response:
        return answer(self.autopilot)

    async def _classes(self, _: web.Request) -> web.Response:
        rows = tuple(ClassSetting(one.name, one.slo, Slo(2.0, 0.2)) for one in self.fleet.classes)
        prices = (PriceView(hardware="H800", num_gpus=2, price_per_hour=4.0), PriceView("CPU", 0, 0.0, 2))
        return answer(ClassesView(version=self.fleet.version, classes=rows, prices=prices))

    async def _set_classes(self, request: web.Request) -> web.Response:
        if self.apply_status != 200:
            return problem(self.apply_status, "the fleet changed: look again")
        changed = (await request.json())["classes"]
        rows = [msgspec.structs.replace(one, slo=msgspec.convert(changed[one.name], Slo | None))
                if one.name in changed else one for one in self.fleet.classes]  # fmt: skip
        self.fleet = msgspec.structs.replace(self.fleet, classes=tuple(rows), version=self.fleet.version + 1)
        return await self._classes(request)

    async def _looks(self, request: web.Request) -> web.Response:
        assert request.query["since_s"] == "7200"
        return answer({"looks": self.looks})

    async def _unpin(self, request: web.Request) -> web.Response:
        if request.match_info["subject"] != "split":
            return problem(404, f"'{request.match_info['subject']}' is not pinned")
        return answer(self.autopilot)

    async def _record(self, request: web.Request) -> web.Response:
        if request.match_info["id"] != "cmpl-1":
            return problem(404, f"there is no request {request.match_info['id']}")
        return answer(self.record)

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        number, self._arrivals = self._arrivals, self._arrivals + 1
        if (status := self.statuses.get(number, 200)) != 200:
            return problem(status, "too much")
        is_chat = request.path.endswith("chat/completions")
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        if number in self.silent:
            try:
                await asyncio.sleep(30)
            except asyncio.CancelledError:
                self.num_closed_by_client += 1
                raise
        await asyncio.sleep(self.first_delay_s)
        pieces = self.texts.get(number, self.pieces)
        for index, piece in enumerate(pieces):
            if index:
                await asyncio.sleep(self.gap_s)
            choice: dict[str, Any] = {"index": 0, "finish_reason": "length" if index == len(pieces) - 1 else None}
            choice |= {"delta": {"content": piece}} if is_chat else {"text": piece}
            await send(response, {"id": "cmpl-1", "choices": [choice]})
            if number in self.truncated:
                return response
            if number in self.broken:
                await send(response, {"error": {"message": "the decode instance is lost"}})
                return response
        usage = {"prompt_tokens": 4, "completion_tokens": len(pieces), "total_tokens": 4 + len(pieces)}
        await send(response, {"id": "cmpl-1", "choices": [], "usage": usage})
        await response.write(b": keep-alive\n\ndata: [DONE]\n\n")
        return response


async def send(response: web.StreamResponse, value: Any) -> None:
    await response.write(b"data: " + json.dumps(value).encode() + b"\n\n")


def eventually(holds: Callable[[], bool], within_s: float = 5.0) -> bool:
    """Whether `holds` becomes true in time; looks often."""
    deadline = time.monotonic() + within_s
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def answer(value: Any) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")


def problem(status: int, message: str) -> web.Response:
    body = {"error": {"message": message, "type": "x", "param": None, "code": None}}
    return web.json_response(body, status=status)


@contextmanager
def serving(fake: Fake) -> Iterator[Fake]:
    """The fake on a free port, while the block runs."""
    loop = asyncio.new_event_loop()
    runner: list[web.AppRunner] = []

    async def begin() -> None:
        runner.append(web.AppRunner(fake.app(), handler_cancellation=True, shutdown_timeout=0.1))
        await runner[0].setup()
        site = web.TCPSite(runner[0], "127.0.0.1", 0)
        await site.start()
        fake.url = f"http://127.0.0.1:{runner[0].addresses[0][1]}"

    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    asyncio.run_coroutine_threadsafe(begin(), loop).result(10)
    try:
        yield fake
    finally:
        asyncio.run_coroutine_threadsafe(runner[0].cleanup(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()
