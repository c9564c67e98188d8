"""Which moment is shown: now, held, the past, or a recording that plays. Pure: the clock is an argument."""

from __future__ import annotations

from dataclasses import dataclass

from ui.tui.model import Mode
from ui.tui.tape import Tape


@dataclass
class Timeline:
    """at_s: Unix time of the moment shown, None for the newest. A recording begins at its beginning and plays."""

    tape: Tape
    mode: Mode = "live"
    at_s: float | None = None
    _plays_since: float | None = None

    @classmethod
    def of(cls, tape: Tape, live: bool, now: float) -> Timeline:
        return cls(tape) if live else cls(tape, "replay", tape.first_s, now)

    def advance(self, now: float) -> None:
        """A recording that plays goes on by the time that went by."""
        if self._plays_since is not None and self.at_s is not None:
            self.at_s = min(self.at_s + now - self._plays_since, self.tape.last_s or self.at_s)
            self._plays_since = now

    def pause(self, now: float) -> None:
        """Hold what is shown, or go on: a recording from here, a fleet with what is now."""
        if self.mode == "replay":
            self._plays_since = now if self._plays_since is None else None
        elif self.at_s is None and self.tape.last_s is not None:
            self.at_s, self.mode = self.tape.last_s, "paused"
        else:
            self.at_s, self.mode = None, "live"

    def seek(self, by_s: float) -> None:
        """Into the past, no further than it is known, or forward, no further than now."""
        first, newest = self.tape.first_s, self.tape.last_s
        if first is None or newest is None:
            return
        at_s = (newest if self.at_s is None else self.at_s) + by_s
        if self.mode == "replay":
            self.at_s = min(max(at_s, first), newest)
        elif at_s >= newest:
            self.at_s, self.mode = None, "live"
        else:
            self.at_s, self.mode = max(at_s, first), "past"

    def live(self) -> None:
        """Back to now; the end of a recording."""
        if self.mode == "replay":
            self.at_s = self.tape.last_s
        else:
            self.at_s, self.mode = None, "live"
