"""What the tests over real sockets share: endpoints with a log, raw sockets, patience."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import zmq

from transfer.wire.endpoint import Timing
from transfer.wire.messages import CONTROL, Abort, Message
from transfer.wire.sockets import shared_context
from transfer.wire.zmq import DealerEndpoint, RouterEndpoint

ANY_PORT = "tcp://127.0.0.1:0"
QUICK = Timing(heartbeat_s=0.1, liveness_s=0.4)
PATIENCE_S = 10.0


class Log:
    """What one endpoint saw, in order."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str, Any]] = []
        self.callbacks: dict[str, Any] = {
            "on_message": lambda peer, message: self.seen.append(("message", peer, message.generation)),
            "on_peer": lambda peer, event: self.seen.append((event.value, peer, None)),
            "on_bad": lambda peer, error: self.seen.append(("bad", peer, str(error))),
        }

    def of(self, peer: str) -> list[str]:
        return [what for what, name, _ in self.seen if name == peer and what != "message"]

    def numbers(self, peer: str = CONTROL) -> list[int]:
        return [number for what, name, number in self.seen if what == "message" and name == peer]

    def complaints(self) -> list[str]:
        return [text for what, _, text in self.seen if what == "bad"]


def abort(number: int, size: int = 0) -> Message:
    return Abort(request_id="r", generation=number, reason="x" * size)


async def until(condition: Callable[[], bool], patience_s: float = PATIENCE_S) -> float:
    """Seconds until the condition held."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < patience_s, "waited in vain"
        await asyncio.sleep(0.005)
    return time.monotonic() - began


@asynccontextmanager
async def started(*endpoints: RouterEndpoint | DealerEndpoint) -> AsyncIterator[None]:
    try:
        for endpoint in endpoints:
            await endpoint.start()
        yield
    finally:
        for endpoint in reversed(endpoints):
            await endpoint.close()


@asynccontextmanager
async def pair(**options: Any) -> AsyncIterator[tuple[RouterEndpoint, Log, DealerEndpoint, Log]]:
    """A router and a dealer "d1", connected."""
    at_router, at_dealer = Log(), Log()
    router = RouterEndpoint(ANY_PORT, **at_router.callbacks, **options)
    async with started(router):
        dealer = DealerEndpoint(router.address, "d1", **at_dealer.callbacks, **options)
        async with started(dealer):
            await until(lambda: at_dealer.of(CONTROL) == at_router.of("d1") == ["connected"])
            yield router, at_router, dealer, at_dealer


@asynccontextmanager
async def raw_dealer(address: str, identity: bytes | None = b"raw") -> AsyncIterator[zmq.Socket[bytes]]:
    socket = shared_context().socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.RCVHWM, 20)
    if identity:
        socket.setsockopt(zmq.IDENTITY, identity)
    socket.connect(address)
    try:
        yield socket
    finally:
        socket.close()


async def read(socket: zmq.Socket[bytes]) -> bytes:
    """The next message of a raw socket."""
    await until(lambda: bool(socket.poll(0)))
    return socket.recv()


SESSION = b"session1"
