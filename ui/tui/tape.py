"""What a session has seen: frames of the live feed, curves, happenings, and the other answers, by time. Bounded; pure.

The live screen and a replayed recording both read their past from here.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Mapping
from typing import Any, NamedTuple

from transfer.api import FleetState, LiveFrame
from transfer.screens import SeriesView
from ui.feed import SET_BACK_S, fold

MAX_FRAMES = 1800
KEYFRAME_EVERY = 30
MAX_POINTS = 3600
MAX_HAPPENINGS = 1000
MAX_ANSWERS = 120

CURVES = ("goodput_per_s", "throughput_per_s", "attainment")


class Happening(NamedTuple):
    """Seen in the feed. kind: joined, left, state, role, xpyd or autopilot."""

    at_s: float
    kind: str
    subject: str
    old: str = ""
    new: str = ""


class Points:
    """The curves that charts show, oldest first."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.values: dict[str, list[float | None]] = {name: [] for name in CURVES}

    def add(self, at_s: float, values: Mapping[str, float | None]) -> None:
        if self.times and at_s <= self.times[-1]:
            if at_s > self.times[-1] - SET_BACK_S:
                return
            self.times.clear()
            for column in self.values.values():
                column.clear()
        self.times.append(at_s)
        for name, column in self.values.items():
            column.append(values.get(name))
        if len(self.times) > 2 * MAX_POINTS:
            del self.times[:-MAX_POINTS]
            for column in self.values.values():
                del column[:-MAX_POINTS]

    def put_before(self, view: SeriesView) -> None:
        """The past before the first frame, as GET /v1/series tells it."""
        first = self.times[0] if self.times else float("inf")
        num = sum(time < first for time in view.times)
        self.times[:0] = map(float, view.times[:num])
        for name, column in self.values.items():
            told = view.series.get(name)
            column[:0] = told.last[:num] if told is not None else [None] * num


class Tape:
    """Frames may be sought by time; a state is folded from the keyframe before it. max_frames 0: no bound."""

    def __init__(self, max_frames: int = MAX_FRAMES) -> None:
        self.points = Points()
        self.happenings: deque[Happening] = deque(maxlen=MAX_HAPPENINGS)
        self._max_frames = max_frames
        self._times: list[float] = []
        self._frames: list[LiveFrame] = []
        self._keys: dict[int, FleetState] = {}
        """By index of its frame, counted from the first one ever."""
        self._dropped = 0
        self._last: FleetState | None = None
        self._sought: tuple[int, FleetState] | None = None
        self._answers: dict[str, deque[tuple[float, Any]]] = {}

    @property
    def first_s(self) -> float | None:
        return self._times[0] if self._times else None

    @property
    def last_s(self) -> float | None:
        return self._times[-1] if self._times else None

    def add(self, frame: LiveFrame, state: FleetState) -> None:
        """A frame and the state after it."""
        index = self._dropped + len(self._frames)
        if frame.kind == "snapshot" or index - max(self._keys, default=-KEYFRAME_EVERY) >= KEYFRAME_EVERY:
            self._keys[index] = state
        self._times.append(frame.at_s)
        self._frames.append(frame)
        if self._last is not None:
            self.happenings.extend(happenings(self._last, state, frame.at_s))
        self._last = state
        self.points.add(frame.at_s, curves_of(state))
        if self._max_frames and len(self._frames) > self._max_frames:
            self._drop()

    def answer(self, name: str, at_s: float, value: Any) -> None:
        """What another path of the API answered; equal neighbours are kept once."""
        kept = self._answers.setdefault(name, deque(maxlen=MAX_ANSWERS))
        if not kept or kept[-1][1] != value:
            kept.append((at_s, value))

    def answer_at(self, name: str, at_s: float) -> Any:
        """The last answer known then, or the first one ever where none was; None without any."""
        kept = self._answers.get(name)
        if not kept:
            return None
        return next((value for time, value in reversed(kept) if time <= at_s), kept[0][1])

    def state_at(self, at_s: float) -> tuple[float, FleetState] | None:
        """The state shown at a time, the first one for any time before it, and when it was taken."""
        if not self._frames:
            return None
        place = max(0, bisect_right(self._times, at_s) - 1)
        index = self._dropped + place
        if self._sought is None or self._sought[0] != index:
            self._sought = (index, self._folded(index))
        return self._times[place], self._sought[1]

    def _folded(self, index: int) -> FleetState:
        near = max(key for key in self._keys if key <= index)
        state = self._keys[near]
        if self._sought is not None and near <= self._sought[0] < index:
            near, state = self._sought
        for at in range(near + 1, index + 1):
            state = fold(state, self._frames[at - self._dropped])
        return state

    def _drop(self) -> None:
        """Forget the oldest frames up to the next keyframe."""
        keys = sorted(self._keys)
        if len(keys) < 2:
            return
        num = keys[1] - self._dropped
        del self._times[:num], self._frames[:num], self._keys[keys[0]]
        self._dropped += num


def curves_of(state: FleetState) -> dict[str, float | None]:
    """A state's points, under the names that GET /v1/series has for them."""
    return {
        "goodput_per_s": state.goodput.per_s,
        "throughput_per_s": state.goodput.throughput_per_s,
        "attainment": state.recent_attainment,
    }


def happenings(old: FleetState, new: FleetState, at_s: float) -> list[Happening]:
    """What an operator would want to be told between two states."""
    found = []
    before = {view.id: view for view in old.instances}
    for view in new.instances:
        was = before.pop(view.id, None)
        if was is None:
            found.append(Happening(at_s, "joined", view.id, "", view.role))
            continue
        if was.role != view.role:
            found.append(Happening(at_s, "role", view.id, was.role, view.role))
        if was.state != view.state:
            found.append(Happening(at_s, "state", view.id, was.state, view.state))
    found += [Happening(at_s, "left", view.id, view.role) for view in before.values()]
    for kind in ("xpyd", "autopilot"):
        if getattr(old, kind) != getattr(new, kind):
            found.append(Happening(at_s, kind, "", getattr(old, kind), getattr(new, kind)))
    return found
