"""Write-through: finished whole blocks go to a KV pool in the background, one request at a time.

Never in the way: the queue is bounded, what does not fit is dropped and counted, and a store gives way when the
instance has to refuse work for want of blocks. A prefix goes to the same pool node as long as that takes it (weighted
rendezvous hash); one that does not is left alone for a while and its prefixes go to their next choice.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from nodes.core.events import Event, Pin, Pinned, Unpin, Unpinned
from nodes.roles.context import Link, RoleContext
from nodes.roles.recent import RecentHashes
from transfer.errors import KvError
from transfer.kv.block import block_hashes
from transfer.kv.port import KvKind, KvOffer, KvSender, KvTrailer
from transfer.terms import InstanceId, RequestId, TokenIds
from transfer.wire.messages import KvPeer, PoolMap, PoolPeer

MAX_KNOWN = 65_536
KNOWN_FOR_S = 60.0
"""A block that a pool had is not offered again for this long; by then it may have been evicted there."""
REST_S, MAX_REST_S = 2.0, 64.0
"""A pool that takes nothing is asked again after the first, doubled each time, up to the second."""
ARENA_SHARE = 8
"""One store pins at most this part (1/n) of the arena."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Finished:
    request_id: RequestId
    tokens: TokenIds
    root: bytes


@dataclass(frozen=True, slots=True)
class _Pool:
    peer: KvPeer
    weight: float


@dataclass(slots=True)
class _Rest:
    """A pool that refused: not asked before until_s, and then rested for twice as long if it refuses again."""

    until_s: float
    next_s: float


class PoolWriter:
    """`handle` puts an event into the core; the core answers Pin through `pinned` before it returns."""

    def __init__(self, context: RoleContext, link: Link, handle: Callable[[Event], None]) -> None:
        self._context, self._link, self._handle = context, link, handle
        self._pools: tuple[_Pool, ...] = ()
        self._rests: dict[InstanceId, _Rest] = {}
        self._queue: deque[_Finished] = deque()
        self._queued = asyncio.Event()
        self._known = RecentHashes(MAX_KNOWN, KNOWN_FOR_S)
        self._pinned: list[int] = []
        self._timeout: asyncio.Timeout | None = None
        self._sender: KvSender | None = None
        self._num_stores = 0
        self.num_stored_blocks = self.num_dropped = self.num_failed = 0

    def set_pools(self, message: PoolMap) -> None:
        """The pools that take puts from now on. What the old ones had says nothing about new lives of them."""
        pools = message.pools if self._context.shares_kv else ()
        before, self._pools = self._pools, tuple(_pool(one) for one in pools)
        lives = [one.peer for one in self._pools]
        if lives != [one.peer for one in before]:
            self._known.clear()
            self._rests = {one.instance_id: self._rests[one.instance_id] for one in lives
                           if one.instance_id in self._rests and one in [was.peer for was in before]}  # fmt: skip

    @property
    def num_pending(self) -> int:
        """Stores that wait, and the one in progress."""
        return len(self._queue) + (self._timeout is not None)

    def offer(self, request_id: RequestId, tokens: TokenIds, root: bytes) -> None:
        """KV of `tokens` is in the prefix cache: store its whole blocks some time. Never blocks."""
        if not self._pools or len(tokens) < self._context.block_size:
            return
        if len(self._queue) >= self._context.bounds.store_queue:
            self.num_dropped += 1
            return
        self._queue.append(_Finished(request_id, tokens, root))
        self._queued.set()

    def give_way(self) -> None:
        """Blocks are short: end the store in progress and let its blocks go."""
        if self._timeout is not None and not self._timeout.expired():  # it may be giving way already
            self.num_dropped += 1
            self._timeout.reschedule(asyncio.get_running_loop().time())

    def pinned(self, effect: Pinned) -> None:
        self._pinned = effect.blocks

    def unpinned(self, effect: Unpinned) -> None:
        """The core took a pin back: its blocks may change from here on."""
        if self._sender is not None:
            self._sender.abort("the blocks are needed")

    async def run(self) -> None:
        """Store what is offered, until cancelled."""
        while True:
            while not self._queue:
                self._queued.clear()
                await self._queued.wait()
            finished = self._queue.popleft()
            try:
                async with asyncio.timeout(self._context.bounds.store_s) as self._timeout:
                    await self._store(finished)
            except (KvError, TimeoutError) as error:
                self.num_failed += 1
                _log.debug("a write to the KV pool ended: %s", error or "no time left")
            finally:
                self._timeout = None

    async def _store(self, finished: _Finished) -> None:
        context, loop = self._context, asyncio.get_running_loop()
        hashes = block_hashes(finished.tokens, context.block_size, finished.root)
        first = self._known.num_leading(hashes, loop.time())
        wanted = tuple(hashes[first : first + max(1, context.engine.num_blocks // ARENA_SHARE)])
        if not wanted or not self._pools:
            return
        self._num_stores += 1
        name = f"{context.instance_id}/store-{self._num_stores}"
        pool = self._choose(hashes[0], loop.time())
        if pool is None:
            self.num_dropped += 1
            return
        self._pinned = []
        self._handle(Pin(name=name, hashes=wanted, lease_s=2 * context.bounds.store_s))
        try:
            await self._push(name, pool, finished, first, wanted[: len(self._pinned)], self._pinned)
        finally:
            if self._sender is not None:
                self._sender.abort("the store was given up")
                self._sender = None
            self._handle(Unpin(name=name))

    async def _push(
        self, name: str, pool: KvPeer, finished: _Finished, first: int, hashes: tuple[bytes, ...], blocks: list[int]
    ) -> None:
        if not blocks:
            return
        context, loop = self._context, asyncio.get_running_loop()
        offer = KvOffer(
            kind=KvKind.STORE, request_id=name, generation=0, source=context.instance_id,
            source_epoch=context.epoch, target_epoch=pool.epoch, fingerprint=finished.root, first_block=first,
            num_blocks=len(blocks), hashes=hashes, user=finished.request_id,
        )  # fmt: skip
        try:
            self._sender = await context.port.open(pool, offer, blocks, context.bounds.open_s)
        except KvError:
            self._refused(pool, loop.time())
            raise
        self._rests.pop(pool.instance_id, None)
        for layer in range(context.engine.layout.num_layers):
            self._sender.push(layer, first, len(blocks))
        await asyncio.sleep(self._link.needs_s(len(blocks) * context.block_size))
        trailer = KvTrailer(num_tokens=(first + len(blocks)) * context.block_size)
        await self._sender.commit(trailer, context.bounds.store_s)
        self._sender = None
        self.num_stored_blocks += len(blocks)
        self._known.see(hashes, loop.time())

    def _choose(self, first_hash: bytes, now: float) -> KvPeer | None:
        """The pool for prefixes that begin so, among those that took what they were offered."""
        taking = tuple(one for one in self._pools
                       if (rest := self._rests.get(one.peer.instance_id)) is None or now >= rest.until_s)  # fmt: skip
        return _rendezvous(first_hash, taking) if taking else None

    def _refused(self, pool: KvPeer, now: float) -> None:
        """It is full or cannot be reached: it gets no offer for a while."""
        before = self._rests.get(pool.instance_id)
        rest_s = before.next_s if before is not None else REST_S
        self._rests[pool.instance_id] = _Rest(now + rest_s, min(MAX_REST_S, 2.0 * rest_s))


def _pool(one: PoolPeer) -> _Pool:
    peer = KvPeer(
        instance_id=one.instance_id, epoch=one.epoch, data_endpoint=one.data_endpoint, host_id=one.host_id
    )  # fmt: skip
    return _Pool(peer, one.weight)


def _rendezvous(first_hash: bytes, pools: tuple[_Pool, ...]) -> KvPeer:
    """Highest -w / ln(u), u drawn from both names: each pool gets its weight's share of prefixes, and one that joins,
    leaves or changes weight moves only its own share (weighted rendezvous hashing, Schindelhauer, Schomaker 2005)."""

    def score(one: _Pool) -> tuple[float, InstanceId]:
        digest = hashlib.sha256(first_hash + one.peer.instance_id.encode()).digest()
        unit = (int.from_bytes(digest[:8], "big") + 0.5) / 2.0**64
        return -one.weight / math.log(min(unit, 1.0 - 2.0**-53)), one.peer.instance_id

    return max(pools, key=score).peer
