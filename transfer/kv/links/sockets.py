"""Sockets of a KV port: tuned, connected, listening, and driven through the handshake."""

from __future__ import annotations

import asyncio
import socket
from urllib.parse import urlsplit

from transfer.errors import ConfigError, KvTransferFailed, ProtocolError
from transfer.kv.links.auth import LENGTH_BYTES, Handshake, decode_word, word_length

SOCKET_BUFFER_BYTES = 2 << 20
CONNECT_S = 5.0
"""For a connection and its handshake, on both sides."""


def listen(host: str, port: int) -> socket.socket:
    """Raises ConfigError when the address cannot be had."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SOCKET_BUFFER_BYTES)  # accepted ones inherit it
        listener.bind((host, port))
        listener.listen(128)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"cannot listen for KV on {host}:{port} ({error}); choose another address, or port 0"
        ) from None
    listener.setblocking(False)
    return listener


async def connect(place: tuple[str, int], stall_s: float) -> socket.socket:
    """A tuned socket connected to (host, port). Raises OSError."""
    loop = asyncio.get_running_loop()
    infos = await loop.getaddrinfo(*place, type=socket.SOCK_STREAM)
    sock = socket.socket(infos[0][0], socket.SOCK_STREAM)
    try:
        tune(sock, stall_s)
        await loop.sock_connect(sock, infos[0][4])
    except BaseException:
        sock.close()
        raise
    return sock


def tune(sock: socket.socket, stall_s: float) -> None:
    """Not blocking, no delay, large buffers, and dead when nothing was acknowledged for stall_s."""
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BUFFER_BYTES)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SOCKET_BUFFER_BYTES)
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # a host that vanished is noticed though nothing ever answers
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(stall_s * 1000))


async def shake(sock: socket.socket, handshake: Handshake) -> None:
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


def split_endpoint(endpoint: str) -> tuple[str, int]:
    """(host, port). Raises KvTransferFailed."""
    try:
        parts = urlsplit(endpoint.strip())
        if parts.scheme == "tcp" and parts.hostname and parts.port:
            return parts.hostname, parts.port
    except ValueError:
        pass
    raise KvTransferFailed(f"{endpoint!r} is not a KV endpoint such as tcp://127.0.0.1:41233")


async def _read(sock: socket.socket, num_bytes: int) -> bytes:
    data = b""
    while len(data) < num_bytes:
        part = await asyncio.get_running_loop().sock_recv(sock, num_bytes - len(data))
        if not part:
            raise ConnectionResetError("the peer closed the connection during the handshake")
        data += part
    return data
