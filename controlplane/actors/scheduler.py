"""The scheduler core's shell: hears nodes and gateway, journals, lets the core decide, performs what it wants.

Tokens do not pass here: `on_message` hands them straight to the TokenRouter.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol, cast, get_args

import msgspec

from controlplane.core import events as ev
from controlplane.core.events import Effect, Event, NodeMessage
from controlplane.gateway.errors import ApiError
from controlplane.gateway.streams import TokenRouter
from transfer.actors.actor import Actor, Envelope
from transfer.api import ActionView, AuditRow, FleetState, Plan, RequestRecord
from transfer.autopilot import AutopilotView, LookRow
from transfer.classes import ClassesView
from transfer.errors import MailboxFull, PeerLost, ProtocolError
from transfer.screens import KvDetail
from transfer.wire.endpoint import Endpoint, PeerEvent
from transfer.wire.messages import Hello, Message, NotWelcome, PrefillDone, StepOutput

TICK_S = 0.1
MAILBOX_SIZE = 65536
ASK_TIMEOUT_S = 15.0
_NODE_MESSAGES = frozenset(get_args(NodeMessage))
_LEVELS = {"info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
_log = logging.getLogger(__name__)


class Core(Protocol):
    """controlplane/core/scheduler.py, SchedulerCore."""

    def handle(self, event: Event, now: float) -> list[Effect]: ...

    def state(self, now: float) -> FleetState: ...

    def plan(self, plan_id: str) -> Plan | None: ...

    def plans(self) -> list[Plan]: ...

    def metrics(self) -> dict[str, float]: ...

    def readings(self, now: float) -> dict[str, float]: ...

    def kv(self, now: float) -> KvDetail: ...

    def autopilot(self, now: float) -> AutopilotView: ...

    def classes(self) -> ClassesView: ...


class SchedulerActor(Actor):
    """Delivery: events in the order they were posted, each handled once and journalled before it is.

    A core that raises is a bug with unknown state, so it is not restarted: its supervisor ends the process.
    """

    def __init__(
        self, core: Core, router: TokenRouter, now: Callable[[], float], *,
        on_finished: Callable[[RequestRecord], None], on_audit: Callable[[AuditRow], None],
        on_kept: Callable[[LookRow | ev.AutopilotState | ev.ClassesState | ev.PlansState], None],
        journal: Callable[[float, Event], None] | None = None, check_hello: Callable[[Hello], str | None] | None = None,
    ) -> None:  # fmt: skip
        """check_hello: a sentence why this node may not join, or None. Connect `endpoint` before the first event."""
        super().__init__(mailbox_size=MAILBOX_SIZE)
        self.endpoint: Endpoint | None = None
        self._core, self._router, self._now = core, router, now
        self._on_finished, self._on_audit, self._on_kept = on_finished, on_audit, on_kept
        self._journal, self._check_hello = journal, check_hello
        self._asks: dict[str, asyncio.Future[Any]] = {}
        self._refused: set[str] = set()

    # --- what the gateway calls -------------------------------------------------------------------------------

    def post(self, event: Event) -> None:
        """Hand over one event. Raises MailboxFull or PeerLost, which means that the core is stuck or has failed."""
        self.mailbox.put(Envelope(event), self.name)

    def report(self, event: Event) -> None:
        """As post, but nothing once the scheduler has ended: there is nobody left to be told."""
        with contextlib.suppress(PeerLost):
            self.post(event)

    def state(self) -> FleetState:
        return self._core.state(self._now())

    def counters(self) -> dict[str, float]:
        return self._core.metrics()

    def readings(self) -> dict[str, float]:
        """This second's value of every series."""
        return self._core.readings(self._now())

    def kv(self) -> KvDetail:
        return self._core.kv(self._now())

    def plans(self) -> list[Plan]:
        return self._core.plans()

    def plan(self, plan_id: str) -> Plan | None:
        return self._core.plan(plan_id)

    def autopilot(self) -> AutopilotView:
        return self._core.autopilot(self._now())

    def classes(self) -> ClassesView:
        return self._core.classes()

    async def ask(self, event: ev.PlanWanted | ev.ApplyWanted) -> Plan:
        """The plan, or ApiError with the core's refusal."""
        return cast(Plan, await self._answer(event.ask_id, event))

    async def steer(self, event: ev.AutopilotWanted) -> AutopilotView:
        """The autopilot after the change, or ApiError with the core's refusal."""
        return cast(AutopilotView, await self._answer(event.ask_id, event))

    async def hold(self, event: ev.HoldWanted) -> ActionView:
        """The instance after the change, or ApiError with the core's refusal."""
        return cast(ActionView, await self._answer(event.ask_id, event))

    async def set_classes(self, event: ev.ClassesWanted) -> ClassesView:
        """The classes after the change, or ApiError with the core's refusal."""
        return cast(ClassesView, await self._answer(event.ask_id, event))

    async def _answer(self, ask_id: str, event: Event) -> object:
        answer: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        self._asks[ask_id] = answer
        try:
            self.post(event)
            async with asyncio.timeout(ASK_TIMEOUT_S):
                return await answer
        except TimeoutError:
            raise ApiError(504, "the scheduler did not answer in time; ask again to see what happened") from None
        finally:
            del self._asks[ask_id]

    def tick(self) -> None:
        """To be called every TICK_S."""
        self.report(ev.Tick())

    # --- what the wire calls ----------------------------------------------------------------------------------

    def on_message(self, peer: str, message: Message) -> None:
        if isinstance(message, StepOutput):
            if peer not in self._refused:
                self._router.on_step(message)
            return
        if type(message) not in _NODE_MESSAGES:
            self._refuse(peer, f"a {type(message).__name__} is the control plane's to send, not a node's")
            return
        if isinstance(message, Hello) and (reason := self._why_refused(peer, message)) is not None:
            self._refuse(peer, reason)
            return
        if peer in self._refused:
            return
        if isinstance(message, PrefillDone):
            self._router.on_prefill_done(message)
        self.report(ev.FromNode(instance_id=peer, message=message))  # type: ignore[arg-type]

    def on_peer(self, peer: str, event: PeerEvent) -> None:
        self._refused.discard(peer)
        if event is PeerEvent.LOST:
            self.report(ev.NodeLost(instance_id=peer))

    def on_bad(self, peer: str, error: ProtocolError) -> None:
        _log.warning("%s was refused: %s", peer, error)

    # --- inside -----------------------------------------------------------------------------------------------

    async def receive(self, message: object) -> None:
        assert isinstance(message, Event)
        events = deque([message])
        while events:
            event, now = events.popleft(), self._now()
            if self._journal is not None:
                self._journal(now, event)
            for effect in self._core.handle(event, now):
                if (answer := self._perform(effect)) is not None:
                    events.append(answer)

    def _perform(self, effect: Effect) -> Event | None:
        """Do it. An event that it gives rise to at once is returned."""
        match effect:
            case ev.Send():
                self._send(effect.instance_id, effect.message)
            case ev.Expect():
                self._router.expect(effect)
            case ev.NeedTokens():
                return self._router.need_tokens(effect.request_id)
            case ev.Fail():
                self._router.fail(effect)
            case ev.Finished():
                self._on_finished(effect.record)
            case ev.Audit():
                row = effect.row
                self._on_audit(row if row.at_s else msgspec.structs.replace(row, at_s=time.time()))
            case ev.Looked():
                now, look = time.time(), effect.row
                times = {"began_at": now + look.began_at, "ended_at": now + look.ended_at}
                self._on_kept(msgspec.structs.replace(look, **times))
            case ev.AutopilotKept():
                self._on_kept(msgspec.structs.replace(effect.state, at_s=time.time()))
            case ev.ClassesKept() | ev.PlansKept():
                self._on_kept(effect.state)
            case ev.PlanReady():
                if (answer := self._asks.get(effect.ask_id)) is not None and not answer.done():
                    answer.set_result(effect.plan)
            case ev.AutopilotReady() | ev.HoldReady() | ev.ClassesReady():
                if (answer := self._asks.get(effect.ask_id)) is not None and not answer.done():
                    answer.set_result(effect.view)
            case ev.PlanRefused():
                if (answer := self._asks.get(effect.ask_id)) is not None and not answer.done():
                    answer.set_exception(ApiError(effect.status, effect.message, said=effect.said))
            case ev.Note():
                _log.log(_LEVELS[effect.level], "%s", effect.text)
            case _:
                raise TypeError(f"the scheduler's shell does not know the effect {type(effect).__name__}")
        return None

    def _send(self, peer: str, message: Message) -> None:
        assert self.endpoint is not None, "connect the endpoint first"
        try:
            self.endpoint.send(peer, message)
        except PeerLost:
            pass  # ev.NodeLost follows, or was heard already
        except (MailboxFull, ProtocolError) as error:
            _log.error("%s", error)

    def _why_refused(self, peer: str, hello: Hello) -> str | None:
        if hello.instance_id != peer:
            return f"the instance calls itself {hello.instance_id} but is connected as {peer}; use one name"
        return self._check_hello(hello) if self._check_hello is not None else None

    def _refuse(self, peer: str, reason: str) -> None:
        """Nothing more is heard from it on this connection."""
        self._refused.add(peer)
        _log.warning("%s is not welcome: %s", peer, reason)
        self._send(peer, NotWelcome(reason=reason))
        self.report(ev.NodeLost(instance_id=peer))
