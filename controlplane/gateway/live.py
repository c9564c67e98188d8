"""GET /v1/live behind the scenes: the fleet's state once a second as a snapshot, then deltas, encoded once for all.

A subscriber that reads too slowly loses deltas and is given a fresh snapshot instead.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec

from transfer.api import FleetState, InstanceView, LiveFrame, Scalar

PERIOD_S = 1.0
MAX_FRAMES_KEPT = 120
MAX_FRAMES_QUEUED = 16


class Subscription:
    """One client's bounded queue of encoded events."""

    def __init__(self, events: list[bytes]) -> None:
        self._events: deque[bytes] = deque(events)
        self._changed = asyncio.Event()
        self._behind = False
        self.closed = False
        if events:
            self._changed.set()

    def put(self, event: bytes) -> None:
        """Queue one event; over the bound everything queued is dropped and a snapshot is due."""
        if len(self._events) >= MAX_FRAMES_QUEUED:
            self._events.clear()
            self._behind = True
        if not self._behind:
            self._events.append(event)
        self._changed.set()

    def close(self) -> None:
        self.closed = True
        self._changed.set()

    async def get(self, snapshot: Callable[[], bytes], timeout_s: float) -> list[bytes]:
        """Everything queued, after waiting up to timeout_s; [] when there is nothing."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()
        except TimeoutError:
            return []
        self._changed.clear()
        events = [snapshot()] if self._behind else list(self._events)
        self._behind = False
        self._events.clear()
        return events


class LiveFeed:
    """Numbers frames with `seq`, keeps the last ones for clients that come back with Last-Event-ID."""

    def __init__(self, state: Callable[[], FleetState]) -> None:
        self._state = state
        # Milliseconds, so that no number of an earlier life of this server (one frame a second) comes again.
        self._seq = time.time_ns() // 1_000_000
        self._last: FleetState | None = None
        self._at_s = 0.0
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=MAX_FRAMES_KEPT)
        self._subscriptions: list[Subscription] = []

    def subscribe(self, last_event_id: str | None) -> Subscription:
        """Starts with the frames missed since last_event_id where they are kept, else with a snapshot."""
        if self._last is None:
            self.tick()
        missed = self._missed(last_event_id)
        subscription = Subscription([self.snapshot()] if missed is None else missed)
        self._subscriptions.append(subscription)
        return subscription

    def unsubscribe(self, subscription: Subscription) -> None:
        self._subscriptions.remove(subscription)

    def snapshot(self) -> bytes:
        """The state as of the last frame, under that frame's number."""
        return _event(LiveFrame(seq=self._seq, kind="snapshot", at_s=self._at_s, state=self._last))

    def tick(self) -> None:
        """Every PERIOD_S: take the state, and send what changed to everybody."""
        before, self._last = self._last, self._state()
        self._at_s = round(time.time(), 3)
        if before is None:
            return
        changed, ids, columns = difference(before, self._last)
        if not changed and not ids:
            return
        self._seq += 1
        frame = LiveFrame(seq=self._seq, kind="delta", at_s=self._at_s, changed=changed, ids=ids, columns=columns)
        event = _event(frame)
        self._kept.append((self._seq, event))
        for subscription in self._subscriptions:
            subscription.put(event)

    def close(self) -> None:
        """The server stops: end every subscription."""
        for subscription in self._subscriptions:
            subscription.close()

    def _missed(self, last_event_id: str | None) -> list[bytes] | None:
        """Frames after that one; None when they are not all kept."""
        if last_event_id is None or not last_event_id.isascii() or not last_event_id.isdigit():
            return None
        seen = int(last_event_id[:20])
        if seen == self._seq:
            return []
        frames = [event for seq, event in self._kept if seq > seen]
        return frames if frames and len(frames) == self._seq - seen else None


Columns = dict[str, tuple[Scalar, ...]]
_FIELDS = tuple(name for name in FleetState.__struct_fields__ if name != "instances")


def difference(old: FleetState, new: FleetState) -> tuple[dict[str, Any], tuple[str, ...], Columns]:
    """(fields that changed, instances that changed, their new values by field), as LiveFrame has them."""
    changed: dict[str, Any] = {name: value for name in _FIELDS if (value := getattr(new, name)) != getattr(old, name)}
    if [view.id for view in old.instances] != [view.id for view in new.instances]:
        changed["instances"] = new.instances
        return changed, (), {}
    pairs = [(was, view) for was, view in zip(old.instances, new.instances, strict=True) if was != view]
    columns: Columns = {}
    for name in InstanceView.__struct_fields__:
        values = tuple(getattr(view, name) for _, view in pairs)
        if values != tuple(getattr(was, name) for was, _ in pairs):
            columns[name] = values
    return changed, tuple(view.id for _, view in pairs), columns


def _event(frame: LiveFrame) -> bytes:
    return b"id: %d\nevent: %s\ndata: %s\n\n" % (frame.seq, frame.kind.encode(), msgspec.json.encode(frame))
