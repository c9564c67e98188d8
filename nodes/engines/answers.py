"""What an engine's HTTP server answers: a body whole, up to a limit, and an error without the prompt it repeats."""

from __future__ import annotations

import asyncio
import re
from typing import Any

from aiohttp import ClientResponse

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,63}")


def named(kind: Any) -> str:
    """An error's type or a reason's name, to end a sentence with; nothing for what is no name. Sentences about a
    request reach logs and history, and an engine's own message may repeat its prompt: that is in the engine's log."""
    return f" ({kind})" if isinstance(kind, str) and _NAME.fullmatch(kind) else ""


def why(error: Exception) -> str:
    """Why a request broke off. aiohttp quotes what it could not parse, which may be a prompt or its answer."""
    said = str(error) if isinstance(error, OSError) else ""
    return said or type(error).__name__


async def read_body(answer: ClientResponse, limit: int) -> bytes:
    """At most `limit` bytes, whereas a single read returns whatever has arrived by then; what follows stays unread."""
    try:
        return await answer.content.readexactly(limit)
    except asyncio.IncompleteReadError as error:
        return error.partial
