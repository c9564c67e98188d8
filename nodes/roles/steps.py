"""The stepping task of one instance: pull a step from the core, run it, push its KV layer by layer, report it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from nodes.core.batching import BatchCore
from nodes.core.events import StepDone, StepPlan, StepUndone
from nodes.engines.engine import OnLayer, StepBatch
from nodes.engines.prediction import predicted_step_s
from nodes.roles.context import RoleContext
from nodes.roles.fetch import PoolFetch
from nodes.roles.gate import StepGate
from nodes.roles.leg import Leg
from transfer.errors import EngineFailed, IllegalTransition, StepAbandoned
from transfer.kv.port import KvSender
from transfer.terms import RequestId
from transfer.wire.messages import StepOutput, TokenItem

EWMA_WEIGHT = 0.1
MIN_SPEED = 1e-3
MAX_JUMP = 5.0
"""A step this many times slower or faster than expected says nothing of the next ones (the process stood still, a page
was missing), unless it happens ODD_RUN times in a row."""
ODD_RUN = 5
SPEED_HALF_LIFE_S = 10.0
"""Of a correction nobody renews: an instance that was slow once must not stay without work for it."""


class Stepper:
    """`find` gives the leg of a request's generation; `handle` puts an event into the core and performs its effects,
    which may add to `items`: what the step says to the gateway, in ONE message."""

    def __init__(
        self, context: RoleContext, core: BatchCore, find: Callable[[RequestId, int | None], Leg | None],
        handle: Callable[[StepDone | StepUndone], None],
    ) -> None:  # fmt: skip
        self._context, self._core, self._find, self._handle = context, core, find, handle
        self._wake = asyncio.Event()
        self.items: list[TokenItem] = []
        self.step_s = 0.0
        """Exponentially weighted mean, seconds."""
        self._speed, self._measured_at = 1.0, 0.0
        self._num_odd = 0

    def speed(self, now: float) -> float:
        """Measured / predicted step time, exponentially weighted; it fades to 1.0 while no step is run."""
        idle_s = max(0.0, now - self._measured_at)
        return float(1.0 + (self._speed - 1.0) * 0.5 ** (idle_s / SPEED_HALF_LIFE_S))

    def role_changed(self) -> None:
        """What the other phase's steps took says nothing about this one's."""
        self.step_s, self._speed, self._num_odd = 0.0, 1.0, 0

    def wake(self) -> None:
        """Something entered the core: look for a step. An idle instance sleeps."""
        self._wake.set()

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            plan = self._core.next_step(loop.time())
            if plan is None:
                self._wake.clear()
                await self._wake.wait()
            else:
                await self._step(plan)

    async def _step(self, plan: StepPlan) -> None:
        context, loop = self._context, asyncio.get_running_loop()
        for request_id in plan.started:
            if (leg := self._find(request_id, None)) is not None:
                leg.started()
        since = loop.time()
        streams = [
            (stream, push.first_block + push.count)
            for push in plan.pushes
            if (leg := self._find(push.request_id, push.generation)) is not None
            and (stream := leg.stream()) is not None
        ]
        claims = [(stream, claim) for stream, upto in streams if (claim := stream.claim(upto)) is not None]
        fetches = self._fetches(plan)
        gate = StepGate([fetch.gate for fetch in fetches]) if fetches else None
        predicted = predicted_step_s(context.engine.latency, plan.chunks)
        try:
            async with asyncio.timeout(context.bounds.step_s):
                result = await context.engine.step(
                    StepBatch(plan.chunks), _on_layer([claim for _, claim in claims]), gate
                )
        except TimeoutError:
            raise EngineFailed(f"a step did not end within {context.bounds.step_s:g} s") from None
        except StepAbandoned as error:
            if gate is None or not gate.failed:
                raise EngineFailed(f"the engine gave up a step that waited for nothing: {error}") from None
            for stream, (_, first, _) in claims:
                stream.unclaim(first)
            self._handle(StepUndone(failed=gate.failed))
            return
        now = loop.time()
        for stream, upto in streams:
            stream.finalise(upto, since, now)
        for fetch in fetches:
            fetch.held_step(result.waited_s)
        self._measure(result.duration_s - result.waited_s, predicted, now)
        self._handle(StepDone(sampled=result.sampled, duration_s=result.duration_s))
        if self.items:
            items, self.items = tuple(self.items), []
            context.send(
                StepOutput(
                    epoch=context.epoch, items=items, step_s=result.duration_s,
                    num_prefill_tokens=plan.num_prefill_tokens,
                )
            )  # fmt: skip

    def _fetches(self, plan: StepPlan) -> list[PoolFetch]:
        """What the step has to wait for. Raises IllegalTransition when it cannot be told: its KV would be wrong."""
        fetches: list[PoolFetch] = []
        for request_id in plan.arriving:
            leg = self._find(request_id, None)
            fetch = None if leg is None else leg.fetch()
            if fetch is None:
                raise IllegalTransition(f"request {request_id}", "no fetch", "a step beside it")
            fetches.append(fetch)
        return fetches

    def _measure(self, measured_s: float, predicted_s: float, now: float) -> None:
        weight = EWMA_WEIGHT if self.step_s else 1.0
        self.step_s += weight * (measured_s - self.step_s)
        if predicted_s > 0.0:
            before = self.speed(now - measured_s)
            odd = not before / MAX_JUMP <= measured_s / predicted_s <= before * MAX_JUMP
            self._num_odd = self._num_odd + 1 if odd else 0
            if odd and self._num_odd < ODD_RUN:
                return
            self._measured_at = now
            self._speed = max(MIN_SPEED, before + EWMA_WEIGHT * (measured_s / predicted_s - before))


def _on_layer(claims: list[tuple[KvSender, int, int]]) -> OnLayer | None:
    if not claims:
        return None

    def on_layer(layer: int) -> None:
        for sender, first, count in claims:
            sender.push(layer, first, count)

    return on_layer
