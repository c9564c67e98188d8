"""Control frames that come over several links, put in the order they were sent in. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from transfer.errors import ProtocolError
from transfer.kv.frames import Frame

MAX_EARLY_BYTES = 64 << 20
FRAME_COST_BYTES = 256
"""Frames that wait for one before them may take so much memory, each counted with this much beside its bytes."""


class InOrder:
    """Each frame is given out once, when all before it were."""

    def __init__(self) -> None:
        self.expected = 0
        self.early_bytes = 0
        self._early: dict[int, tuple[Frame, int]] = {}

    def take(self, sequence: int, frame: Frame, num_bytes: int) -> Iterator[Frame]:
        """The frames whose turn it is now; to be exhausted. Raises ProtocolError when too much waits for one."""
        if sequence < self.expected or sequence in self._early:
            return  # a repeat
        cost = num_bytes + FRAME_COST_BYTES
        self._early[sequence] = frame, cost
        self.early_bytes += cost
        while self.expected in self._early:
            frame, cost = self._early.pop(self.expected)
            self.early_bytes -= cost
            self.expected += 1
            yield frame
        if self.early_bytes > MAX_EARLY_BYTES:
            raise ProtocolError(f"{len(self._early)} control frames wait for number {self.expected}, which is missing")

    def clear(self) -> None:
        """Nothing is waited for any more."""
        self._early.clear()
        self.early_bytes = 0
