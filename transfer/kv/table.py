"""Which of one side's blocks a stream moves, in offered order, and as runs of neighbours in its arena."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class SlabPlace(NamedTuple):
    layer: int
    first: int
    stop: int


Run = tuple[int, int]
"""(first block id, number of blocks): neighbours in an arena."""


class BlockTable:
    """One side's block ids, one for each offered block; -1 is not wanted."""

    def __init__(self, blocks: Sequence[int]) -> None:
        self.blocks = list(blocks)
        self._stops = list(range(1, len(self.blocks) + 1))  # where the run of neighbours that holds an index ends
        for index in range(len(self.blocks) - 2, -1, -1):
            if self.blocks[index + 1] == self.blocks[index] + 1 and self.blocks[index] >= 0:
                self._stops[index] = self._stops[index + 1]

    def __len__(self) -> int:
        return len(self.blocks)

    def runs(self, first: int, count: int) -> list[Run]:
        """Offered blocks first..first+count as runs of neighbours in the arena."""
        runs, end = [], first + count
        while first < end:
            stop = min(self._stops[first], end)
            runs.append((self.blocks[first], stop - first))
            first = stop
        return runs
