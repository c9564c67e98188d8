"""Block tables of one arena: allocation, reference counts and the prefix cache. Holds ids and hashes, never KV bytes.

A block is exactly one of free, cached (nobody holds it, its KV can still be found by hash) and referenced.
Cached blocks count as free: they are given up, least recently used first, when memory is needed.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import NamedTuple

from nodes.core.runs import FreeRuns, FreeStack
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

    def __init__(self, num_blocks: int, *, prefix_cache: bool = True, contiguous: bool = True) -> None:
        if num_blocks < 1:
            raise InvalidValue(f"an arena needs at least one block, got {num_blocks}; raise the KV memory")
        self.num_blocks = num_blocks
        self.num_references = 0
        """Sum of all reference counts: equals the summed length of all tables, or blocks have leaked."""
        self._prefix_cache = prefix_cache
        self._free: FreeRuns | FreeStack = FreeRuns(num_blocks) if contiguous else FreeStack(num_blocks)
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._refs = [0] * num_blocks
        self._key: list[BlockKey | None] = [None] * num_blocks
        self._index: dict[bytes, int] = {}
        self._slack = min(_SLACK_BLOCKS, num_blocks // 32) if contiguous else 0
        self._taken: list[int] = []
        self._stored: dict[bytes, int] = {}
        self._removed: dict[bytes, None] = {}
        self._history: deque[tuple[str, list[int]]] = deque(maxlen=_HISTORY)

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
        index, held = self._index, self._key
        for key in keys:
            block = index.get(key[0])
            if block is None or held[block] != key:
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
        refs = self._refs
        return self.num_free - len([block for block in hits if refs[block] == 0])

    def share(self, table: BlockTable, hits: list[int]) -> None:
        """Append blocks found by `match` to a table."""
        refs, cached = self._refs, self._cached
        for block in hits:
            count = refs[block]
            if count == 0:
                del cached[block]
            refs[block] = count + 1
        self._history.append(("share", hits))
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
        short = count + slack - self._free.total
        if short > 0 and self._cached:
            self._evict(min(short, len(self._cached)))
        after = table.blocks[-1] if table.blocks else None
        taken = self._free.take(count, after=after, room=slack)
        refs = self._refs
        for block in taken:
            refs[block] = 1
        self._history.append(("take", taken))
        self.num_references += count
        self._taken.extend(taken)
        table.blocks.extend(taken)
        return True

    def commit(self, block: int, key: BlockKey) -> None:
        """The whole block's KV is computed: make it findable. The first block with a key keeps the entry."""
        self.commit_all([block], [key])

    def commit_all(self, blocks: Sequence[int], keys: Sequence[BlockKey]) -> None:
        """The same for several, in order."""
        if not self._prefix_cache:
            return
        index, held, stored, removed = self._index, self._key, self._stored, self._removed
        for block, key in zip(blocks, keys, strict=True):
            digest = key[0]
            if digest not in index:
                index[digest] = stored[digest] = block
                held[block] = key
                if removed:
                    removed.pop(digest, None)

    def release(self, table: BlockTable) -> int:
        """Give up a table's blocks; returns how many it held. Raises IllegalTransition below zero references.

        The tail becomes the least recently used, so that prefixes outlive what follows them.
        """
        blocks, table.blocks = table.blocks, []
        refs, held, cached = self._refs, self._key, self._cached
        for block in reversed(blocks):
            count = refs[block] - 1
            if count < 0:
                raise IllegalTransition(f"block {block}", "unreferenced", "release", self._past(block))
            refs[block] = count
            if count == 0:
                if held[block] is None:
                    self._free.add(block)
                else:
                    cached[block] = None
        if blocks:
            self._history.append(("release", blocks))
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

    def _evict(self, count: int) -> None:
        """Give up the `count` least recently used cached blocks."""
        index, held, stored, removed, cached = self._index, self._key, self._stored, self._removed, self._cached
        evicted = list(islice(cached, count))
        for block in evicted:
            key = held[block]
            if key is None:
                raise IllegalTransition(f"block {block}", "cached without a key", "evict", self._past(block))
            held[block] = None
            digest = key[0]
            del cached[block], index[digest]
            if stored:
                stored.pop(digest, None)
            removed[digest] = None
        self._history.append(("evict", evicted))
        self._free.add_all(evicted)

    def _past(self, block: int) -> tuple[str, ...]:
        """What happened to a block of late, each with the references it had after; read back from those it has now."""
        found: list[str] = []
        refs = self._refs[block]
        for what, blocks in reversed(self._history):
            if block in blocks:
                found.append(f"{what} ({refs} references)")
                refs += {"release": 1, "share": -1, "take": -1}.get(what, 0)
        return tuple(reversed(found))
