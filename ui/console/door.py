"""Who may use the console from another machine: who knows the fleet's API key, remembered in a cookie for a day.

On loopback there is no door. Streamlit's own pages and sockets, /live and everything but /healthz are behind it.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qs

from markupsafe import Markup
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from ui.console.markup import tag
from ui.console.style import read
from ui.words import choose, words

COOKIE = "phaseplane_console"
KEEP_S = 86_400
OPEN_PATH = "/healthz"
"""For whoever watches the process; it says nothing about the fleet."""
WRONG_WAIT_S = 1.0
MAX_BODY_BYTES = 4096
POLICY_VIOLATION = 1008


class Door:
    """ASGI middleware. A wrong key costs WRONG_WAIT_S, one attempt after the other."""

    def __init__(self, app: ASGIApp, api_key: str) -> None:
        self._app, self._key = app, api_key.encode()
        token = hmac.new(secrets.token_bytes(32), self._key, hashlib.sha256)
        self._pass = token.hexdigest()
        self._turn = asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or scope["path"] == OPEN_PATH or self._knows(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": POLICY_VIOLATION})
        else:
            request = Request(scope, receive)
            answer = await self._let_in(request) if request.method == "POST" else _form(request, 401, wrong=False)
            await answer(scope, receive, send)

    def _knows(self, scope: Scope) -> bool:
        for name, value in scope["headers"]:
            if name == b"cookie":
                try:
                    found = SimpleCookie(value.decode("latin-1")).get(COOKIE)
                except CookieError:
                    continue
                if found is not None and hmac.compare_digest(found.value.encode(), self._pass.encode()):
                    return True
        return False

    async def _let_in(self, request: Request) -> Response:
        body = b""
        async for chunk in request.stream():
            body += chunk
            if len(body) > MAX_BODY_BYTES:
                return _form(request, 413, wrong=True)
        given = parse_qs(body.decode("utf-8", "replace")).get("key", [""])[0].strip()
        if not hmac.compare_digest(given.encode(), self._key):
            async with self._turn:
                await asyncio.sleep(WRONG_WAIT_S)
            return _form(request, 403, wrong=True)
        answer = RedirectResponse("/", 303)
        secure = request.url.scheme == "https"
        answer.set_cookie(COOKIE, self._pass, KEEP_S, httponly=True, samesite="strict", secure=secure)
        return answer


def _form(request: Request, status: int, *, wrong: bool) -> HTMLResponse:
    """A page of one field, in the browser's language."""
    say = words(choose(request.headers.get("accept-language", "en").split(",")[0], {}))
    field = tag("input", name="key", type="password", autocomplete="current-password", required="", autofocus="")
    note = tag("p", say.say("console.door.wrong"), role="alert") if wrong else None
    inner = tag("form", tag("label", say.say("console.door.key"), field), tag("button", say.say("console.door.enter")),
                note, method="post", action="/")  # fmt: skip
    style = tag("style", Markup(read("door.css")))
    head = tag("head", tag("meta", charset="utf-8"), tag("title", say.say("app.name")), style)
    page = tag("html", head, tag("body", tag("main", tag("h1", say.say("app.name")), inner)), lang=say.lang)
    return HTMLResponse(f"<!doctype html>{page}", status)
