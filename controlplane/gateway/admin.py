"""The operator's API: fleet, live feed, plans, holds, finished requests, audit. JSON as in transfer/api.py."""

from __future__ import annotations

import time

import msgspec
from aiohttp import web

from controlplane.core.events import ApplyWanted, HoldWanted, PlanWanted
from controlplane.gateway.bodies import decoder, read, receive
from controlplane.gateway.errors import ApiError, invalid
from controlplane.gateway.generate import json_response
from controlplane.gateway.service import GATEWAY, TENANT, Archive, Gateway
from controlplane.text import shown
from transfer.api import ApplyRequest, HoldAction, PlanRequest
from transfer.said import say

MAX_ROWS = 1000
MAX_NAME_CHARS = 200
KEEPALIVE_S = 10.0
_OUTCOMES = ("ok", "cancelled", "rejected", "timed_out", "error")
HOLDS: dict[str, HoldAction] = {"cordon": "cordon", "drain": "drain", "resume": "resume"}
_plan_request = decoder(PlanRequest)
_apply_request = decoder(ApplyRequest)


async def fleet(request: web.Request) -> web.StreamResponse:
    return json_response(request.app[GATEWAY].control.state())


async def live(request: web.Request) -> web.StreamResponse:
    """SSE until the client leaves or the server stops."""
    gateway = request.app[GATEWAY]
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    subscription = gateway.live.subscribe(request.headers.get("Last-Event-ID"))
    try:
        await response.prepare(request)
        while not subscription.closed:
            events = await subscription.get(gateway.live.snapshot, KEEPALIVE_S)
            await response.write(b"".join(events) or b": nothing new\n\n")
        await response.write_eof()
    except ConnectionError:
        pass  # the client left
    finally:
        gateway.live.unsubscribe(subscription)
    return response


async def create_plan(request: web.Request) -> web.StreamResponse:
    """What would happen. Changes nothing."""
    gateway = request.app[GATEWAY]
    wanted = read(_plan_request, await receive(request))
    if (wanted.xpyd is None) == (wanted.moves is None):
        raise invalid('send exactly one of xpyd (such as "1P2D") and moves (instance id to role)', "xpyd")
    return json_response(await gateway.control.ask(PlanWanted(ask_id=gateway.mint_id("ask"), request=wanted)))


async def list_plans(request: web.Request) -> web.StreamResponse:
    return json_response({"plans": request.app[GATEWAY].control.plans()})


async def get_plan(request: web.Request) -> web.StreamResponse:
    plan_id = request.match_info["plan_id"]
    plan = request.app[GATEWAY].control.plan(plan_id)
    if plan is None:
        said = say("refused.unknown_plan", plan=shown(plan_id))
        raise ApiError(404, str(said), param="plan_id", said=said)
    return json_response(plan)


async def apply_plan(request: web.Request) -> web.StreamResponse:
    return await _apply(request, undo=False)


async def undo_plan(request: web.Request) -> web.StreamResponse:
    return await _apply(request, undo=True)


async def list_requests(request: web.Request) -> web.StreamResponse:
    """?limit= (100), ?outcome=. The newest first."""
    outcome = request.query.get("outcome")
    if outcome is not None and outcome not in _OUTCOMES:
        raise invalid(f"outcome must be one of {', '.join(_OUTCOMES)}, got {shown(outcome)}", "outcome")
    records = await _archive(request).requests(_limit(request), outcome)
    return json_response({"requests": records})


async def get_request(request: web.Request) -> web.StreamResponse:
    request_id = request.match_info["request_id"]
    record = await _archive(request).request(request_id)
    if record is None:
        said = say("refused.no_request", id=shown(request_id))
        raise ApiError(404, str(said), param="request_id", said=said)
    return json_response(record)


async def list_audit(request: web.Request) -> web.StreamResponse:
    """?limit= (100). The newest first."""
    return json_response({"audit": await _archive(request).audit(_limit(request))})


async def list_looks(request: web.Request) -> web.StreamResponse:
    """?since_s= how far back, in seconds (86400); ?limit= (100). The newest first."""
    text = request.query.get("since_s", "86400")
    if not (text.isascii() and text.isdigit() and len(text) <= 9):
        raise invalid(f"since_s must be a whole number of seconds, got {text[:20]!r}", "since_s")
    return json_response({"looks": await _archive(request).looks(time.time() - int(text), _limit(request))})


async def hold_instance(request: web.Request) -> web.StreamResponse:
    """Cordon, drain or resume, as the last part of the path says."""
    gateway: Gateway = request.app[GATEWAY]
    event = HoldWanted(
        ask_id=gateway.mint_id("ask"), instance_id=request.match_info["instance_id"],
        action=HOLDS[request.path.rpartition("/")[2]], apply=await _apply_of(request), at_s=time.time(),
    )  # fmt: skip
    return json_response(await gateway.control.hold(event))


async def _apply(request: web.Request, *, undo: bool) -> web.StreamResponse:
    gateway: Gateway = request.app[GATEWAY]
    event = ApplyWanted(
        ask_id=gateway.mint_id("ask"), plan_id=request.match_info["plan_id"], apply=await _apply_of(request), undo=undo,
        at_s=time.time(),
    )  # fmt: skip
    return json_response(await gateway.control.ask(event))


async def _apply_of(request: web.Request) -> ApplyRequest:
    """The body; with API keys the actor is whose key it was."""
    wanted = read(_apply_request, await receive(request))
    for name in ("idempotency_key", "actor"):
        if (length := len(getattr(wanted, name))) > MAX_NAME_CHARS:
            raise invalid(f"{name} may have {MAX_NAME_CHARS} characters, got {length}", name)
    return msgspec.structs.replace(wanted, actor=request[TENANT]) if TENANT in request else wanted


def _limit(request: web.Request) -> int:
    text = request.query.get("limit", "100")
    if not (text.isascii() and text.isdigit() and len(text) <= 9 and 1 <= int(text) <= MAX_ROWS):
        raise invalid(f"limit must be a whole number from 1 to {MAX_ROWS}, got {text[:20]!r}", "limit")
    return int(text)


def _archive(request: web.Request) -> Archive:
    return request.app[GATEWAY].archive
