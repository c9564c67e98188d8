"""Free blocks of one arena as runs of consecutive ids, so that a table gets few, long runs.

Knows nothing of who holds a block or what is in it (blocks.py does).
"""

from __future__ import annotations

from bisect import bisect_left, insort


class FreeRuns:
    """Disjoint maximal runs of free ids in [0, num_blocks). Each operation costs O(log runs) and a short memmove."""

    def __init__(self, num_blocks: int) -> None:
        self.total = 0
        self._length: dict[int, int] = {}  # first id -> run length
        self._start: dict[int, int] = {}  # id after the last -> first id
        self._sizes: list[tuple[int, int]] = []  # (length, first id), sorted
        self._insert(0, num_blocks)

    def add(self, block: int) -> None:
        """Return one id, joining it to the runs on both sides."""
        first, end = block, block + 1
        if block in self._start:
            first = self._start[block]
            self._remove(first)
        if end in self._length:
            after = end
            end += self._length[after]
            self._remove(after)
        self._insert(first, end - first)

    def add_all(self, blocks: list[int]) -> None:
        for block in blocks:
            self.add(block)

    def take(self, count: int, *, after: int | None = None, room: int = 0) -> list[int]:
        """Take `count` ids (the caller knows that `total` is enough) from as few runs as there are.

        after: the last id of a table that grows. The ids behind it come first; failing that the middle of the
        longest run, so that tables that grow keep out of each other's way. Otherwise the shortest run that holds
        `count` and `room` more (what the table will probably want later), else the longest.
        """
        taken: list[int] = []
        if after is not None and after + 1 in self._length:
            self._cut(after + 1, 0, min(count, self._length[after + 1]), taken)
        while (wanted := count - len(taken)) > 0:
            fit = bisect_left(self._sizes, (wanted + room, -1)) if after is None else len(self._sizes)
            length, first = self._sizes[min(fit, len(self._sizes) - 1)]
            offset = 0 if after is None else max(0, length - wanted) // 2
            self._cut(first, offset, min(wanted, length), taken)
        return taken

    def blocks(self) -> list[int]:
        """Every free id, for integrity checks."""
        return [block for first, length in self._length.items() for block in range(first, first + length)]

    def _cut(self, first: int, offset: int, count: int, taken: list[int]) -> None:
        length = self._length[first]
        self._remove(first)
        if offset:
            self._insert(first, offset)
        if rest := length - offset - count:
            self._insert(first + offset + count, rest)
        taken.extend(range(first + offset, first + offset + count))

    def _insert(self, first: int, length: int) -> None:
        self._length[first] = length
        self._start[first + length] = first
        insort(self._sizes, (length, first))
        self.total += length

    def _remove(self, first: int) -> None:
        length = self._length.pop(first)
        del self._start[first + length]
        del self._sizes[bisect_left(self._sizes, (length, first))]
        self.total -= length


class FreeStack:
    """The same where no KV is ever moved and ids are only counted: the last one returned is taken first."""

    def __init__(self, num_blocks: int) -> None:
        self._free = list(range(num_blocks - 1, -1, -1))

    @property
    def total(self) -> int:
        return len(self._free)

    def add(self, block: int) -> None:
        self._free.append(block)

    def add_all(self, blocks: list[int]) -> None:
        self._free += blocks

    def take(self, count: int, *, after: int | None = None, room: int = 0) -> list[int]:
        """Take `count` ids; the caller knows that `total` is enough."""
        taken = self._free[-count:]
        del self._free[-count:]
        return taken

    def blocks(self) -> list[int]:
        return list(self._free)
