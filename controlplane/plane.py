"""Scheduler, token router and wire joined into one Plane, on whatever loop and network: live, or in virtual time.

No HTTP, no files, no signals here: main.py adds those. Tests submit requests to it directly.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import Protocol

from controlplane.actors.metronome import Metronome
from controlplane.actors.scheduler import TICK_S, Core, SchedulerActor
from controlplane.core.events import Arrived, AutopilotState, ClassesState, Event, PlansState, RequestSpec
from controlplane.gateway.assembler import Assembler, Piece
from controlplane.gateway.streams import SWEEP_EVERY_S, Client, TokenRouter
from transfer.actors.supervision import RestartPolicy, Strategy, Supervisor
from transfer.api import AuditRow, RequestRecord
from transfer.autopilot import LookRow
from transfer.said import say
from transfer.wire.endpoint import Endpoint, OnBad, OnMessage, OnPeer
from transfer.wire.messages import Hello


class MakeEndpoint(Protocol):
    """RouterEndpoint with its address bound, or InprocNetwork.router."""

    def __call__(self, *, on_message: OnMessage, on_peer: OnPeer, on_bad: OnBad | None = None) -> Endpoint: ...


@dataclass
class Hooks:
    """Where finished things go, and what is asked before a node may join. All called on the loop, must not block."""

    on_finished: Callable[[RequestRecord], None] = lambda record: None
    on_audit: Callable[[AuditRow], None] = lambda row: None
    on_kept: Callable[[LookRow | AutopilotState | ClassesState | PlansState], None] = lambda kept: None
    """What the autopilot has to remember."""
    on_gap: Callable[[float], None] = lambda seconds: None
    on_failure: Callable[[str, Exception], None] = lambda name, error: None
    """An actor ended for good: the plane cannot go on."""
    journal: Callable[[float, Event], None] | None = None
    check_hello: Callable[[Hello], str | None] | None = None


@dataclass
class Plane:
    """Made by `build`; `start` it, `stop` it."""

    router: TokenRouter
    scheduler: SchedulerActor
    endpoint: Endpoint
    supervisor: Supervisor

    async def start(self) -> None:
        """Raises ConfigError when the wire's address cannot be bound."""
        self.supervisor.spawn("scheduler", lambda: self.scheduler, RestartPolicy(strategy=Strategy.ESCALATE))
        self.supervisor.spawn("tick", lambda: Metronome(self.scheduler.tick, TICK_S))
        self.supervisor.spawn("watchdog", lambda: Metronome(self.router.sweep, SWEEP_EVERY_S))
        await self.endpoint.start()

    async def stop(self) -> None:
        """Handle what is queued, then end. Clients must have had their terminal events before. Idempotent."""
        await self.supervisor.stop()
        await self.endpoint.close()

    async def submit(self, spec: RequestSpec) -> AsyncGenerator[Piece, None]:
        """One request without HTTP: its tokens as they come, without text. Raises ApiError when it fails.

        Leaving the iterator early cancels the request; close it (contextlib.aclosing) to do so at once.
        """
        client = Client()
        stream = self.router.open(spec, client, Assembler(None), live=True)
        try:
            self.scheduler.post(Arrived(request=spec))
            while not stream.closed:
                await client.wait()
                pieces = stream.take()
                self.router.delivered(stream)
                for piece in pieces:
                    yield piece
            if stream.error is not None:
                raise stream.error
        finally:
            self.router.abandon(stream, say("ended.disconnected"))


def build(
    core: Core, make_endpoint: MakeEndpoint, hooks: Hooks | None = None, *, now: Callable[[], float] | None = None,
    max_streams: int = 4096, max_unread_tokens: int = 4096,
) -> Plane:  # fmt: skip
    """Wire the parts; nothing runs before `start`. now: the running loop's time by default, seconds."""
    hooks = hooks or Hooks()
    now = now or asyncio.get_running_loop().time

    def report(event: Event) -> None:
        scheduler.report(event)

    router = TokenRouter(report, now, max_streams=max_streams, max_unread_tokens=max_unread_tokens, on_gap=hooks.on_gap)
    scheduler = SchedulerActor(
        core, router, now, on_finished=hooks.on_finished, on_audit=hooks.on_audit,
        on_kept=hooks.on_kept, journal=hooks.journal, check_hello=hooks.check_hello,
    )  # fmt: skip
    endpoint = make_endpoint(on_message=scheduler.on_message, on_peer=scheduler.on_peer, on_bad=scheduler.on_bad)
    scheduler.endpoint = endpoint
    return Plane(router, scheduler, endpoint, Supervisor("control", hooks.on_failure))


async def collect(pieces: AsyncGenerator[Piece, None]) -> list[int]:
    """All output ids of a submitted request."""
    async with contextlib.aclosing(pieces) as stream:
        return [token for piece in [piece async for piece in stream] for token in piece.token_ids]
