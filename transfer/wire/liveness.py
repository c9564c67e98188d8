"""Who has been silent for too long. Pure: time is an argument, nothing here sends or reads."""

from __future__ import annotations


class Liveness:
    """Silence of peers as far as this process was awake to hear it, checked every period_s.

    A check that comes later than that found this process asleep (a blocked loop, a stopped process), not
    its peers: the time asleep counts as nobody's silence. Callers read their socket empty before a check.
    """

    def __init__(self, period_s: float, liveness_s: float, now: float) -> None:
        self._period_s, self._liveness_s = period_s, liveness_s
        self._checked_at = now
        self._heard_at: dict[str, float] = {}

    def heard(self, peer: str, now: float) -> None:
        self._heard_at[peer] = now

    def forget(self, peer: str) -> None:
        self._heard_at.pop(peer, None)

    def overdue(self, now: float) -> tuple[str, ...]:
        """Peers silent for longer than liveness_s, oldest acquaintance first. To be called every period_s."""
        asleep_s = now - self._checked_at - self._period_s
        self._checked_at = now
        if asleep_s > self._period_s:
            for peer, heard_at in self._heard_at.items():
                self._heard_at[peer] = min(now, heard_at + asleep_s)
        return tuple(peer for peer, heard_at in self._heard_at.items() if now - heard_at > self._liveness_s)
