"""What every open browser tab is shown, drawn once for each language in use and sent to all: GET /live of the console.

A tab that reads slowly gets the newest frame whole instead of those it missed.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Mapping
from typing import NamedTuple

import msgspec

from transfer.api import AuditRow, FleetState
from ui.client import FleetClient
from ui.console.trail import Trail
from ui.errors import CliError
from ui.feed import Feed

BEAT_S = 2.0
"""Longest time between two frames, also while the fleet says nothing: its age is then what is new."""
SHORTEST_S = 0.5
"""Between two frames."""
AUDIT_EVERY_S = 10.0
NUM_AUDIT = 300
LONGEST_S = 5.0
RETRY = b"retry: 1000\n\n"


class Scene(NamedTuple):
    """What parts are drawn from. age_s None: nothing has been heard yet."""

    state: FleetState | None
    age_s: float | None
    url: str
    trail: Trail
    audit: tuple[AuditRow, ...]


class Drawn(NamedTuple):
    """code: of the verdict; announce: what a screen reader hears when it changes; parts: HTML by name. fleet: changes
    when pages should be drawn anew: with the fleet's version and with roles and states of instances."""

    code: str
    announce: str
    parts: Mapping[str, str]
    fleet: str = ""


Draw = Callable[[Scene, str], Drawn]


class _Frame(msgspec.Struct, frozen=True):
    seq: int
    age: float | None
    code: str
    announce: str
    fleet: str
    parts: Mapping[str, str]


class _Channel:
    """The last frame in one language, as a whole and as what changed in it."""

    def __init__(self) -> None:
        self.seq = 0
        self.num_watching = 0
        self.changed = b""
        self._drawn: Drawn | None = None
        self._age_s: float | None = None
        self._whole: tuple[int, bytes] = (0, b"")

    def take(self, drawn: Drawn, age_s: float | None) -> None:
        before = {} if self._drawn is None else self._drawn.parts
        new = {name: text for name, text in drawn.parts.items() if before.get(name) != text}
        self.seq, self._drawn, self._age_s = self.seq + 1, drawn, age_s
        self.changed = _event(_Frame(self.seq, age_s, drawn.code, drawn.announce, drawn.fleet, new))

    def whole(self) -> bytes:
        if self._whole[0] != self.seq and self._drawn is not None:
            drawn = self._drawn
            event = _event(_Frame(self.seq, self._age_s, drawn.code, drawn.announce, drawn.fleet, drawn.parts))
            self._whole = (self.seq, event)
        return self._whole[1]


class Broadcast:
    """`run` it as a task beside the feed it reads; `events` serves one tab."""

    def __init__(self, feed: Feed, client: FleetClient, draw: Draw) -> None:
        self._feed, self._client, self._draw = feed, client, draw
        self._channels: dict[str, _Channel] = {}
        self._trail = Trail()
        self._audit: tuple[AuditRow, ...] = ()
        self._news = asyncio.Condition()
        self.closed = False

    async def run(self) -> None:
        """Draw when the feed has news, and at least every BEAT_S. Until cancelled."""
        revision, connects, audited, version = -1, 0, 0.0, -1
        while True:
            revision = await self._feed.changed(revision, BEAT_S)
            state = self._feed.state
            if state is not None and not self._feed.stale:
                if self._feed.num_connects != connects:
                    connects = self._feed.num_connects
                    await self._fill()
                self._trail.add(self._feed.at_s, state)
                if state.version != version or time.monotonic() - audited > AUDIT_EVERY_S:
                    version, audited = state.version, time.monotonic()
                    await self._look_up()
            for lang, channel in self._channels.items():
                if channel.num_watching:
                    self._draw_for(lang, channel)
            async with self._news:
                self._news.notify_all()
            await asyncio.sleep(SHORTEST_S)

    async def events(self, lang: str) -> AsyncIterator[bytes]:
        """Server-sent events for one tab: a whole frame, then what changes, until `close`."""
        channel = self._channels.setdefault(lang, _Channel())
        channel.num_watching += 1
        try:
            self._draw_for(lang, channel)
            seen, event = channel.seq, RETRY + channel.whole()
            yield event  # others are drawn meanwhile, so what was sent is noted before
            while not self.closed:
                await self._beyond(channel, seen)
                if channel.seq > seen:
                    event = channel.changed if channel.seq == seen + 1 else channel.whole()
                    seen = channel.seq
                    yield event
        finally:
            channel.num_watching -= 1

    async def _beyond(self, channel: _Channel, seen: int) -> None:
        """Wait for a frame after that one, for LONGEST_S at most."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LONGEST_S), self._news:
                await self._news.wait_for(lambda: channel.seq > seen or self.closed)

    async def close(self) -> None:
        """End every tab's stream, so that the server can stop."""
        self.closed = True
        async with self._news:
            self._news.notify_all()

    def _draw_for(self, lang: str, channel: _Channel) -> None:
        age_s = None if self._feed.state is None else self._feed.age_s
        scene = Scene(self._feed.state, age_s, self._client.url, self._trail, self._audit)
        channel.take(self._draw(scene, lang), None if age_s is None else round(age_s, 2))

    async def _fill(self) -> None:
        """The minutes before now, after a connection: also those in which the console was not there."""
        with contextlib.suppress(CliError):  # a chart that begins now is worth showing too
            await self._trail.fill(self._client)

    async def _look_up(self) -> None:
        with contextlib.suppress(CliError):  # marks on a chart: the next look brings them
            self._audit = tuple(await self._client.audit(NUM_AUDIT))


def _event(frame: _Frame) -> bytes:
    return b"data: %s\n\n" % msgspec.json.encode(frame)
