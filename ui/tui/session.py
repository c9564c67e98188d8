"""Where a screen's data come from: a running fleet, or a recording that plays. Both fill a tape."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import msgspec

from transfer.api import LiveFrame
from transfer.screens import SeriesView
from ui.client import FleetClient
from ui.errors import CliError
from ui.feed import Feed
from ui.sse import Event
from ui.tui.draw_past import of_instance
from ui.tui.model import Picture
from ui.tui.recording import ANSWERS, FRAME, Recorder
from ui.tui.tape import CURVES, Tape

POLL_S = 2.0
PAST_S = 3600.0
PAST_STEP_S = 3.0
INSTANCE_S, INSTANCE_STEP_S = 2400.0, 5.0
"""Of one instance: what may be gone back to in a session, and what a chart shows before it."""
ROWS = 200
_frames = msgspec.json.Decoder(LiveFrame)


class Session(Protocol):
    """client: None where nothing can be changed. wanted: the answers beside the feed that the screen shows now;
    instance: the one whose past it shows."""

    tape: Tape
    client: FleetClient | None
    url: str
    wanted: tuple[str, ...]
    instance: str | None

    async def run(self) -> None: ...

    def ask_now(self) -> None:
        """Poll at once, for example since another panel is shown."""
        ...

    async def news(self, timeout_s: float) -> None:
        """Returns when there is something new, or at the end of timeout_s."""
        ...

    def picture(self, basis: Picture, at_s: float | None) -> Picture:
        """The moment at_s, or the newest one."""
        ...


class TapedFeed(Feed):
    """A feed that keeps its frames."""

    def __init__(self, client: FleetClient, tape: Tape, recorder: Recorder | None) -> None:
        super().__init__(client.live)
        self._tape, self._recorder = tape, recorder

    async def take(self, event: Event) -> None:
        await super().take(event)
        if self.state is None:
            return
        frame = _frames.decode(event.data)
        self._tape.add(frame, self.state)
        if self._recorder is not None:
            self._recorder.put(frame.at_s, FRAME, frame)


class LiveSession:
    """A fleet through its control plane. `run` owns every connection; cancel it to end."""

    def __init__(self, client: FleetClient, recorder: Recorder | None = None) -> None:
        self.tape = Tape()
        self.client: FleetClient | None = client
        self.url = client.url
        self.feed = TapedFeed(client, self.tape, recorder)
        self.wanted: tuple[str, ...] = ()
        self.instance: str | None = None
        self.problem = ""
        """Why an answer beside the feed did not come."""
        self._open, self._recorder = client, recorder
        self._past: SeriesView | None = None
        self._revision = 0
        self._asked = asyncio.Event()
        self._ask: dict[str, Callable[[], Awaitable[Any]]] = {
            "requests": lambda: client.requests(ROWS), "audit": lambda: client.audit(ROWS), "kv": client.kv,
            "autopilot": client.autopilot,
        }  # fmt: skip

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self.feed.run())
            group.create_task(self._poll())
            group.create_task(self._look_back())

    async def news(self, timeout_s: float) -> None:
        self._revision = await self.feed.changed(self._revision, timeout_s)

    def ask_now(self) -> None:
        self._asked.set()

    def picture(self, basis: Picture, at_s: float | None) -> Picture:
        feed = self.feed
        seen = (feed.at_s, feed.state) if at_s is None else self.tape.state_at(at_s)
        shown_s, state = seen if seen is not None else (feed.at_s, feed.state)
        until = shown_s if at_s is None else at_s
        return _with_answers(replace(
            basis, fleet=state, at_s=until, newest_s=feed.at_s, age_s=feed.age_s, url=self.url, past=self._past,
            error=feed.error or (self._recorder.problem if self._recorder is not None else "") or self.problem,
        ), self.tape)  # fmt: skip

    async def _poll(self) -> None:
        while True:
            for name in ANSWERS if self._recorder is not None else self.wanted:
                await self._take(name)
            if self.instance is not None:
                with contextlib.suppress(CliError):  # its curves stay as they were; the feed says what is wrong
                    self._past = await self._open.series(of_instance(self.instance), -INSTANCE_S, INSTANCE_STEP_S)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(POLL_S):
                    await self._asked.wait()
            self._asked.clear()

    async def _take(self, name: str) -> None:
        try:
            value = await self._ask[name]()
        except CliError as error:
            self.problem = "" if self.feed.error else str(error)
            return
        self.problem = ""
        at_s = self.feed.at_s or time.time()
        self.tape.answer(name, at_s, value)
        if self._recorder is not None:
            self._recorder.put(at_s, name, value)

    async def _look_back(self) -> None:
        """The curves of the hour before this session and what was done in it, once."""
        revision = 0
        while self.feed.state is None:
            revision = await self.feed.changed(revision, POLL_S)
        await self._take("audit")
        with contextlib.suppress(CliError):  # the charts then begin with this session
            self.tape.points.put_before(await self._open.series(CURVES, -PAST_S, PAST_STEP_S))


@dataclass
class ReplaySession:
    """A recording: it plays by the clock from its beginning, and may be sought in. It changes nothing."""

    tape: Tape
    url: str
    client: FleetClient | None = None
    wanted: tuple[str, ...] = ()
    instance: str | None = None

    async def run(self) -> None:
        await asyncio.Event().wait()

    async def news(self, timeout_s: float) -> None:
        await asyncio.sleep(timeout_s)

    def ask_now(self) -> None:
        """Everything is there."""

    def picture(self, basis: Picture, at_s: float | None) -> Picture:
        newest = self.tape.last_s or 0.0
        found = self.tape.state_at(newest if at_s is None else at_s)
        shown_s, state = found if found is not None else (0.0, None)
        until = shown_s if at_s is None else min(max(at_s, shown_s), newest)
        return _with_answers(replace(
            basis, fleet=state, at_s=until, newest_s=newest, age_s=0.0, mode="replay", url=self.url, read_only=True,
        ), self.tape)  # fmt: skip


def _with_answers(picture: Picture, tape: Tape) -> Picture:
    """With what other paths had answered by then."""
    at_s = picture.at_s
    records = tape.answer_at("requests", at_s) or ()
    if at_s < picture.newest_s:
        records = [record for record in records if record.arrived_at + record.e2e_s <= at_s]
    return replace(
        picture, points=tape.points, happenings=tape.happenings, records=records,
        audit=tape.answer_at("audit", at_s) or (), kv=tape.answer_at("kv", at_s),
        autopilot=tape.answer_at("autopilot", at_s),
    )  # fmt: skip
