"""The autopilot's API: its state, its mode, and what it must leave alone. JSON as in transfer/api.py."""

from __future__ import annotations

import msgspec
from aiohttp import web

from controlplane.core.events import AutopilotWanted
from controlplane.gateway.bodies import decoder, read, receive
from controlplane.gateway.errors import invalid
from controlplane.gateway.generate import json_response
from controlplane.gateway.service import GATEWAY, TENANT
from transfer.autopilot import MAX_NAME_CHARS, AutopilotRequest, PinRequest

_change = decoder(AutopilotRequest)
_pin = decoder(PinRequest)


async def get_autopilot(request: web.Request) -> web.StreamResponse:
    return json_response(request.app[GATEWAY].control.autopilot())


async def put_autopilot(request: web.Request) -> web.StreamResponse:
    """Change the mode or a limit; what is left out stays."""
    wanted = read(_change, await receive(request))
    if TENANT in request:
        wanted = msgspec.structs.replace(wanted, actor=request[TENANT])
    return await _steer(request, AutopilotWanted(ask_id="", change=wanted))


async def create_pin(request: web.Request) -> web.StreamResponse:
    """Idempotent: a pin that is there already is replaced."""
    wanted = read(_pin, await receive(request))
    if TENANT in request:
        wanted = msgspec.structs.replace(wanted, actor=request[TENANT])
    return await _steer(request, AutopilotWanted(ask_id="", pin=wanted))


async def delete_pin(request: web.Request) -> web.StreamResponse:
    """?actor= who releases it, without API keys."""
    actor = request[TENANT] if TENANT in request else request.query.get("actor", "operator")
    if len(actor) > MAX_NAME_CHARS:
        raise invalid(f"actor may have {MAX_NAME_CHARS} characters, got {len(actor)}", "actor")
    subject = request.match_info["subject"]
    return await _steer(request, AutopilotWanted(ask_id="", unpin=subject, actor=actor))


async def _steer(request: web.Request, event: AutopilotWanted) -> web.StreamResponse:
    gateway = request.app[GATEWAY]
    named = msgspec.structs.replace(event, ask_id=gateway.mint_id("ask"))
    return json_response(await gateway.control.steer(named))
