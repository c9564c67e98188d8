"""The shell around one simulated instance's batching core: nodes/roles/shell.py without a loop.

Performs the core's effects and routes them to legs (prefill.py, decode.py); decides nothing that the core decides.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from controlplane.sim.feed import CacheFeed
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
from nodes.core.residency import BatchConfig
from transfer.terms import InstanceId, RequestId
from transfer.wire.messages import Abort, LoadReport, Released

if TYPE_CHECKING:
    from controlplane.sim.node import SimEngine
    from controlplane.sim.world import World

MAX_FENCES = 4096


class SimLeg:
    """One generation of one request on one instance; nodes/roles/leg.py says what each call means."""

    __slots__ = ("aborted", "blocks", "generation", "have_blocks", "request_id", "shell", "spec")

    def __init__(self, shell: SimShell, spec: SequenceSpec) -> None:
        self.shell, self.spec = shell, spec
        self.request_id, self.generation = spec.request_id, spec.generation
        self.blocks = self.have_blocks = 0
        self.aborted: str | None = None

    def begin(self) -> None:
        self.shell.handle(Add(spec=self.spec))

    def repeated(self) -> None: ...

    def started(self) -> None: ...

    def gate(self) -> Gate | None:
        return None

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


class SimShell:
    """Idempotent by (request_id, generation), as BatchShell."""

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
        self.stepper = Stepper(world, self, self.core)
        self.feed = CacheFeed(world, node)
        self.writer = PoolWriter(world, self)
        self._legs: dict[RequestId, SimLeg] = {}
        self._next: dict[RequestId, SimLeg] = {}
        self._aborts: dict[RequestId, int] = {}
        self._fences: OrderedDict[RequestId, int] = OrderedDict()
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
        return not self._legs and not self._next and self.core.idle

    @property
    def at_rest(self) -> bool:
        """No step runs, and what was measured of the last ones does not fade."""
        return not self.stepper.busy and self.stepper.measured.speed(self.world.now) == 1.0

    def legs(self) -> list[SimLeg]:
        return list(self._legs.values())

    def leg(self, request_id: RequestId, generation: int | None = None) -> SimLeg | None:
        """The leg of exactly this generation; of any when None."""
        leg = self._legs.get(request_id)
        return leg if leg is not None and (generation is None or generation == leg.generation) else None

    def is_aborted(self, request_id: RequestId) -> bool:
        leg = self._legs.get(request_id)
        return leg is None or leg.aborted is not None

    def load(self) -> LoadReport:
        step_s, speed = self.stepper.report()
        return self.core.load(self.world.now, step_s=step_s, speed=speed, unsettled=self.writer.num_pending)

    def tick(self) -> None:
        """Leases. Those of what KV arrives for start anew, as they do with every layer."""
        for leg in self.legs():
            leg.keep()
        if self.core.lease_over(self.world.now):
            self.stepper.settle()
            self.handle(Tick())

    def admit(self, leg: SimLeg) -> None:
        """Begin a leg, unless this generation or a newer one is here or has ended here."""
        if leg.generation <= self._fences.get(leg.request_id, -1):
            return
        here = self._legs.get(leg.request_id)
        if here is None:
            self._begin(leg)
        elif here.generation == leg.generation:
            here.repeated()
        elif here.generation < leg.generation:
            waiting = self._next.get(leg.request_id)
            if waiting is None or waiting.generation < leg.generation:
                self._next[leg.request_id] = leg
            here.abort("the request was placed again")

    def abort(self, message: Abort) -> None:
        """End every leg of the request up to this generation; Released follows when it holds nothing."""
        request_id, generation = message.request_id, message.generation
        self._aborts[request_id] = max(generation, self._aborts.get(request_id, -1))
        self._fence(request_id, generation)
        waiting = self._next.get(request_id)
        if waiting is not None and waiting.generation <= generation:
            del self._next[request_id]
        leg = self._legs.get(request_id)
        if leg is None or leg.generation > generation:
            self.handle(Drop(request_id=request_id, generation=generation, reason=message.reason))
        else:
            leg.abort(message.reason)

    def drop(self, leg: SimLeg, reason: str) -> None:
        """Give a leg's blocks back."""
        self.handle(Drop(request_id=leg.request_id, generation=leg.generation, reason=reason))

    def handle(self, event: Event) -> None:
        """One event into the core; its effects are performed before the next event enters."""
        if type(event) in _SETTLES:
            self.stepper.settle()
            self._disturbed = True
        self._events.append(event)
        if self._handling:
            return
        self._handling = True
        self.num_handled += 1
        events, performers, handle = self._events, self._performers, self.core.handle
        while events:
            for effect in handle(events.popleft(), self.world.now):
                performers[type(effect)](effect)
        self._handling = False
        if not self.stepper.busy:
            if self.core.num_running or self.core.num_prefilling:
                self.world.wake(self.stepper)
        elif self._disturbed:
            self.stepper.disturb()
        else:
            self.stepper.look()
        self._disturbed = False

    # --- effects --------------------------------------------------------------------------------------------

    def _admitted(self, effect: Admitted) -> None:
        if (leg := self.leg(effect.request_id, effect.generation)) is not None:
            leg.admitted(effect)

    def _not_admitted(self, effect: NotAdmitted) -> None:
        if (leg := self.leg(effect.request_id, effect.generation)) is not None:
            self.writer.give_way()
            del self._legs[leg.request_id]  # nothing was held: the same order may come again
            leg.refused(effect)
            self._begin_next(leg.request_id)

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
        leg = self._legs.get(effect.request_id)
        ended = leg if leg is not None and leg.generation <= effect.generation else None
        if ended is not None:
            del self._legs[ended.request_id]
            self._fence(ended.request_id, ended.generation)
            ended.gone(effect)
        aborted = self._aborts.get(effect.request_id)
        if aborted is not None and (
            effect.generation >= aborted or (ended is not None and ended.generation <= aborted)
        ):
            del self._aborts[effect.request_id]
            self.node.send(Released(request_id=effect.request_id, generation=aborted, num_blocks=effect.num_blocks))
        self._begin_next(effect.request_id)

    def _begin(self, leg: SimLeg) -> None:
        self._legs[leg.request_id] = leg
        leg.begin()

    def _begin_next(self, request_id: RequestId) -> None:
        if self._next and request_id not in self._legs and (leg := self._next.pop(request_id, None)) is not None:
            self._begin(leg)

    def _fence(self, request_id: RequestId, generation: int) -> None:
        self._fences[request_id] = max(generation, self._fences.pop(request_id, -1))
        if len(self._fences) > MAX_FENCES:
            self._fences.popitem(last=False)


_SETTLES = (Drop, Pause, Tick)
