"""Who a request is from: API keys by tenant, compared in constant time. Without keys everyone is the same nobody."""

from __future__ import annotations

import hashlib
import hmac

from aiohttp import web

from controlplane.config import Config
from controlplane.gateway.errors import ApiError

_SCHEME = "Bearer "


def authenticate(config: Config, request: web.Request) -> str | None:
    """The tenant's name; None when no keys are set. Raises ApiError 401 for a missing or wrong key."""
    keys = config.server.api_keys
    if not keys:
        return None
    header = request.headers.get("Authorization", "")
    if not header.startswith(_SCHEME):
        raise ApiError(401, "this server needs an API key: send Authorization: Bearer KEY", code="missing_api_key")
    secret = header[len(_SCHEME) :].strip().encode()
    found: str | None = None
    for tenant, key in keys.items():  # all of them, so that timing does not tell which one was close
        if hmac.compare_digest(secret, key.encode()):
            found = tenant
    if found is None:
        raise ApiError(401, "the API key is not known here; check it", code="invalid_api_key")
    return found


def salt_of(config: Config, tenant: str) -> str:
    """Separates the KV of tenants: nobody can tell from the timing what another one asked. "" without keys."""
    key = config.server.api_keys.get(tenant)
    return "" if key is None else hashlib.sha256(f"phaseplane-tenant\0{tenant}\0{key}".encode()).hexdigest()
