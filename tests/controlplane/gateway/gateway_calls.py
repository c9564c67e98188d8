"""How gateway tests call the OpenAI endpoints over HTTP."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from gateway_fakes import Front

from controlplane.config import Model

MODEL = Model(name="m", engine="emulated", max_context=4096)
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
TEXT = {"model": "m", "prompt": "hi"}


async def post(f: Front, path: str, body: Any, **headers: str) -> tuple[int, Any, Mapping[str, str]]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with f.client.post(path, data=data, headers=headers) as response:
        return response.status, await response.json(), response.headers


async def events(f: Front, path: str, body: dict[str, Any]) -> list[Any]:
    """Every data line of a stream; [DONE] as it is."""
    async with f.client.post(path, json=body | {"stream": True}) as response:
        assert response.status == 200
        assert response.content_type == "text/event-stream"
        text = (await response.read()).decode()
    assert text.endswith("\n\n")
    lines = [event.removeprefix("data: ") for event in text.removesuffix("\n\n").split("\n\n")]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]
