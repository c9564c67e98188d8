"""A pool's store over its memory and its SSD: performs what the index decides, on the event loop, waiting for no disk.

The roles' side (KvDelegate, messages) is nodes/roles/kv_pool.py.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from nodes.pool.index import Changes
from nodes.pool.store import Lease, PoolStore, Reserved
from nodes.pool.tiers import SsdTier
from transfer.kv.arena import KvArena

FLUSH_S = 1.5
"""Longest an orderly end writes to SSD what is in memory only."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class KeeperTimes:
    """write_s, lease_s: longest a put without progress and a get may hold blocks; the port ends both sooner."""

    write_s: float = 30.0
    lease_s: float = 60.0
    flush_s: float = FLUSH_S


class Keeper:
    """changed: told what moved between tiers. revoke: called with the key of a put that took too long, before its
    blocks return. What is not listed here is the store's: pins and lookups need no shell."""

    def __init__(
        self, store: PoolStore, arena: KvArena, ssd: SsdTier | None, changed: Callable[[Changes], None],
        revoke: Callable[[Hashable], None], times: KeeperTimes | None = None,
    ) -> None:  # fmt: skip
        self.store, self.ssd = store, ssd
        self._arena, self._changed, self._revoke = arena, changed, revoke
        self._times = times or KeeperTimes()
        self._loads: dict[bytes, asyncio.Task[None]] = {}
        self._spills: dict[bytes, asyncio.Task[None]] = {}
        self._closing = False
        if ssd is not None:
            ssd.removed, ssd.pinned = self._ssd_removed, store.pinned
            store.ssd_recovered(ssd.hashes())

    # --- puts -----------------------------------------------------------------------------------------------------

    def reserve(self, key: Hashable, hashes: Sequence[bytes], user: str | None = None) -> Reserved:
        """As PoolStore.reserve. Raises Refused."""
        now = self._now()
        reserved = self.store.reserve(key, hashes, now, now + self._times.write_s, user)
        for block in reserved.taken:
            self._arena.bump(block)
        self._tell()
        return reserved

    def renew(self, key: Hashable) -> None:
        self.store.renew(key, self._now() + self._times.write_s)

    def commit(self, key: Hashable) -> tuple[bytes, ...]:
        committed = self.store.commit(key, self._now())
        self.settle()
        return committed

    def release(self, key: Hashable) -> None:
        self.store.release(key)

    # --- gets -----------------------------------------------------------------------------------------------------

    def read(
        self, key: Hashable, hashes: Sequence[bytes], user: str | None = None
    ) -> Sequence[int] | Awaitable[Sequence[int]]:
        """Blocks of the leading `hashes` that are here, kept until `done`. An awaitable when some come from SSD: it may
        be cancelled, and answers fewer when some cannot be read."""
        lease = self._lease(key, hashes, user)
        return self._loaded(lease) if lease.waiting else lease.blocks

    async def read_now(self, key: Hashable, hashes: Sequence[bytes]) -> Sequence[int]:
        """As `read` for no request, awaited."""
        return await self._loaded(self._lease(key, hashes, None))

    def done(self, key: Hashable) -> None:
        """The read has ended, well or badly."""
        self.store.unlease(key)
        self.settle()

    # --- time and the end -----------------------------------------------------------------------------------------

    def tick(self) -> None:
        now = self._now()
        for key in self.store.overdue_writes(now):
            self._revoke(key)
            self.store.release(key)
        self.store.end_overdue(now)
        if self.ssd is not None:
            self.ssd.tick()
        self.settle()

    def settle(self) -> None:
        """Start the writes to SSD that the index wants now, and tell what has changed."""
        if not self._closing:
            for h, block in (*self.store.trim(), *self.store.next_spills()):
                self._begin_spill(h, block)
        self._tell()

    def leaked_blocks(self) -> int:
        """Blocks of either tier that are in no state, or that only one of index and tier knows. Must be 0."""
        on_ssd = self.ssd.num_blocks if self.ssd is not None else 0
        return self.store.leaked_blocks() + abs(self.store.ssd_blocks - on_ssd)

    def check(self) -> int:
        """The same in full, and every book of both tiers. O(blocks)."""
        wrong = self.leaked_blocks() + self.store.check()
        if self.ssd is not None:
            wrong += sum(not self.store.on_ssd(h) for h in self.ssd.hashes())
            wrong += self.ssd.check(at_rest=not (self._loads or self._spills))
        return wrong

    @property
    def busy(self) -> bool:
        """Blocks move between the tiers."""
        return bool(self._loads or self._spills)

    async def close(self) -> None:
        """Write to SSD what is in memory only, as far as time allows, and let the SSD go."""
        self._closing = True
        if self.ssd is None:
            return
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._times.flush_s
        while loop.time() < deadline:
            failed = self.ssd.stats.num_failed
            for h, block in self.store.flush_spills():
                self._begin_spill(h, block)
            if not self._spills:
                break
            await asyncio.wait(
                [*self._spills.values()], timeout=deadline - loop.time(), return_when=asyncio.FIRST_COMPLETED
            )
            if self.ssd.stats.num_failed > failed:
                break  # it is full, or failing
        await self.ssd.close()

    # --- helpers --------------------------------------------------------------------------------------------------

    def _lease(self, key: Hashable, hashes: Sequence[bytes], user: str | None) -> Lease:
        now = self._now()
        lease = self.store.lease(key, hashes, now, now + self._times.lease_s, user)
        for h, block in lease.loads:
            self._arena.bump(block)
            self._loads[h] = self._spawn(self._load(h, block), "load", self._loads, h)
        self._tell()
        return lease

    async def _loaded(self, lease: Lease) -> Sequence[int]:
        loads = [self._loads[h] for h in lease.waiting if h in self._loads]
        if loads:
            await asyncio.wait(loads)  # leaves them alone when this is cancelled: a thread writes into the block
        return self.store.resident(lease, self._now() + self._times.lease_s)

    async def _load(self, h: bytes, block: int) -> None:
        ok = False
        try:
            ok = self.ssd is not None and await self.ssd.read(h, block)
        finally:
            self.store.loaded(h, ok, self._now())
            self.settle()

    def _begin_spill(self, h: bytes, block: int) -> None:
        self._spills[h] = self._spawn(self._spill(h, block), "spill", self._spills, h)

    async def _spill(self, h: bytes, block: int) -> None:
        ok = False
        try:
            ok = self.ssd is not None and await self.ssd.write(h, block)
        finally:
            self._spills.pop(h, None)
            self.store.spilled(h, ok)
            self.settle()

    def _ssd_removed(self, h: bytes) -> None:
        self.store.ssd_removed(h)
        self._tell()

    def _tell(self) -> None:
        changes = self.store.take_changes()
        if changes is not None:
            self._changed(changes)

    def _spawn(
        self, work: Coroutine[Any, Any, None], what: str, tasks: dict[bytes, asyncio.Task[None]], h: bytes
    ) -> asyncio.Task[None]:
        def ended(task: asyncio.Task[None]) -> None:
            if tasks.get(h) is task:
                del tasks[h]
            if not task.cancelled() and (error := task.exception()) is not None:
                _log.error("a %s of the KV pool failed", what, exc_info=error)

        task = asyncio.create_task(work, name=f"pool {what} {h.hex()[:8]}")
        task.add_done_callback(ended)
        return task

    def _now(self) -> float:
        return asyncio.get_running_loop().time()
