"""What a role is given by its instance: identity, engine, port, a way to tell the control plane, and bounds."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from dataclasses import dataclass, field

from nodes.core.residency import BatchConfig
from nodes.engines.engine import Engine
from nodes.engines.served import ServedEngine
from transfer.kv.port import KvPort
from transfer.terms import InstanceId, KvLayout, ModelIdentity, kv_fingerprint
from transfer.wire.messages import KvPeer, Message


@dataclass(frozen=True)
class Bounds:
    """Deadlines and sizes of a role, seconds and counts.

    open_s, fetch_s: longest wait for a grant, for a pool's answer. step_s: longest one engine step may take
    before the engine counts as failed. tick_s: how often leases are looked at. cache_events_s: cache changes
    are told together at least this far apart. store_queue: finished requests waiting for write-through.
    """

    open_s: float = 5.0
    fetch_s: float = 5.0
    store_s: float = 10.0
    step_s: float = 120.0
    tick_s: float = 0.25
    cache_events_s: float = 0.05
    store_queue: int = 64


@dataclass(frozen=True)
class RoleContext:
    """One instance's life. `send` never raises and never blocks: what cannot be sent now is dropped, as on a
    connection that breaks (the control plane places such work again)."""

    instance_id: InstanceId
    epoch: int
    host_id: str
    engine: Engine | ServedEngine
    port: KvPort
    send: Callable[[Message], None]
    config: BatchConfig
    bounds: Bounds = field(default_factory=Bounds)

    @property
    def block_size(self) -> int:
        return self.engine.layout.block_size

    @property
    def shares_kv(self) -> bool:
        """Whether KV can come into the engine and out of it at all."""
        return not isinstance(self.engine, ServedEngine) or self.engine.shares_kv

    def root(self, salt: str) -> bytes:
        """Root of the block hash chain, and the fingerprint in offers, for one tenant."""
        return _fingerprint(self.engine.model, self.engine.layout, salt)

    def is_me(self, peer: KvPeer) -> bool:
        return peer.instance_id == self.instance_id and peer.epoch == self.epoch


@functools.lru_cache(maxsize=1024)
def _fingerprint(model: ModelIdentity, layout: KvLayout, salt: str) -> bytes:
    return kv_fingerprint(model, layout, salt)


class Link:
    """The wire of an emulated engine: transfers of one instance share its bandwidth. No time where links are real.

    Streaming layer by layer hides under compute all of a step's KV but its last layer, as it would for real.
    """

    def __init__(self, engine: Engine | ServedEngine) -> None:
        self._engine = None if isinstance(engine, ServedEngine) else engine
        self._busy_until = 0.0

    def needs_s(self, num_tokens: int) -> float:
        """Seconds for the KV of that many tokens alone; 0.0 where the link is real."""
        return 0.0 if self._engine is None else self._engine.handoff_s(num_tokens)

    def send(self, num_tokens: int, since: float, now: float) -> float:
        """KV of `num_tokens` tokens, made between `since` and `now`: when it will all have been sent."""
        needed = self.needs_s(num_tokens)
        if self._engine is None or needed <= 0.0:
            return now
        self._busy_until = max(
            max(self._busy_until, since) + needed, now + needed / self._engine.latency.shape.num_layers
        )
        return self._busy_until


async def sleep_until(deadline: float) -> None:
    delay = deadline - asyncio.get_running_loop().time()
    if delay > 0.0:
        await asyncio.sleep(delay)
