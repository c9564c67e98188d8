"""HTTP to one OpenAI-compatible server: where it may be, its key, what it says of itself, one streamed completion.

Knows nothing of jobs or tokens. Follows no redirect and no proxy: a key goes to the host that was named and no other.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
import socket
from collections.abc import AsyncGenerator, Sequence
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from nodes.engines.answers import read_body
from transfer.errors import EngineFailed, InvalidValue, JobFailed

CONNECT_S = 5.0
ASK_S = 5.0
STALL_S = 300.0
"""A stream that brings nothing for so long has ended; the wait for its first token included."""
LINE_BYTES = 1 << 20
MAX_SAID_CHARS = 200
BAD_REQUEST, UNAUTHORIZED, FORBIDDEN, NOT_FOUND = 400, 401, 403, 404
KEY_FAULTS = (UNAUTHORIZED, FORBIDDEN)
BUSY = (429, 502, 503, 504)
"""Of the moment: they say nothing of what the server understands."""
HEALTH = ("/health", "/v1/models")
"""The first of them that the server has tells whether it is well."""


def checked_url(url: str, insecure: bool) -> str:
    """The server's root, without /v1. insecure: whether plain http beyond loopback is meant. Raises InvalidValue."""
    parts = urlsplit(url)
    try:
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if parts.scheme not in ("http", "https") or not host or parts.query or parts.fragment:
        raise InvalidValue(f"--engine-url must be like http://127.0.0.1:8080, got {url!r}")
    if parts.username is not None or parts.password is not None:
        raise InvalidValue("--engine-url must hold no password; name a file with the key by --engine-key-file")
    if parts.scheme == "http" and not is_loopback(host) and not insecure:
        raise InvalidValue(
            f"{host} is another machine, and by http anybody between sees prompts and the key; use an https URL, or "
            "allow it on a network of your own with --engine-insecure yes"
        )
    shown = f"[{host}]" if ":" in host else host
    path = parts.path.rstrip("/").removesuffix("/v1")
    return f"{parts.scheme}://{shown}{f':{port}' if port else ''}{path}"


def is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class Upstream:
    """One server. Every request has a deadline, and a connection of its own: one that was kept open may be closed by
    the server at the moment it is used again. `close` is idempotent."""

    def __init__(self, url: str, key: str | None = None) -> None:
        """url: as checked_url returns it. Call on the event loop."""
        self.url = url
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, socket_factory=_socket, force_close=True),
            headers={} if key is None else {"Authorization": f"Bearer {key}"},
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=STALL_S),
            read_bufsize=LINE_BYTES, trust_env=False,
        )  # fmt: skip
        self._health: str | None = None

    async def get(self, path: str) -> tuple[int, Any]:
        """Status and JSON body (None where it is none). Raises EngineFailed when there is no answer."""
        try:
            async with asyncio.timeout(ASK_S), self._session.get(self.url + path, allow_redirects=False) as answer:
                return answer.status, _parsed(await read_body(answer, LINE_BYTES))
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise EngineFailed(f"the server at {self.url} does not answer ({_why(error)}); is it running?") from error

    async def check(self) -> None:
        """Raises EngineFailed, in a sentence, when the server is not well."""
        for path in HEALTH if self._health is None else (self._health,):
            status, _ = await self.get(path)
            if status == NOT_FOUND and path is not HEALTH[-1]:
                continue
            if not 200 <= status < 300:
                raise EngineFailed(f"the server at {self.url} answers {path} with {status}")
            self._health = path
            return

    async def complete(self, body: dict[str, Any]) -> AsyncGenerator[dict[str, Any] | None, None]:
        """Streams one completion: None when the server has taken it, then its chunks. Closing the generator closes the
        connection, by which servers learn to stop. Raises Refused or another JobFailed."""
        try:
            async with self._session.post(
                f"{self.url}/v1/completions", json=body, allow_redirects=False
            ) as answer:  # fmt: skip
                if answer.status != 200:
                    raise Declined(self.url, answer.status, _said(await read_body(answer, LINE_BYTES)))
                yield None
                try:
                    while line := await answer.content.readline():
                        if not line.startswith(b"data:"):
                            continue
                        data = line[5:].strip()
                        if data == b"[DONE]":
                            return
                        yield self._chunk(data)
                except GeneratorExit:
                    answer.close()
                    raise
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            raise JobFailed(f"the stream from {self.url} broke ({_why(error)})") from error

    async def close(self) -> None:
        with contextlib.suppress(aiohttp.ClientError):
            await self._session.close()

    def _chunk(self, data: bytes) -> dict[str, Any]:
        chunk = _parsed(data)
        if not isinstance(chunk, dict):
            raise JobFailed(f"the server at {self.url} streams what is no JSON object")
        if "error" in chunk:
            raise JobFailed(f"the server at {self.url} gave the request up{_said(data)}")
        return chunk


class Declined(JobFailed):
    """The server took the request not at all."""

    def __init__(self, url: str, status: int, said: str) -> None:
        self.status = status
        super().__init__(f"the server at {url} refused the request with {status}{said}")


def _socket(address: Sequence[Any]) -> socket.socket:
    """Small writes leave at once: some servers leave them to Nagle's algorithm, which costs 40 ms a token."""
    family, kind, protocol = address[:3]
    made = socket.socket(family, kind, protocol)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return made


def _parsed(body: bytes) -> Any:
    try:
        return json.loads(body)
    except ValueError:
        return None


def _said(body: bytes) -> str:
    """The message of an OpenAI error. Anything else may repeat the prompt and is not shown."""
    error = found.get("error") if isinstance(found := _parsed(body), dict) else None
    message = error.get("message") if isinstance(error, dict) else None
    return f": {' '.join(message.split())[:MAX_SAID_CHARS]}" if isinstance(message, str) and message else ""


def _why(error: BaseException) -> str:
    return str(error) or type(error).__name__
