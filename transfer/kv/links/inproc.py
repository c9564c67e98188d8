"""KvPort within one process, for virtual time: the same sessions and frames as over TCP, without sockets or threads.

A network has latency and bandwidth, kept with loop.call_at, and faults drawn from a seed: lost connections, repeated
frames, changed bytes, delays. Frames of one connection arrive in the order they were sent, as over TCP.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from transfer.errors import ConfigError, KvCorrupt, KvError, KvTransferFailed, PhaseplaneError
from transfer.kv.arena import KvArena
from transfer.kv.frames import FrameReader
from transfer.kv.links.base import SessionPort
from transfer.kv.links.context import PortContext
from transfer.kv.links.session import Session
from transfer.kv.port import KvDelegate
from transfer.kv.stream import SendLimits
from transfer.terms import InstanceId
from transfer.wire.messages import KvPeer

SCHEME = "inproc://"


@dataclass(frozen=True, slots=True)
class KvFaults:
    """Probabilities for each frame: the connection is lost instead, the frame comes twice, one of its bytes is changed,
    or it and all behind it come delay_s later."""

    lose: float = 0.0
    duplicate: float = 0.0
    corrupt: float = 0.0
    delay: float = 0.0
    delay_s: float = 0.1


class InprocKvNetwork:
    """What ports of one process meet on. Deterministic: equal seeds and equal traffic give equal faults."""

    def __init__(
        self, seed: int = 0, *, latency_s: float = 0.0, bytes_per_s: float = math.inf, faults: KvFaults | None = None
    ) -> None:  # fmt: skip
        self.latency_s, self.bytes_per_s = latency_s, bytes_per_s
        self.faults = faults or KvFaults()
        self.random = random.Random(seed)
        self.ports: dict[str, InprocKvPort] = {}

    def port(self, **options: Any) -> InprocKvPort:
        """A port on this network; options as InprocKvPort's. It joins when it is started."""
        return InprocKvPort(self, **options)

    def cut(self, instance_id: InstanceId) -> None:
        """Lose every connection an instance has, as when a switch restarts; it can connect again at once."""
        port = self.ports.get(SCHEME + instance_id)
        if port is not None:
            port.lose_connections("the connection was cut")

    def crash(self, instance_id: InstanceId) -> None:
        """An instance is killed: its connections are lost and its port takes part no more; its name is free again."""
        port = self.ports.get(SCHEME + instance_id)
        if port is not None:
            port.leave(f"{instance_id} was killed")


class InprocKvPort(SessionPort):
    """KvPort on an InprocKvNetwork; its endpoint is inproc://instance_id. Blocks are copied, never mapped."""

    def __init__(
        self, network: InprocKvNetwork, *, instance_id: str, epoch: int, arena: KvArena,
        delegate: KvDelegate | None = None, fingerprint: bytes | None = None, stall_s: float = 10.0,
        window_bytes: int = 8 << 20, slab_bytes: int = 512 << 10,
    ) -> None:  # fmt: skip
        super().__init__(
            PortContext(
                instance_id=instance_id, epoch=epoch, arena=arena, host_id="", delegate=delegate, shm=False,
                window_bytes=window_bytes, limits=SendLimits(slab_bytes=slab_bytes, stall_s=stall_s),
                fingerprint=fingerprint,
            )
        )  # fmt: skip
        self._network = network
        self._peers: dict[str, Session] = {}

    @property
    def endpoint(self) -> str:
        return SCHEME + self._context.instance_id

    async def start(self) -> None:
        """Join the network. Raises ConfigError when the name is taken."""
        if self.endpoint in self._network.ports:
            raise ConfigError(f"{self.endpoint} is on the network already; close it, or choose another instance id")
        self._network.ports[self.endpoint] = self

    async def close(self) -> None:
        """Leave the network; every stream fails. Idempotent."""
        self.leave(f"{self._context.instance_id} closed its KV port")
        await self._roles_done()

    def leave(self, reason: str) -> None:
        """Take part no more; every stream fails, here and at its peers. Idempotent."""
        self._closed = True
        if self._network.ports.get(self.endpoint) is self:
            del self._network.ports[self.endpoint]
        self.lose_connections(reason)

    def lose_connections(self, reason: str) -> None:
        """Every stream of this port fails, here and at its peers."""
        self._lose_all(KvTransferFailed(reason))

    async def _connected(self, peer: KvPeer) -> Session:
        await asyncio.sleep(2 * self._network.latency_s if peer.data_endpoint not in self._peers else 0)
        if self._closed:
            raise KvTransferFailed(f"the KV port of {self._context.instance_id} is closed")
        session = self._peers.get(peer.data_endpoint)
        if session is None:
            other = self._network.ports.get(peer.data_endpoint)
            if other is None:
                raise KvTransferFailed(f"cannot connect to {peer.data_endpoint} for KV: nobody is there")
            session = self._join(other)
        return session

    def _join(self, other: InprocKvPort) -> Session:
        def forget(session: Session) -> None:
            self._remove_session(session)
            if self._peers.get(other.endpoint) is session:
                del self._peers[other.endpoint]

        here = InprocLink(self._network, self._context, forget, opener=True)
        there = InprocLink(self._network, other._context, other._remove_session, opener=False)
        here.peer, there.peer = there, here
        self._peers[other.endpoint] = here.session
        self._add_session(here.session, opened=True)
        other._add_session(there.session, opened=False)
        return here.session


class InprocLink:
    """Link: one end of a connection. Bytes are copied when they enter the network, like a socket's."""

    striped = False

    def __init__(
        self, network: InprocKvNetwork, context: PortContext, on_closed: Callable[[Session], None], *, opener: bool
    ) -> None:
        self.peer: InprocLink | None = None
        self.session = Session(context, self, opener=opener)
        self._network, self._on_closed = network, on_closed
        self._loop = asyncio.get_running_loop()
        self._reader = FrameReader(self.session)
        self._flying: deque[bytes] = deque()
        self._free_s = self._last_arrival_s = 0.0
        self._pumping = self._closed = False

    def wake(self) -> None:
        if not (self._pumping or self._closed):
            self._pumping = True
            self._loop.call_at(max(self._loop.time(), self._free_s), self._pump)

    def flush(self) -> None:
        """Nothing to gain: the network is busy or it is not."""

    def divert(self, stream: int, link: int | None = None) -> None:
        self._reader.divert(stream)

    def drop(self, stream: int) -> None:
        """Nothing refers to the stream's memory: frames were copied when they were sent."""

    def close(self, error: KvError) -> None:
        if self._closed:
            return
        self._closed = True
        self._flying.clear()
        self.session.lost(error)
        self._on_closed(self.session)
        if self.peer is not None:
            reason = f"the peer ended the connection: {error}"
            told = KvCorrupt(reason) if isinstance(error, KvCorrupt) else KvTransferFailed(reason)
            self._loop.call_later(self._network.latency_s, self.peer.close, told)

    def _pump(self) -> None:
        self._pumping = False
        frame = None if self._closed else self.session.next_frame()
        if frame is None:
            return
        data = b"".join(frame.parts)
        network, faults, draw = self._network, self._network.faults, self._network.random.random
        if draw() < faults.lose:
            self.close(KvTransferFailed("the connection was lost"))
            return
        if draw() < faults.corrupt:
            at = network.random.randrange(len(data))
            data = data[:at] + bytes([data[at] ^ (1 << network.random.randrange(8))]) + data[at + 1 :]
        self._free_s = max(self._loop.time(), self._free_s) + len(data) / network.bytes_per_s
        delay_s = faults.delay_s if draw() < faults.delay else 0.0
        for _ in range(2 if draw() < faults.duplicate else 1):
            self._fly(data, self._free_s + network.latency_s + delay_s)
        self.wake()

    def _fly(self, data: bytes, arrival_s: float) -> None:
        self._last_arrival_s = max(self._last_arrival_s, arrival_s)
        self._flying.append(data)
        self._loop.call_at(self._last_arrival_s, self._land)

    def _land(self) -> None:
        """One timer for each frame, but the oldest frame first: timers of one moment have no order."""
        if self._flying and self.peer is not None:
            self.peer.deliver(self._flying.popleft())

    def deliver(self, data: bytes) -> None:
        """Bytes from the other end."""
        if self._closed:
            return
        try:
            self._reader.feed(data)
        except PhaseplaneError as error:
            self.close(error if isinstance(error, KvError) else KvTransferFailed(str(error)))
