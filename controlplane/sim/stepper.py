"""The steps of one simulated instance: pulled from its batching core, timed by its latency profile.

Runs of equal decode steps are one call of the heap: they are taken together when something may look at them or change
what comes next (`settle`). With `stepwise` every step is one.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Protocol

from controlplane.sim.runs import Measured, Noise, Run, slope_of
from nodes.core.batching import BatchCore
from nodes.core.events import StepDone, StepPlan, StepUndone
from nodes.engines.engine import Sampled
from transfer.terms import RequestId

if TYPE_CHECKING:
    from controlplane.sim.router import Stream
    from controlplane.sim.shell import SimLeg, SimShell
    from controlplane.sim.world import World

ENDS = 1
"""The token that ends an output whose length its request does not tell."""
_END = Sampled(ENDS)


class Gate(Protocol):
    """Leading KV of a prompt on its way while the rest is computed."""

    failed: bool

    def due_s(self, layer: int) -> float: ...

    def held_step(self, waited_s: float) -> None: ...


class Stepper:
    """factor: how many times longer than predicted steps take now (a straggler)."""

    def __init__(self, world: World, shell: SimShell, core: BatchCore) -> None:
        self._world, self._shell, self._core, self._heap = world, shell, core, world.heap
        node = shell.node
        self._latency = node.latency
        error = node.spec.latency_error
        seed = (world.config.seed, zlib.crc32(node.id.encode()), node.epoch)
        self._noise = Noise(error, seed) if error > 0.0 else None
        self._tells_length, self._stepwise = world.config.max_tokens is None, world.config.stepwise
        self._num_steps = 0
        self._serial = 0
        self._run: Run | None = None
        self._streams: list[tuple[Stream, int]] = []
        self._context = 0
        self._gates: list[Gate] = []
        self._waited_s = 0.0
        self.factor = 1.0
        self.measured = Measured()

    @property
    def busy(self) -> bool:
        return self._run is not None

    # --- from step to step ------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Pull a step unless one runs."""
        if self._run is not None:
            return
        now = self._heap.now
        plan = self._core.next_step(now, bare=True)
        if plan is None or plan.size is None:
            return
        for request_id in plan.started:
            if (leg := self._shell.leg(request_id)) is not None:
                leg.started()
        size = plan.size
        first_s = self._latency.step_s(size.num_new_tokens, size.context_tokens, size.batch, size.attention_pairs)
        run = self._run = Run(plan, now, first_s, self.factor, size.batch)
        self._context = size.context_tokens
        self._streams = self._find_streams() if self._core.num_running else []
        if plan.num_prefill_tokens or self._stepwise:
            self._plan_one(run)
        else:
            self._plan_many(run)
        self._schedule(run)

    def settle(self) -> None:
        """Take the steps that have ended by now; the one in flight stays in flight."""
        run = self._run
        if run is not None and run.count > 1:
            self._take(run, run.num_ended(self._heap.now))

    def disturb(self) -> None:
        """Something changed: what comes after the step in flight is planned anew."""
        run = self._run
        if run is None or run.count == 1:
            return
        ended = run.num_ended(self._heap.now)
        if ended + 1 < run.count:
            run.count = ended + 1
            self._schedule(run)

    def look(self) -> None:
        """After an event: does somebody join or leave the decodes that run?"""
        run = self._run
        if run is not None and run.count > 1 and (self._core.num_prefilling or self._core.num_running != run.num_rows):
            self.disturb()

    def slow(self, factor: float) -> None:
        """Steps that begin from now on take so many times as long as predicted."""
        self.settle()
        self.disturb()
        self.factor = factor

    def report(self) -> tuple[float, float]:
        """(step_s, speed) as a heartbeat tells them."""
        run, now = self._run, self._heap.now
        if run is not None:
            self.measured.take(run, max(run.measured, run.num_ended(now)))
        return self.measured.step_s, self.measured.speed(now)

    def predicted_s(self, num_new: int, num_before: int) -> float:
        """Seconds of a step of one chunk, by the profile and by what steps took of late."""
        return self._latency.prefill_s(num_new, num_before) * self.measured.speed(self._heap.now)

    def fail(self) -> None:
        """The instance is dead: what it had delivered by now counts, nothing else will end."""
        self.settle()
        if self._run is not None:
            self._world.worked(self._shell.node.id, self._heap.now - self._run.start_s)
        self._run = None
        self._serial += 1

    def gate_failed(self, request_id: RequestId) -> None:
        """KV that the running step waits for will not come: the step is abandoned."""
        run = self._run
        if run is None or request_id not in run.plan.arriving:
            return
        self._run = None
        self._serial += 1
        for push in run.plan.pushes:
            if (leg := self._shell.leg(push.request_id)) is not None:
                leg.unclaim()
        failed = tuple(name for name in run.plan.arriving
                       if (leg := self._shell.leg(name)) is not None and (gate := leg.gate()) is not None
                       and gate.failed)  # fmt: skip
        self._shell.handle(StepUndone(failed=failed))

    # --- planning -----------------------------------------------------------------------------------------------

    def _plan_one(self, run: Run) -> None:
        noise = None if self._noise is None else self._noise.factors(self._num_steps, 1)
        run.stretch(1, 0.0, noise)
        self._waited_s = 0.0
        if run.plan.arriving:
            self._waited_s = self._wait(run)

    def _plan_many(self, run: Run) -> None:
        """As many steps as are even, and the one after them."""
        even = self._core.even_steps()
        if even and not self._tells_length:
            even = max(0, min([even, *(stream.num_output - stream.count - 1 for stream, _ in self._streams)]))
        count = even
        slope_s: float | None = 0.0
        if count > 0:
            slope_s = slope_of(self._latency, run.num_rows, self._context, run.first_s, count + 1)
            if slope_s is None:
                count, slope_s = 0, 0.0
        noise = None if self._noise is None else self._noise.factors(self._num_steps, count + 1)
        run.stretch(count + 1, slope_s or 0.0, noise)
        self._waited_s = 0.0
        if count and not all([stream.first_at is not None for stream, _ in self._streams]):
            self._heap.at(run.end_s(1), self._first, run)  # a first token is told at once

    def _find_streams(self) -> list[tuple[Stream, int]]:
        """Who gets the tokens, and of which generation."""
        streams, legs, found = self._world.router.streams, self._shell.legs.live, []
        for request_id, generation in self._core.running:
            stream, leg = streams.get(request_id), legs.get(request_id)
            if stream is not None and generation in stream.generations and leg is not None and leg.aborted is None:
                stream.stepper = self
                found.append((stream, generation))
        return found

    def _wait(self, run: Run) -> float:
        """How long the step stands still: layer l begins when its KV is there, which comes evenly, so that the first or
        the last layer decides."""
        gates = [gate for name in run.plan.arriving
                 if (leg := self._shell.leg(name)) is not None and (gate := leg.gate()) is not None]  # fmt: skip
        num_layers, step_s = self._latency.shape.num_layers, run.duration_s(0)
        end = run.start_s + step_s
        for gate in gates:
            end = max(end, gate.due_s(0) + step_s, gate.due_s(num_layers - 1) + step_s / num_layers)
        self._gates = gates
        return end - run.start_s - step_s

    def _schedule(self, run: Run) -> None:
        self._serial += 1
        self._heap.at(run.end_s(run.count) + self._waited_s, self._ended, self._serial)

    # --- ends ---------------------------------------------------------------------------------------------------

    def _ended(self, serial: int) -> None:
        """The last step of the run has ended."""
        if serial != self._serial or self._run is None:
            return
        run, now = self._run, self._heap.now
        self._take(run, run.count - 1)
        self.measured.take(run, run.count, self._waited_s)
        self._num_steps += run.count
        self._run = None
        self._world.worked(self._shell.node.id, now - run.start_s)
        self._finalise(run.plan, run.end_s(run.count - 1), now)
        streams = self._streams
        sampled = {} if self._tells_length else {
            stream.request_id: _END for stream, _ in streams if stream.count + 1 >= stream.num_output
        }  # fmt: skip
        counts = [stream.count for stream, _ in streams]
        self._shell.handle(StepDone(sampled=sampled, duration_s=run.duration_s(run.count - 1), quiet=True))
        told = zip(streams, counts, strict=True)
        self._deliver([one for one, count in told if one[0].count == count], now)

    def _first(self, run: Run) -> None:
        """The first step of the run has ended, unless it was cut short: then its end is told by itself."""
        if self._run is run and run.count > 1:
            self._take(run, max(run.taken, 1))

    def _deliver(self, streams: list[tuple[Stream, int]], now: float) -> None:
        """A token of the step that has ended."""
        next_token, legs = self._world.router.next_token, self._shell.legs.live
        for stream, generation in streams:
            leg = legs.get(stream.request_id)
            if generation in stream.generations and leg is not None and leg.aborted is None:
                next_token(stream, generation, now)

    def _finalise(self, plan: StepPlan, since: float, now: float) -> None:
        """KV that the step has made leaves."""
        for push in plan.pushes:
            leg: SimLeg | None = self._shell.leg(push.request_id)
            if leg is not None and leg.generation == push.generation:
                leg.finalise(push.first_block + push.count, since, now)
        if self._gates:
            for gate in self._gates:
                gate.held_step(self._waited_s)
            self._gates = []
        self._waited_s = 0.0

    def _take(self, run: Run, upto: int) -> None:
        """Steps [taken, upto) of the run have ended, all of them even."""
        count = upto - run.taken
        if count <= 0:
            return
        first, run.taken = run.taken, upto
        self._core.ahead(count)
        begun, ended = run.end_s(first + 1), run.end_s(upto)
        gap = run.longest_s(first + 1, upto) if count > 1 else 0.0
        more_tokens = self._world.router.more_tokens
        for stream, generation in self._streams:
            more_tokens(stream, generation, count, begun, gap, ended)
