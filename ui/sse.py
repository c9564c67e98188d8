"""Server-sent events out of an HTTP body, one at a time. It knows no payload."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import NamedTuple, Protocol

MAX_EVENT_BYTES = 16 << 20


class Event(NamedTuple):
    """`id` is "" when the server sent none; `data` has the lines of one event joined."""

    data: bytes
    id: str = ""
    name: str = ""


class Chunks(Protocol):
    """What aiohttp's response.content offers."""

    def iter_any(self) -> AsyncIterator[bytes]: ...


async def read_events(body: Chunks) -> AsyncIterator[Event]:
    """Yield whole events as they arrive; comments (keep-alives) are skipped.

    Raises ValueError when one event is larger than 16 MiB. A body that ends within an event drops the rest.
    """
    buffer = b""
    data: list[bytes] = []
    event_id = name = ""
    async for chunk in body.iter_any():
        buffer += chunk
        if len(buffer) > MAX_EVENT_BYTES:
            raise ValueError("one server-sent event is larger than 16 MiB")
        *lines, buffer = buffer.split(b"\n")
        for raw in lines:
            line = raw.removesuffix(b"\r")
            if not line:
                if data:
                    yield Event(b"\n".join(data), event_id, name)
                data, name = [], ""
                continue
            field, _, value = line.partition(b":")
            value = value.removeprefix(b" ")
            if field == b"data":
                data.append(value)
            elif field == b"id":
                event_id = value.decode()
            elif field == b"event":
                name = value.decode()
