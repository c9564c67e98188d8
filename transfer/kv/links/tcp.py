"""KvPort over TCP: bytes go from one arena's memory to the other's through the sockets, with no copy of ours between.

Received payload is scattered by recvmsg straight into the granted blocks; sent slabs are gathered by sendmsg. Frames
are made only when the socket can take them, so no backlog builds up. On one host the payload stays in shared memory.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from urllib.parse import urlsplit

from transfer.errors import ConfigError, KvTransferFailed, ProtocolError
from transfer.kv.arena import KvArena
from transfer.kv.links.auth import (
    LENGTH_BYTES,
    Handshake,
    acceptor_handshake,
    decode_word,
    opener_handshake,
    word_length,
)
from transfer.kv.links.base import SessionPort
from transfer.kv.links.connection import TcpConnection
from transfer.kv.links.context import PortContext, log
from transfer.kv.links.session import Session
from transfer.kv.links.shm import local_host_id
from transfer.kv.port import KvDelegate
from transfer.kv.stream import SendLimits
from transfer.wire.messages import KvPeer

SOCKET_BUFFER_BYTES = 2 << 20
CONNECT_S = 5.0
MAX_CONNECTIONS = 1024


class TcpKvPort(SessionPort):
    """KvPort on one listening socket, with kept connections to peers. Raises ConfigError for an unsafe address.

    host, port: where to listen; beyond loopback `auth_key` is required, and every peer must hold it. advertise: the
    host peers are told, where it is not `host`. stall_s: how long a stream may owe something before it fails.
    """

    def __init__(
        self, *, instance_id: str, epoch: int, arena: KvArena, delegate: KvDelegate | None = None,
        host: str = "127.0.0.1", port: int = 0, advertise: str | None = None, auth_key: bytes | None = None,
        host_id: str | None = None, fingerprint: bytes | None = None, stall_s: float = 10.0,
        window_bytes: int = 8 << 20, slab_bytes: int = 512 << 10,
        checksum: bool = True, shm: bool = True, shm_checksum: bool = True,
    ) -> None:  # fmt: skip
        if not _is_loopback(host) and not auth_key:
            raise ConfigError(f"listening for KV on {host} needs an auth key; set one on every node, or use 127.0.0.1")
        super().__init__(
            PortContext(
                instance_id=instance_id, epoch=epoch, arena=arena, host_id=host_id or local_host_id(),
                delegate=delegate, window_bytes=window_bytes, limits=SendLimits(slab_bytes=slab_bytes, stall_s=stall_s),
                checksum=checksum, shm=shm, shm_checksum=shm_checksum, fingerprint=fingerprint,
            )
        )  # fmt: skip
        self._host, self._port, self._advertise = host, port, advertise
        self._key = auth_key
        self._listener: socket.socket | None = None
        self._tasks: dict[asyncio.Task[None], None] = {}
        self._peers: dict[str, asyncio.Task[Session]] = {}

    @property
    def endpoint(self) -> str:
        host = self._advertise or self._host
        return f"tcp://[{host}]:{self._port}" if ":" in host else f"tcp://{host}:{self._port}"

    async def start(self) -> None:
        """Listen. Raises ConfigError when the address cannot be had."""
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SOCKET_BUFFER_BYTES)  # accepted ones inherit it
            listener.bind((self._host, self._port))
            listener.listen(128)
        except OSError as error:
            listener.close()
            raise ConfigError(
                f"cannot listen for KV on {self._host}:{self._port} ({error}); choose another address, or port 0"
            ) from None
        listener.setblocking(False)
        self._port = int(listener.getsockname()[1])
        self._listener = listener
        self._spawn(self._accept(listener))

    async def close(self) -> None:
        """Fail every stream, close every connection. Idempotent."""
        self._closed = True
        tasks = [*self._tasks, *self._peers.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._peers.clear()
        self._lose_all(KvTransferFailed(f"{self._context.instance_id} closed its KV port"))
        if self._listener is not None:
            self._listener.close()
            self._listener = None

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
        loop = asyncio.get_running_loop()
        host, port = _split(endpoint)
        sock: socket.socket | None = None
        try:
            async with asyncio.timeout(CONNECT_S):
                infos = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
                sock = socket.socket(infos[0][0], socket.SOCK_STREAM)
                self._tune(sock)
                await loop.sock_connect(sock, infos[0][4])
                await _shake(sock, opener_handshake(self._key))
            return self._admit(sock, endpoint, opener=True)
        except (OSError, TimeoutError, ProtocolError) as error:
            self._peers.pop(endpoint, None)
            if sock is not None:
                sock.close()
            raise KvTransferFailed(f"cannot connect to {endpoint} for KV: {error or 'no answer in time'}") from None
        except asyncio.CancelledError:
            if sock is not None:
                sock.close()
            raise

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, _ = await loop.sock_accept(listener)
            except OSError as error:  # out of descriptors, or the peer left before it was accepted
                log.warning("cannot accept a KV connection: %s", error)
                await asyncio.sleep(0.1)
                continue
            if len(self._sessions) + len(self._tasks) > MAX_CONNECTIONS:
                log.warning("refusing a KV connection: %d are open", MAX_CONNECTIONS)
                sock.close()
                continue
            self._spawn(self._greet(sock))

    async def _greet(self, sock: socket.socket) -> None:
        try:
            self._tune(sock)
            async with asyncio.timeout(CONNECT_S):
                await _shake(sock, acceptor_handshake(self._key))
            self._admit(sock, None, opener=False)
        except (OSError, TimeoutError, ProtocolError) as error:
            log.warning("turned a KV connection away: %s", error or "no handshake in time")
            sock.close()
        except asyncio.CancelledError:
            sock.close()
            raise

    def _admit(self, sock: socket.socket, endpoint: str | None, *, opener: bool) -> Session:
        def forget(session: Session) -> None:
            self._remove_session(session)
            if endpoint is not None:
                self._peers.pop(endpoint, None)

        connection = TcpConnection(sock, self._context, forget, opener=opener)
        self._add_session(connection.session, opened=opener)
        return connection.session

    def _tune(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER_BYTES)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SOCKET_BUFFER_BYTES)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # a host that vanished is noticed though nothing ever answers
            timeout_ms = int(self._context.limits.stall_s * 1000)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, timeout_ms)

    def _spawn(self, work: asyncio._CoroutineLike[None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks[task] = None
        task.add_done_callback(lambda done: self._tasks.pop(done, None))


async def _shake(sock: socket.socket, handshake: Handshake) -> None:
    """Drive a handshake over a socket. Raises ProtocolError, or OSError when the peer leaves."""
    loop = asyncio.get_running_loop()
    out = next(handshake)
    while True:
        if out:
            await loop.sock_sendall(sock, out)
        length = word_length(await _read(sock, LENGTH_BYTES))
        try:
            out = handshake.send(decode_word(await _read(sock, length)))
        except StopIteration as stop:
            last, problem = stop.value
            if last:
                await loop.sock_sendall(sock, last)
            if problem:
                raise ProtocolError(problem) from None
            return


async def _read(sock: socket.socket, num_bytes: int) -> bytes:
    data = b""
    while len(data) < num_bytes:
        part = await asyncio.get_running_loop().sock_recv(sock, num_bytes - len(data))
        if not part:
            raise ConnectionResetError("the peer closed the connection during the handshake")
        data += part
    return data


def _split(endpoint: str) -> tuple[str, int]:
    try:
        parts = urlsplit(endpoint)
        if parts.scheme == "tcp" and parts.hostname and parts.port:
            return parts.hostname, parts.port
    except ValueError:
        pass
    raise KvTransferFailed(f"{endpoint!r} is not a KV endpoint such as tcp://127.0.0.1:41233")


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _retrieve(task: asyncio.Task[Session]) -> None:
    """A connect that nobody waits for any more must not be reported as an unhandled error."""
    if not task.cancelled():
        task.exception()
