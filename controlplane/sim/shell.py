"""The shell around one simulated instance's batching core: nodes/roles/shell.py without a loop.

Performs the core's effects and routes them to legs (prefill.py, decode.py); decides nothing that the core decides.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from controlplane.sim.feed import CacheFeed
from controlplane.sim.fetch import PoolFetch
from controlplane.sim.stepper import Gate, Stepper
from controlplane.sim.writer import PoolWriter
from nodes.core.batching import BatchCore
from nodes.core.events import (
    Add,
    Admitted,
    Cached,
    CannotPause,
    Computed,
    Drop,
    Effect,
    Emit,
    Event,
    Gone,
    Grown,
    HandsChanged,
    NotAdmitted,
    Pause,
    Paused,
    Pinned,
    SequenceSpec,
    Tick,
    Unpinned,
)
from nodes.core.legs import Legs
from nodes.core.residency import BatchConfig
from transfer.terms import InstanceId, RequestId
from transfer.wire.messages import Abort, KvSource, LoadReport, PrefillDone, PrefillStarted, Released

if TYPE_CHECKING:
    from controlplane.sim.node import SimEngine
    from controlplane.sim.world import World


class SimLeg:
    """One generation of one request on one instance; nodes/roles/leg.py says what each call means."""

    __slots__ = (
        "_fetch", "_started_s", "aborted", "blocks", "forgotten", "generation", "have_blocks", "request_id", "shell",
        "spec",
    )  # fmt: skip

    def __init__(self, shell: SimShell, spec: SequenceSpec) -> None:
        self.shell, self.spec = shell, spec
        self.request_id, self.generation = spec.request_id, spec.generation
        self.blocks = self.have_blocks = 0
        self.aborted: str | None = None
        self.forgotten = False
        self._fetch: PoolFetch | None = None
        self._started_s: float | None = None

    def begin(self) -> None:
        self.shell.handle(Add(spec=self.spec))

    def repeated(self) -> None: ...

    def started(self) -> None:
        if self._started_s is None:
            self._started_s = self.shell.world.now
            self.shell.node.send(PrefillStarted(request_id=self.request_id, generation=self.generation))

    def gate(self) -> Gate | None:
        return self._fetch

    def finalise(self, upto: int, since: float, now: float) -> None: ...

    def unclaim(self) -> None: ...

    def admitted(self, effect: Admitted) -> None:
        self.blocks, self.have_blocks = len(effect.blocks), effect.have_blocks

    def refused(self, effect: NotAdmitted) -> None: ...

    def computed(self, effect: Computed) -> None: ...

    def grown(self, effect: Grown) -> None:
        self.blocks = len(effect.blocks)

    def emitted(self, effect: Emit) -> None: ...

    def paused(self, effect: Paused) -> None: ...

    def cannot_pause(self, effect: CannotPause) -> None: ...

    def abort(self, reason: str) -> None:
        self.aborted = self.aborted or reason
        self.shell.drop(self, reason)

    def gone(self, effect: Gone) -> None: ...

    def keep(self) -> None:
        """A heartbeat passed."""

    def orphaned(self) -> None:
        """Its own instance is dead."""

    def peer_lost(self, instance_id: InstanceId) -> None:
        """That instance is dead: what it was to send or to receive will not be."""

    def fetch_leading(self, source: KvSource | None) -> None:
        """Once it is admitted."""
        if source is None:
            return
        upto = min(source.num_blocks, (len(self.spec.tokens) - 1) // self.shell.world.config.block_size)
        if upto > self.have_blocks:
            self._fetch = PoolFetch(self.shell, self, source.peer, upto)
            self._fetch.begin()

    def stop_fetch(self) -> None:
        if self._fetch is not None:
            self._fetch.stop()

    def prefill_done(
        self, computed: Computed, computed_s: float, transfer_s: float = 0.0, transfer_bytes: float = 0.0
    ) -> PrefillDone:
        fetch = self._fetch
        return PrefillDone(
            request_id=self.request_id, generation=self.generation, computed_tokens=computed.computed_tokens,
            cached_tokens=computed.cached_tokens, fetched_tokens=computed.fetched_tokens,
            prefill_s=computed_s - (computed_s if self._started_s is None else self._started_s),
            transfer_s=transfer_s, exposed_s=self.shell.world.now - computed_s, transfer_bytes=round(transfer_bytes),
            fetch_s=fetch.fetch_s if fetch else 0.0, fetch_exposed_s=fetch.exposed_s if fetch else 0.0,
        )  # fmt: skip


class SimShell:
    """Idempotent by (request_id, generation), see nodes/core/legs.py."""

    def __init__(self, world: World, node: SimEngine) -> None:
        self.world, self.node = world, node
        spec, config = node.spec, world.config
        self.core = BatchCore(
            BatchConfig(
                num_blocks=spec.num_blocks, block_size=config.block_size, max_context=config.max_context,
                token_budget=spec.token_budget, max_running=spec.max_running,
                eos_token_ids=world.model.eos_token_ids, contiguous=False,
            )
        )  # fmt: skip
        self.feed = CacheFeed(world, node)
        self.writer = PoolWriter(world, self)
        self.legs = Legs[SimLeg]()
        self.stepper = Stepper(world, self, self.core)
        self._events: deque[Event] = deque()
        self._handling = self._disturbed = False
        self.num_handled = 0
        self._performers: dict[type[Effect], Callable[[Any], None]] = {
            Emit: self._emit, Gone: self._gone, HandsChanged: lambda effect: None, Cached: self._cached,
            Pinned: self.writer.pinned, Unpinned: self.writer.unpinned, Admitted: self._admitted,
            NotAdmitted: self._not_admitted, Computed: self._computed, Grown: self._grown, Paused: self._paused,
            CannotPause: self._cannot_pause,
        }  # fmt: skip

    @property
    def idle(self) -> bool:
        return self.legs.idle and self.core.idle

    @property
    def at_rest(self) -> bool:
        """No step runs, and what was measured of the last ones does not fade."""
        measured = self.stepper.measured
        return not self.stepper.busy and measured.speed(self.world.now) == measured.speed(math.inf)

    def leg(self, request_id: RequestId, generation: int | None = None) -> SimLeg | None:
        """The leg of exactly this generation; of any when None."""
        return self.legs.find(request_id, generation)

    def load(self) -> LoadReport:
        step_s, speed = self.stepper.report()
        return self.core.load(self.world.now, step_s=step_s, speed=speed, unsettled=self.writer.num_pending)

    def tick(self) -> None:
        """Leases. Those of what KV arrives for start anew, as they do with every layer."""
        for leg in list(self.legs.live.values()):
            leg.keep()
        if self.core.lease_over(self.world.now):
            self.stepper.settle()
            self.handle(Tick())

    def abort(self, message: Abort) -> None:
        """End every leg of the request up to this generation; Released follows when it holds nothing."""
        if not self.legs.abort(message, self.world.now):
            self.handle(Drop(request_id=message.request_id, generation=message.generation, reason=message.reason))

    def drop(self, leg: SimLeg, reason: str) -> None:
        """Give a leg's blocks back."""
        self.handle(Drop(request_id=leg.request_id, generation=leg.generation, reason=reason))

    def handle(self, event: Event) -> None:
        """One event into the core; its effects are performed before the next event enters."""
        stepper, core = self.stepper, self.core
        if type(event) in _SETTLES:
            stepper.settle()
            self._disturbed = True
        self._events.append(event)
        if self._handling:
            return
        self._handling = True
        self.num_handled += 1
        events, performers, handle, now = self._events, self._performers, core.handle, self.world.heap.now
        while events:
            for effect in handle(events.popleft(), now):
                performers[type(effect)](effect)
        self._handling = False
        if not stepper.busy:
            if core.num_running or core.num_prefilling:
                self.world.wake(stepper)
        elif self._disturbed:
            stepper.disturb()
        else:
            stepper.look()
        self._disturbed = False

    # --- effects --------------------------------------------------------------------------------------------

    def _admitted(self, effect: Admitted) -> None:
        if (leg := self.leg(effect.request_id, effect.generation)) is not None:
            leg.admitted(effect)

    def _not_admitted(self, effect: NotAdmitted) -> None:
        if (leg := self.leg(effect.request_id, effect.generation)) is not None:
            self.writer.give_way()
            self.legs.refused(leg)
            leg.refused(effect)
            self.legs.begin_next(leg.request_id)

    def _computed(self, effect: Computed) -> None:
        if (leg := self.leg(effect.request_id, effect.generation)) is not None:
            leg.computed(effect)

    def _grown(self, effect: Grown) -> None:
        if (leg := self.leg(effect.request_id, effect.generation)) is not None:
            leg.grown(effect)

    def _paused(self, effect: Paused) -> None:
        if (leg := self.leg(effect.request_id, effect.generation)) is not None:
            leg.paused(effect)

    def _cannot_pause(self, effect: CannotPause) -> None:
        if (leg := self.leg(effect.request_id, effect.generation)) is not None:
            leg.cannot_pause(effect)

    def _cached(self, effect: Cached) -> None:
        self.feed.change(effect.stored, effect.removed)

    def _emit(self, effect: Emit) -> None:
        leg = self.leg(effect.request_id, effect.generation)
        if leg is None or leg.aborted is not None:
            return
        leg.emitted(effect)
        self.world.router.token(
            effect.request_id, effect.generation, effect.index, effect.finish, effect.cached_tokens, self.stepper,
            self.world.now,
        )  # fmt: skip

    def _gone(self, effect: Gone) -> None:
        ended = self.legs.gone(effect, self.world.now)
        if ended is not None:
            ended.gone(effect)
        aborted = self.legs.answered(effect, ended)
        if aborted is not None:
            self.node.send(Released(request_id=effect.request_id, generation=aborted, num_blocks=effect.num_blocks))
        self.legs.begin_next(effect.request_id)


_SETTLES = (Drop, Pause, Tick)
