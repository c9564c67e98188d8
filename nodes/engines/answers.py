"""Reads the body of an HTTP answer whole, up to a limit: a single read returns whatever has arrived by then."""

from __future__ import annotations

import asyncio

from aiohttp import ClientResponse


async def read_body(answer: ClientResponse, limit: int) -> bytes:
    """At most `limit` bytes; what follows stays unread."""
    try:
        return await answer.content.readexactly(limit)
    except asyncio.IncompleteReadError as error:
        return error.partial
