"""GET /healthz (the process lives), /readyz (requests can be served) and /metrics."""

from __future__ import annotations

import resource
import time

from aiohttp import web

from controlplane.gateway.errors import ApiError
from controlplane.gateway.generate import json_response
from controlplane.gateway.prometheus import CONTENT_TYPE
from controlplane.gateway.service import GATEWAY, Gateway
from transfer.api import FleetState


async def healthz(request: web.Request) -> web.StreamResponse:
    return json_response({"status": "ok"})


async def readyz(request: web.Request) -> web.StreamResponse:
    """Of the fleet, or with ?instance=ID of that instance alone: what probes beside a node ask."""
    gateway, instance = request.app[GATEWAY], request.query.get("instance")
    reason = why_not_ready(gateway) if instance is None else why_not_serving(gateway.control.state(), instance)
    if reason is not None:
        raise ApiError(503, reason, code="not_ready", retry_after_s=1.0)
    return json_response({"status": "ready"})


async def metrics(request: web.Request) -> web.StreamResponse:
    gateway = request.app[GATEWAY]
    usage = resource.getrusage(resource.RUSAGE_SELF)
    process = {
        "gateway_streams": float(len(gateway.router)),
        "gateway_late_items_total": float(gateway.router.num_late_items),
        "process_cpu_seconds_total": usage.ru_utime + usage.ru_stime,
        "process_resident_memory_peak_bytes": usage.ru_maxrss * 1024.0,
        "process_start_time_seconds": time.time() - (gateway.now() - gateway.started_s),
    }
    body = gateway.metrics.render(gateway.control.state(), gateway.control.counters(), process)
    return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE})


def why_not_ready(gateway: Gateway) -> str | None:
    """None when a request could be placed now; else what is missing."""
    return "the server is stopping" if gateway.stopping else missing_role(gateway.control.state())


def why_not_serving(fleet: FleetState, instance: str) -> str | None:
    """None when that instance takes requests; else a sentence."""
    state = next((view.state for view in fleet.instances if view.id == instance), "not here")
    return None if state == "ready" else f"instance {instance} is {state}; wait, or look at its log"


def missing_role(fleet: FleetState) -> str | None:
    """None when a mixed instance, or a prefill and a decode instance, is ready; else a sentence."""
    ready = {view.role for view in fleet.instances if view.state == "ready"}
    if "mixed" in ready or {"prefill", "decode"} <= ready:
        return None
    needed = [role for role in ("prefill", "decode") if role not in ready]
    return f"no {' and no '.join(needed)} instance is ready; start nodes or wait until they have loaded the model"
