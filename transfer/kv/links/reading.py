"""Fetches whose blocks come from a slower tier first: what the role awaits runs in a task that this connection owns.

Whatever happens it ends, cancelled if need be, before the role is told that the fetch ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial

from transfer.errors import PhaseplaneError
from transfer.kv.frames import Fetch
from transfer.kv.links.context import PortContext, guard, log
from transfer.kv.port import KvDelegate

READ_S = 60.0
"""Longest a role may read for one fetch; the asker's own deadline is usually sooner, and cancels it."""


@dataclass(slots=True)
class _Reading:
    frame: Fetch
    role: KvDelegate
    future: asyncio.Future[Sequence[int]]
    timer: asyncio.TimerHandle
    given_up: str = ""


class Readings:
    """Reads in progress, by stream. ready(frame, role, blocks): one has ended, its role is told by whoever takes over.
    refuse(stream, reason): one has not, and its role was told."""

    def __init__(
        self, context: PortContext, ready: Callable[[Fetch, KvDelegate, Sequence[int]], None],
        refuse: Callable[[int, str], None],
    ) -> None:  # fmt: skip
        self._context, self._ready, self._refuse = context, ready, refuse
        self._readings: dict[int, _Reading] = {}

    def __len__(self) -> int:
        return len(self._readings)

    @property
    def streams(self) -> list[int]:
        return list(self._readings)

    def start(self, frame: Fetch, role: KvDelegate, found: Awaitable[Sequence[int]]) -> None:
        late = f"{self._context.instance_id} did not read the blocks within {READ_S:g} s"
        future = asyncio.ensure_future(found)
        timer = asyncio.get_running_loop().call_later(READ_S, self.cancel, frame.stream, late)
        self._readings[frame.stream] = _Reading(frame, role, future, timer)
        self._context.tasks[future] = None
        future.add_done_callback(partial(self._ended, frame.stream))

    def cancel(self, stream: int, reason: str) -> None:
        """The fetch is over; nothing happens when it was not reading."""
        reading = self._readings.get(stream)
        if reading is not None:
            reading.given_up = reason
            reading.future.cancel()

    def lost(self) -> None:
        for stream in self.streams:
            self.cancel(stream, "the connection was lost")

    def _ended(self, stream: int, future: asyncio.Future[Sequence[int]]) -> None:
        del self._context.tasks[future]
        reading = self._readings.pop(stream)
        reading.timer.cancel()
        refusal = reading.given_up or _problem(future)
        if refusal is None:
            guard(lambda: self._ready(reading.frame, reading.role, future.result()))
            return
        if not future.cancelled():
            future.exception()  # seen
        guard(lambda: reading.role.kv_served(reading.frame.fetch))
        self._refuse(stream, refusal)


def _problem(future: asyncio.Future[Sequence[int]]) -> str | None:
    """Why there are no blocks, in a sentence for the asker; None when there are."""
    if future.cancelled():
        return "the role behind the KV port stopped reading"
    error = future.exception()
    if error is None:
        return None
    if isinstance(error, PhaseplaneError):
        return str(error)
    log.error("a role failed while it read KV for a fetch", exc_info=error)
    return f"the role behind the KV port failed: {type(error).__name__}"
