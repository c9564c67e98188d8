"""Arena blocks for KV that the engine still has of a request which ended, until it is saved in them: the answer, which
the next turn of a chat begins with. Only where there is room to spare."""

from __future__ import annotations

from nodes.core.blocks import BlockKey, BlockPool, BlockTable
from nodes.core.events import Effect
from nodes.core.jobs import Keep, Keeping, Kept
from transfer.kv.block import block_hashes
from transfer.terms import pack_tokens

ROOM_SHARE = 8
"""One request is given at most this part (1/n) of the arena, and as much is left free beside it."""


class Keeps:
    """A keep is a block table without a sequence. It has no lease: the engine may write until it has let go (Kept)."""

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        self._pool, self._block_size = pool, block_size
        self._tables: dict[str, tuple[BlockTable, list[BlockKey], int]] = {}

    def keep(self, event: Keep, now: float, effects: list[Effect]) -> None:
        pool, table, keys = self._pool, BlockTable(), self._keys(event)
        hits = pool.match(keys)
        wanted, most = len(keys) - len(hits), pool.num_blocks // ROOM_SHARE
        if 0 < wanted <= most and pool.room_beside(hits) >= wanted + most:
            pool.share(table, hits)
            pool.extend(table, wanted)
            self._tables[event.name] = (table, keys, len(hits))
        effects.append(Keeping(name=event.name, blocks=list(table.blocks), num_cached=len(hits)))

    def kept(self, event: Kept) -> None:
        """Idempotent."""
        if event.name not in self._tables:
            return
        table, keys, first = self._tables.pop(event.name)
        if event.is_saved:
            self._pool.commit_all(table.blocks[first:], keys[first:])
        self._pool.release(table)

    def tables(self) -> list[BlockTable]:
        return [table for table, _, _ in self._tables.values()]

    def _keys(self, event: Keep) -> list[BlockKey]:
        size = self._block_size
        return [
            BlockKey(digest, pack_tokens(event.tokens[index * size : (index + 1) * size]))
            for index, digest in enumerate(block_hashes(event.tokens, size, event.root))
        ]
