"""Serves the console: Streamlit's pages, and GET /live beside them, from one process and one port.

Nothing is reported to anybody and nothing is fetched from elsewhere: it works on a machine without a network.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import uvicorn
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from streamlit import config as streamlit_config
from streamlit.starlette import App

from transfer.hosts import is_foreign, is_loopback
from ui import looks
from ui.console.backend import Backend, install
from ui.console.broadcast import Broadcast
from ui.console.door import OPEN_PATH, Door
from ui.console.islands import LIVE_PATH
from ui.console.planning import stop_all
from ui.console.screens import PAGES
from ui.console.shell import page_routes
from ui.console.views import draw
from ui.errors import CliError
from ui.machine import free_port, port_is_free
from ui.words import choose

SCRIPT = Path(__file__).with_name("app.py")
STOP_S = 3
SOFT: dict[looks.Theme, str] = {"light": "#f3f5f7", "dark": "#1a2129"}
"""Ground of fields and of the sidebar."""
ACCENT: dict[looks.Theme, str] = {"light": "#0b5cad", "dark": "#3779c4"}
"""Of buttons, whose text is white."""
LOCAL_NAMES = ["localhost", "127.0.0.1", "[::1]", "::1"]


@dataclass(frozen=True, slots=True)
class Serving:
    """What the console was asked for. url and api_key: the fleet's. allowed_hosts: names it answers to on loopback
    beside those of this machine."""

    url: str
    api_key: str | None = None
    host: str = "127.0.0.1"
    port: int = 8501
    allowed_hosts: tuple[str, ...] = ()

    @property
    def local_names(self) -> list[str]:
        """What it is called: on loopback it answers to no other name."""
        return [*LOCAL_NAMES, self.host, *self.allowed_hosts]

    @property
    def own_url(self) -> str:
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"


def serve(wanted: Serving, tell: Callable[[str], None]) -> None:
    """Until Ctrl-C or SIGTERM; tells its address first. Raises CliError when it may not or cannot listen there."""
    check(wanted)
    if wanted.port == 0:
        wanted = replace(wanted, port=free_port(wanted.host))
    settle(wanted)
    app, console = build(wanted)
    options = uvicorn.Config(
        app, wanted.host, wanted.port, log_level="warning", access_log=False, ws="websockets-sansio",
        timeout_graceful_shutdown=STOP_S,
    )  # fmt: skip
    logging.getLogger("streamlit").setLevel(logging.ERROR)
    server = _Server(options)
    server.on_exit = console.stop
    tell(wanted.own_url)
    with contextlib.suppress(KeyboardInterrupt):  # uvicorn has stopped in order and passes the signal on
        server.run()


def check(wanted: Serving) -> None:
    """Raises CliError for an address that others reach without a key, and for a port that is taken."""
    if not is_loopback(wanted.host) and not wanted.api_key:
        raise CliError(
            f"--host {wanted.host} is reachable by others: set PHASEPLANE_API_KEY to a key of the fleet, which the "
            "console then asks its visitors for, or use 127.0.0.1"
        )
    try:
        free = wanted.port == 0 or port_is_free(wanted.host, wanted.port)
    except OSError as error:
        raise CliError(f"cannot listen on {wanted.host} ({error.strerror}); use --host 127.0.0.1") from None
    if not free:
        raise CliError(
            f"port {wanted.port} on {wanted.host} is in use; run `phaseplane console --port {wanted.port + 1}`"
        )


def settle(wanted: Serving) -> None:
    """Streamlit's options. They win over its own files and variables."""
    local = is_loopback(wanted.host)
    options: dict[str, Any] = {
        "browser.gatherUsageStats": False, "browser.serverAddress": wanted.host, "browser.serverPort": wanted.port,
        "client.toolbarMode": "viewer", "client.showErrorDetails": "none", "global.developmentMode": False,
        "server.headless": True, "server.address": wanted.host, "server.port": wanted.port,
        "server.fileWatcherType": "none", "server.runOnSave": False,
        "server.allowedHosts": wanted.local_names if local else [],
        "server.enableStaticServing": False, "server.disconnectedSessionTTL": 60, "server.maxUploadSize": 1,
        "logger.level": "error", "runner.magicEnabled": False,
    }  # fmt: skip
    for theme in ("light", "dark"):
        options[f"theme.{theme}.primaryColor"] = ACCENT[theme]
        options[f"theme.{theme}.backgroundColor"] = looks.GROUNDS[theme]
        options[f"theme.{theme}.secondaryBackgroundColor"] = SOFT[theme]
        options[f"theme.{theme}.sidebar.backgroundColor"] = SOFT[theme]
        options[f"theme.{theme}.sidebar.secondaryBackgroundColor"] = looks.GROUNDS[theme]
    streamlit_config.get_config_options(force_reparse=True, options_from_flags=options)


def build(wanted: Serving) -> tuple[App, Console]:
    """The ASGI application, and what runs beside it."""
    console = Console(wanted)
    middleware = [] if is_loopback(wanted.host) or not wanted.api_key else [Middleware(Door, api_key=wanted.api_key)]
    routes = [
        Route(LIVE_PATH, console.live), Route(OPEN_PATH, _healthy), Route("/{page}/_stcore/{probe}", _not_here),
        *page_routes(PAGES),
    ]  # fmt: skip
    return App(SCRIPT, routes=routes, lifespan=console.lifespan, middleware=middleware), console


class Console:
    """The backend and the broadcast of one server."""

    def __init__(self, wanted: Serving) -> None:
        self._wanted = wanted
        self._broadcast: Broadcast | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @contextlib.asynccontextmanager
    async def lifespan(self, _: App) -> AsyncIterator[None]:
        """Connected to the fleet while the server runs; a fleet that is not there yet is waited for."""
        async with Backend(self._wanted.url, self._wanted.api_key) as backend:
            install(backend)
            self._broadcast = Broadcast(backend.feed, backend.client, draw)
            drawing = asyncio.create_task(self._broadcast.run(), name="draw for all tabs")
            try:
                yield
            finally:
                drawing.cancel()
                await asyncio.gather(drawing, return_exceptions=True)
                stop_all()
                install(None)

    async def live(self, request: Request) -> Response:
        """GET /live?lang=: what changes on the screen, until the tab closes."""
        if self._broadcast is None:
            return PlainTextResponse("", 503)
        if is_foreign(request.headers.get("host"), self._wanted.host, self._wanted.allowed_hosts):
            return PlainTextResponse("", 403)
        events = self._broadcast.events(choose(request.query_params.get("lang"), {}))
        return StreamingResponse(events, media_type="text/event-stream", headers={"Cache-Control": "no-store"})

    def stop(self) -> None:
        """End the tabs' streams at once: they would hold up the end of the server."""
        if self._broadcast is not None:
            task = asyncio.get_running_loop().create_task(self._broadcast.close())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)


class _Server(uvicorn.Server):
    """Says when it begins to stop, before it waits for connections to end."""

    on_exit: Any = None

    async def shutdown(self, sockets: Any = None) -> None:
        self.on_exit()
        await super().shutdown(sockets)


async def _healthy(_: Request) -> Response:
    return PlainTextResponse("ok")


async def _not_here(_: Request) -> Response:
    """Streamlit's script in the browser looks below a page's own address first; this neither answers it nor is logged
    by the browser as an error."""
    return Response(status_code=300)
