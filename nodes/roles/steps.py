"""The stepping task of one instance: pull a step from the core, run it, push its KV layer by layer, report it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from nodes.core.batching import BatchCore
from nodes.core.events import Effect, StepDone, StepPlan, StepUndone
from nodes.core.speed import SpeedMeter
from nodes.engines.engine import Chunk, Engine, OnLayer, StepBatch
from nodes.engines.prediction import predicted_step_s
from nodes.roles.context import RoleContext
from nodes.roles.fetch import PoolFetch
from nodes.roles.gate import StepGate
from nodes.roles.leg import Leg
from transfer.errors import EngineFailed, IllegalTransition, StepAbandoned
from transfer.kv.port import KvSender
from transfer.terms import RequestId
from transfer.wire.messages import StepOutput, TokenItem

Find = Callable[[RequestId, int | None], Leg | None]
"""The leg of a request's generation here; of any when None."""


class Runs(Protocol):
    """What has the core's sequences computed: Stepper for an engine that runs steps, ServedRuns (served.py) for one
    that batches by itself. items: what it tells the gateway next; the shell adds each Emit."""

    items: list[TokenItem]
    meter: SpeedMeter

    async def run(self) -> None:
        """For the instance's life; raises EngineFailed when the engine is lost."""

    def wake(self) -> None:
        """Something entered the core."""

    def perform(self, effect: Effect) -> None:
        """Of the effects that only its kind of core says."""

    def beside_fetch_s(self, chunk: Chunk) -> float:
        """Seconds this chunk computes alone while its leading blocks are fetched; 0.0: it waits until all are here."""


class Stepper:
    """`find` gives the leg of a request's generation; `handle` puts an event into the core and performs its effects,
    which may add to `items`: what the step says to the gateway, in ONE message."""

    def __init__(
        self, context: RoleContext, engine: Engine, core: BatchCore, find: Find,
        handle: Callable[[StepDone | StepUndone], None],
    ) -> None:  # fmt: skip
        self._context, self._engine, self._core, self._find, self._handle = context, engine, core, find, handle
        self._wake = asyncio.Event()
        self.items: list[TokenItem] = []
        self.meter = SpeedMeter()

    def perform(self, effect: Effect) -> None:
        raise TypeError(f"the shell cannot perform {type(effect).__name__}")

    def beside_fetch_s(self, chunk: Chunk) -> float:
        """By the profile and by what steps took of late."""
        predicted_s = predicted_step_s(self._engine.latency, [chunk])
        return predicted_s * self.meter.speed(asyncio.get_running_loop().time())

    def wake(self) -> None:
        """Something entered the core: look for a step. An idle instance sleeps."""
        self._wake.set()

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            begun = loop.time()
            plan = self._core.next_step(begun)
            if plan is None:
                self._wake.clear()
                await self._wake.wait()
            else:
                await self._step(plan, begun)

    async def _step(self, plan: StepPlan, begun: float) -> None:
        """begun: when it was asked for. What an instance takes for a step includes planning and telling it: its
        requests wait for that, too."""
        context, loop = self._context, asyncio.get_running_loop()
        for request_id in plan.started:
            if (leg := self._find(request_id, None)) is not None:
                leg.started()
        streams = [
            (stream, push.first_block + push.count)
            for push in plan.pushes
            if (leg := self._find(push.request_id, push.generation)) is not None
            and (stream := leg.stream()) is not None
        ]
        claims = [(stream, claim) for stream, upto in streams if (claim := stream.claim(upto)) is not None]
        fetches = self._fetches(plan)
        gate = StepGate([fetch.gate for fetch in fetches]) if fetches else None
        predicted = predicted_step_s(self._engine.latency, plan.chunks)
        try:
            async with asyncio.timeout(context.bounds.step_s):
                result = await self._engine.step(
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
            stream.finalise(upto, begun, now)
        for fetch in fetches:
            fetch.held_step(result.waited_s)
        self._handle(StepDone(sampled=result.sampled, duration_s=result.duration_s))
        if self.items:
            items, self.items = tuple(self.items), []
            context.send(
                StepOutput(
                    epoch=context.epoch, items=items, step_s=result.duration_s,
                    num_prefill_tokens=plan.num_prefill_tokens,
                )
            )  # fmt: skip
        ended = loop.time()
        self.meter.measured(ended - begun - result.waited_s, predicted, ended)

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


def _on_layer(claims: list[tuple[KvSender, int, int]]) -> OnLayer | None:
    if not claims:
        return None

    def on_layer(layer: int) -> None:
        for sender, first, count in claims:
            sender.push(layer, first, count)

    return on_layer
