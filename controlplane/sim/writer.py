"""Write-through of a simulated instance: finished whole blocks go to a KV pool, one request at a time.

nodes/roles/writer.py in simulated time. A store takes its turn on the links like any other transfer, for the blocks the
pool lacks; what the same request has put into the pool from another instance is not offered again.
"""

from __future__ import annotations

import hashlib
import math
from collections import deque
from typing import TYPE_CHECKING

from nodes.core.counted import made_up_key
from nodes.core.events import Pin, Pinned, Unpin, Unpinned
from transfer.errors import Refused
from transfer.terms import InstanceId, RequestId
from transfer.wire.messages import PoolMap, PoolPeer

if TYPE_CHECKING:
    from controlplane.sim.pool import SimPool
    from controlplane.sim.shell import SimShell
    from controlplane.sim.world import World

MAX_QUEUE = 64
MAX_KNOWN = 65_536
KNOWN_FOR_S = 60.0
STORE_S = 10.0
REST_S, MAX_REST_S = 2.0, 64.0
ARENA_SHARE = 8


class _Store:
    """One under way."""

    __slots__ = ("hashes", "name", "pinned", "pool", "request_id", "upto")

    def __init__(
        self, name: str, request_id: RequestId, pool: SimPool, hashes: tuple[bytes, ...], upto: int, pinned: bool
    ) -> None:
        self.name, self.request_id, self.pool, self.hashes = name, request_id, pool, hashes
        self.upto, self.pinned = upto, pinned


class PoolWriter:
    def __init__(self, world: World, shell: SimShell) -> None:
        self._world, self._shell = world, shell
        self._pools: tuple[PoolPeer, ...] = ()
        self._rests: dict[InstanceId, tuple[float, float]] = {}
        self._queue: deque[tuple[RequestId, list[bytes]]] = deque()
        self._known: dict[bytes, float] = {}
        self._chosen: dict[bytes, SimPool] = {}
        self._store: _Store | None = None
        self._num_pinned = 0
        self._num_stores = 0
        self._waits = False
        self.num_dropped = self.num_failed = self.num_stored_blocks = 0

    def set_pools(self, message: PoolMap) -> None:
        before, self._pools = self._pools, message.pools
        self._chosen.clear()
        lives = [(one.instance_id, one.epoch) for one in self._pools]
        was = [(one.instance_id, one.epoch) for one in before]
        if lives != was:
            self._known.clear()
            self._rests = {name: self._rests[name] for name, epoch in lives
                           if name in self._rests and (name, epoch) in was}  # fmt: skip

    @property
    def num_pending(self) -> int:
        return len(self._queue) + (self._store is not None)

    def offer(self, request_id: RequestId, num_tokens: int) -> None:
        """KV of so many tokens of the request is in the prefix cache: store its whole blocks some time."""
        count = num_tokens // self._world.config.block_size
        if not self._pools or not count:
            return
        if len(self._queue) >= MAX_QUEUE:
            self.num_dropped += 1
            return
        hashes = [key.digest for key in self._world.keys.get(request_id, ())[:count]]
        while len(hashes) < count:
            hashes.append(made_up_key(hashes[-1] if hashes else b"", request_id, len(hashes)).digest)
        self._queue.append((request_id, hashes))
        self._later()

    def give_way(self) -> None:
        """Blocks are short: end the store in progress and let its blocks go."""
        if self._store is not None:
            self.num_dropped += 1
            self._end(self._store, ok=False)

    def pinned(self, effect: Pinned) -> None:
        self._num_pinned = len(effect.blocks)

    def unpinned(self, effect: Unpinned) -> None:
        if self._store is not None and self._store.name == effect.name:
            self._end(self._store, ok=False)

    def peer_lost(self, instance_id: InstanceId) -> None:
        if self._store is not None and self._store.pool.id == instance_id:
            self.num_failed += 1
            self._end(self._store, ok=False)

    # --- one store ----------------------------------------------------------------------------------------------

    def _later(self) -> None:
        """Not within the event that the core handles now."""
        if not self._waits:
            self._waits = True
            self._world.heap.at(self._world.now, self._next)

    def _next(self) -> None:
        self._waits = False
        while self._queue and self._store is None and self._shell.node.alive:
            request_id, hashes = self._queue.popleft()
            self._begin(request_id, hashes)

    def _begin(self, request_id: RequestId, hashes: list[bytes]) -> None:
        world, now = self._world, self._world.now
        first = self._num_known(hashes, now)
        most = max(1, self._shell.node.spec.num_blocks // ARENA_SHARE)
        if first == len(hashes) or not self._pools:
            return
        pool = self._choose(hashes[0], now)
        if pool is None:
            self.num_dropped += 1
            return
        start = max(first, pool.num_put_by(request_id))
        wanted = tuple(hashes[start : first + most])
        if not wanted:
            return
        self._num_stores += 1
        name = f"{self._shell.node.id}/store-{self._num_stores}"
        num_new = pool.num_new(wanted)
        if num_new:  # what is only looked at needs no protection
            self._num_pinned = 0
            self._shell.handle(Pin(name=name, hashes=wanted, lease_s=2 * STORE_S))
            wanted = wanted[: self._num_pinned]
        try:
            if not wanted:
                raise Refused("the blocks are gone already")
            num_new = pool.reserve((name, self._shell.node.epoch), wanted, request_id)
        except Refused:
            if wanted:
                self._refused(pool.id, now)
                self.num_failed += 1
            self._shell.handle(Unpin(name=name))
            return
        if self._rests:
            self._rests.pop(pool.id, None)
        store = self._store = _Store(name, request_id, pool, wanted, start + len(wanted), bool(num_new))
        if not num_new:
            self._end(store, ok=True)
            return
        done_s = world.links.book(self._shell.node.nic, pool.nic, world.num_bytes(num_new), now, now)
        if done_s > now + STORE_S:
            world.heap.at(now + STORE_S, self._late, store)
        else:
            world.heap.at(done_s, self._stored, store)

    def _stored(self, store: _Store) -> None:
        if self._store is store and self._shell.node.alive and store.pool.alive:
            self._end(store, ok=True)
            self._next()

    def _late(self, store: _Store) -> None:
        if self._store is store and self._shell.node.alive:
            self.num_failed += 1
            self._end(store, ok=False)
            self._next()

    def _end(self, store: _Store, *, ok: bool) -> None:
        self._store = None
        key = (store.name, self._shell.node.epoch)
        if ok:
            store.pool.commit(key)
            store.pool.put_by(store.request_id, store.upto)
            self.num_stored_blocks += len(store.hashes)
            self._remember(store.hashes, self._world.now)
        elif store.pool.alive:
            store.pool.release(key)
        if store.pinned:
            self._shell.handle(Unpin(name=store.name))
        if self._queue:
            self._later()

    # --- which pool ---------------------------------------------------------------------------------------------

    def _choose(self, first_hash: bytes, now: float) -> SimPool | None:
        """Among those that took what they were offered, by weighted rendezvous hash."""
        chosen = self._chosen.get(first_hash) if not self._rests else None
        if chosen is not None and chosen.alive:
            return chosen
        best: tuple[float, InstanceId] | None = None
        for one in self._pools:
            rest = self._rests.get(one.instance_id)
            if rest is not None and now < rest[0]:
                continue
            digest = hashlib.sha256(first_hash + one.instance_id.encode()).digest()
            unit = (int.from_bytes(digest[:8], "big") + 0.5) / 2.0**64
            score = (-one.weight / math.log(min(unit, 1.0 - 2.0**-53)), one.instance_id)
            best = score if best is None else max(best, score)
        if best is None:
            return None
        pool = self._world.pool(best[1])
        if pool is not None:
            if not self._rests and len(self._chosen) < MAX_KNOWN:
                self._chosen[first_hash] = pool
            return pool
        self._refused(best[1], now)
        return None

    def _refused(self, pool: InstanceId, now: float) -> None:
        rest_s = self._rests.get(pool, (0.0, REST_S))[1]
        self._rests[pool] = (now + rest_s, min(MAX_REST_S, 2.0 * rest_s))

    def _remember(self, hashes: tuple[bytes, ...], now: float) -> None:
        known = self._known
        known.update(dict.fromkeys(hashes, now))
        if len(known) > MAX_KNOWN:
            self._known = {h: at_s for h, at_s in known.items() if now - at_s <= KNOWN_FOR_S}
            while len(self._known) > MAX_KNOWN:
                del self._known[next(iter(self._known))]

    def _num_known(self, hashes: list[bytes], now: float) -> int:
        known, since = self._known, now - KNOWN_FOR_S
        for index, h in enumerate(hashes):
            if known.get(h, -1.0e18) < since:
                return index
        return len(hashes)
