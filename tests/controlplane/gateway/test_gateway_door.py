"""Clients that send or read byte by byte, on raw sockets: each has a deadline, and connections are counted."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
import uvloop
from aiohttp import web
from gateway_calls import MODEL, TEXT
from gateway_fakes import Front, front, items

from controlplane.config import Config, Limits
from controlplane.gateway import door
from controlplane.gateway.app import build_app
from controlplane.gateway.door import open_door

SHORT_S = 0.3
LONG_S = 5.0
"""No deadline that a test does not mean may be the one that ends its connection."""
EARLIEST_S, LATEST_S = 0.9 * SHORT_S, 3.0
"""uvloop's clock has steps of a millisecond, and a busy machine is late."""
GET = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n"


@asynccontextmanager
async def house(**limits: Any) -> AsyncIterator[tuple[Front, int]]:
    """A gateway behind its real door, and the port."""
    patient = {f"{name}_timeout_s": LONG_S for name in ("header", "body", "idle", "read")}
    config = Config(model=MODEL, limits=Limits(**{**patient, **limits}))
    async with front(config) as f:
        listener = socket.create_server(("127.0.0.1", 0))
        runner = web.AppRunner(build_app(f.gateway), handler_cancellation=True, shutdown_timeout=1.0)
        await runner.setup()
        listening = await open_door(runner, listener, f.gateway.config.limits)
        try:
            yield f, listener.getsockname()[1]
        finally:
            listening.close()
            await runner.cleanup()


class Client:
    """A raw connection and how long it lived."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.since = asyncio.get_running_loop().time()

    @classmethod
    async def connect(cls, port: int, **options: Any) -> Client:
        return cls(*await asyncio.open_connection("127.0.0.1", port, **options))

    def post(self, path: str, value: Any) -> None:
        body = json.dumps(value).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
        self.writer.write(head.encode() + body)

    async def drip(self, data: bytes, every_s: float = 0.02) -> None:
        """Byte by byte, until the other side has closed."""
        for place in range(len(data)):
            if self.reader.at_eof() or self.writer.is_closing():
                return
            self.writer.write(data[place : place + 1])
            await asyncio.sleep(every_s)

    async def answer(self) -> tuple[int, Any]:
        """One answer and its JSON."""
        async with asyncio.timeout(LONG_S - 1):
            head = (await self.reader.readuntil(b"\r\n\r\n")).decode()
            headers = dict(line.lower().split(": ", 1) for line in head.split("\r\n")[1:] if line)
            body = await self.reader.readexactly(int(headers["content-length"]))
        return int(head.split()[1]), json.loads(body)

    async def closed_after(self) -> float:
        """Read to the end; seconds since it connected or `since` was set."""
        async with asyncio.timeout(LONG_S - 1):
            with suppress(ConnectionError):
                await self.reader.read()
        self.writer.close()
        return asyncio.get_running_loop().time() - self.since


async def dripped_header() -> None:
    async with house(header_timeout_s=SHORT_S) as (_, port):
        client = await Client.connect(port)
        dripping = asyncio.create_task(client.drip(GET + b"X-Long: " + b"y" * 500))
        status, body = await client.answer()
        assert status == 408
        assert body["error"]["type"] == "timeout_error"
        assert "header did not arrive within 0.3 s" in body["error"]["message"]
        assert EARLIEST_S <= await client.closed_after() < LATEST_S
        dripping.cancel()


async def test_a_header_sent_byte_by_byte_is_answered_408_and_closed() -> None:
    await dripped_header()


def test_the_same_on_the_loop_that_serves() -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(dripped_header())
        runner.run(unread_answer())


async def test_a_header_in_pieces_in_time_is_served_and_the_deadline_is_over_with_it() -> None:
    async with house(header_timeout_s=SHORT_S) as (_, port):
        client = await Client.connect(port)
        for _ in range(3):
            for part in (GET[:9], GET[9:], b"\r\n"):
                client.writer.write(part)
                await asyncio.sleep(SHORT_S / 6)
            assert await client.answer() == (200, {"status": "ok"})
        await asyncio.sleep(2 * SHORT_S)
        client.writer.write(GET + b"\r\n")
        assert (await client.answer())[0] == 200, "idle is not late"
        client.since = asyncio.get_running_loop().time()
        client.writer.write(GET)
        assert (await client.answer())[0] == 408, "every header of a connection has the deadline"
        await client.closed_after()


async def test_a_header_deadline_does_not_touch_an_answer_in_progress() -> None:
    async with house(header_timeout_s=SHORT_S) as (f, port):
        client = await Client.connect(port)
        body = json.dumps(TEXT).encode()
        client.writer.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body) + body
        )
        (spec,) = await f.arrivals(1)
        client.writer.write(GET)
        await asyncio.sleep(2 * SHORT_S)
        f.say(*items(spec.request_id, "late"))
        status, answer = await client.answer()
        assert (status, answer["choices"][0]["text"]) == (200, "late")
        client.writer.write(b"\r\n")
        assert (await client.answer())[0] == 200
        client.writer.close()


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize", "/v1/plans",
                                  "/v1/plans/plan-1/apply"])  # fmt: skip
async def test_a_body_sent_byte_by_byte_is_answered_408_and_closed(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door, "LINGER_S", 0.2)
    async with house(body_timeout_s=SHORT_S) as (f, port):
        client = await Client.connect(port)
        client.writer.write(f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5000\r\n\r\n".encode())
        dripping = asyncio.create_task(client.drip(b" " * 5000))
        status, body = await client.answer()
        assert (status, body["error"]["type"]) == (408, "timeout_error")
        assert "body did not arrive within 0.3 s" in body["error"]["message"]
        assert EARLIEST_S <= await client.closed_after() < LATEST_S
        assert not f.core.events
        dripping.cancel()


async def test_a_body_that_nobody_wants_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door, "LINGER_S", 0.2)
    async with house() as (_, port):
        client = await Client.connect(port)
        client.writer.write(b"POST /v1/nothing HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5000\r\n\r\n")
        dripping = asyncio.create_task(client.drip(b" " * 5000))
        assert (await client.answer())[0] == 404
        assert await client.closed_after() < LATEST_S
        dripping.cancel()


async def test_a_body_announced_over_the_limit_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door, "LINGER_S", 0.2)
    async with house(max_body_bytes=4999) as (_, port):
        client = await Client.connect(port)
        client.writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5000\r\n\r\n")
        status, body = await client.answer()
        assert (status, "4999 bytes" in body["error"]["message"]) == (413, True)
        assert await client.closed_after() < LATEST_S


@pytest.mark.parametrize("num_requests", [0, 2])
async def test_an_idle_connection_is_closed(num_requests: int) -> None:
    async with house(idle_timeout_s=SHORT_S) as (_, port):
        client = await Client.connect(port)
        for _ in range(num_requests):
            client.writer.write(GET + b"\r\n")
            assert (await client.answer())[0] == 200
            client.since = asyncio.get_running_loop().time()
            await asyncio.sleep(SHORT_S / 2)
        assert EARLIEST_S <= await client.closed_after() < LATEST_S


async def test_a_request_in_progress_is_not_idle() -> None:
    async with house(idle_timeout_s=SHORT_S, header_timeout_s=SHORT_S, body_timeout_s=SHORT_S) as (f, port):
        client = await Client.connect(port)
        body = json.dumps(TEXT).encode()
        client.writer.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body) + body
        )
        (spec,) = await f.arrivals(1)
        await asyncio.sleep(3 * SHORT_S)
        f.say(*items(spec.request_id, "slow"))
        assert (await client.answer())[1]["choices"][0]["text"] == "slow"
        client.writer.close()


async def unread_answer() -> None:
    async with house(read_timeout_s=SHORT_S) as (f, port):
        f.gateway.models[0].tokenizer.max_context = 10_000_000
        client = await Client.connect(port, limit=1024)
        client.post("/tokenize", {"prompt": "é" * 1_000_000})
        await client.writer.drain()
        head = await client.reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200")
        await asyncio.sleep(4 * SHORT_S)
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await client.reader.readexactly(length)
        client.writer.close()


async def test_a_client_that_does_not_read_its_answer_is_cut_off() -> None:
    await unread_answer()


async def test_connections_beyond_the_most_are_answered_503_and_their_places_come_back() -> None:
    async with house(max_connections=3) as (_, port):
        clients = [await Client.connect(port) for _ in range(3)]
        for client in clients:
            client.writer.write(GET + b"\r\n")
            assert (await client.answer())[0] == 200
        turned_away = await Client.connect(port)
        status, body = await turned_away.answer()
        assert (status, body["error"]["type"]) == (503, "overloaded_error")
        assert "3 connections are open" in body["error"]["message"]
        assert await turned_away.closed_after() < LATEST_S
        clients[0].writer.close()
        for _ in range(200):
            client = await Client.connect(port)
            client.writer.write(GET + b"\r\n")
            status, _ = await client.answer()
            client.writer.close()
            if status == 200:
                break
            await asyncio.sleep(0.02)
        assert status == 200
        for client in clients[1:]:
            client.writer.close()
