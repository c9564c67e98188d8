"""The accepting side of a TCP KV port: who is let in, to a new session or to one that has several connections.

A connection costs little, but not nothing: there are bounds for the port and for each remote address, and whoever is
turned away is told why. A handshake has a deadline.
"""

from __future__ import annotations

import asyncio
import hashlib
import socket
from collections.abc import Callable, Coroutine
from typing import Any

from transfer.errors import ProtocolError
from transfer.kv.links.auth import Word, acceptor_handshake
from transfer.kv.links.bundle import Bundle
from transfer.kv.links.connection import TcpConnection
from transfer.kv.links.context import PortContext, log
from transfer.kv.links.session import Session
from transfer.kv.links.sockets import CONNECT_S, shake, tune

MAX_CONNECTIONS = 1024
MAX_CONNECTIONS_PER_ADDRESS = 512
"""Instances of one host share an address, and each keeps a connection to every peer it meets."""
MAX_TURNED_AWAY = 64
"""Refusals in progress; beyond that a connection is closed without a word."""


class Door:
    """Accepts for one port. opened, closed: a session has begun, and nothing is left of it."""

    def __init__(
        self, context: PortContext, key: bytes | None,
        opened: Callable[[Session], None], closed: Callable[[Session], None],
    ) -> None:  # fmt: skip
        self._context, self._key, self._opened, self._closed = context, key, opened, closed
        self._bundles: dict[bytes, Bundle] = {}  # by digest of their token, so that look-up time tells nothing of it
        self._addresses: dict[str, int] = {}  # open connections of each
        self._refusing = 0

    @property
    def num_connections(self) -> int:
        """Open or in their handshake, those being refused apart."""
        return sum(self._addresses.values())

    async def accept(self, listener: socket.socket, spawn: Callable[[Coroutine[Any, Any, None]], None]) -> None:
        """Accept until cancelled; `spawn` owns the task of each handshake."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, address = await loop.sock_accept(listener)
            except OSError as error:  # out of descriptors, or the peer left before it was accepted
                log.warning("cannot accept a KV connection: %s", error)
                await asyncio.sleep(0.1)
                continue
            spawn(self._greet(sock, str(address[0])))

    async def _greet(self, sock: socket.socket, address: str) -> None:
        refusal = self._full(address)
        if refusal:
            if self._refusing >= MAX_TURNED_AWAY:
                sock.close()
                return
            self._refusing += 1
        else:
            self._addresses[address] = self._addresses.get(address, 0) + 1
        bundle: Bundle | None = None

        def admit(word: Word) -> tuple[str | None, bytes]:
            nonlocal bundle
            if not word.striped:
                return None, b""
            if not word.token:
                bundle = self._new_bundle()
                return None, bundle.token
            bundle = self._bundles.get(_digest(word.token))
            return (None if bundle is not None else "it wants to join a session that is not here"), b""

        try:
            tune(sock, self._context.limits.stall_s)
            async with asyncio.timeout(CONNECT_S):
                await shake(sock, acceptor_handshake(self._key, admit, refusal))
        except (OSError, TimeoutError, ProtocolError) as error:
            log.warning("turned a KV connection away: %s", error or "no handshake in time")
            sock.close()
            self._gone(address, refused=bool(refusal))
        except asyncio.CancelledError:
            sock.close()
            self._gone(address, refused=bool(refusal))
            raise
        else:
            self._admit(sock, address, bundle)

    def _admit(self, sock: socket.socket, address: str, bundle: Bundle | None) -> None:
        if bundle is None:
            connection = TcpConnection(sock, lambda _: self._hung_up(address, session))
            session = Session(self._context, connection, opener=False)
            self._opened(session)
            connection.serve(session)
            return

        def hung_up(connection: TcpConnection) -> None:
            self._gone(address)
            bundle.hung_up(connection)

        if not (bundle.lanes or bundle.closing):  # nobody has joined it yet
            self._bundles[_digest(bundle.token)] = bundle
            self._opened(bundle.session)
        bundle.attach(TcpConnection(sock, hung_up))

    def _new_bundle(self) -> Bundle:
        def closed(session: Session) -> None:
            self._bundles.pop(_digest(bundle.token), None)
            self._closed(session)

        bundle = Bundle(self._context, closed)
        return bundle

    def _hung_up(self, address: str, session: Session) -> None:
        self._gone(address)
        self._closed(session)

    def _full(self, address: str) -> str:
        """Why nobody more is let in from there, or nothing."""
        if self.num_connections >= MAX_CONNECTIONS:
            return f"{self._context.instance_id} has {MAX_CONNECTIONS} KV connections open; try again later"
        if self._addresses.get(address, 0) >= MAX_CONNECTIONS_PER_ADDRESS:
            return (
                f"{self._context.instance_id} has {MAX_CONNECTIONS_PER_ADDRESS} KV connections open from {address}; "
                "close idle ones, or try again later"
            )
        return ""

    def _gone(self, address: str, *, refused: bool = False) -> None:
        if refused:
            self._refusing -= 1
            return
        left = self._addresses[address] - 1
        if left:
            self._addresses[address] = left
        else:
            del self._addresses[address]


def _digest(token: bytes) -> bytes:
    return hashlib.sha256(token).digest()
