"""One instance as an actor: joins the control plane under its own name, beats, takes role orders, leaves in order.

Requests are the role's business (roles/); this is membership. A life begins with `started` and ends with
`stopped`; what fails it (a lost engine, a bug) is raised to its supervisor, which begins another life.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Protocol

from nodes.core.instance import InstanceState, move
from nodes.engines.engine import Engine
from nodes.engines.served import ServedEngine
from nodes.pool.ssd import SsdConfig
from nodes.pool.tiers import SsdTier
from nodes.roles.base import BatchRole, InstanceRole
from nodes.roles.choice import ENGINE_ROLES, batch_config, engine_role, why_not
from nodes.roles.context import Bounds, RoleContext
from nodes.roles.kv_pool import PoolRole
from transfer.actors.actor import Actor, Envelope
from transfer.errors import InvalidValue, MailboxFull, PeerLost, ProtocolError, RemoteError
from transfer.kv.arena import HostArena, KvArena
from transfer.kv.port import KvDelegate, KvPort
from transfer.profile import HardwareProfile
from transfer.terms import InstanceId, KvLayout, Role
from transfer.wire.endpoint import Endpoint, OnBad, OnMessage, OnPeer, PeerEvent
from transfer.wire.messages import (
    CONTROL,
    PROTOCOL_VERSION,
    Goodbye,
    Heartbeat,
    Hello,
    Message,
    NotWelcome,
    RoleOrder,
    RoleReport,
    Welcome,
)

MAILBOX_SIZE = 16_384
EPOCH_BITS = 48
HELLO_RETRY_S = 2.0
REFUSED, MISCONFIGURED = 3, 2
"""Exit statuses of an agent whose instance gives up."""
DRAIN_S = 1.0
GOODBYE_S = 0.05
"""What an orderly exit waits for its last message to leave."""

_log = logging.getLogger(__name__)


class RolePort(KvPort, Protocol):
    """A port whose role can be replaced."""

    delegate: KvDelegate | None


class MakePort(Protocol):
    def __call__(self, instance_id: InstanceId, epoch: int, arena: KvArena) -> RolePort: ...


class MakeEndpoint(Protocol):
    def __call__(self, instance_id: InstanceId, on_message: OnMessage, on_peer: OnPeer, on_bad: OnBad) -> Endpoint: ...


@dataclass(frozen=True)
class PoolMemory:
    """What a kv_pool has in an engine's place. ssd: where it keeps more blocks than memory holds."""

    layout: KvLayout
    num_blocks: int
    hardware: HardwareProfile
    shared: bool = False
    ssd: SsdConfig | None = None


@dataclass(frozen=True)
class InstanceSpec:
    """What one instance is, and how its parts are made, anew for each life.

    make_engine: for a kv_pool returns PoolMemory. grace_s: how long work goes on without a control plane.
    give_up: called with a sentence and an exit status when no further life will do better: REFUSED when the
    control plane will never take this instance, MISCONFIGURED when it cannot be made as told.
    role_changed: called after a role switch: a next life keeps the role."""

    instance_id: InstanceId
    role: Role
    host_id: str
    make_engine: Callable[[], Awaitable[Engine | ServedEngine | PoolMemory]]
    make_port: MakePort
    make_endpoint: MakeEndpoint
    give_up: Callable[[str, int], None]
    role_changed: Callable[[InstanceId, Role], None] = lambda instance_id, role: None
    token_budget: int = 2048
    max_running: int = 256
    prefix_cache: bool = True
    grace_s: float = 10.0
    bounds: Bounds = field(default_factory=Bounds)
    make_epoch: Callable[[], int] = lambda: secrets.randbits(EPOCH_BITS)


@dataclass(frozen=True, slots=True)
class _Peer:
    event: PeerEvent


@dataclass(frozen=True, slots=True)
class _Failed:
    error: Exception


class InstanceActor(Actor):
    """Delivery: at most once and in order within a session, as the endpoint's. Work is idempotent by
    (request_id, generation), see BatchShell; a repeated RoleOrder reports the role again."""

    def __init__(self, spec: InstanceSpec) -> None:
        super().__init__(mailbox_size=MAILBOX_SIZE)
        self.spec, self.epoch = spec, spec.make_epoch()
        self.state = InstanceState.STARTING
        self.engine: Engine | ServedEngine | None = None
        self.role: InstanceRole | None = None
        self._arena: KvArena | None = None
        self._memory: PoolMemory | None = None
        self._ssd: SsdTier | None = None
        self._port: RolePort | None = None
        self._endpoint: Endpoint | None = None
        self._control_epoch: int | None = None
        self._connected = self._welcomed = False
        self._heartbeat_s = 1.0
        self._beats: asyncio.Task[None] | None = None
        self._grace: asyncio.TimerHandle | None = None
        self._failure: Exception | None = None
        self._goodbye = "the instance stops"

    # --- a life ---------------------------------------------------------------------------------------------

    async def started(self) -> None:
        try:
            await self._come_up()
        except InvalidValue as error:
            self._give_up(str(error), MISCONFIGURED)
            raise

    async def _come_up(self) -> None:
        spec = self.spec
        made = await spec.make_engine()
        if isinstance(made, PoolMemory):
            self._memory = made
            self._arena = HostArena(made.layout, made.num_blocks, shared=made.shared)
            if made.ssd is not None:
                self._ssd = await SsdTier.open(made.ssd, self._arena)
        else:
            self.engine, self._arena = made, made.arena
        self._port = spec.make_port(spec.instance_id, self.epoch, self._arena)
        await self._port.start()
        self.role = self._make_role(self._port, self._arena)
        self.role.start()
        self._port.delegate = self.role
        self._move("loaded")
        self._endpoint = spec.make_endpoint(spec.instance_id, self._on_message, self._on_peer, self._on_bad)
        await self._endpoint.start()
        self._start_beats()
        _log.info(
            "%s is up: %s, %d KV blocks, epoch %x", spec.instance_id, spec.role, self._arena.num_blocks, self.epoch
        )

    async def stopped(self) -> None:
        if self.state is not InstanceState.STOPPING:
            self._move("stop")
        if self._grace is not None:
            self._grace.cancel()
        if self._beats is not None:
            self._beats.cancel()
        if self._endpoint is not None:
            self._send(Goodbye(epoch=self.epoch, reason=self._goodbye))
        if self.role is not None:
            self.role.drop_all(self._goodbye)
            if self._failure is None:
                await self.role.drain(DRAIN_S)  # the running step still writes its blocks
            await self.role.close()
        elif self._ssd is not None:  # the life ended before its role began
            await self._ssd.close()
        if self._endpoint is not None:
            await asyncio.sleep(GOODBYE_S)
            await self._endpoint.close()
        if self._port is not None:
            await self._port.close()
        if self.engine is not None:
            await self.engine.close()
        elif isinstance(self._arena, HostArena):
            self._arena.close()
        _log.info("%s has ended: %s", self.spec.instance_id, self._goodbye)

    def fail(self, error: Exception) -> None:
        """End this life: the error is raised to the supervisor. The first one counts."""
        if self._failure is None and self.state is not InstanceState.STOPPING:
            self._failure = error
            self._goodbye = f"the instance failed: {type(error).__name__}"
            self._move("fail")
            with contextlib.suppress(MailboxFull, PeerLost):  # full: the next message is as good
                self.mailbox.put(Envelope(_Failed(error)), self.name)

    # --- what comes in --------------------------------------------------------------------------------------

    async def receive(self, message: object) -> None:
        if self._failure is not None:
            raise self._failure
        match message:
            case _Peer(event=PeerEvent.CONNECTED):
                self._connected = True
                self._hello()
            case _Peer(event=PeerEvent.LOST):
                self._lost()
            case Welcome():
                self._welcome(message)
            case NotWelcome():
                self._give_up(message.reason, REFUSED)
            case RoleOrder():
                self._order(message)
            case Message() if self.role is not None:
                self.role.receive(message)

    def _on_message(self, peer: str, message: Message) -> None:
        self.mailbox.put(Envelope(message), self.name)

    def _on_peer(self, peer: str, event: PeerEvent) -> None:
        self.mailbox.put(Envelope(_Peer(event)), self.name)

    def _on_bad(self, peer: str, error: ProtocolError) -> None:
        """Before the first Welcome this is a refusal; later the endpoint reconnects by itself."""
        if self._control_epoch is None:
            self._give_up(str(error), REFUSED)
        else:
            _log.warning("%s: %s", self.spec.instance_id, error)

    # --- membership -----------------------------------------------------------------------------------------

    def _hello(self) -> None:
        spec, port, role, arena = self.spec, self._port, self.role, self._arena
        if port is None or role is None or arena is None:
            return
        engine = self.engine
        served = engine if isinstance(engine, ServedEngine) else None
        hardware = engine.hardware if engine is not None else self._memory.hardware if self._memory else None
        assert hardware is not None  # a life has an engine or a pool's memory
        self._send(
            Hello(
                protocol=PROTOCOL_VERSION, instance_id=spec.instance_id, epoch=self.epoch, role=role.role,
                model=engine.model if engine else None, layout=arena.layout, engine=engine.kind if engine else "dram",
                hardware=hardware, latency=engine.latency if engine else None, num_blocks=role.load().num_blocks,
                data_endpoint=port.endpoint, host_id=spec.host_id, holdings=role.holdings(),
                token_budget=spec.token_budget if engine else 0, engine_version=served.version if served else "",
                shares_kv=served is None or served.shares_kv, moves=served is None,
            )
        )  # fmt: skip

    def _welcome(self, message: Welcome) -> None:
        if self.role is None:
            return
        self._cancel_grace()
        if self._control_epoch not in (None, message.control_epoch):
            _log.warning("%s: another control plane took over; dropping the old one's work", self.spec.instance_id)
            self.role.drop_all("another control plane took over")
        if not self._welcomed:
            _log.info("%s joined the control plane as %s", self.spec.instance_id, self.role.role)
        self._control_epoch, self._welcomed = message.control_epoch, True
        self._heartbeat_s = message.heartbeat_s
        self.role.snapshot()
        self._start_beats()

    def _lost(self) -> None:
        self._connected = self._welcomed = False
        _log.warning("%s lost the control plane; its work goes on for %g s", self.spec.instance_id, self.spec.grace_s)
        self._cancel_grace()
        self._grace = asyncio.get_running_loop().call_later(self.spec.grace_s, self._grace_over)

    def _grace_over(self) -> None:
        self._grace = None
        if self.role is not None and not self.role.idle:
            _log.warning("%s drops its work: the control plane did not come back", self.spec.instance_id)
            self.role.drop_all("the control plane is gone")

    def _cancel_grace(self) -> None:
        if self._grace is not None:
            self._grace.cancel()
            self._grace = None

    def _start_beats(self) -> None:
        if self._beats is not None:
            self._beats.cancel()
        self._beats = asyncio.create_task(self._beat(), name=f"{self.spec.instance_id}/beats")

    async def _beat(self) -> None:
        while True:
            if self._welcomed:
                self._send_beat()
                await asyncio.sleep(self._heartbeat_s)
            else:
                await asyncio.sleep(HELLO_RETRY_S)
                if self._connected and not self._welcomed:
                    self._hello()  # the first one may have met a control plane that was just starting

    def _send_beat(self) -> None:
        if self.role is not None and self._welcomed:
            self._send(
                Heartbeat(
                    epoch=self.epoch, state=self.state.value, load=self.role.load(),
                    holdings=self.role.holdings(), role=self.role.role,
                )
            )  # fmt: skip

    def _give_up(self, sentence: str, status: int) -> None:
        self._goodbye = sentence
        self.spec.give_up(f"{self.spec.instance_id}: {sentence}", status)

    def _send(self, message: Message) -> None:
        """What cannot be sent is dropped: on a lost connection the control plane places such work again."""
        if self._endpoint is None:
            return
        try:
            self._endpoint.send(CONTROL, message)
        except RemoteError as error:
            _log.debug("%s: %s", self.spec.instance_id, error)

    # --- roles ----------------------------------------------------------------------------------------------

    def _order(self, order: RoleOrder) -> None:
        role, name = self.role, self.spec.instance_id
        if role is None:
            return
        reason = why_not(order, role, name, self.epoch)
        if reason is None and order.role is not role.role:
            self._move("switch")
            self._take_role(order.role, role)
            self._move("switched")
            self.spec.role_changed(name, order.role)
            _log.info("%s changed its role from %s to %s", name, role.role, order.role)
        now = self.role.role if self.role is not None else role.role
        self._send(
            RoleReport(plan_id=order.plan_id, epoch=self.epoch, role=now, ok=reason is None, detail=reason or "")
        )
        self._send_beat()

    def _take_role(self, wanted: Role, old: InstanceRole) -> None:
        if self._port is None or not isinstance(old, BatchRole):
            raise TypeError(f"{self.spec.instance_id} has no engine role to replace")
        old.shell.role_changed()
        self.role = ENGINE_ROLES[wanted](old.shell)
        self._port.delegate = self.role

    def _make_role(self, port: KvPort, arena: KvArena) -> InstanceRole:
        spec = self.spec
        if self.engine is None:
            bounds = spec.bounds
            return PoolRole(spec.instance_id, self.epoch, arena, port, self._send, bounds.cache_events_s, ssd=self._ssd)
        config = batch_config(
            self.engine, token_budget=spec.token_budget, max_running=spec.max_running, prefix_cache=spec.prefix_cache
        )
        context = RoleContext(
            instance_id=spec.instance_id, epoch=self.epoch, host_id=spec.host_id, engine=self.engine, port=port,
            send=self._send, config=config, bounds=spec.bounds,
        )  # fmt: skip
        return engine_role(spec.role, context, self.fail)

    def _move(self, event: str) -> None:
        self.state = move(self.state, event, instance_id=self.spec.instance_id)
