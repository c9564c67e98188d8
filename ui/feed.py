"""Follows GET /v1/live for a screen: folds frames into a FleetState that knows its age, and reconnects by itself.

The console and the TUI both live on this; nobody else reads the events.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any, get_type_hints

import msgspec

from transfer.api import FleetState, InstanceView, LiveFrame
from ui.client import FleetClient
from ui.errors import CliError
from ui.sse import Event

STALE_S = 3.0
"""From this age on a state is STALE and nothing may be changed by it."""
SET_BACK_S = 60.0
"""A control plane's clock that is set back by more begins new charts, as it does there; by less, they wait for it."""
SHORTEST_WAIT_S, LONGEST_WAIT_S = 0.25, 2.0
"""Between attempts to connect; each failure doubles it."""

Connect = Callable[[str | None], AbstractAsyncContextManager[AsyncIterator[Event]]]
"""Opens the stream, after the event of that id where one is named. Raises CliError when it cannot, or breaks."""

_TYPES: dict[str, Any] = get_type_hints(FleetState)
_frames = msgspec.json.Decoder(LiveFrame)


class Feed:
    """The fleet as last heard. `run` it as a task; read it from the same loop.

    revision: grows with every frame and whenever the connection comes or goes, so that a reader can wait for news.
    """

    def __init__(
        self, connect: Connect, *, now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:  # fmt: skip
        self.state: FleetState | None = None
        self.seq = 0
        self.at_s = 0.0
        """Unix time of the state, by the control plane's clock."""
        self.connected = False
        self.error = ""
        """Why there is no connection, in a sentence."""
        self.num_connects = 0
        self.revision = 0
        self._connect, self._now, self._sleep = connect, now, sleep
        self._heard_s: float | None = None
        self._news = asyncio.Condition()

    @property
    def age_s(self) -> float:
        """Seconds since the last frame; infinite before the first."""
        return float("inf") if self._heard_s is None else max(0.0, self._now() - self._heard_s)

    @property
    def stale(self) -> bool:
        """Whether the state is too old to act on."""
        return self.age_s > STALE_S

    async def run(self) -> None:
        """Follow until cancelled, through every loss of the connection."""
        wait_s = SHORTEST_WAIT_S
        while True:
            before = self.num_connects
            try:
                await self._follow()
                self.error = "the control plane ended the stream"
            except (CliError, msgspec.MsgspecError, ValueError) as error:
                self.error = str(error)
            await self._tell(connected=False)
            wait_s = SHORTEST_WAIT_S if self.num_connects > before else min(LONGEST_WAIT_S, 2 * wait_s)
            await self._sleep(wait_s)

    async def changed(self, since: int, timeout_s: float | None = None) -> int:
        """The revision, once it is beyond `since` or timeout_s is over."""
        try:
            async with asyncio.timeout(timeout_s), self._news:
                await self._news.wait_for(lambda: self.revision > since)
        except TimeoutError:
            pass
        return self.revision

    async def take(self, event: Event) -> None:
        """One event: fold it in. Raises ValueError for a frame that does not follow the last one."""
        try:
            frame = _frames.decode(event.data)
            if frame.kind == "delta" and frame.seq != self.seq + 1:
                raise ValueError(f"frame {frame.seq} does not follow frame {self.seq}")
            self.state = fold(self.state, frame)
        except (msgspec.MsgspecError, ValueError):
            self.seq = 0  # the next connection begins with a snapshot
            raise
        self.seq, self.at_s, self._heard_s = frame.seq, frame.at_s, self._now()
        await self._tell(connected=True)

    async def _follow(self) -> None:
        async with self._connect(str(self.seq) if self.seq else None) as events:
            self.num_connects += 1
            async for event in events:
                await self.take(event)

    async def _tell(self, connected: bool) -> None:
        self.connected = connected
        if connected:
            self.error = ""
        async with self._news:
            self.revision += 1
            self._news.notify_all()


def follow(client: FleetClient) -> Feed:
    """A feed over an open client. `asyncio.create_task(feed.run())` sets it going."""
    return Feed(client.live)


def fold(state: FleetState | None, frame: LiveFrame) -> FleetState:
    """The state after a frame. Raises ValueError for a delta without a state or for an instance unknown to it, and
    msgspec.ValidationError for values of another type."""
    if frame.kind == "snapshot":
        if frame.state is None:
            raise ValueError(f"snapshot {frame.seq} has no state")
        return frame.state
    if state is None:
        raise ValueError(f"delta {frame.seq} came before any snapshot")
    new = {name: msgspec.convert(value, _TYPES[name]) for name, value in frame.changed.items() if name in _TYPES}
    if frame.ids:
        new["instances"] = _with_columns(state.instances, frame)
    return msgspec.structs.replace(state, **new) if new else state


def _with_columns(views: tuple[InstanceView, ...], frame: LiveFrame) -> tuple[InstanceView, ...]:
    rows = dict(zip(frame.ids, zip(*frame.columns.values(), strict=True), strict=True))
    names = [name if name in InstanceView.__struct_fields__ else None for name in frame.columns]
    known = {view.id for view in views}
    if unknown := [name for name in frame.ids if name not in known]:
        raise ValueError(f"frame {frame.seq} speaks of {unknown[0]}, which is not in the fleet")
    found = []
    for view in views:
        row = rows.get(view.id)
        values = {} if row is None else {name: value for name, value in zip(names, row, strict=True) if name}
        found.append(msgspec.structs.replace(view, **values) if values else view)
    return tuple(found)
