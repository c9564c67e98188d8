"""The kv_pool role: memory and SSD that keep KV blocks by content and give them to whoever asks for their hashes.

Puts, gets and questions come through the instance's KV port; only what was committed, of the right name and checksum
is ever served, all else is a miss. Standalone pools (nodes/kvpool.py) run it without a control plane.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable, Sequence
from dataclasses import asdict

from nodes.pool.index import Changes
from nodes.pool.keeper import Keeper
from nodes.pool.policy import EvictionPolicy
from nodes.pool.policy_reuse import ReusePolicy
from nodes.pool.store import PoolStore
from nodes.pool.tiers import SsdTier
from nodes.roles.cache import CacheFeed
from nodes.roles.refusals import refusal
from nodes.roles.replication import Replicator
from transfer.errors import Refused
from transfer.kv.arena import KvArena
from transfer.kv.port import KvAnswer, KvAsk, KvAskKind, KvFetch, KvKind, KvOffer, KvPort, KvTrailer
from transfer.terms import MAX_ID_CHARS, InstanceId, Role
from transfer.wire.messages import (
    Abort,
    CacheSnapshotWanted,
    Holding,
    LoadReport,
    Message,
    Migrate,
    Prefill,
    Released,
    Replicate,
    Reserve,
)

TICK_S = 1.0
MAX_PIN_S = 86_400.0


class PoolRole:
    """InstanceRole over a Keeper. Holds nothing for requests, so it is always idle. Owns `ssd` and closes it."""

    role = Role.KV_POOL
    idle = True

    def __init__(
        self, instance_id: InstanceId, epoch: int, arena: KvArena, port: KvPort, send: Callable[[Message], None],
        cache_events_s: float = 0.05, *, ssd: SsdTier | None = None, policy: EvictionPolicy | None = None,
    ) -> None:  # fmt: skip
        self._instance_id, self._epoch, self._port, self._send = instance_id, epoch, port, send
        self._feed = CacheFeed(epoch, send, cache_events_s)
        self._offers: dict[Hashable, KvOffer] = {}
        self._ticker: asyncio.TimerHandle | None = None
        policy = policy if policy is not None else ReusePolicy(arena.num_blocks)
        self.store = PoolStore(arena.num_blocks, policy, ssd_blocks=ssd.capacity if ssd is not None else 0)
        self.keeper = Keeper(self.store, arena, ssd, self._changed, self._revoke)
        self._copies = Replicator(instance_id, epoch, arena.layout, self.keeper, port, send)

    def start(self) -> None:
        self._tick()

    def receive(self, message: Message) -> None:
        match message:
            case CacheSnapshotWanted():
                self.snapshot()
            case Replicate():
                self._copies.begin(message)
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
            leaked_blocks=self.keeper.leaked_blocks(),
            ssd_blocks=self.store.ssd_blocks,
            ssd_capacity_blocks=self.store.ssd_capacity,
            unsettled=self.store.unsettled_blocks,
        )

    def snapshot(self) -> None:
        self._feed.snapshot(self.store.hashes(), self.store.ssd_hashes())

    def drop_all(self, reason: str) -> None:
        """Nothing here belongs to a request; content stays good whoever the control plane is."""

    async def drain(self, timeout_s: float) -> bool:
        return True

    async def close(self) -> None:
        self._feed.close()
        if self._ticker is not None:
            self._ticker.cancel()
        await self._copies.close()
        await self.keeper.close()
        self._feed.close()

    def stats(self) -> dict[str, float]:
        """Sizes in blocks, and counters since this life began."""
        store, ssd = self.store, self.keeper.ssd
        stats: dict[str, float] = {
            "dram_capacity_blocks": store.num_blocks, "dram_blocks": store.cached_blocks,
            "free_blocks": store.free_blocks, "writing_blocks": store.writing_blocks,
            "loading_blocks": store.loading_blocks, "spilling_blocks": store.spilling_blocks,
            "held_blocks": store.pinned_blocks, "leaked_blocks": self.keeper.leaked_blocks(),
            "num_evicted": store.num_evicted, "num_hits": store.num_hits, "num_misses": store.num_misses,
            "num_replicated": self._copies.num_blocks, "ssd_blocks": store.ssd_blocks,
            "ssd_capacity_blocks": store.ssd_capacity,
        }  # fmt: skip
        if ssd is not None:
            found = {f"found_{name}": value for name, value in asdict(ssd.found).items()}
            stats |= {f"ssd_{name}": value for name, value in (asdict(ssd.stats) | found).items()}
        return stats

    # --- KvDelegate -----------------------------------------------------------------------------------------

    def kv_offered(self, offer: KvOffer) -> Sequence[int]:
        if offer.kind is not KvKind.STORE:
            raise Refused(self._not_mine())
        reserved = self.keeper.reserve(_key(offer), offer.hashes, _user(offer.user or offer.request_id))
        self._offers[_key(offer)] = offer
        return reserved.blocks

    def kv_progress(self, offer: KvOffer) -> None:
        self.keeper.renew(_key(offer))

    def kv_arrived(self, offer: KvOffer, trailer: KvTrailer) -> None:
        if self._offers.pop(_key(offer), None) is None:
            raise Refused("this write to the pool took too long and was given up")
        self.keeper.commit(_key(offer))

    def kv_failed(self, offer: KvOffer, reason: str) -> None:
        self._offers.pop(_key(offer), None)
        self.keeper.release(_key(offer))

    def kv_wanted(self, fetch: KvFetch) -> Sequence[int] | Awaitable[Sequence[int]]:
        return self.keeper.read(fetch, fetch.hashes, _user(fetch.request_id))

    def kv_served(self, fetch: KvFetch) -> None:
        self.keeper.done(fetch)

    def kv_asked(self, ask: KvAsk) -> KvAnswer:
        match ask.kind:
            case KvAskKind.LOOKUP:
                return KvAnswer(epoch=self._epoch, num_blocks=self.store.lookup(ask.hashes))
            case KvAskKind.PIN:
                return KvAnswer(epoch=self._epoch, num_blocks=self._pin(ask))
            case KvAskKind.UNPIN:
                self.store.unpin(_pin_name(ask))
                return KvAnswer(epoch=self._epoch)
            case KvAskKind.STATS:
                return KvAnswer(epoch=self._epoch, stats=self.stats())

    # --- helpers --------------------------------------------------------------------------------------------

    def _pin(self, ask: KvAsk) -> int:
        if not 0 < ask.ttl_s <= MAX_PIN_S:
            raise Refused(f"a pin's ttl_s must be above 0 and at most {MAX_PIN_S:g} s, got {ask.ttl_s:g}")
        return self.store.pin(_pin_name(ask), ask.hashes, self._now() + ask.ttl_s)

    def _changed(self, changes: Changes) -> None:
        self._feed.change(changes.stored, changes.removed, changes.stored_ssd)

    def _revoke(self, key: Hashable) -> None:
        late = self._offers.get(key)
        if late is None:  # it was ended with another
            return
        self._port.revoke(late.request_id, late.generation)
        for other, offer in list(self._offers.items()):  # a put of another peer that has the same name was ended too
            if offer.request_id == late.request_id and offer.generation <= late.generation:
                del self._offers[other]
                self.keeper.release(other)

    def _tick(self) -> None:
        self._ticker = asyncio.get_running_loop().call_later(TICK_S, self._tick)
        self.keeper.tick()

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    def _not_mine(self) -> str:
        return f"{self._instance_id} is a kv_pool node: it stores and serves KV blocks and runs no request"


def _key(offer: KvOffer) -> Hashable:
    return offer.source, offer.source_epoch, offer.request_id, offer.generation


def _user(request_id: str) -> str:
    """It is kept for as long as a block: what a peer sends as one must not be long."""
    return request_id[:MAX_ID_CHARS]


def _pin_name(ask: KvAsk) -> Hashable:
    if not 0 < len(ask.name) <= MAX_ID_CHARS:
        raise Refused(f"a pin needs a name of 1 to {MAX_ID_CHARS} characters, got {len(ask.name)}")
    return ask.source, ask.name
