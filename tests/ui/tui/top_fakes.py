"""For tests of the screen: prepared frames, a control plane that streams them, and a screen over a fixed clock."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC
from functools import cache
from typing import Any

import msgspec
from aiohttp import web
from textual.pilot import Pilot
from ui_fakes import Fake, a_fleet, a_kv_detail, a_plan, a_record, an_autopilot, answer

from transfer.api import (
    AuditRow,
    ClassView,
    FleetState,
    Goodput,
    InstanceView,
    LiveFrame,
    Plan,
    Prediction,
    Quantiles,
    RequestRecord,
)
from transfer.terms import Slo
from ui.client import FleetClient
from ui.feed import fold
from ui.tui.app import TopApp
from ui.tui.model import Picture
from ui.tui.pen import Pen
from ui.tui.session import LiveSession, ReplaySession
from ui.tui.tape import Tape
from ui.words import words

START_S = 1_700_000_000.0
PEN = Pen(words("en", {}), zone=UTC)


def instances(num: int = 5) -> tuple[InstanceView, ...]:
    """Prefill, decode and a pool, each with its own figures."""
    roles = ["prefill"] * ((num - 1) // 2) + ["decode"] * (num - 1 - (num - 1) // 2) + ["kv_pool"]
    found = []
    for index, role in enumerate(roles):
        pool = role == "kv_pool"
        found.append(InstanceView(
            id="pool-0" if pool else f"n{index}", role=role, state="ready", hardware="CPU" if pool else "H800",
            model="" if pool else "tiny", epoch=7, num_gpus=0 if pool else 1, price_per_hour=0.5 if pool else 2.0,
            num_running=0 if pool else 3 * index, num_waiting=index % 2, queued_prefill_tokens=120 * index,
            num_blocks=1000, free_blocks=1000 - 190 * index, kv_use=0.19 * index,
            step_s=0.0 if pool else 0.012 + index / 1e3, last_seen_s=0.4, speed=1.0 + index / 10,
            provenance="" if pool else "preset", tpot_p50_s=0.015 + index / 1e3 if role == "decode" else None,
        ))  # fmt: skip
    return tuple(found)


def fleet(**changes: Any) -> FleetState:
    """2P2D and a pool that meets its objectives."""
    state = a_fleet(
        xpyd="2P2D", instances=instances(), recent_attainment=0.97, in_flight=12, uptime_s=3600.0,
        goodput=Goodput(per_s=9.7, per_gpu=2.425, throughput_per_s=10.0, cost_per_good=0.00024, per_dollar=4200.0),
        stages_s={"queue": 3.0, "prefill": 2.0, "transfer": 0.5, "decode_admission": 0.0, "decode": 1.5},
        bottleneck="queue", autopilot="advise", advice="move n0 P->D: +18 %, 80 % interval 12 to 23, about 6 s",
        classes=(ClassView(
            name="default", slo=Slo(ttft_s=2.0, tpot_s=0.2), good=900, total=930, attainment=0.968, recent_good=97,
            recent_total=100, recent_per_s=9.7, ttft_s=Quantiles(p50=0.12, p90=0.4, p99=0.9),
            tpot_s=Quantiles(p50=0.02, p90=0.03, p99=0.05),
        ),),
    )  # fmt: skip
    return msgspec.structs.replace(state, **changes)


def records() -> list[RequestRecord]:
    """Three that finished, the newest first: good, missed, cancelled."""
    good = msgspec.structs.replace(
        a_record(), arrived_at=START_S + 590, prefill="n0", decode="n2",
        stages_s={"queue": 0.05, "decode_admission": 0.01, "prefill": 0.1, "transfer": 0.02, "decode": 0.02},
    )  # fmt: skip
    missed = msgspec.structs.replace(
        good, request_id="cmpl-2", good=False, ttft_s=2.4, e2e_s=3.0, arrived_at=START_S + 500
    )
    gone = msgspec.structs.replace(good, request_id="cmpl-3", good=None, outcome="cancelled", ttft_s=None, stages_s={})
    return [good, missed, gone]


def audit() -> list[AuditRow]:
    row = AuditRow(
        at_s=START_S + 400, actor="alice", action="done", subject="plan-1", detail="1P3D to 2P2D",
        predicted=Prediction(goodput_per_s=9.1, goodput_low=8.0, goodput_high=10.0),
        measured=Prediction(goodput_per_s=9.5, attainment=0.96, duration_s=1.2),
    )  # fmt: skip
    return [row, msgspec.structs.replace(row, at_s=START_S + 300, action="apply", measured=None)]


def frames(num: int = 600) -> list[LiveFrame]:
    """A second apart: goodput swings, and after five minutes n0 changes its role."""
    before = (msgspec.structs.replace(instances()[0], role="decode"), *instances()[1:])
    found = [LiveFrame(seq=1, kind="snapshot", at_s=START_S, state=fleet(xpyd="1P3D", instances=before))]
    for index in range(1, num):
        swing = abs((index % 120) - 60) / 60
        goodput = Goodput(per_s=6 + 4 * swing, per_gpu=1.5 + swing, throughput_per_s=10.5, cost_per_good=0.0003)
        changed: dict[str, object] = {
            "goodput": goodput,
            "recent_attainment": 0.8 + 0.19 * swing,
            "in_flight": index % 30,
        }
        frame = LiveFrame(seq=index + 1, kind="delta", at_s=START_S + index, changed=changed)
        if index == 300:
            frame = msgspec.structs.replace(frame, ids=("n0",), columns={"state": ("draining",)})
        if index == 302:
            frame.changed["xpyd"] = "2P2D"
            columns = {"state": ("ready",), "role": ("prefill",)}
            frame = msgspec.structs.replace(frame, ids=("n0",), columns=columns)
        found.append(frame)
    return found


@cache
def told(num: int = 600) -> tuple[tuple[LiveFrame, FleetState], ...]:
    """Those frames as they come over the wire, each with the state after it."""
    found, state = [], None
    for made in frames(num):
        frame = msgspec.json.decode(msgspec.json.encode(made), type=LiveFrame)
        state = fold(state, frame)
        found.append((frame, state))
    return tuple(found)


def tape(num: int = 600) -> Tape:
    """All that, as a recording holds it."""
    found = Tape(max_frames=0)
    for frame, state in told(num):
        found.add(frame, state)
    answers = {"requests": records(), "audit": audit(), "kv": a_kv_detail(), "autopilot": an_autopilot()}
    for name, value in answers.items():
        found.answer(name, START_S, value)
    return found


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@dataclass
class FixedSession(ReplaySession):
    """A live fleet that stands still: the end of the tape, fresh, without a connection."""

    age_s: float = 0.4

    def picture(self, basis: Picture, at_s: float | None) -> Picture:
        found = super().picture(basis, at_s)
        return replace(found, mode=basis.mode, age_s=self.age_s, read_only=False)

    async def news(self, timeout_s: float) -> None:
        await asyncio.Event().wait()


class FixedApp(TopApp):
    """At the end of a tape, as if live; nothing moves."""

    def __init__(self, pen: Pen = PEN, num: int = 600, age_s: float = 0.4) -> None:
        url = "http://127.0.0.1:8000"
        session = FixedSession(tape(num), url, FleetClient(url), age_s=age_s)
        super().__init__(session, pen, Picture(url=url), clock=Clock())


@dataclass
class TopFake(Fake):
    """The fake control plane, with a stream that lives and the lists that the screen shows."""

    fleet: FleetState = field(default_factory=fleet)
    done: list[Plan] = field(default_factory=lambda: [a_plan("done", before="1P3D", after="2P2D")])
    """GET /v1/plans."""
    period_s: float = 0.1
    silent_live: bool = False
    """The stream stays open and says nothing more after its snapshot."""

    async def _plans(self, _: web.Request) -> web.Response:
        return answer({"plans": self.done})

    async def _records(self, _: web.Request) -> web.Response:
        return answer({"requests": records()})

    async def _audit(self, _: web.Request) -> web.Response:
        return answer({"audit": audit()})

    async def _live(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        seq = 1
        frame = LiveFrame(seq=seq, kind="snapshot", at_s=time.time(), state=self.fleet)
        while True:
            await response.write(b"id: %d\ndata: %s\n\n" % (seq, msgspec.json.encode(frame)))
            await asyncio.sleep(self.period_s if not self.silent_live else 60.0)
            seq += 1
            frame = LiveFrame(
                seq=seq, kind="delta", at_s=time.time(), changed={"in_flight": seq, "version": self.fleet.version}
            )

    def posts(self) -> list[tuple[str, Any]]:
        """What it was asked to change."""
        return [(what, body) for what, body in self.asked if not what.startswith("GET")]


@asynccontextmanager
async def standing(app: TopApp, size: tuple[int, int] = (120, 40)) -> AsyncIterator[Pilot[None]]:
    """A screen over a fixed session, drawn."""
    async with app.run_test(size=size) as pilot:
        await pilot.pause()
        app.redraw()
        yield pilot


@asynccontextmanager
async def opened(
    fake: Fake, size: tuple[int, int] = (120, 40), **basis: Any
) -> AsyncIterator[tuple[TopApp, Pilot[None]]]:
    """The screen over a running fake, its first frame drawn."""
    async with FleetClient(fake.url) as client:
        app = TopApp(LiveSession(client), PEN, Picture(url=fake.url, **basis))
        async with app.run_test(size=size) as pilot:
            await until(pilot, lambda: app.picture.fleet is not None)
            yield app, pilot


async def until(pilot: Pilot[None], holds: Callable[[], bool], within_s: float = 5.0) -> None:
    """Waits until `holds`; fails when it does not in time."""
    deadline = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < deadline, "it did not come about in time"
        await pilot.pause(0.02)


def shown(app: TopApp) -> str:
    """The characters on the screen, line by line."""
    strips = app.screen._compositor.render_strips()
    return "\n".join("".join(segment.text for segment in strip).rstrip() for strip in strips)
