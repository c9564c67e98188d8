"""The console's server without a browser: the live stream, the door beyond loopback, the bridge, what is refused."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from starlette.testclient import TestClient
from starlette.websockets import WebSocketDisconnect
from ui_fakes import Fake

from ui.client import FleetClient
from ui.console import broadcast
from ui.console.backend import Backend, a_change, install, serving
from ui.console.broadcast import Broadcast, Drawn, Scene
from ui.console.door import Door
from ui.console.server import Serving, build, check, settle
from ui.errors import CliError, Unreachable
from ui.feed import Feed
from ui.sse import Event

KEY = "a-secret-of-the-fleet"


@contextlib.contextmanager
def running(backend: Backend) -> Iterator[Backend]:
    """The backend on a loop of its own, as the server has it."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    asyncio.run_coroutine_threadsafe(backend.__aenter__(), loop).result(10)
    try:
        yield backend
    finally:
        asyncio.run_coroutine_threadsafe(backend.__aexit__(None, None, None), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()


def test_script_threads_ask_through_the_bridge(fleet: Fake):
    with running(Backend(fleet.url)) as backend:
        assert backend.ask(lambda client: client.fleet()).xpyd == "1P1D"
        assert backend.spawn(lambda client: client.kv()).result(5).handoff_bytes == 3000
        with pytest.raises(CliError, match="there is no request nothing"):
            backend.ask(lambda client: client.request_record("nothing"))
        with pytest.raises(CliError, match=r"there is no request \.\./audit\?limit=1"):
            backend.ask(lambda client: client.request_record("../audit?limit=1"))

        async def never(_: FleetClient) -> None:
            await asyncio.sleep(60)

        with pytest.raises(Unreachable, match=r"did not answer within 0\.1 s"):
            backend.ask(never, 0.1)
    with pytest.raises(CliError, match="stopping"):
        backend.ask(lambda client: client.fleet())


def test_a_process_without_a_backend_says_so():
    install(None)
    with pytest.raises(CliError, match="phaseplane console"):
        serving()
    assert a_change(3).idempotency_key != a_change(3).idempotency_key


# --- the live stream ----------------------------------------------------------------------------------------------


def drawing(scene: Scene, lang: str) -> Drawn:
    xpyd = "nothing" if scene.state is None else scene.state.xpyd
    version = 0 if scene.state is None else scene.state.version
    return Drawn("met", lang, {"constant": "same", "xpyd": xpyd, "version": str(version)})


class Source:
    """A feed whose frames the test decides."""

    def __init__(self) -> None:
        self.frames: asyncio.Queue[Event] = asyncio.Queue()
        self.feed = Feed(self._connect)

    @contextlib.asynccontextmanager
    async def _connect(self, _: str | None) -> AsyncIterator[AsyncIterator[Event]]:
        yield self._events()

    async def _events(self) -> AsyncIterator[Event]:
        while True:
            yield await self.frames.get()

    def say(self, seq: int, version: int) -> None:
        state = {"xpyd": "1P1D", "models": [], "instances": [], "goodput": {}, "attainment": None,
                 "orphaned_kv_blocks": 0, "in_flight": 0, "version": version}  # fmt: skip
        frame = {"seq": seq, "kind": "snapshot", "at_s": float(seq), "state": state}
        self.frames.put_nowait(Event(json.dumps(frame).encode()))


@pytest.fixture
async def live(fleet: Fake, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[Source, Broadcast]]:
    monkeypatch.setattr(broadcast, "SHORTEST_S", 0.0)
    monkeypatch.setattr(broadcast, "BEAT_S", 0.05)
    source = Source()
    async with FleetClient(fleet.url) as client, asyncio.TaskGroup() as group:
        shown = Broadcast(source.feed, client, drawing)
        tasks = [group.create_task(source.feed.run()), group.create_task(shown.run())]
        yield source, shown
        await shown.close()
        for task in tasks:
            task.cancel()


def decoded(event: bytes) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(event.rpartition(b"data: ")[2])
    return found


async def test_a_tab_is_sent_the_whole_and_then_what_changed(live: tuple[Source, Broadcast]):
    source, shown = live
    source.say(1, version=4)
    await source.feed.changed(0, 5.0)
    events = shown.events("en")
    first = await anext(events)
    assert first.startswith(b"retry: ")
    assert decoded(first)["parts"] == {"constant": "same", "xpyd": "1P1D", "version": "4"}
    source.say(2, version=5)
    async with asyncio.timeout(5):
        while (frame := decoded(await anext(events)))["parts"] != {"version": "5"}:
            assert frame["parts"] == {}  # beats in between carry the age alone
            assert frame["age"] is not None
    await events.aclose()


async def test_silence_is_seen_as_a_growing_age(live: tuple[Source, Broadcast]):
    source, shown = live
    events = shown.events("en")
    assert decoded(await anext(events))["age"] is None
    source.say(1, version=1)
    async with asyncio.timeout(5):
        while decoded(await anext(events))["age"] is None:
            pass
        ages = [decoded(await anext(events))["age"] for _ in range(4)]
    assert ages == sorted(ages)
    assert ages[-1] > ages[0]
    await events.aclose()


async def test_tabs_share_each_frame_and_a_slow_one_gets_the_whole(live: tuple[Source, Broadcast]):
    source, shown = live
    tabs = [shown.events("en") for _ in range(2)]
    slow = shown.events("en")
    await anext(slow)
    source.say(1, version=9)

    async def several(events: AsyncIterator[bytes]) -> dict[int, bytes]:
        return {decoded(event)["seq"]: event for event in [await anext(events) for _ in range(8)][3:]}

    async with asyncio.timeout(5):
        one, other = await asyncio.gather(*map(several, tabs))
        shared = one.keys() & other.keys()
        assert len(shared) >= 3
        assert all(one[seq] is other[seq] for seq in shared)  # the very same bytes: encoded once
        assert decoded(await anext(slow))["parts"] == {"constant": "same", "xpyd": "1P1D", "version": "9"}
    for events in (*tabs, slow):
        await events.aclose()


async def test_closing_ends_every_stream(live: tuple[Source, Broadcast]):
    _, shown = live
    events = shown.events("zh-Hant")
    assert decoded(await anext(events))["announce"] == "zh-Hant"
    await shown.close()
    async with asyncio.timeout(5):
        left = [event async for event in events]
    assert len(left) <= 1


# --- the server ---------------------------------------------------------------------------------------------------


def test_beyond_loopback_a_key_is_needed():
    with pytest.raises(CliError, match="reachable by others: set PHASEPLANE_API_KEY"):
        check(Serving("http://127.0.0.1:8000", None, "0.0.0.0", 0))
    check(Serving("http://127.0.0.1:8000", KEY, "0.0.0.0", 0))
    check(Serving("http://127.0.0.1:8000", None, "::1", 0))


def test_a_taken_port_is_named(fleet: Fake):
    port = int(fleet.url.rpartition(":")[2])
    with pytest.raises(CliError, match=rf"port {port} on 127.0.0.1 is in use; run `phaseplane console --port"):
        check(Serving(fleet.url, None, "127.0.0.1", port))


def test_nothing_is_reported_and_nothing_is_offered_for_deployment():
    from streamlit import config

    settle(Serving("http://127.0.0.1:8000", host="127.0.0.7"))
    assert "127.0.0.7" in config.get_option("server.allowedHosts"), "it answers to its own name"
    settle(Serving("http://127.0.0.1:8000"))
    assert config.get_option("browser.gatherUsageStats") is False
    assert config.get_option("client.toolbarMode") == "viewer"
    assert "127.0.0.1" in config.get_option("server.allowedHosts")


def test_the_door_lets_in_who_knows_the_key(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("ui.console.door.WRONG_WAIT_S", 0.0)
    routes = [Route("/", lambda _: PlainTextResponse("in")), Route("/healthz", lambda _: PlainTextResponse("well"))]
    app = Starlette(routes=routes, middleware=[Middleware(Door, api_key=KEY)])
    with TestClient(app, follow_redirects=False) as client:
        shut = client.get("/", headers={"Accept-Language": "zh-TW,zh;q=0.9"})
        assert shut.status_code == 401
        assert "API \u91d1\u9470" in shut.text
        assert client.get("/live").status_code == 401
        with pytest.raises(WebSocketDisconnect), client.websocket_connect("/_stcore/stream"):
            pass
        assert client.get("/healthz").text == "well"
        assert client.post("/", data={"key": "wrong"}).status_code == 403
        assert client.post("/", data={"key": "x" * 5000}).status_code == 413
        assert client.get("/").status_code == 401
        let_in = client.post("/", data={"key": KEY})
        assert let_in.status_code == 303
        cookie = let_in.headers["set-cookie"]
        assert "HttpOnly" in cookie
        assert "SameSite=strict" in cookie
        assert KEY not in cookie
        assert client.get("/").text == "in"
        client.cookies.clear()
        client.cookies.set("phaseplane_console", "forged")
        assert client.get("/").status_code == 401


def test_live_is_for_this_machine_alone_on_loopback(fleet: Fake):
    """A name that others made point here must not read the fleet through a visitor's browser."""
    app, console = build(Serving(fleet.url))
    routes = Starlette(routes=[Route("/live", console.live)], lifespan=lambda _: console.lifespan(app))
    with TestClient(routes, base_url="http://evil.example:8501") as client:
        assert client.get("/live").status_code == 403
