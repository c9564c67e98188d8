"""What a server says of itself: whether it is ready, the model's name there, its context, its slots, its version."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from nodes.engines.openai.upstream import KEY_FAULTS, Upstream
from transfer.errors import EngineFailed, InvalidValue
from transfer.terms import ModelIdentity

RETRY_S = 0.5


@dataclass(frozen=True, slots=True)
class Facts:
    """slots: requests that it runs at a time, where it tells."""

    served_name: str
    version: str
    max_context: int
    slots: int | None


async def until_ready(upstream: Upstream, ready_s: float) -> None:
    """Servers that load a model answer late, or with an error until then."""
    loop = asyncio.get_running_loop()
    end_s = loop.time() + ready_s
    while True:
        try:
            await upstream.check()
            return
        except EngineFailed:
            if loop.time() > end_s:
                raise
        await asyncio.sleep(RETRY_S)


async def read_facts(upstream: Upstream, wanted: str | None, identity: ModelIdentity) -> Facts:
    """Raises InvalidValue, in a sentence, when the server has not the model or does not let us in."""
    status, body = await upstream.get("/v1/models")
    if status in KEY_FAULTS:
        raise InvalidValue(f"the server at {upstream.url} refuses the key ({status}); name a file with the right one "
                           "by --engine-key-file")  # fmt: skip
    rows = [one for one in (body.get("data") or [] if isinstance(body, dict) else [])
            if isinstance(one, dict) and isinstance(one.get("id"), str)]  # fmt: skip
    names = [one["id"] for one in rows]
    name = wanted or (identity.name if identity.name in names or len(names) != 1 else names[0])
    row = next((one for one in rows if one["id"] == name), None)
    if row is None:
        there = ", ".join(names[:8]) or "none"
        raise InvalidValue(f"the server at {upstream.url} has no model {name!r}, but {there}; name one by "
                           "--engine-served-name")  # fmt: skip
    meta = row.get("meta")
    context = row.get("max_model_len") or (meta.get("n_ctx") if isinstance(meta, dict) else None)
    _, version = await upstream.get("/version")
    _, props = await upstream.get("/props")
    slots = _field(props, "total_slots")
    return Facts(
        served_name=name, version=str(_field(version, "version") or _field(props, "build_info") or ""),
        max_context=context if isinstance(context, int) and context > 0 else identity.max_context,
        slots=slots if isinstance(slots, int) and slots > 0 else None,
    )  # fmt: skip


def _field(body: Any, name: str) -> Any:
    return body.get(name) if isinstance(body, dict) else None
