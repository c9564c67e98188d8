"""One life of a simulated instance as the control plane sees it: membership, roles, and where its messages go."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from controlplane.core.events import FromNode, NodeMessage
from controlplane.sim.decode import DecodeLeg
from controlplane.sim.links import Nic
from controlplane.sim.prefill import PrefillLeg
from controlplane.sim.shell import SimShell
from controlplane.sim.spec import NodeSpec
from transfer.errors import InvalidValue, Refused
from transfer.profile import HardwareProfile, LatencyProfile
from transfer.terms import InstanceId, RequestId, Role
from transfer.wire.messages import (
    PROTOCOL_VERSION,
    Abort,
    CacheSnapshotWanted,
    Heartbeat,
    Hello,
    Holding,
    KvPeer,
    LoadReport,
    Message,
    Migrate,
    MigrateFailed,
    PoolMap,
    Prefill,
    PrefillFailed,
    Reserve,
    ReserveRefused,
    RoleOrder,
    RoleReport,
    Welcome,
)

if TYPE_CHECKING:
    from controlplane.sim.pool import SimPool
    from controlplane.sim.world import World

LINK_EFFICIENCY = 0.8


class SimNode:
    """alive turns False once, with `die`; a later life is another object. muted: its heartbeats are lost."""

    def __init__(self, world: World, spec: NodeSpec, epoch: int) -> None:
        self.world, self.spec, self.id, self.epoch, self.role = world, spec, spec.id, epoch, spec.role
        self.alive, self.welcomed, self.muted = True, False, False
        efficiency = spec.latency.link_efficiency if spec.latency is not None else LINK_EFFICIENCY
        self.nic = Nic(spec.id, spec.host or spec.id, spec.link_bytes_per_s * efficiency)

    def send(self, message: NodeMessage) -> None:
        if self.alive:
            self.world.inbox.append(FromNode(instance_id=self.id, message=message))

    def as_pool(self) -> SimPool | None:
        """Itself, if it is one."""
        return None

    def hello(self) -> Hello:
        raise InvalidValue(f"{self.id} has neither an engine nor memory")

    def receive(self, message: Message) -> None:
        """Any message of the control plane."""

    def load(self) -> LoadReport:
        return LoadReport()

    def holdings(self) -> tuple[Holding, ...]:
        return ()

    def tick(self) -> None:
        """Some times a lease: what is late, and what moves slowly."""

    def peer_lost(self, instance_id: InstanceId) -> None:
        """Another instance is dead."""

    def die(self) -> None:
        self.alive = False

    def beat(self) -> None:
        if self.alive and self.welcomed and not self.muted:
            self.send(self.heartbeat())

    def heartbeat(self) -> Heartbeat:
        return Heartbeat(epoch=self.epoch, state="ready", load=self.load(), holdings=self.holdings(), role=self.role)


class SimEngine(SimNode):
    """A prefill, decode or mixed instance."""

    def __init__(self, world: World, spec: NodeSpec, epoch: int, latency: LatencyProfile) -> None:
        super().__init__(world, spec, epoch)
        self.latency = latency
        self.shell = SimShell(world, self)
        self._last: Heartbeat | None = None
        self._last_name: tuple[int, Role, int] | None = None
        self._takers: dict[type[Message], Any] = {
            Reserve: self._reserve, Prefill: self._prefill, Migrate: self._migrate, Abort: self.shell.abort,
            PoolMap: self.shell.writer.set_pools, CacheSnapshotWanted: lambda message: self.snapshot(),
            RoleOrder: self._order, Welcome: self._welcome,
        }  # fmt: skip

    def hello(self) -> Hello:
        spec, world, latency = self.spec, self.world, self.latency
        return Hello(
            protocol=PROTOCOL_VERSION, instance_id=self.id, epoch=self.epoch, role=self.role, model=world.model,
            layout=world.layout, engine="emulated", hardware=_hardware(spec, latency.hardware), latency=latency,
            num_blocks=spec.num_blocks, data_endpoint=f"sim://{self.id}", host_id=self.nic.host,
            holdings=self.holdings(), token_budget=spec.token_budget, shares_kv=spec.shares_kv, moves=spec.moves,
        )  # fmt: skip

    def receive(self, message: Message) -> None:
        taker = self._takers.get(type(message))
        if taker is not None:
            taker(message)

    def heartbeat(self) -> Heartbeat:
        """The last one again, where nothing has happened since."""
        name = (self.shell.num_handled, self.role, self.shell.writer.num_pending)
        if self._last is None or name != self._last_name or not self.shell.at_rest:
            self._last, self._last_name = super().heartbeat(), name
        return self._last

    def load(self) -> LoadReport:
        return self.shell.load()

    def holdings(self) -> tuple[Holding, ...]:
        return self.shell.core.holdings()

    def snapshot(self) -> None:
        self.shell.feed.snapshot(self.shell.core.cached_hashes())

    def tick(self) -> None:
        self.shell.tick()

    def peer_lost(self, instance_id: InstanceId) -> None:
        for leg in list(self.shell.legs.live.values()):
            leg.peer_lost(instance_id)
        self.shell.writer.peer_lost(instance_id)

    def die(self) -> None:
        self.shell.stepper.fail()
        self.world.num_preemptions += self.shell.core.load(self.world.now).num_preemptions
        super().die()
        for leg in list(self.shell.legs.live.values()):
            leg.orphaned()

    # --- KV between instances -----------------------------------------------------------------------------------

    def open(self, peer: KvPeer, leg: PrefillLeg) -> DecodeLeg:
        """The reservation that this prefill's KV goes to. Raises Refused."""
        target = self.peer_leg(peer, leg.request_id, leg.generation)
        target.offered(leg, leg.first_block, leg.blocks, migrates=False)
        return target

    def peer_leg(self, peer: KvPeer, request_id: RequestId, generation: int) -> DecodeLeg:
        """A reservation on another instance. Raises Refused."""
        node = self.world.nodes.get(peer.instance_id)
        if node is None or not node.alive or not isinstance(node, SimEngine):
            raise Refused(f"{peer.instance_id} cannot be reached")
        if node.epoch != peer.epoch:
            raise Refused(f"{peer.instance_id} was restarted since the request was placed")
        leg = node.shell.leg(request_id, generation)
        if not isinstance(leg, DecodeLeg):
            raise Refused(f"{peer.instance_id} holds no reservation for generation {generation} of {request_id}")
        return leg

    # --- messages -----------------------------------------------------------------------------------------------

    def _welcome(self, message: Welcome) -> None:
        self.welcomed = True
        self.snapshot()
        self.beat()

    def _reserve(self, message: Reserve) -> None:
        if self.role is Role.PREFILL:
            self.send(
                ReserveRefused(
                    request_id=message.request_id, generation=message.generation, reason=self._not_mine(), retry=False,
                    free_blocks=self.load().free_blocks,
                )
            )  # fmt: skip
        else:
            self.shell.legs.admit(DecodeLeg(self.shell, message))

    def _prefill(self, message: Prefill) -> None:
        if self.role is Role.DECODE:
            self.send(PrefillFailed(
                request_id=message.request_id, generation=message.generation, reason=self._not_mine()
            ))  # fmt: skip
        else:
            self.shell.legs.admit(PrefillLeg(self.shell, message))

    def _migrate(self, message: Migrate) -> None:
        leg = self.shell.leg(message.request_id, message.generation)
        if isinstance(leg, DecodeLeg):
            leg.migrate(message)
        else:
            self.send(MigrateFailed(
                request_id=message.request_id, generation=message.generation, reason="the request is not here"
            ))  # fmt: skip

    def _order(self, order: RoleOrder) -> None:
        why_not = None
        if order.epoch != self.epoch:
            why_not = f"{self.id} was restarted since the order was given; look at the fleet again"
        elif order.role is not self.role:
            if Role.KV_POOL is order.role:
                why_not = f"{self.id} has an engine and cannot become a kv_pool"
            elif not self.shell.idle:
                why_not = f"{self.id} is not idle: it holds KV for {len(self.holdings())} requests; drain it first"
            else:
                self.role = order.role
                self.shell.stepper.measured.restart()
                self.world.num_moves += 1
        self.send(
            RoleReport(
                plan_id=order.plan_id, epoch=self.epoch, role=self.role, ok=why_not is None, detail=why_not or ""
            )
        )
        self.beat()

    def _not_mine(self) -> str:
        return f"{self.id} is a {self.role} instance; send this to one that does the other phase"


def _hardware(spec: NodeSpec, declared: HardwareProfile) -> HardwareProfile:
    """As declared, with what the spec says of this instance."""
    fields = {name: getattr(declared, name) for name in declared.__struct_fields__}
    fields |= {
        "name": spec.hardware, "num_gpus": spec.num_gpus, "price_per_hour": spec.price_per_hour,
        "link_bytes_per_s": spec.link_bytes_per_s,
    }  # fmt: skip
    return HardwareProfile(**fields)
