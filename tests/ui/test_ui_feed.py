"""The feed: frames become a fleet, its age is known, and it comes back by itself with what it missed, or a snapshot.

No real time passes: connecting, the clock and sleeping are the test's.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import pytest

from transfer.api import ClassView, FleetState, Goodput, InstanceView, LiveFrame, Quantiles
from transfer.terms import Slo
from ui.errors import Unreachable
from ui.feed import LONGEST_WAIT_S, SHORTEST_WAIT_S, STALE_S, Feed, fold
from ui.sse import Event


def view(name: str, **fields: object) -> InstanceView:
    base = InstanceView(id=name, role="decode", state="ready", hardware="H20", model="m", epoch=1)
    return msgspec.structs.replace(base, **fields)


def fleet(*views: InstanceView, **fields: object) -> FleetState:
    base = FleetState(
        xpyd="1P1D", models=("m",), instances=views or (view("a"), view("b")), goodput=Goodput(per_s=1.5),
        attainment=None, orphaned_kv_blocks=0, in_flight=0, version=1,
    )  # fmt: skip
    return msgspec.structs.replace(base, **fields)


def event(frame: LiveFrame) -> Event:
    return Event(msgspec.json.encode(frame), str(frame.seq), frame.kind)


def snapshot(seq: int, state: FleetState | None = None) -> Event:
    return event(LiveFrame(seq=seq, kind="snapshot", at_s=100.0 + seq, state=state or fleet()))


def delta(seq: int, **changed: object) -> Event:
    return event(LiveFrame(seq=seq, kind="delta", at_s=100.0 + seq, changed=changed))


class Server:
    """Answers each connection with the next script: events, then the end, an error, or silence for ever (None)."""

    def __init__(self, *scripts: list[Event | Exception | None]) -> None:
        self.scripts, self.asked, self.slept = list(scripts), list[str | None](), list[float]()
        self.now = 1000.0
        self.enough = asyncio.Event()

    @asynccontextmanager
    async def connect(self, last_event_id: str | None) -> AsyncIterator[AsyncIterator[Event]]:
        self.asked.append(last_event_id)
        script = self.scripts.pop(0) if self.scripts else [None]
        if script and isinstance(script[0], Exception):
            raise script[0]
        yield self.play(script)

    async def play(self, script: list[Event | Exception | None]) -> AsyncIterator[Event]:
        for step in script:
            if step is None:
                self.enough.set()
                await asyncio.Event().wait()
            elif isinstance(step, Exception):
                raise step
            else:
                yield step

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        await asyncio.sleep(0)

    async def follow(self) -> Feed:
        """The feed when every script has been played."""
        feed = Feed(self.connect, now=lambda: self.now, sleep=self.sleep)
        running = asyncio.create_task(feed.run())
        try:
            async with asyncio.timeout(5):
                await self.enough.wait()
        finally:
            running.cancel()
            await asyncio.wait([running])
        return feed


async def test_deltas_fold_into_the_snapshot_with_their_types() -> None:
    classes = [ClassView(name="chat", slo=Slo(ttft_s=1.0, tpot_s=0.1), good=3, total=4, attainment=0.75,
                         ttft_s=Quantiles(p50=0.2), tpot_s=Quantiles(), doomed=1)]  # fmt: skip
    frame = LiveFrame(
        seq=8, kind="delta", changed={"in_flight": 7, "goodput": Goodput(per_s=2.5), "classes": classes, "new_one": 3},
        ids=("b",), columns={"num_running": (4,), "kv_use": (0.25,), "state": ("draining",), "unknown": (1,)},
    )  # fmt: skip
    server = Server([snapshot(7), event(frame), None])
    feed = await server.follow()
    assert feed.state == fleet(
        view("a"), view("b", num_running=4, kv_use=0.25, state="draining"),
        in_flight=7, goodput=Goodput(per_s=2.5), classes=tuple(classes),
    )  # fmt: skip
    assert (feed.seq, feed.num_connects, feed.error) == (8, 1, "")


async def test_the_state_grows_old_and_is_stale_after_three_seconds() -> None:
    server = Server([snapshot(7), None])
    unheard = Feed(server.connect, now=lambda: server.now)
    assert (unheard.stale, unheard.age_s, unheard.state) == (True, float("inf"), None)
    feed = await server.follow()
    assert (feed.age_s, feed.stale, feed.at_s) == (0.0, False, 107.0)
    server.now += STALE_S
    assert not feed.stale
    server.now += 0.001
    assert feed.stale
    assert feed.age_s == pytest.approx(STALE_S + 0.001)
    await feed.take(delta(8, in_flight=1))
    assert not feed.stale


async def test_it_reconnects_after_the_last_frame_it_has_seen() -> None:
    gone = Unreachable("the fleet went away")
    server = Server([snapshot(7), delta(8, in_flight=1), gone], [delta(9, in_flight=2)], [delta(10, version=4), None])
    feed = await server.follow()
    assert server.asked == [None, "8", "9"]
    assert feed.state == fleet(in_flight=2, version=4)
    assert server.slept == [SHORTEST_WAIT_S, SHORTEST_WAIT_S]
    assert feed.connected
    assert feed.error == ""


async def test_it_asks_less_and_less_often_while_nobody_answers_and_says_why() -> None:
    down = [Unreachable("no fleet answers")]
    server = Server([snapshot(7)], down, down, down, down, down, [None])
    feed = await server.follow()
    assert server.slept == [SHORTEST_WAIT_S, 0.5, 1.0, LONGEST_WAIT_S, LONGEST_WAIT_S, LONGEST_WAIT_S]
    assert (feed.connected, feed.error, feed.seq) == (False, "no fleet answers", 7)


@pytest.mark.parametrize(
    "bad",
    [
        delta(12, in_flight=1), delta(8, in_flight="many"), Event(b"{", "8", "delta"), Event(b"{}", "8", "delta"),
        event(LiveFrame(seq=8, kind="delta", ids=("z",), columns={"num_running": (1,)})),
        event(LiveFrame(seq=8, kind="delta", ids=("a", "b"), columns={"num_running": (1,)})),
        event(LiveFrame(seq=8, kind="snapshot")),
    ],
    ids=["gap", "type", "json", "no frame", "unknown instance", "short column", "empty snapshot"],
)  # fmt: skip
async def test_what_cannot_be_folded_makes_it_begin_anew_with_a_snapshot(bad: Event) -> None:
    server = Server([snapshot(7), bad], [snapshot(20, fleet(in_flight=5)), None])
    feed = await server.follow()
    assert server.asked == [None, None]
    assert feed.state == fleet(in_flight=5)


async def test_a_new_life_of_the_control_plane_replaces_everything() -> None:
    server = Server([snapshot(7)], [snapshot(5000, fleet(view("z"), version=0)), delta(5001, version=1), None])
    feed = await server.follow()
    assert feed.state == fleet(view("z"), version=1)


async def test_readers_wait_for_news_and_miss_none() -> None:
    server = Server()
    feed = Feed(server.connect, now=lambda: server.now)
    seen = feed.revision
    waiting = [asyncio.create_task(feed.changed(seen)) for _ in range(3)]
    await asyncio.sleep(0)
    await feed.take(snapshot(7))
    revisions = [await one for one in waiting]
    assert revisions == [seen + 1] * 3
    assert await feed.changed(seen) == seen + 1, "what has happened is not waited for"
    assert await feed.changed(seen + 1, timeout_s=0.001) == seen + 1


def test_a_delta_before_any_snapshot_is_refused() -> None:
    with pytest.raises(ValueError, match="before any snapshot"):
        fold(None, LiveFrame(seq=1, kind="delta"))
