"""What operators keep the autopilot from changing: the split as a whole or single instances, for a time or until
released. Bounded."""

from __future__ import annotations

from dataclasses import dataclass

from transfer.autopilot import PinView
from transfer.said import Said, say

SPLIT = "split"
"""The subject that stands for the roles of all instances."""
MAX_PINS = 1024


@dataclass(frozen=True, slots=True)
class Pin:
    """until_s: loop time; None: until released."""

    subject: str
    who: str
    until_s: float | None
    why: str

    @property
    def said(self) -> Said:
        one = self.subject != SPLIT
        pin = say("pin.one", id=self.subject, who=self.who) if one else say("pin.split", who=self.who)
        return say("pin.because", pin=pin, why=self.why) if self.why else pin


class Pins:
    """By subject; a later pin of the same subject replaces the earlier one. Idempotent."""

    def __init__(self) -> None:
        self._pins: dict[str, Pin] = {}
        self.num_changes = 0
        """By operators, not by time."""

    def put(self, subject: str, who: str, ttl_s: float | None, why: str, now: float) -> bool:
        """False when there are too many."""
        self._expire(now)
        if subject not in self._pins and len(self._pins) >= MAX_PINS:
            return False
        self._pins[subject] = Pin(subject, who, None if ttl_s is None else now + ttl_s, why)
        self.num_changes += 1
        return True

    def release(self, subject: str, now: float) -> bool:
        """False when it was not pinned."""
        self._expire(now)
        known = self._pins.pop(subject, None) is not None
        self.num_changes += known
        return known

    def get(self, subject: str, now: float) -> Pin | None:
        self._expire(now)
        return self._pins.get(subject)

    def views(self, now: float) -> tuple[PinView, ...]:
        """In order of subject, the split first."""
        kept = sorted(self._pins.values(), key=lambda one: (one.subject != SPLIT, one.subject))
        lefts = [None if one.until_s is None else one.until_s - now for one in kept]
        return tuple(
            PinView(subject=one.subject, who=one.who, left_s=left_s, why=one.why)
            for one, left_s in zip(kept, lefts, strict=True)
            if left_s is None or left_s > 0
        )

    def _expire(self, now: float) -> None:
        for one in list(self._pins.values()):
            if one.until_s is not None and one.until_s <= now:
                del self._pins[one.subject]
