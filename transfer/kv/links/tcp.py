"""KvPort over TCP: bytes go from one arena's memory to the other's through the sockets, with no copy of ours between.

Received payload is scattered by recvmsg straight into the granted blocks; sent slabs are gathered by sendmsg. Frames
are made only when the socket can take them, so no backlog builds up. On one host the payload stays in shared memory;
between hosts another project's transfer engine may carry it (direct.py).
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from transfer.errors import ConfigError, KvError, KvTransferFailed, ProtocolError
from transfer.kv.arena import KvArena
from transfer.kv.links.auth import opener_handshake
from transfer.kv.links.base import SessionPort
from transfer.kv.links.bundle import MAX_LINKS, Bundle
from transfer.kv.links.choice import LinkLimits
from transfer.kv.links.connection import TcpConnection
from transfer.kv.links.context import PortContext
from transfer.kv.links.direct import DirectReader, make_reader
from transfer.kv.links.direct_ring import DirectRing, RingLimits
from transfer.kv.links.door import Door
from transfer.kv.links.session import Session
from transfer.kv.links.shm import local_host_id
from transfer.kv.links.sockets import CONNECT_S, connect, listen, shake, split_endpoint
from transfer.kv.port import KvDelegate
from transfer.kv.stream import SendLimits
from transfer.wire.messages import KvPeer


class TcpKvPort(SessionPort):
    """KvPort on listening sockets, with kept connections to peers. Raises ConfigError for an unsafe address.

    host, port: where to listen, several hosts (one for each network card) with commas between; beyond loopback
    `auth_key` is required, and every peer must hold it. advertise: the hosts peers are told, where not `host`.
    links: connections to each endpoint of a peer; more than one connection stripes a session over all of them.
    stall_s: how long a stream may owe something before it fails; link_limits: when a link is given up for others.
    direct: a backend (mooncake, nixl) that carries payload where memory is not shared and the peer has it too.
    """

    def __init__(
        self, *, instance_id: str, epoch: int, arena: KvArena, delegate: KvDelegate | None = None,
        host: str = "127.0.0.1", port: int = 0, advertise: str | None = None, auth_key: bytes | None = None,
        host_id: str | None = None, fingerprint: bytes | None = None, stall_s: float = 10.0,
        window_bytes: int = 8 << 20, slab_bytes: int = 512 << 10,
        checksum: bool = True, shm: bool = True, shm_checksum: bool = False,
        links: int = 1, link_limits: LinkLimits | None = None,
        direct: str | DirectReader | None = None, ring_limits: RingLimits | None = None,
    ) -> None:  # fmt: skip
        hosts = [name.strip() for name in host.split(",")]
        shown = [name.strip() for name in (advertise or host).split(",")]
        _check_hosts(hosts, shown, links, auth_key)
        super().__init__(
            PortContext(
                instance_id=instance_id, epoch=epoch, arena=arena, host_id=host_id or local_host_id(),
                delegate=delegate, window_bytes=window_bytes, limits=SendLimits(slab_bytes=slab_bytes, stall_s=stall_s),
                link_limits=link_limits or LinkLimits(),
                checksum=checksum, shm=shm, shm_checksum=shm_checksum, fingerprint=fingerprint,
            )
        )  # fmt: skip
        if direct is not None:
            reader = make_reader(direct, shown[0]) if isinstance(direct, str) else direct
            self._context.direct = DirectRing(reader, arena, ring_limits or RingLimits(read_s=stall_s / 2))
        self._hosts, self._shown, self._ports, self._links = hosts, shown, [port] * len(hosts), links
        self._key = auth_key
        self._door = Door(self._context, auth_key, self._add_accepted, self._remove_session)
        self._listeners: list[socket.socket] = []
        self._tasks: dict[asyncio.Task[None], None] = {}
        self._peers: dict[str, asyncio.Task[Session]] = {}

    @property
    def endpoint(self) -> str:
        return ",".join(_endpoint(*pair) for pair in zip(self._shown, self._ports, strict=True))

    async def start(self) -> None:
        """Listen. Raises ConfigError when an address cannot be had, or the backend cannot start."""
        if self._context.direct is not None:
            await self._context.direct.start(self._context.instance_id)
        for number, host in enumerate(self._hosts):
            try:
                listener = listen(host, self._ports[number])
            except ConfigError:
                self._stop_listening()
                await self._close_direct()
                raise
            self._ports[number] = int(listener.getsockname()[1])
            self._listeners.append(listener)
        for listener in self._listeners:
            self._spawn(self._door.accept(listener, self._spawn))

    async def close(self) -> None:
        """Fail every stream, close every connection. Idempotent."""
        self._closed = True
        tasks = [*self._tasks, *self._peers.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._peers.clear()
        self._lose_all(KvTransferFailed(f"{self._context.instance_id} closed its KV port"))
        self._stop_listening()
        await self._roles_done()
        await self._close_direct()

    async def _connected(self, peer: KvPeer) -> Session:
        if self._closed:
            raise KvTransferFailed(f"the KV port of {self._context.instance_id} is closed")
        endpoint = peer.data_endpoint
        task = self._peers.get(endpoint)
        if task is None or (task.done() and (task.cancelled() or task.exception() or task.result().failure)):
            task = asyncio.get_running_loop().create_task(self._connect(endpoint))
            task.add_done_callback(_retrieve)
            self._peers[endpoint] = task
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():
                raise KvTransferFailed(f"the KV port of {self._context.instance_id} is closed") from None
            raise

    async def _connect(self, endpoint: str) -> Session:
        """A session to a peer over the first of its endpoints that answers; the others join soon."""
        try:
            places = [split_endpoint(one) for one in endpoint.split(",") for _ in range(self._links)][:MAX_LINKS]
            if len(places) == 1:
                sock = await self._reach(places[0], CONNECT_S)
                return self._opened(endpoint, sock)
            return await self._connect_striped(endpoint, places)
        except (KvError, asyncio.CancelledError):
            self._peers.pop(endpoint, None)
            raise

    async def _connect_striped(self, endpoint: str, places: list[tuple[str, int]]) -> Session:
        failure = KvTransferFailed("")
        distinct = list(dict.fromkeys(places))
        token = b""

        def learn(found: bytes) -> None:
            nonlocal token
            token = found

        for place in distinct:
            try:
                sock = await self._reach(place, CONNECT_S / len(distinct), striped=True, learn=learn)
            except KvTransferFailed as error:
                failure = error
                continue
            join = partial(self._join_soon, places)
            forget = partial(self._forget, endpoint)
            bundle = Bundle(self._context, forget, token=token, connect=join, num_links=len(places))
            self._add_session(bundle.session, opened=True)
            bundle.attach(TcpConnection(sock, bundle.hung_up), places.index(place))
            return bundle.session
        raise failure

    def _join_soon(self, places: list[tuple[str, int]], bundle: Bundle, link: int) -> None:
        self._spawn(self._join(places[link], bundle, link))

    async def _join(self, place: tuple[str, int], bundle: Bundle, link: int) -> None:
        try:
            sock = await self._reach(place, CONNECT_S, striped=True, token=bundle.token)
        except KvTransferFailed as error:
            bundle.not_attached(link, str(error))
        else:
            bundle.attach(TcpConnection(sock, bundle.hung_up), link)

    async def _reach(
        self, place: tuple[str, int], timeout_s: float,
        *, striped: bool = False, token: bytes = b"", learn: Callable[[bytes], None] | None = None,
    ) -> socket.socket:  # fmt: skip
        """A connected socket, handshake done. Raises KvTransferFailed."""
        handshake = opener_handshake(self._key, striped=striped, token=token, learn=learn)
        sock: socket.socket | None = None
        try:
            async with asyncio.timeout(timeout_s):
                sock = await connect(place, self._context.limits.stall_s)
                await shake(sock, handshake)
            return sock
        except (OSError, TimeoutError, ProtocolError) as error:
            if sock is not None:
                sock.close()
            reason = str(error) or "no answer in time"
            raise KvTransferFailed(f"cannot connect to {_endpoint(*place)} for KV: {reason}") from None
        except asyncio.CancelledError:
            if sock is not None:
                sock.close()
            raise

    def _opened(self, endpoint: str, sock: socket.socket) -> Session:
        connection = TcpConnection(sock, lambda _: self._forget(endpoint, session))
        session = Session(self._context, connection, opener=True)
        self._add_session(session, opened=True)
        connection.serve(session)
        return session

    def _add_accepted(self, session: Session) -> None:
        self._add_session(session, opened=False)

    def _forget(self, endpoint: str, session: Session) -> None:
        self._remove_session(session)
        self._peers.pop(endpoint, None)

    async def _close_direct(self) -> None:
        if self._context.direct is not None:
            await self._context.direct.close()

    def _stop_listening(self) -> None:
        for listener in self._listeners:
            listener.close()
        self._listeners.clear()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks[task] = None
        task.add_done_callback(lambda done: self._tasks.pop(done, None))


def _check_hosts(hosts: list[str], shown: list[str], links: int, auth_key: bytes | None) -> None:
    for host in hosts:
        if not _is_loopback(host) and not auth_key:
            raise ConfigError(f"listening for KV on {host} needs an auth key; give --data-key-file, or use 127.0.0.1")
    if len(shown) != len(hosts):
        raise ConfigError(f"{len(hosts)} hosts to listen for KV on, but {len(shown)} to advertise; name as many")
    if not 1 <= links * len(hosts) <= MAX_LINKS:
        raise ConfigError(f"{links} links on each of {len(hosts)} hosts; a session may have 1 to {MAX_LINKS} in all")


def _endpoint(host: str, port: int) -> str:
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _retrieve(task: asyncio.Task[Session]) -> None:
    """A connect that nobody waits for any more must not be reported as an unhandled error."""
    if not task.cancelled():
        task.exception()
