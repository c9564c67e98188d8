"""How calls end early: errors after the first byte, disconnects, slow readers, a full or stopping server."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from gateway_calls import MODEL, TEXT, events, post
from gateway_fakes import front, items, until

from controlplane.config import Config, Limits
from controlplane.core.events import Fail
from controlplane.gateway.errors import ApiError
from transfer.errors import PeerLost
from transfer.said import say


async def test_an_error_after_the_first_byte_is_an_event_and_the_end() -> None:
    async with front() as f:
        task = asyncio.create_task(events(f, "/v1/completions", TEXT))
        (spec,) = await f.arrivals(1)
        f.say(*items(spec.request_id, "abc", finish=None))
        await until(lambda: bool(f.core.first_tokens()))
        f.plane.router.fail(
            Fail(request_id=spec.request_id, status=500, kind="internal", said=say("text", text="engine failed"))
        )
        first, last = await task
        assert first["choices"][0]["text"] == "abc"
        assert last["error"]["message"] == "engine failed"
        assert [(ended.outcome, ended.output_tokens) for ended in f.core.ended()] == [("error", 3)]


async def test_too_many_in_flight_and_a_scheduler_that_has_ended() -> None:
    async with front(Config(model=MODEL, limits=Limits(max_in_flight=2))) as f:
        status, answer, headers = await post(f, "/v1/completions", TEXT | {"n": 3})
        assert (status, answer["error"]["code"]) == (429, "overloaded")
        assert "Retry-After" in headers

        def gone(event: object) -> None:
            raise PeerLost("actor scheduler has ended")

        real, f.gateway.control.post = f.gateway.control.post, gone  # type: ignore[method-assign]
        status, answer, _ = await post(f, "/v1/completions", TEXT)
        f.gateway.control.post = real  # type: ignore[method-assign]
        assert status == 503
        assert len(f.plane.router) == 0
        f.core.events.clear()


async def test_a_stopping_server_ends_streams_and_takes_no_more() -> None:
    async with front() as f:
        streaming = asyncio.create_task(events(f, "/v1/completions", TEXT))
        waiting = asyncio.create_task(post(f, "/v1/completions", TEXT))
        first, _ = await f.arrivals(2)
        f.say(*items(first.request_id, "a", finish=None))
        await until(lambda: bool(f.core.first_tokens()))
        f.gateway.stopping = True
        f.plane.router.fail_all(ApiError(503, "the server is stopping", retry_after_s=1.0))
        assert "stopping" in (await streaming)[-1]["error"]["message"]
        assert (await waiting)[0] == 503
        assert (await post(f, "/v1/completions", TEXT))[0] == 503


@pytest.mark.parametrize("body", [TEXT, TEXT | {"stream": True}, TEXT | {"n": 3}], ids=["whole", "stream", "n=3"])
async def test_a_disconnect_during_silent_prefill_is_noticed_within_a_second(body: dict[str, Any]) -> None:
    async with front() as f:
        task = asyncio.create_task(post(f, "/v1/completions", body))
        num = body.get("n", 1)
        await f.arrivals(num)
        task.cancel()
        await until(lambda: len(f.core.ended()) == num, "the disconnect was noticed", 1.0)
        assert {(ended.outcome, ended.by_node) for ended in f.core.ended()} == {("cancelled", False)}


async def test_a_disconnect_in_the_middle_of_a_stream() -> None:
    async with front() as f:
        opening = asyncio.ensure_future(f.client.post("/v1/completions", json=TEXT | {"stream": True}))
        (spec,) = await f.arrivals(1)
        f.say(*items(spec.request_id, "abc", finish=None))
        response = await opening
        assert b"abc" in await response.content.readany()
        response.close()
        await until(lambda: len(f.core.ended()) == 1, "the disconnect was noticed", 1.0)
        assert (f.core.ended()[0].outcome, f.core.ended()[0].output_tokens) == ("cancelled", 3)


async def test_a_client_that_does_not_read_its_stream_is_cut_off() -> None:
    async with front(Config(model=MODEL, limits=Limits(max_unread_tokens=64))) as f:
        reader, writer = await asyncio.open_connection(f.client.host, f.client.port, limit=1024)
        body = json.dumps(TEXT | {"stream": True}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        (spec,) = await f.arrivals(1)
        for place in range(100_000):
            f.say(*items(spec.request_id, "x", finish=None, start=place))
            if place % 16 == 0:
                await asyncio.sleep(0)
            if f.core.ended():
                break
        (ended,) = f.core.ended()
        assert ended.outcome == "cancelled"
        assert "does not read" in (ended.error or "")
        writer.close()
        assert reader.exception() is None or isinstance(reader.exception(), ConnectionError)
