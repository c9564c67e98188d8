"""Takes connections and bounds what a client may do with one: how many there are, and how long it may send or read.

Protects against clients that send headers or read answers byte by byte. The body's time is kept by bodies.receive.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from typing import Any

from aiohttp import web

from controlplane.config import Limits
from controlplane.gateway.errors import ApiError

BACKLOG = 1024
LINGER_S = 2.0
"""What comes of a request after its answer is read and dropped for this long, so that the client sees the answer."""

_REASONS = {408: "Request Timeout", 503: "Service Unavailable"}
_log = logging.getLogger(__name__)


async def open_door(runner: web.AppRunner, listener: socket.socket, limits: Limits) -> asyncio.Server:
    """Serve what was set up in `runner` on a bound socket. Close it before the runner is cleaned up."""
    server = runner.server
    assert server is not None, "set the runner up first"
    return await asyncio.get_running_loop().create_server(Door(server, limits), sock=listener, backlog=BACKLOG)


class Door:
    """Makes the protocol of every connection and counts those that are open."""

    def __init__(self, server: web.Server, limits: Limits) -> None:
        self.limits, self.num_open = limits, 0
        self._server = server

    def __call__(self) -> asyncio.Protocol:
        options: dict[str, Any] = {"access_log": None}  # none at all, which aiohttp takes but does not declare
        return Visitor(
            self, self._server, loop=asyncio.get_running_loop(), keepalive_timeout=self.limits.idle_timeout_s,
            lingering_time=LINGER_S, **options,
        )  # fmt: skip


class Visitor(web.RequestHandler):
    """One connection. Idle between requests aiohttp closes it; with half a header or an unread answer it ends here."""

    def __init__(self, door: Door, server: web.Server, **options: Any) -> None:
        super().__init__(server, **options)
        self._door, self._timer_loop = door, options["loop"]
        self._header: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._door.num_open += 1
        if self._door.num_open > (most := self._door.limits.max_connections):
            self._leave(ApiError(503, f"{most} connections are open, the most this server holds", retry_after_s=1.0))

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        # The handler still waits for a request after these bytes: they are a part of its header.
        if self._waiter is None or self._waiter.done():
            self._header_came()
        elif self._header is None and data:
            self._header = self._timer_loop.call_later(self._door.limits.header_timeout_s, self._late)

    def pause_writing(self) -> None:
        """The client reads slower than it is answered."""
        super().pause_writing()
        if self._unread is None:
            self._unread = self._timer_loop.call_later(self._door.limits.read_timeout_s, self._not_read)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._was_read()

    def connection_lost(self, exc: BaseException | None) -> None:
        self._door.num_open -= 1
        self._header_came()
        self._was_read()
        super().connection_lost(exc)

    def _header_came(self) -> None:
        if self._header is not None:
            self._header.cancel()
            self._header = None

    def _was_read(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def _late(self) -> None:
        self._header = None
        limit_s = self._door.limits.header_timeout_s
        self._leave(ApiError(408, f"the request's header did not arrive within {limit_s:g} s; send it at once"))

    def _not_read(self) -> None:
        self._unread = None
        if self.transport is not None:
            _log.info("a connection is cut: its client read nothing for %g s", self._door.limits.read_timeout_s)
            self.transport.abort()

    def _leave(self, error: ApiError) -> None:
        """Tell why, outside any request, and close."""
        body = error.body()
        head = [
            f"HTTP/1.1 {error.status} {_REASONS[error.status]}", "Content-Type: application/json; charset=utf-8",
            f"Content-Length: {len(body)}", "Connection: close",
        ]  # fmt: skip
        if error.retry_after_s is not None:
            head.append(f"Retry-After: {error.retry_after_s:g}")
        if self.transport is not None:
            self.transport.write("\r\n".join([*head, "", ""]).encode() + body)
        self.force_close()
