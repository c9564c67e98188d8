"""The kv_pool role: DRAM that keeps KV blocks by content and gives them to whoever asks for their hashes.

Puts and gets come through the instance's KV port; only what was committed is ever served.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Sequence

from nodes.pool.store import PoolStore
from nodes.roles.cache import CacheFeed
from nodes.roles.refusals import refusal
from transfer.errors import Refused
from transfer.kv.arena import KvArena
from transfer.kv.port import KvFetch, KvKind, KvOffer, KvPort, KvTrailer
from transfer.terms import InstanceId, Role
from transfer.wire.messages import (
    Abort,
    CacheSnapshotWanted,
    Holding,
    LoadReport,
    Message,
    Migrate,
    Prefill,
    Released,
    Reserve,
)

WRITE_S = 30.0
PIN_S = 60.0
"""Longest a put without progress and a get may hold blocks; the port ends both sooner."""
TICK_S = 1.0


class PoolRole:
    """InstanceRole over a PoolStore. Holds nothing for requests, so it is always idle."""

    role = Role.KV_POOL
    idle = True

    def __init__(
        self, instance_id: InstanceId, epoch: int, arena: KvArena, port: KvPort, send: Callable[[Message], None],
        cache_events_s: float = 0.05,
    ) -> None:  # fmt: skip
        self._instance_id, self._arena, self._port, self._send = instance_id, arena, port, send
        self.store = PoolStore(arena.num_blocks)
        self._feed = CacheFeed(epoch, send, cache_events_s)
        self._offers: dict[Hashable, KvOffer] = {}
        self._ticker: asyncio.TimerHandle | None = None

    def start(self) -> None:
        self._tick()

    def receive(self, message: Message) -> None:
        match message:
            case CacheSnapshotWanted():
                self.snapshot()
            case Abort():
                self._send(Released(request_id=message.request_id, generation=message.generation, num_blocks=0))
            case Prefill() | Reserve() | Migrate():
                self._send(refusal(message, self._not_mine()))

    def holdings(self) -> tuple[Holding, ...]:
        return ()

    def load(self) -> LoadReport:
        return LoadReport(
            num_blocks=self.store.num_blocks,
            free_blocks=self.store.free_blocks,
            cached_blocks=self.store.cached_blocks,
            leaked_blocks=self.store.leaked_blocks(),
        )

    def snapshot(self) -> None:
        self._feed.snapshot(self.store.hashes())

    def drop_all(self, reason: str) -> None:
        """Nothing here belongs to a request; content stays good whoever the control plane is."""

    async def drain(self, timeout_s: float) -> bool:
        return True

    async def close(self) -> None:
        self._feed.close()
        if self._ticker is not None:
            self._ticker.cancel()

    # --- KvDelegate -----------------------------------------------------------------------------------------

    def kv_offered(self, offer: KvOffer) -> Sequence[int]:
        if offer.kind is not KvKind.STORE:
            raise Refused(self._not_mine())
        key = _key(offer)
        reserved = self.store.reserve(key, offer.hashes, self._now() + WRITE_S)
        self._offers[key] = offer
        for block in reserved.taken:
            self._arena.bump(block)
        self._feed.change((), reserved.evicted)
        return reserved.blocks

    def kv_progress(self, offer: KvOffer) -> None:
        self.store.renew(_key(offer), self._now() + WRITE_S)

    def kv_arrived(self, offer: KvOffer, trailer: KvTrailer) -> None:
        key = _key(offer)
        if self._offers.pop(key, None) is None:
            raise Refused("this write to the pool took too long and was given up")
        self._feed.change(self.store.commit(key), ())

    def kv_failed(self, offer: KvOffer, reason: str) -> None:
        self._offers.pop(_key(offer), None)
        self.store.release(_key(offer))

    def kv_wanted(self, fetch: KvFetch) -> Sequence[int]:
        return self.store.pin(fetch, fetch.hashes, self._now() + PIN_S)

    def kv_served(self, fetch: KvFetch) -> None:
        self.store.unpin(fetch)

    def _tick(self) -> None:
        loop = asyncio.get_running_loop()
        self._ticker = loop.call_later(TICK_S, self._tick)
        for key in self.store.overdue_writes(loop.time()):
            offer = self._offers.pop(key)
            self._port.revoke(offer.request_id, offer.generation)
            self.store.release(key)
        self.store.drop_overdue_pins(loop.time())

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    def _not_mine(self) -> str:
        return f"{self._instance_id} is a kv_pool node: it stores and serves KV blocks and runs no request"


def _key(offer: KvOffer) -> Hashable:
    return offer.source, offer.source_epoch, offer.request_id, offer.generation
