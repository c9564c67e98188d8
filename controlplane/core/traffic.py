"""The offered load of the last minutes, measured at the gateway: what forecasts are made from. Bounded."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

MAX_ARRIVALS = 4096


@dataclass(slots=True, frozen=True)
class Arrival:
    """output_tokens: what came out in the end, learned at completion; None while unknown."""

    at_s: float
    model: str
    traffic_class: str
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int | None


class Traffic:
    def __init__(self, window_s: float) -> None:
        self.window_s = window_s
        self._arrivals: deque[tuple[float, str]] = deque(maxlen=MAX_ARRIVALS)
        self._finished: deque[Arrival] = deque(maxlen=MAX_ARRIVALS)

    def arrived(self, at_s: float, model: str) -> None:
        self._arrivals.append((at_s, model))

    def finished(self, arrival: Arrival) -> None:
        """What one request turned out to be."""
        self._finished.append(arrival)

    def offered(self, now: float, model: str) -> tuple[int, float]:
        """Arrivals in the window, and the seconds they span (the window, or since the oldest kept one)."""
        recent = [at_s for at_s, name in self._arrivals if name == model and now - at_s <= self.window_s]
        if not recent:
            return 0, self.window_s
        whole = len(self._arrivals) == MAX_ARRIVALS or now - recent[0] < self.window_s
        return len(recent), max(1.0, now - recent[0]) if whole else self.window_s

    def shapes(self, now: float, model: str) -> list[Arrival]:
        """Finished requests of the window: the sizes that offered load comes in."""
        return [one for one in self._finished if one.model == model and now - one.at_s <= self.window_s]
