"""A simulated kv_pool: the pool's own index and policy over two tiers, and what reads and writes of each take.

nodes/roles/kv_pool.py and nodes/pool/keeper.py in simulated time. No byte is kept.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING

from controlplane.sim.disk import SimDisk
from controlplane.sim.feed import CacheFeed
from controlplane.sim.node import SimNode
from controlplane.sim.spec import NodeSpec
from nodes.pool.policy import make_policy
from nodes.pool.store import SKIP, PoolStore
from transfer.errors import Refused
from transfer.profile import HardwareProfile
from transfer.terms import InstanceId, RequestId
from transfer.wire.messages import (
    PROTOCOL_VERSION,
    Abort,
    CacheSnapshotWanted,
    Hello,
    LoadReport,
    Message,
    Migrate,
    MigrateFailed,
    Prefill,
    PrefillFailed,
    Released,
    Replicate,
    Replicated,
    Reserve,
    ReserveRefused,
    RoleOrder,
    RoleReport,
    Welcome,
)

if TYPE_CHECKING:
    from controlplane.sim.world import World

WRITE_S, LEASE_S = 30.0, 60.0
MAX_COPIES, MAX_WAITING = 2, 32
MAX_PUTS = 4096
"""Requests remembered by what they have put."""


class SimPool(SimNode):
    """Holds nothing for requests. lease and reserve are answered at once; how long the bytes take is the caller's, by
    links and, for what comes from SSD, by the time that lease tells."""

    def __init__(self, world: World, spec: NodeSpec, epoch: int) -> None:
        super().__init__(world, spec, epoch)
        self.disk = SimDisk(world, spec.ssd_blocks, self._ssd_removed) if spec.ssd_blocks else None
        self.store = PoolStore(
            spec.num_blocks, make_policy(spec.num_blocks), ssd_blocks=self.disk.capacity if self.disk else 0
        )
        if self.disk is not None:
            self.disk.pinned = self.store.pinned
        self._feed = CacheFeed(world, self)
        self._loads: dict[bytes, float] = {}
        self._puts: dict[RequestId, int] = {}
        self._copies: list[tuple[Replicate, SimPool, int]] = []
        self._waiting: deque[Replicate] = deque()

    def as_pool(self) -> SimPool:
        return self

    def hello(self) -> Hello:
        spec = self.spec
        hardware = HardwareProfile(
            name=spec.hardware, num_gpus=spec.num_gpus, peak_flops=1.0, memory_bytes=1.0, memory_bytes_per_s=1.0,
            link_bytes_per_s=spec.link_bytes_per_s, price_per_hour=spec.price_per_hour,
        )  # fmt: skip
        return Hello(
            protocol=PROTOCOL_VERSION, instance_id=self.id, epoch=self.epoch, role=self.role, model=None,
            layout=self.world.layout, engine="dram", hardware=hardware, latency=None, num_blocks=spec.num_blocks,
            data_endpoint=f"sim://{self.id}", host_id=self.nic.host,
        )  # fmt: skip

    def receive(self, message: Message) -> None:
        match message:
            case Welcome():
                self.welcomed = True
                self._feed.snapshot(self.store.hashes(), self.store.ssd_hashes())
                self.beat()
            case CacheSnapshotWanted():
                self._feed.snapshot(self.store.hashes(), self.store.ssd_hashes())
            case Replicate():
                self._copy(message)
            case Abort():
                self.send(Released(request_id=message.request_id, generation=message.generation, num_blocks=0))
            case RoleOrder():
                detail = f"{self.id} is a kv_pool: it has only memory"
                self.send(RoleReport(
                    plan_id=message.plan_id, epoch=self.epoch, role=self.role, ok=message.role is self.role,
                    detail="" if message.role is self.role else detail,
                ))  # fmt: skip
            case Reserve() | Prefill() | Migrate():
                self._refuse(message)

    def load(self) -> LoadReport:
        store = self.store
        return LoadReport(
            num_blocks=store.num_blocks, free_blocks=store.free_blocks, cached_blocks=store.cached_blocks,
            leaked_blocks=store.leaked_blocks(), ssd_blocks=store.ssd_blocks, ssd_capacity_blocks=store.ssd_capacity,
            unsettled=store.unsettled_blocks,
        )  # fmt: skip

    def tick(self) -> None:
        now = self.world.now
        for key in self.store.overdue_writes(now):
            self.store.release(key)
        self.store.end_overdue(now)
        self._settle()

    def peer_lost(self, instance_id: InstanceId) -> None:
        for order, target, _ in list(self._copies):
            if target.id == instance_id:
                self._copied(order, 0, f"{instance_id} is gone")

    # --- puts and gets ------------------------------------------------------------------------------------------

    def num_new(self, hashes: Sequence[bytes]) -> int:
        """Of these, how many are not here yet."""
        return len(hashes) - self.store.lookup(hashes)

    def num_put_by(self, request_id: RequestId) -> int:
        """Leading blocks that this request has put here, from whichever instance."""
        return self._puts.get(request_id, 0)

    def put_by(self, request_id: RequestId, num_blocks: int) -> None:
        self._puts[request_id] = num_blocks
        if len(self._puts) > MAX_PUTS:
            del self._puts[next(iter(self._puts))]

    def reserve(self, key: Hashable, hashes: Sequence[bytes], user: str | None = None) -> int:
        """How many of them are new here and must be sent. Raises Refused when there is no room."""
        now = self.world.now
        reserved = self.store.reserve(key, hashes, now, now + WRITE_S, user)
        self._tell()
        return sum(block != SKIP for block in reserved.blocks)

    def commit(self, key: Hashable) -> None:
        self.store.commit(key, self.world.now)
        self._settle()

    def release(self, key: Hashable) -> None:
        self.store.release(key)

    def lease(self, key: Hashable, hashes: Sequence[bytes], user: str | None = None) -> tuple[int, float]:
        """(leading blocks that will be in memory, when the last of them is)."""
        now = self.world.now
        lease = self.store.lease(key, hashes, now, now + LEASE_S, user)
        for h, _ in lease.loads:
            if self.disk is not None:
                self._loads[h] = done_s = self.disk.read(h)
                self.world.heap.at(done_s, self._loaded, h)
        self._tell()
        return len(lease.blocks), max((self._loads.get(h, now) for h in lease.waiting), default=now)

    def unlease(self, key: Hashable) -> None:
        self.store.unlease(key)
        self._settle()

    # --- between the tiers --------------------------------------------------------------------------------------

    def _loaded(self, h: bytes) -> None:
        self._loads.pop(h, None)
        if self.disk is not None:
            self.disk.has_read(h)
        self.store.loaded(h, True, self.world.now)
        self._settle()

    def _spilled(self, h: bytes, ok: bool) -> None:
        self.store.spilled(h, ok)
        self._settle()

    def _ssd_removed(self, h: bytes) -> None:
        self.store.ssd_removed(h)

    def _settle(self) -> None:
        """Start the writes to SSD that the index wants now, and tell what has changed."""
        spills = self.store.trim()
        if self.disk is not None:
            for h, _ in (*spills, *self.store.next_spills()):
                self.disk.write(h, self._spilled)
        self._tell()

    def _tell(self) -> None:
        changes = self.store.take_changes()
        if changes is not None:
            self._feed.change(changes.stored, changes.removed, changes.stored_ssd)

    # --- copies of hot prefixes ---------------------------------------------------------------------------------

    def _copy(self, order: Replicate) -> None:
        if order.epoch != self.epoch:
            self._answer(order, 0, f"{self.id} was restarted since the order was given")
        elif len(self._copies) + len(self._waiting) >= MAX_WAITING:
            self._answer(order, 0, f"{self.id} has {MAX_WAITING} copies to make already; ask again later")
        elif len(self._copies) >= MAX_COPIES:
            self._waiting.append(order)
        else:
            self._begin_copy(order)

    def _begin_copy(self, order: Replicate) -> None:
        world, key = self.world, ("replicate", order.name)
        target = world.pool(order.target.instance_id)
        if target is None or target.epoch != order.target.epoch:
            self._answer(order, 0, f"{order.target.instance_id} cannot be reached")
            return
        count, read_s = self.lease(key, order.hashes)
        try:
            num_new = target.reserve((self.id, *key), order.hashes[:count]) if count else 0
        except Refused as error:
            count, reason = 0, str(error)
        else:
            reason = "" if count else "none of the blocks is here any more"
        if not count:
            self.unlease(key)
            self._answer(order, 0, reason)
            return
        self._copies.append((order, target, count))
        sent_s = world.links.book(self.nic, target.nic, world.num_bytes(num_new), world.now, world.now)
        world.heap.at(max(sent_s, read_s), self._sent, order)

    def _sent(self, order: Replicate) -> None:
        found = next((one for one in self._copies if one[0] is order), None)
        if found is not None and self.alive:
            found[1].commit((self.id, "replicate", order.name))
            self._copied(order, found[2], "")

    def _copied(self, order: Replicate, count: int, reason: str) -> None:
        self._copies = [one for one in self._copies if one[0] is not order]
        self.unlease(("replicate", order.name))
        self._answer(order, count, reason)
        if self._waiting and len(self._copies) < MAX_COPIES:
            self._begin_copy(self._waiting.popleft())

    def _answer(self, order: Replicate, count: int, reason: str) -> None:
        self.send(Replicated(name=order.name, epoch=self.epoch, num_blocks=count, reason=reason))

    def _refuse(self, order: Reserve | Prefill | Migrate) -> None:
        reason = f"{self.id} is a kv_pool node: it stores and serves KV blocks and runs no request"
        name, generation = order.request_id, order.generation
        match order:
            case Reserve():
                self.send(ReserveRefused(
                    request_id=name, generation=generation, reason=reason, retry=False, free_blocks=0
                ))  # fmt: skip
            case Prefill():
                self.send(PrefillFailed(request_id=name, generation=generation, reason=reason))
            case Migrate():
                self.send(MigrateFailed(request_id=name, generation=generation, reason=reason))
