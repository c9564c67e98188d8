"""What simulated nodes share: time, the links, the router, each other, and the way to the scheduler core."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from controlplane.core.events import Event, FromNode, NodeMessage
from controlplane.sim.heap import Heap
from controlplane.sim.links import Links
from controlplane.sim.router import Router
from controlplane.sim.spec import SimConfig
from nodes.core.blocks import BlockKey
from transfer.terms import InstanceId, KvLayout, ModelIdentity, RequestId

if TYPE_CHECKING:
    from controlplane.sim.node import SimNode
    from controlplane.sim.pool import SimPool
    from controlplane.sim.stepper import Stepper


class World:
    """keys: of each request's whole prompt blocks, while it is in progress. inbox: events that wait for the core; they
    are all handled before time goes on. dirty: instances that may begin a step when this instant is over."""

    def __init__(self, config: SimConfig, model: ModelIdentity, layout: KvLayout) -> None:
        self.config, self.model, self.layout = config, model, layout
        self.heap = Heap()
        self.links = Links(config.core.same_host_bytes_per_s)
        self.inbox: deque[Event] = deque()
        self.router = Router(self.inbox.append)
        self.nodes: dict[InstanceId, SimNode] = {}
        self.keys: dict[RequestId, tuple[BlockKey, ...]] = {}
        self.dirty: dict[Stepper, None] = {}
        self.busy_s: dict[InstanceId, float] = {}
        """Seconds of steps, over all lives and roles."""
        self.num_moves = 0
        self.num_preemptions = 0
        """Of instances that are gone."""

    @property
    def now(self) -> float:
        return self.heap.now

    def send(self, sender: InstanceId, message: NodeMessage) -> None:
        self.inbox.append(FromNode(instance_id=sender, message=message))

    def worked(self, instance: InstanceId, seconds: float) -> None:
        self.busy_s[instance] = self.busy_s.get(instance, 0.0) + seconds

    def wake(self, stepper: Stepper) -> None:
        self.dirty[stepper] = None

    def pool(self, name: InstanceId) -> SimPool | None:
        """The living kv_pool of this name."""
        node = self.nodes.get(name)
        return node.as_pool() if node is not None and node.alive else None

    def num_bytes(self, num_blocks: int) -> float:
        return num_blocks * self.config.block_size * self.config.token_bytes
