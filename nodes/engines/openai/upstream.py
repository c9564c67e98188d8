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

from nodes.engines.answers import named, read_body, why
from transfer.errors import EngineFailed, InvalidValue, JobFailed

CONNECT_S = 5.0
ASK_S = 5.0
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

    def __init__(self, url: str, key: str | None, idle_s: float) -> None:
        """url: as checked_url returns it. idle_s: longest time without a token of a completion, the wait for its first
        one included. Call on the event loop."""
        self.url, self._idle_s = url, idle_s
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, socket_factory=_socket, force_close=True),
            headers={} if key is None else {"Authorization": f"Bearer {key}"},
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=idle_s),
            read_bufsize=LINE_BYTES, trust_env=False,
        )  # fmt: skip
        self._health: str | None = None

    async def get(self, path: str) -> tuple[int, Any]:
        """Status and JSON body (None where it is none). Raises EngineFailed when there is no answer."""
        try:
            async with asyncio.timeout(ASK_S), self._session.get(self.url + path, allow_redirects=False) as answer:
                return answer.status, _parsed(await read_body(answer, LINE_BYTES))
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise EngineFailed(f"the server at {self.url} does not answer ({why(error)}); is it running?") from error

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
        connection, by which servers learn to stop. Raises Declined or another JobFailed."""
        try:
            async with self._session.post(
                f"{self.url}/v1/completions", json=body, allow_redirects=False
            ) as answer:  # fmt: skip
                if answer.status != 200:
                    raise Declined(self.url, answer.status, await read_body(answer, LINE_BYTES))
                yield None
                try:
                    async with contextlib.aclosing(self._chunks(answer)) as chunks:
                        async for chunk in chunks:
                            yield chunk
                except GeneratorExit:
                    answer.close()
                    raise
        except (aiohttp.ClientError, OSError, ValueError) as error:
            if isinstance(error, TimeoutError) and not isinstance(error, aiohttp.ConnectionTimeoutError):
                raise JobFailed(
                    f"the server at {self.url} brought no token for {self._idle_s:g} s; see its log, or allow it "
                    "longer with --engine-idle-s"
                ) from error
            raise JobFailed(f"the stream from {self.url} broke ({why(error)})") from error

    async def _chunks(self, answer: aiohttp.ClientResponse) -> AsyncGenerator[dict[str, Any], None]:
        """Raises TimeoutError when nothing of the completion comes for idle_s: pings say that the connection is open,
        not that the request goes on."""
        loop = asyncio.get_running_loop()
        moved_at = loop.time()
        while True:
            async with asyncio.timeout_at(moved_at + self._idle_s):
                line = await answer.content.readline()
            data = line[5:].strip() if line.startswith(b"data:") else None
            if not line or data == b"[DONE]":
                return
            if data is None:
                continue
            chunk = self._chunk(data)
            if _moves(chunk):
                moved_at = loop.time()
            yield chunk

    async def close(self) -> None:
        with contextlib.suppress(aiohttp.ClientError):
            await self._session.close()

    def _chunk(self, data: bytes) -> dict[str, Any]:
        chunk = _parsed(data)
        if not isinstance(chunk, dict):
            raise JobFailed(f"the server at {self.url} streams what is no JSON object")
        if "error" in chunk:
            raise EngineSaid(f"the server at {self.url} gave the request up", data)
        return chunk


class EngineSaid(JobFailed):
    """in_full: with the server's own message, which may repeat the prompt: for a prompt of ours alone."""

    def __init__(self, sentence: str, body: bytes) -> None:
        error = found.get("error") if isinstance(found := _parsed(body), dict) else None
        kind, said = (error.get("type"), error.get("message")) if isinstance(error, dict) else (None, None)
        self.in_full = sentence
        if isinstance(said, str) and said:
            self.in_full += f": {' '.join(said.split())[:MAX_SAID_CHARS]}"
        super().__init__(sentence + named(kind))


class Declined(EngineSaid):
    """The server took the request not at all."""

    def __init__(self, url: str, status: int, body: bytes) -> None:
        self.status = status
        super().__init__(f"the server at {url} refused the request with {status}", body)


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


def _moves(chunk: dict[str, Any]) -> bool:
    choices = chunk.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices else None
    return isinstance(choice, dict) and any(choice.get(name) for name in ("text", "token_ids", "finish_reason"))
