"""The control plane's end over ZeroMQ: a ROUTER that binds and keeps one session per dealer.

Decides nothing about messages; routing by identity, liveness and refusing strangers is all it does.
"""

from __future__ import annotations

import asyncio
import contextlib

import zmq

from transfer.errors import ConfigError, MailboxFull, PeerLost, ProtocolError
from transfer.terms import MAX_ID_CHARS
from transfer.wire import frames
from transfer.wire.codec import WIRE, Codec
from transfer.wire.curve import CurveKeys, ZapHandler, check_bind
from transfer.wire.endpoint import QUEUE_SIZE, OnBad, OnMessage, OnPeer, PeerEvent, Timing
from transfer.wire.liveness import Liveness
from transfer.wire.messages import CONTROL, Message
from transfer.wire.sockets import BATCH, Monitor, Pump, ZmqSocket, new_context, new_socket, shared_context

MAX_PEERS = 4096

_PROBE_EVERY_S = 0.02
_PROBE_FOR_S = 0.2
_PROBE_PATIENCE = 64
"""Batches read, at most, before a peer that may be gone is probed."""
_UNBIND_TIMEOUT_S = 1.0


class RouterEndpoint:
    """The control plane's end: any number of dealers up to MAX_PEERS, each under its own identity.

    A dealer that comes back under the same identity replaces its older connection (LOST, then CONNECTED).
    A dealer whose process ended is LOST as soon as its connection breaks; one that went silent, after
    liveness_s. With `curve` the router has a context of its own, since its allow-list belongs to the context.
    """

    def __init__(
        self,
        address: str,
        *,
        on_message: OnMessage,
        on_peer: OnPeer,
        on_bad: OnBad | None = None,
        identity: str = CONTROL,
        timing: Timing | None = None,
        curve: CurveKeys | None = None,
        queue_size: int = QUEUE_SIZE,
        codec: Codec = WIRE,
    ) -> None:
        check_bind(address, curve)
        self.identity, self.address = identity, address
        self._on_message, self._on_peer, self._on_bad = on_message, on_peer, on_bad
        self._timing, self._curve, self._queue_size, self._codec = timing or Timing(), curve, queue_size, codec
        self._sessions: dict[str, bytes] = {}
        self._zap: ZapHandler | None = None
        self._socket: ZmqSocket | None = None
        self._pump: Pump | None = None
        self._tick_timer: asyncio.TimerHandle | None = None
        self._probe_timer: asyncio.TimerHandle | None = None
        self._probe_until = 0.0
        self._unbound = asyncio.Event()

    @property
    def peers(self) -> tuple[str, ...]:
        """Peers with an open session, in the order they came."""
        return tuple(self._sessions)

    async def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._context = new_context() if self._curve else shared_context()
        socket = new_socket(self._context, zmq.ROUTER, self._queue_size)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        if self._curve:
            self._curve.guard(socket)
            if self._curve.allowed is not None:
                self._zap = ZapHandler(self._context, self._curve.allowed)
        self._socket = socket
        try:
            socket.bind(self.address)
        except zmq.ZMQError as error:
            address = self.address
            await self.close()
            raise ConfigError(f"cannot bind {address} ({error}); choose another port or stop what uses it") from None
        self.address = socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._monitor = Monitor(self._context, socket, zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED, self._on_connection)
        self._liveness = Liveness(self._timing.heartbeat_s / 2, self._timing.liveness_s, self._loop.time())
        self._pump = Pump(socket, self._take)
        self._tick_timer = self._loop.call_later(self._timing.heartbeat_s / 2, self._tick)

    async def close(self) -> None:
        """Returns when the port is free again."""
        socket, self._socket = self._socket, None
        if socket is None:
            return
        for timer in (self._tick_timer, self._probe_timer):
            if timer:
                timer.cancel()
        if self._pump:
            self._pump.close()
            socket.unbind(self.address)
            with contextlib.suppress(TimeoutError):  # then closing the socket frees the port, a little later
                async with asyncio.timeout(_UNBIND_TIMEOUT_S):
                    await self._unbound.wait()
            self._monitor.close()
        socket.close()
        self._sessions.clear()
        if self._zap:
            self._zap.close()
        if self._curve:
            await asyncio.to_thread(self._context.term)

    def send(self, peer: str, message: Message) -> None:
        session = self._sessions.get(peer)
        if session is None or self._socket is None:
            raise PeerLost(f"{peer} is not connected, so a {type(message).__name__} was not sent")
        try:
            self._send(peer, frames.prefix(frames.MESSAGE, session) + self._codec.encode(message))
        except zmq.Again:
            raise MailboxFull(
                f"{peer} reads too slowly: {self._queue_size} messages wait for it; send later or drop it"
            ) from None
        except zmq.ZMQError:
            self._probe_later()
            raise PeerLost(f"{peer} closed its connection, so a {type(message).__name__} was not sent") from None

    def drop(self, peer: str, reason: str) -> None:
        """End this peer's session and tell it why in a sentence. LOST follows at once if it was connected."""
        session = self._sessions.get(peer, frames.NO_SESSION)
        text = reason.encode()[: frames.MAX_SENTENCE_BYTES]
        self._try_send(peer, frames.prefix(frames.REFUSED, session) + text)
        self._lose(peer)

    def _send(self, peer: str, frame: bytes) -> None:
        if self._socket is None or self._pump is None:
            raise zmq.ZMQError(zmq.ENOTSOCK)
        self._pump.kick()  # before sending, which may fail and still swallow a signal
        self._socket.send(peer.encode(), zmq.NOBLOCK | zmq.SNDMORE)
        self._socket.send(frame, zmq.NOBLOCK)

    def _try_send(self, peer: str, frame: bytes) -> bool:
        """False: the peer has no connection. A full queue counts as sent: its owner has plenty to hear."""
        try:
            self._send(peer, frame)
        except zmq.Again:
            return True
        except zmq.ZMQError:
            return False
        return True

    def _take(self) -> None:
        assert self._socket is not None
        name = self._socket.recv(zmq.NOBLOCK)
        frame = self._socket.recv(zmq.NOBLOCK)
        while self._socket.getsockopt(zmq.RCVMORE):
            self._socket.recv(zmq.NOBLOCK)
            frame = b""
        # libzmq gives nameless peers, and connections replaced by a newer one, a name that starts with 0.
        if name[0] == 0 or len(name) > MAX_ID_CHARS:
            return
        try:
            peer = name.decode()
        except UnicodeDecodeError:
            return
        kind, session = frames.split(frame)
        if kind == frames.OPEN:
            self._opened(peer, session)
        elif kind not in (frames.MESSAGE, frames.PING):
            self._bad(peer, ProtocolError("the bytes are not a Phaseplane frame; check what connects to this port"))
        elif session != self._sessions.get(peer):
            self._try_send(peer, frames.prefix(frames.STALE, session))
        else:
            self._heard(peer, kind, session, frame)

    def _heard(self, peer: str, kind: int, session: bytes, frame: bytes) -> None:
        self._liveness.heard(peer, self._loop.time())
        if kind == frames.PING:
            self._try_send(peer, frames.prefix(frames.PONG, session))
            return
        try:
            message = self._codec.decode(memoryview(frame)[frames.PREFIX_BYTES :])
        except ProtocolError as error:
            self._bad(peer, error)
            return
        self._on_message(peer, message)

    def _opened(self, peer: str, session: bytes) -> None:
        self._lose(peer)
        if len(self._sessions) >= MAX_PEERS:
            self._try_send(peer, frames.prefix(frames.REFUSED, session) + b"the control plane has too many peers")
            return
        self._sessions[peer] = session
        self._liveness.heard(peer, self._loop.time())
        self._try_send(peer, frames.prefix(frames.PONG, session))
        self._on_peer(peer, PeerEvent.CONNECTED)

    def _bad(self, peer: str, error: ProtocolError) -> None:
        try:
            if self._on_bad:
                self._on_bad(peer, error)
        finally:
            if self._socket is not None:
                self.drop(peer, str(error))

    def _lose(self, peer: str) -> None:
        if self._sessions.pop(peer, None) is not None:
            self._liveness.forget(peer)
            self._on_peer(peer, PeerEvent.LOST)

    def _on_connection(self, event: int) -> None:
        if event == zmq.EVENT_DISCONNECTED:
            self._probe_later()
        elif self._socket is None:
            self._unbound.set()

    def _probe_later(self) -> None:
        """Some connection broke; which one, only sending tells, once libzmq has taken note: look a few times."""
        self._probe_until = self._loop.time() + _PROBE_FOR_S
        if self._probe_timer is None and self._socket is not None:
            self._probe_timer = self._loop.call_later(_PROBE_EVERY_S, self._probe)

    def _probe(self) -> None:
        self._probe_timer = None
        if self._loop.time() < self._probe_until:
            self._probe_timer = self._loop.call_later(_PROBE_EVERY_S, self._probe)
        self._read(_PROBE_PATIENCE)  # what a peer sent before it went is heard first
        for peer, session in tuple(self._sessions.items()):
            if not self._try_send(peer, frames.prefix(frames.PONG, session)):
                self._lose(peer)

    def _tick(self) -> None:
        self._tick_timer = self._loop.call_later(self._timing.heartbeat_s / 2, self._tick)
        # libzmq serves peers in turn, so as many messages as there are peers include one of each that sent.
        self._read(1 + len(self._sessions) // BATCH)
        for peer in self._liveness.overdue(self._loop.time()):
            self._lose(peer)

    def _read(self, num_batches: int) -> None:
        for _ in range(num_batches):
            if self._pump is None or self._pump.drain():
                return
