"""The aiohttp application: routes, authentication and the last line of error handling. No middleware chain."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

from aiohttp import web

from controlplane.gateway import admin, health, models, objectives, past, steering
from controlplane.gateway.auth import authenticate
from controlplane.gateway.errors import ApiError
from controlplane.gateway.openai_chat import chat_completions
from controlplane.gateway.openai_completions import completions
from controlplane.gateway.service import GATEWAY, TENANT, Gateway
from controlplane.text import shown
from transfer.hosts import is_foreign

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_log = logging.getLogger(__name__)

_OPEN: dict[tuple[str, str], Handler] = {
    ("GET", "/healthz"): health.healthz,
    ("GET", "/readyz"): health.readyz,
}
"""Without an API key, for probes."""
_GUARDED: dict[tuple[str, str], Handler] = {
    ("POST", "/v1/chat/completions"): chat_completions,
    ("POST", "/v1/completions"): completions,
    ("GET", "/v1/models"): models.list_models,
    ("GET", "/v1/models/{model:.+}"): models.get_model,
    ("POST", "/tokenize"): models.tokenize,
    ("POST", "/detokenize"): models.detokenize,
    ("GET", "/metrics"): health.metrics,
    ("GET", "/v1/fleet"): admin.fleet,
    ("GET", "/v1/live"): admin.live,
    ("GET", "/v1/plans"): admin.list_plans,
    ("POST", "/v1/plans"): admin.create_plan,
    ("GET", "/v1/plans/{plan_id}"): admin.get_plan,
    ("POST", "/v1/plans/{plan_id}/apply"): admin.apply_plan,
    ("POST", "/v1/plans/{plan_id}/undo"): admin.undo_plan,
    **{("POST", f"/v1/instances/{{instance_id}}/{action}"): admin.hold_instance for action in admin.HOLDS},
    ("GET", "/v1/series"): past.get_series,
    ("GET", "/v1/kv"): past.get_kv,
    ("GET", "/v1/requests"): admin.list_requests,
    ("GET", "/v1/requests/{request_id}"): admin.get_request,
    ("GET", "/v1/audit"): admin.list_audit,
    ("GET", "/v1/classes"): objectives.get_classes,
    ("PUT", "/v1/classes"): objectives.put_classes,
    ("GET", "/v1/autopilot"): steering.get_autopilot,
    ("PUT", "/v1/autopilot"): steering.put_autopilot,
    ("GET", "/v1/autopilot/looks"): admin.list_looks,
    ("POST", "/v1/autopilot/pins"): steering.create_pin,
    ("DELETE", "/v1/autopilot/pins/{subject}"): steering.delete_pin,
}


def build_app(gateway: Gateway) -> web.Application:
    """Run it with handler_cancellation=True, so that a handler ends when its client leaves."""
    app = web.Application(client_max_size=gateway.config.limits.max_body_bytes)
    app[GATEWAY] = gateway
    for routes, guarded in ((_OPEN, False), (_GUARDED, True)):
        for (method, path), handler in routes.items():
            app.router.add_route(method, path, _shielded(gateway, handler, guarded=guarded))
            if method == "GET" and path != "/v1/live":
                app.router.add_route("HEAD", path, _shielded(gateway, handler, guarded=guarded))
    methods: dict[str, list[str]] = {}
    for method, path in (*_OPEN, *_GUARDED):
        methods.setdefault(path, []).append(method)
    for path, allowed in methods.items():
        app.router.add_route("*", path, _shielded(gateway, _not_allowed(allowed), guarded=False))
    app.router.add_route("*", "/{tail:.*}", _shielded(gateway, _not_found, guarded=False))
    return app


def _shielded(gateway: Gateway, handler: Handler, *, guarded: bool) -> Handler:
    """Authenticates, and turns whatever a handler raises into an answer in OpenAI's shape."""
    server = gateway.config.server
    keys_needed = guarded and bool(server.api_keys)
    max_body = gateway.config.limits.max_body_bytes

    async def run(request: web.Request) -> web.StreamResponse:
        try:
            if not server.api_keys and is_foreign(request.headers.get("Host"), server.host, server.allowed_hosts):
                raise ApiError(403, f"this server does not answer to {shown(request.host)}; use 127.0.0.1, or add the "
                                    "name to server.allowed_hosts")  # fmt: skip
            if keys_needed and (tenant := authenticate(gateway.config, request)) is not None:
                request[TENANT] = tenant
            elif guarded and not keys_needed and _is_foreign(request):
                raise ApiError(403, "a page of another site may not use this server; its own programs may")
            return await handler(request)
        except ApiError as error:
            return error.response()
        except web.HTTPRequestEntityTooLarge:
            return ApiError(413, f"the body is over the limit of {max_body} bytes; send less").response()
        except web.HTTPException as error:
            return ApiError(error.status, error.reason).response()
        except web.RequestPayloadError:
            return ApiError(400, "the body is not in the encoding its headers name; send it as it is").response()
        except ConnectionError:
            raise  # the client left
        except Exception as error:  # noqa: BLE001 (the boundary to clients: logged without its text, answered as 500)
            _log.error("%s %s failed with %s", request.method, request.path, type(error).__name__, exc_info=error)
            return ApiError(500, "the server failed on this request; its log says why").response()

    return run


def _is_foreign(request: web.Request) -> bool:
    """Whether a page of another site makes somebody's browser send this: without keys, all that could stop it."""
    return request.method not in ("GET", "HEAD") and request.headers.get("Sec-Fetch-Site") == "cross-site"


def _not_allowed(allowed: list[str]) -> Handler:
    async def handler(request: web.Request) -> web.StreamResponse:
        response = ApiError(405, f"{request.path[:200]} takes {' and '.join(allowed)}, not {request.method}").response()
        response.headers["Allow"] = ", ".join(allowed)
        return response

    return handler


async def _not_found(request: web.Request) -> web.StreamResponse:
    raise ApiError(404, f"there is nothing at {request.path[:200]}; see /v1/models", code="not_found")
