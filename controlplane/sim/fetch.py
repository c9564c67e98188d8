"""Leading blocks of a simulated prompt that come from a pool, layer by layer beside its compute where that pays.

nodes/roles/fetch.py in simulated time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nodes.core.events import Arriving, Fetched
from transfer.terms import InstanceId
from transfer.wire.messages import KvPeer

if TYPE_CHECKING:
    from controlplane.sim.pool import SimPool
    from controlplane.sim.shell import SimLeg, SimShell


class PoolFetch:
    """Blocks [leg.have_blocks, upto) of an admitted leg; the KV comes evenly between start_s and end_s. A Gate."""

    def __init__(self, shell: SimShell, leg: SimLeg, peer: KvPeer, upto: int) -> None:
        self._shell, self._leg, self._peer, self._upto = shell, leg, peer, upto
        self._pool: SimPool | None = None
        self._since = self._ready_at = self._ended_at = shell.world.now
        self._start_s = self._end_s = self._since
        self._count = 0
        self._begun = self._ended = self.failed = False
        self._waited_s = 0.0

    @property
    def fetch_s(self) -> float:
        return self._ended_at - self._since

    @property
    def exposed_s(self) -> float:
        """What compute waited: until the rest of the prompt could join a step, and within that step."""
        return self._ready_at - self._since + self._waited_s

    def held_step(self, waited_s: float) -> None:
        self._waited_s += waited_s

    def due_s(self, layer: int) -> float:
        num_layers = self._shell.node.latency.shape.num_layers
        return self._start_s + (self._end_s - self._start_s) * (layer + 1) / num_layers

    def begin(self) -> None:
        world, leg, shell = self._shell.world, self._leg, self._shell
        shell.core.renew(leg.request_id, leg.generation, world.now)  # outlives the fetch
        self._start_s = start_s = world.now + world.config.core.fetch_latency_s
        pool = world.pool(self._peer.instance_id)
        if pool is None or pool.epoch != self._peer.epoch:
            world.heap.at(self._start_s, self._fail)
            return
        self._pool = pool
        hashes = [key.digest for key in leg.spec.keys[leg.have_blocks : self._upto]]
        self._count, read_s = pool.lease(self, hashes, leg.request_id)
        if not self._count:
            world.heap.at(self._start_s, self._fail)
            return
        num_bytes, num_layers = world.num_bytes(self._count), world.layout.num_layers
        self._end_s = max(read_s, world.links.book(pool.nic, shell.node.nic, num_bytes, start_s, start_s, num_layers))
        first_step_s = self._first_step_s()
        if first_step_s > 0.0:
            world.heap.at(max(self._end_s - first_step_s, self.due_s(0)), self._join)
        world.heap.at(self._end_s, self._end)

    def stop(self) -> None:
        """Nobody wants it any more; a step with the sequence ends undisturbed."""
        self._ended = True
        self._release()

    def peer_lost(self, instance_id: InstanceId) -> None:
        if self._pool is not None and self._pool.id == instance_id:
            self._fail()

    # --- on the way -------------------------------------------------------------------------------------------

    def _join(self) -> None:
        """The rest of the prompt may join a step; where requests decode it never does."""
        if self._ended or self._shell.core.num_running or not self._shell.node.alive:
            return
        self._begun, self._ready_at = True, self._shell.world.now
        self._tell(Arriving, self._count)

    def _end(self) -> None:
        if self._ended or not self._shell.node.alive:
            return
        self._ended, self._ended_at = True, self._shell.world.now
        if not self._begun:
            self._ready_at = self._ended_at
        self._release()
        self._tell(Fetched, self._count)
        self._leg.finalise(self._leg.have_blocks + self._count, self._start_s, self._ended_at)

    def _fail(self) -> None:
        """What was promised will not come."""
        if self._ended or not self._shell.node.alive:
            return
        self._ended = self.failed = True
        self._ended_at = self._ready_at = self._shell.world.now
        self._release()
        self._shell.stepper.gate_failed(self._leg.request_id)
        self._tell(Fetched, 0)

    def _tell(self, event: type[Arriving] | type[Fetched], num_blocks: int) -> None:
        leg = self._leg
        self._shell.handle(
            event(request_id=leg.request_id, generation=leg.generation, num_blocks=leg.have_blocks + num_blocks)
        )

    def _first_step_s(self) -> float:
        """Of the tokens behind the promised blocks that fit into one step; 0.0 when there are none."""
        size, leg = self._shell.world.config.block_size, self._leg
        start = (leg.have_blocks + self._count) * size
        count = min(len(leg.spec.tokens) - 1 - start, self._shell.node.spec.token_budget)
        return self._shell.stepper.predicted_s(count, start) if count > 0 else 0.0

    def _release(self) -> None:
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.unlease(self)
