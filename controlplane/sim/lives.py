"""Lives of simulated instances: how they begin, and what goes wrong with them."""

from __future__ import annotations

from collections.abc import Mapping

from controlplane.core.events import NodeLost
from controlplane.sim.node import SimEngine, SimNode
from controlplane.sim.pool import SimPool
from controlplane.sim.spec import Fault, NodeSpec
from controlplane.sim.world import World
from transfer.errors import InvalidValue
from transfer.terms import InstanceId, Role


class Lives:
    """The control plane learns of an end as it would: by silence (SimConfig.liveness_s) or the next life's Hello."""

    def __init__(self, world: World, specs: Mapping[InstanceId, NodeSpec]) -> None:
        self._world, self._specs = world, specs
        self._epochs = dict.fromkeys(specs, 0)

    def join(self, name: str) -> None:
        """A life of this instance begins."""
        spec, world = self._specs[name], self._world
        before = world.nodes.get(name)
        if before is not None and before.alive:
            return
        self._epochs[name] += 1
        node: SimNode
        if spec.role is Role.KV_POOL:
            node = SimPool(world, spec, self._epochs[name])
        elif spec.latency is None:
            raise InvalidValue(f"{name} is to be a {spec.role} instance and has no latency profile; give it one")
        else:
            node = SimEngine(world, spec, self._epochs[name], spec.latency)
        if before is not None:
            node.role = before.role
        world.nodes[name] = node
        world.send(name, node.hello())

    def fault(self, fault: Fault) -> None:
        world, names = self._world, [fault.instance] if fault.instance else list(self._world.nodes)
        until_s = world.now + fault.duration_s
        for name in names:
            node = world.nodes.get(name)
            if node is None:
                raise InvalidValue(f"a fault names instance {name!r}, which the fleet does not have")
            if fault.kind == "kill":
                self._kill(node, until_s if fault.duration_s > 0 else None)
            elif fault.kind == "mute":
                node.muted = True
                world.heap.at(until_s, self._unmute, node)
            elif fault.kind != "slow":
                raise InvalidValue(f"there is no fault {fault.kind!r}; take kill, slow or mute")
            elif isinstance(node, SimEngine):
                node.shell.stepper.slow(fault.factor)
                world.heap.at(until_s, node.shell.stepper.slow, 1.0)

    def _unmute(self, node: SimNode) -> None:
        node.muted = False

    def _kill(self, node: SimNode, rejoins_s: float | None) -> None:
        world = self._world
        if not node.alive:
            return
        node.die()
        for other in world.nodes.values():
            if other.alive:
                other.peer_lost(node.id)
        world.heap.at(world.now + world.config.liveness_s, self._lost, node)
        if rejoins_s is not None:
            world.heap.at(rejoins_s, self.join, node.id)

    def _lost(self, node: SimNode) -> None:
        if self._world.nodes[node.id] is node:
            self._world.inbox.append(NodeLost(instance_id=node.id))
