"""A node's end over ZeroMQ: a DEALER that connects, and reconnects with a fresh socket and session each time.

One TCP connection is one session, so nothing queued in an old one is ever replayed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
from enum import Enum

import zmq

from transfer.errors import ConfigError, MailboxFull, PeerLost, ProtocolError
from transfer.terms import MAX_ID_CHARS
from transfer.wire import frames
from transfer.wire.codec import WIRE, Codec
from transfer.wire.curve import CurveKeys, check_bind
from transfer.wire.endpoint import QUEUE_SIZE, OnBad, OnMessage, OnPeer, PeerEvent, Timing
from transfer.wire.liveness import Liveness
from transfer.wire.messages import CONTROL, Message
from transfer.wire.sockets import Monitor, Pump, new_socket, shared_context

BACKOFF_BASE_S = 0.05
BACKOFF_CAP_S = 1.0

_HANDSHAKE_FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
_log = logging.getLogger(__name__)


class _Link(Enum):
    CLOSED = "closed"
    WAITING = "waiting"
    OPENING = "opening"
    CONNECTED = "connected"


class DealerEndpoint:
    """A node's end: one identity, one peer, named CONTROL. Connects, and reconnects for ever until closed.

    After LOST it opens a new socket and session after an exponential backoff with jitter (seeded by the
    identity, at most BACKOFF_CAP_S). Send Hello on every CONNECTED: the router kept nothing.
    """

    def __init__(
        self,
        address: str,
        identity: str,
        *,
        on_message: OnMessage,
        on_peer: OnPeer,
        on_bad: OnBad | None = None,
        timing: Timing | None = None,
        curve: CurveKeys | None = None,
        queue_size: int = QUEUE_SIZE,
        codec: Codec = WIRE,
    ) -> None:
        check_bind(address, curve)
        if not 0 < len(identity.encode()) <= MAX_ID_CHARS or identity[0] == "\0":
            raise ConfigError(f"instance id {identity[:MAX_ID_CHARS]!r} must be 1 to {MAX_ID_CHARS} bytes of UTF-8")
        self.identity, self.address = identity, address
        self._on_message, self._on_peer, self._on_bad = on_message, on_peer, on_bad
        self._timing, self._curve, self._queue_size, self._codec = timing or Timing(), curve, queue_size, codec
        self._random = random.Random(identity)
        self._link = _Link.CLOSED
        self._attempts = 0

    async def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._open()

    async def close(self) -> None:
        if self._link in (_Link.OPENING, _Link.CONNECTED):
            self._close_socket()
        if self._link is not _Link.CLOSED:
            self._timer.cancel()
        self._link = _Link.CLOSED

    def send(self, peer: str, message: Message) -> None:
        if peer != CONTROL or self._link is not _Link.CONNECTED:
            raise PeerLost(f"{peer} is not connected, so a {type(message).__name__} was not sent")
        frame = self._message_prefix + self._codec.encode(message)
        try:
            self._socket.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            raise MailboxFull(
                f"the control plane reads too slowly: {self._queue_size} messages wait for it; send later"
            ) from None
        finally:
            self._pump.kick()

    def _open(self) -> None:
        self._session = os.urandom(frames.SESSION_BYTES)
        self._message_prefix = frames.prefix(frames.MESSAGE, self._session)
        context = shared_context()
        self._socket = new_socket(context, zmq.DEALER, self._queue_size)
        try:
            self._socket.setsockopt(zmq.IDENTITY, self.identity.encode())
            self._socket.setsockopt(zmq.RECONNECT_IVL, -1)
            if self._curve:
                self._curve.unlock(self._socket)
            events = zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED | _HANDSHAKE_FAILED
            self._monitor = Monitor(context, self._socket, events, self._on_connection)
        except ConfigError:
            self._socket.close()
            raise
        self._pump = Pump(self._socket, self._take)
        self._liveness = Liveness(self._timing.heartbeat_s / 2, self._timing.liveness_s, self._loop.time())
        self._liveness.heard(CONTROL, self._loop.time())
        self._ping_next = True
        self._link = _Link.OPENING
        self._timer = self._loop.call_later(self._timing.heartbeat_s / 2, self._tick)
        self._socket.connect(self.address)
        self._socket.send(frames.prefix(frames.OPEN, self._session), zmq.NOBLOCK)
        self._pump.kick()

    def _reopen(self) -> None:
        try:
            self._open()
        except ConfigError as error:
            _log.warning("%s cannot reconnect yet: %s", self.identity, error)
            self._timer = self._loop.call_later(BACKOFF_CAP_S, self._reopen)

    def _close_socket(self) -> None:
        self._timer.cancel()
        self._pump.close()
        self._monitor.close()
        self._socket.close()

    def _take(self) -> None:
        frame = self._socket.recv(zmq.NOBLOCK)
        kind, session = frames.split(frame)
        if session != self._session:
            return
        now = self._loop.time()
        self._liveness.heard(CONTROL, now)
        if kind == frames.MESSAGE:
            self._deliver(frame)
        elif kind == frames.PONG and self._link is _Link.OPENING:
            self._link, self._connected_at = _Link.CONNECTED, now
            self._on_peer(CONTROL, PeerEvent.CONNECTED)
        elif kind == frames.REFUSED:
            self._bad(ProtocolError(f"the control plane refused {self.identity}: {frames.sentence(frame)}"))
        elif kind == frames.STALE:
            self._lose()

    def _deliver(self, frame: bytes) -> None:
        try:
            message = self._codec.decode(memoryview(frame)[frames.PREFIX_BYTES :])
        except ProtocolError as error:
            self._bad(error)
            return
        self._on_message(CONTROL, message)

    def _bad(self, error: ProtocolError) -> None:
        try:
            if self._on_bad:
                self._on_bad(CONTROL, error)
        finally:
            self._lose()

    def _lose(self) -> None:
        """Give this session up and open another after the backoff."""
        if self._link not in (_Link.OPENING, _Link.CONNECTED):
            return
        was_connected = self._link is _Link.CONNECTED
        if was_connected and self._loop.time() - self._connected_at > BACKOFF_CAP_S:
            self._attempts = 0
        self._close_socket()
        delay_s = min(BACKOFF_CAP_S, BACKOFF_BASE_S * 2 ** min(self._attempts, 10)) * self._random.uniform(0.5, 1.0)
        self._attempts += 1
        self._link = _Link.WAITING
        self._timer = self._loop.call_later(delay_s, self._reopen)
        if was_connected:
            self._on_peer(CONTROL, PeerEvent.LOST)

    def _on_connection(self, event: int) -> None:
        if self._link not in (_Link.OPENING, _Link.CONNECTED):
            return
        if event & _HANDSHAKE_FAILED:
            self._bad(ProtocolError(f"{self.address} refused the keys of {self.identity}; check the CURVE key files"))
        else:
            self._disconnected(self._session)

    def _disconnected(self, session: bytes) -> None:
        if session != self._session or self._link not in (_Link.OPENING, _Link.CONNECTED):
            return
        if self._pump.drain():  # what control sent before it went is heard first
            self._lose()
        else:
            self._loop.call_soon(self._disconnected, session)

    def _tick(self) -> None:
        self._timer = self._loop.call_later(self._timing.heartbeat_s / 2, self._tick)
        if self._pump.drain() and self._liveness.overdue(self._loop.time()):
            self._lose()
        elif self._link is _Link.CONNECTED:
            if self._ping_next:
                self._ping()
            self._ping_next = not self._ping_next

    def _ping(self) -> None:
        with contextlib.suppress(zmq.Again):  # then the queue is full of messages, which say that we live as well
            self._socket.send(frames.prefix(frames.PING, self._session), zmq.NOBLOCK)
        self._pump.kick()
