"""Objectives of the traffic classes: read, and changed while the fleet runs. JSON as in transfer/classes.py."""

from __future__ import annotations

import time

import msgspec
from aiohttp import web

from controlplane.core.events import ClassesWanted
from controlplane.gateway.bodies import decoder, read, receive
from controlplane.gateway.generate import json_response
from controlplane.gateway.service import GATEWAY, TENANT
from transfer.classes import ClassesRequest

_change = decoder(ClassesRequest)


async def get_classes(request: web.Request) -> web.StreamResponse:
    return json_response(request.app[GATEWAY].control.classes())


async def put_classes(request: web.Request) -> web.StreamResponse:
    """Change the classes that are named; with API keys the actor is whose key it was."""
    gateway = request.app[GATEWAY]
    wanted = read(_change, await receive(request))
    if TENANT in request:
        wanted = msgspec.structs.replace(wanted, actor=request[TENANT])
    event = ClassesWanted(ask_id=gateway.mint_id("ask"), change=wanted, at_s=time.time())
    return json_response(await gateway.control.set_classes(event))
