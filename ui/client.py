"""Talks to a running control plane over HTTP. Every failure becomes one sentence that names the next command."""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar
from urllib.parse import quote, urlencode, urlsplit

import aiohttp
import msgspec

from transfer.api import ActionView, ApplyRequest, AuditRow, FleetState, HoldAction, Plan, PlanRequest, RequestRecord
from transfer.autopilot import AutopilotRequest, AutopilotView, LookRow, PinRequest
from transfer.classes import ClassesRequest, ClassesView
from transfer.said import Said
from transfer.screens import KvDetail, SeriesView
from ui.errors import ApiError, CliError, Unreachable
from ui.sse import Event, read_events

DEFAULT_URL = "http://127.0.0.1:8000"

FLEET_PATH = "/v1/fleet"
LIVE_PATH = "/v1/live"
AUTOPILOT_PATH = "/v1/autopilot"
CLASSES_PATH = "/v1/classes"
OWN_PATHS = (FLEET_PATH, "/v1/plans", AUTOPILOT_PATH)
"""Every Phaseplane control plane has these."""

_CONNECT_S = 5.0
_ANSWER_S = 30.0
_APPLY_S = 600.0
"""A control plane may answer `apply` only when the rebalance is over."""

T = TypeVar("T")


class ModelCard(msgspec.Struct, frozen=True):
    """One entry of GET /v1/models; servers add fields of their own."""

    id: str
    max_model_len: int | None = None


class _ModelList(msgspec.Struct, frozen=True):
    data: list[ModelCard]


class _Plans(msgspec.Struct, frozen=True):
    plans: list[Plan]


class _Requests(msgspec.Struct, frozen=True):
    requests: list[RequestRecord]


class _Audit(msgspec.Struct, frozen=True):
    audit: list[AuditRow]


class _Looks(msgspec.Struct, frozen=True):
    looks: list[LookRow]


class Tokenized(msgspec.Struct, frozen=True):
    """The answer of POST /tokenize."""

    tokens: list[int]
    max_model_len: int | None = None


class FleetClient:
    """One session to one control plane. Use as `async with FleetClient(url, key) as fleet`.

    GET calls and plan, apply and undo (with an idempotency key) may be repeated safely.
    """

    def __init__(self, url: str, api_key: str | None = None, answer_s: float = _ANSWER_S) -> None:
        self.url = clean_url(url)
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._answer_s = answer_s
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            headers=self._headers,
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=self._answer_s, sock_connect=_CONNECT_S),
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.close()

    async def fleet(self) -> FleetState:
        return _decode(await self._call("GET", FLEET_PATH), FleetState, self.url)

    async def models(self) -> list[ModelCard]:
        return _decode(await self._call("GET", "/v1/models"), _ModelList, self.url).data

    async def tokenize(self, model: str, text: str) -> Tokenized:
        body = {"model": model, "prompt": text, "add_special_tokens": False}
        return _decode(await self._call("POST", "/tokenize", body), Tokenized, self.url)

    async def plan(self, request: PlanRequest) -> Plan:
        return _decode(await self._call("POST", "/v1/plans", request), Plan, self.url)

    async def get_plan(self, plan_id: str) -> Plan:
        return _decode(await self._call("GET", f"/v1/plans/{plan_id}"), Plan, self.url)

    async def plans(self) -> list[Plan]:
        """The newest first."""
        return _decode(await self._call("GET", "/v1/plans"), _Plans, self.url).plans

    async def apply(self, plan_id: str, request: ApplyRequest) -> Plan:
        return _decode(await self._call("POST", f"/v1/plans/{plan_id}/apply", request, _APPLY_S), Plan, self.url)

    async def undo(self, plan_id: str, request: ApplyRequest) -> Plan:
        return _decode(await self._call("POST", f"/v1/plans/{plan_id}/undo", request, _APPLY_S), Plan, self.url)

    async def autopilot(self) -> AutopilotView:
        return _decode(await self._call("GET", AUTOPILOT_PATH), AutopilotView, self.url)

    async def looks(self, since_s: float, limit: int = 1000) -> list[LookRow]:
        """What the autopilot said in the last since_s seconds, the newest first."""
        path = f"{AUTOPILOT_PATH}/looks?since_s={since_s:.0f}&limit={limit}"
        return _decode(await self._call("GET", path), _Looks, self.url).looks

    async def set_autopilot(self, change: AutopilotRequest) -> AutopilotView:
        return _decode(await self._call("PUT", AUTOPILOT_PATH, change), AutopilotView, self.url)

    async def pin(self, pin: PinRequest) -> AutopilotView:
        return _decode(await self._call("POST", f"{AUTOPILOT_PATH}/pins", pin), AutopilotView, self.url)

    async def unpin(self, subject: str) -> AutopilotView:
        path = f"{AUTOPILOT_PATH}/pins/{quote(subject, safe='')}"
        return _decode(await self._call("DELETE", path), AutopilotView, self.url)

    async def classes(self) -> ClassesView:
        return _decode(await self._call("GET", CLASSES_PATH), ClassesView, self.url)

    async def set_classes(self, change: ClassesRequest) -> ClassesView:
        return _decode(await self._call("PUT", CLASSES_PATH, change), ClassesView, self.url)

    async def request_record(self, request_id: str) -> RequestRecord:
        return _decode(await self._call("GET", f"/v1/requests/{quote(request_id, safe='')}"), RequestRecord, self.url)

    async def requests(self, limit: int = 100, outcome: str | None = None) -> list[RequestRecord]:
        """Finished requests, the newest first."""
        chosen = {"limit": limit} if outcome is None else {"limit": limit, "outcome": outcome}
        return _decode(await self._call("GET", f"/v1/requests?{urlencode(chosen)}"), _Requests, self.url).requests

    async def audit(self, limit: int = 100) -> list[AuditRow]:
        """The newest first."""
        return _decode(await self._call("GET", f"/v1/audit?limit={limit}"), _Audit, self.url).audit

    async def series(
        self, names: Sequence[str] = (), since_s: float = -600.0, step_s: float = 1.0, until_s: float | None = None
    ) -> SeriesView:
        """The past of these series, or their names when none are given; times as in GET /v1/series (docs/feed.md)."""
        asked: dict[str, str | float] = {"since_s": since_s, "step_s": step_s}
        if names:
            asked["names"] = ",".join(names)
        if until_s is not None:
            asked["until_s"] = until_s
        return _decode(await self._call("GET", f"/v1/series?{urlencode(asked)}"), SeriesView, self.url)

    async def kv(self) -> KvDetail:
        return _decode(await self._call("GET", "/v1/kv"), KvDetail, self.url)

    async def cordon(self, instance_id: str, request: ApplyRequest) -> ActionView:
        """Place nothing new on it; what it has goes on."""
        return await self.hold(instance_id, "cordon", request)

    async def drain(self, instance_id: str, request: ApplyRequest) -> ActionView:
        """Place nothing new on it, and move its running decodes away."""
        return await self.hold(instance_id, "drain", request)

    async def resume(self, instance_id: str, request: ApplyRequest) -> ActionView:
        """Place on it again."""
        return await self.hold(instance_id, "resume", request)

    async def hold(self, instance_id: str, action: HoldAction, request: ApplyRequest) -> ActionView:
        """Cordon, drain or resume."""
        path = f"/v1/instances/{quote(instance_id, safe='')}/{action}"
        return _decode(await self._call("POST", path, request), ActionView, self.url)

    async def is_ready(self) -> bool:
        """Whether /readyz answers 200; False also when nothing answers."""
        try:
            await self._call("GET", "/readyz")
        except CliError:
            return False
        return True

    @contextlib.asynccontextmanager
    async def stream(
        self, path: str, body: bytes, timeout_s: float, headers: dict[str, str] | None = None
    ) -> AsyncIterator[tuple[aiohttp.ClientResponse, AsyncIterator[Event]]]:
        """POST a JSON body and read events. The caller looks at the status; leaving the block drops the connection."""
        timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=_CONNECT_S)
        sent = {"Content-Type": "application/json", **(headers or {})}
        async with self._open().post(self.url + path, data=body, headers=sent, timeout=timeout) as response:
            yield response, read_events(response.content)

    @contextlib.asynccontextmanager
    async def live(
        self, last_event_id: str | None = None, silence_s: float = 20.0
    ) -> AsyncIterator[AsyncIterator[Event]]:
        """GET /v1/live: its events, each a LiveFrame, until the block is left or the connection ends.

        Raises Unreachable, also when nothing at all is heard for silence_s, and ApiError.
        """
        headers = {} if last_event_id is None else {"Last-Event-ID": last_event_id}
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S, sock_read=silence_s)
        try:
            async with self._open().get(self.url + LIVE_PATH, headers=headers, timeout=timeout) as response:
                if response.status >= 300:
                    said = error_sentence(response.status, await response.read(), self.url, LIVE_PATH)
                    raise ApiError(said, response.status)
                yield read_events(response.content)
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            raise unreachable(self.url, error) from None

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            raise CliError("the connection is not open yet; run the command again")
        return self._session

    async def _call(self, method: str, path: str, body: object = None, timeout_s: float | None = None) -> bytes:
        data = None if body is None else msgspec.json.encode(body)
        headers = {} if data is None else {"Content-Type": "application/json"}
        timeout = aiohttp.ClientTimeout(total=timeout_s or self._answer_s, sock_connect=_CONNECT_S)
        session = self._open()
        try:
            async with session.request(
                method, self.url + path, data=data, headers=headers, timeout=timeout, allow_redirects=False
            ) as response:
                answer = await response.read()
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            raise unreachable(self.url, error) from None
        if response.status >= 300:
            raise ApiError(error_sentence(response.status, answer, self.url, path), response.status, _said(answer))
        return answer


def clean_url(url: str) -> str:
    """`url` without a trailing slash; a bare host:port gets http://. Raises CliError for another scheme."""
    text = url.strip().rstrip("/").removesuffix("/v1")
    if "://" not in text:
        text = f"http://{text}"
    if not text.startswith(("http://", "https://")) or len(text.partition("://")[2]) == 0:
        raise CliError(f"{url!r} is not the address of a fleet; give --url like {DEFAULT_URL}")
    return text


def unreachable(url: str, error: Exception) -> Unreachable:
    """What to say when a fleet cannot be reached."""
    if isinstance(error, TimeoutError):
        return Unreachable(f"the fleet at {url} did not answer in time; run `phaseplane doctor --url {url}`")
    if isinstance(error, aiohttp.ClientSSLError):
        return Unreachable(f"{url} does not speak TLS, or not with a certificate trusted here; try --url with http://")
    if isinstance(error, aiohttp.InvalidURL):
        return Unreachable(f"{url!r} is not the address of a fleet; give --url like {DEFAULT_URL}")
    if isinstance(error, aiohttp.ClientResponseError):
        return Unreachable(f"what answers at {url} does not speak HTTP, so it is no fleet; check --url")
    if isinstance(error, aiohttp.ClientConnectorDNSError):
        host = urlsplit(url).hostname
        return Unreachable(f"no machine is known by the name {host}; check --url {url}, or the name service here")
    if isinstance(error, aiohttp.ClientConnectorError):
        return Unreachable(
            f"no fleet answers at {url} ({_reason(error)}); start one with `phaseplane up`, or name another with --url"
        )
    reason = str(error) or type(error).__name__
    return Unreachable(f"the fleet at {url} broke off the connection ({reason}); run `phaseplane status --url {url}`")


def error_sentence(status: int, answer: bytes, url: str, path: str) -> str:
    """The server's own sentence and what to do next."""
    said = error_message(answer)
    if said is None or (status == 404 and path in OWN_PATHS):
        return (
            f"{url} answered {path} with HTTP {status}, as no Phaseplane control plane of this version does; "
            "it is another server, or one that stands between: check --url"
        )
    said = said.rstrip(".")
    if status == 401:
        return f"{said}; set PHASEPLANE_API_KEY to a key of this fleet"
    if "`phaseplane " in said:
        return said
    if path == FLEET_PATH:
        return f"{said}; run `phaseplane doctor --url {url}`"
    if status == 409:
        return f"{said}; run `phaseplane status --url {url}` and then plan again"
    return f"{said}; run `phaseplane status --url {url}` to see the fleet"


def error_message(answer: bytes) -> str | None:
    """`error.message` of an OpenAI-shaped error body, if it is one."""
    try:
        value: Any = msgspec.json.decode(answer)
    except msgspec.DecodeError:
        return None
    error = value.get("error") if isinstance(value, dict) else None
    message = error.get("message") if isinstance(error, dict) else error
    return message if isinstance(message, str) and message else None


class _Error(msgspec.Struct, frozen=True):
    said: Said | None = None


class _Refusal(msgspec.Struct, frozen=True):
    error: _Error


def _said(answer: bytes) -> Said | None:
    """Of an error body; None where it has no code."""
    try:
        return msgspec.json.decode(answer, type=_Refusal).error.said
    except msgspec.MsgspecError:
        return None


def _decode(answer: bytes, kind: type[T], url: str) -> T:
    try:
        return msgspec.json.decode(answer, type=kind)
    except msgspec.DecodeError as error:
        raise Unreachable(
            f"{url} answers, but not like a Phaseplane control plane of this version ({error}); check --url, "
            f"or run `phaseplane doctor --url {url}`"
        ) from None


def _reason(error: aiohttp.ClientConnectorError) -> str:
    cause = error.os_error
    return os.strerror(cause.errno).lower() if cause.errno and cause.errno > 0 else str(cause)
