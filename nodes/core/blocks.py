"""Block tables of one arena: allocation, reference counts and the prefix cache. Holds ids and hashes, never KV bytes.

A block is exactly one of free, cached (nobody holds it, its KV can still be found by hash) and referenced.
Cached blocks count as free: they are given up, least recently used first, when memory is needed.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable
from typing import NamedTuple

from nodes.core.runs import FreeRuns
from transfer.errors import IllegalTransition, InvalidValue

_HISTORY = 256
_SLACK_BLOCKS = 32


class BlockKey(NamedTuple):
    """What a whole block holds: the chained sha256 of every token up to its end, and its own tokens, packed."""

    digest: bytes
    tokens: bytes


class BlockTable:
    """The blocks one sequence holds, in order. `blocks` is the live list; a release replaces it."""

    __slots__ = ("blocks",)

    def __init__(self) -> None:
        self.blocks: list[int] = []


class Changes(NamedTuple):
    """What happened since the last drain. taken: blocks whose bytes will differ. stored, removed: index entries."""

    taken: list[int]
    stored: dict[bytes, int]
    removed: tuple[bytes, ...]


class BlockPool:
    """Owns every block id of an arena. Deterministic: equal calls give equal ids.

    A release is idempotent by construction: the table gives its blocks up as it is released.
    """

    def __init__(self, num_blocks: int, *, prefix_cache: bool = True) -> None:
        if num_blocks < 1:
            raise InvalidValue(f"an arena needs at least one block, got {num_blocks}; raise the KV memory")
        self.num_blocks = num_blocks
        self.num_references = 0
        """Sum of all reference counts: equals the summed length of all tables, or blocks have leaked."""
        self._prefix_cache = prefix_cache
        self._free = FreeRuns(num_blocks)
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._refs = [0] * num_blocks
        self._key: list[BlockKey | None] = [None] * num_blocks
        self._index: dict[bytes, int] = {}
        self._slack = min(_SLACK_BLOCKS, num_blocks // 32)
        self._taken: list[int] = []
        self._stored: dict[bytes, int] = {}
        self._removed: dict[bytes, None] = {}
        self._history: deque[tuple[str, int, int]] = deque(maxlen=_HISTORY)

    @property
    def num_free(self) -> int:
        """Blocks that can be taken now, cached ones included."""
        return self._free.total + len(self._cached)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_referenced(self) -> int:
        return self.num_blocks - self.num_free

    def match(self, keys: Iterable[BlockKey]) -> list[int]:
        """Blocks that hold the leading `keys`, full digest and tokens both equal. Takes nothing."""
        found: list[int] = []
        for key in keys:
            block = self._index.get(key.digest)
            if block is None or self._key[block] != key:
                break
            found.append(block)
        return found

    def find(self, digests: Iterable[bytes]) -> list[int]:
        """Blocks of the leading digests. For what names KV by hash alone (a pool); a request uses `match`."""
        found: list[int] = []
        for digest in digests:
            block = self._index.get(digest)
            if block is None:
                break
            found.append(block)
        return found

    def room_beside(self, hits: list[int]) -> int:
        """Blocks still free once `hits` are referenced."""
        return self.num_free - sum(1 for block in hits if self._refs[block] == 0)

    def share(self, table: BlockTable, hits: list[int]) -> None:
        """Append blocks found by `match` to a table."""
        for block in hits:
            if self._refs[block] == 0:
                del self._cached[block]
            self._refs[block] += 1
            self._history.append(("share", block, self._refs[block]))
        self.num_references += len(hits)
        table.blocks.extend(hits)

    def extend(self, table: BlockTable, count: int, room: int = 0) -> bool:
        """Append `count` blocks to a table, contiguous where possible; False (and nothing taken) without room.

        room: blocks the table will probably want later. A few more cached blocks than needed may be given up
        (at most 32, and 1/32 of the arena), so that what grows block by block still finds runs.
        """
        if count > self.num_free:
            return False
        if count <= 0:
            return True
        slack = min(room, self._slack)
        while self._cached and self._free.total < count + slack:
            self._evict()
        after = table.blocks[-1] if table.blocks else None
        taken = self._free.take(count, after=after, room=slack)
        for block in taken:
            self._refs[block] = 1
            self._history.append(("take", block, 1))
        self.num_references += count
        self._taken.extend(taken)
        table.blocks.extend(taken)
        return True

    def commit(self, block: int, key: BlockKey) -> None:
        """The whole block's KV is computed: make it findable. The first block with a key keeps the entry."""
        if not self._prefix_cache or key.digest in self._index:
            return
        self._index[key.digest] = block
        self._key[block] = key
        self._stored[key.digest] = block
        self._removed.pop(key.digest, None)

    def release(self, table: BlockTable) -> int:
        """Give up a table's blocks; returns how many it held. Raises IllegalTransition below zero references.

        The tail becomes the least recently used, so that prefixes outlive what follows them.
        """
        blocks, table.blocks = table.blocks, []
        for block in reversed(blocks):
            refs = self._refs[block] - 1
            self._history.append(("release", block, refs))
            if refs < 0:
                raise IllegalTransition(f"block {block}", "unreferenced", "release", self._past(block))
            self._refs[block] = refs
            if refs == 0:
                if self._key[block] is None:
                    self._free.add(block)
                else:
                    self._cached[block] = None
        self.num_references -= len(blocks)
        return len(blocks)

    def digests(self) -> tuple[bytes, ...]:
        """Hashes of all blocks that can be found, oldest entry first."""
        return tuple(self._index)

    def drain(self) -> Changes:
        """What changed since the last call."""
        changes = Changes(self._taken, self._stored, tuple(self._removed))
        self._taken, self._stored, self._removed = [], {}, {}
        return changes

    @property
    def has_changes(self) -> bool:
        return bool(self._taken or self._stored or self._removed)

    def check(self, tables: Iterable[BlockTable]) -> int:
        """Compare every block with the tables alive. Returns how many blocks leaked (must be 0): held by no table,
        yet neither free nor cached. Raises IllegalTransition when a block is two things at once. O(num_blocks)."""
        held = [0] * self.num_blocks
        for table in tables:
            for block in table.blocks:
                held[block] += 1
        free = [0] * self.num_blocks
        for block in self._free.blocks():
            free[block] += 1
        leaked = 0
        for block in range(self.num_blocks):
            refs, cached = self._refs[block], block in self._cached
            key = self._key[block]
            indexed = key is not None and self._index.get(key.digest) == block
            places = free[block] + cached + (refs > 0)
            if (
                places > 1
                or held[block] > refs
                or cached > indexed
                or (key is not None) != indexed
                or free[block] & indexed
            ):
                state = f"free {free[block]}, cached {cached}, indexed {indexed}, references {refs}"
                raise IllegalTransition(f"block {block}", state, f"check ({held[block]} in tables)", self._past(block))
            leaked += places == 0 or refs > held[block]
        return leaked

    def _evict(self) -> None:
        block, _ = self._cached.popitem(last=False)
        key = self._key[block]
        if key is None:
            raise IllegalTransition(f"block {block}", "cached without a key", "evict", self._past(block))
        self._key[block] = None
        del self._index[key.digest]
        self._stored.pop(key.digest, None)
        self._removed[key.digest] = None
        self._history.append(("evict", block, 0))
        self._free.add(block)

    def _past(self, block: int) -> tuple[str, ...]:
        return tuple(f"{what} ({refs} references)" for what, id_, refs in self._history if id_ == block)
