"""Runs what ServedCore launches on an engine that batches by itself: a task a job, one message of output a loop turn.

Decides nothing of requests; its own are the deadlines: an engine that stands still, or does not let go, is lost.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import aclosing
from functools import partial
from typing import Any

from nodes.core.events import Effect, Event
from nodes.core.jobs import Began, Cancel, Drew, JobOver, Launch, Saved, Started
from nodes.core.speed import SpeedMeter
from nodes.engines.engine import Chunk
from nodes.engines.served import Job, Output, ServedEngine
from nodes.roles.context import RoleContext
from nodes.roles.served_times import JobTimes, Timed
from nodes.roles.steps import Find
from transfer.errors import EngineFailed, JobFailed
from transfer.terms import RequestId
from transfer.wire.messages import StepOutput, TokenItem

Spawn = Callable[[Coroutine[Any, Any, None], str, Callable[[], None] | None], asyncio.Task[None]]
LOOKS = 4
"""Times within Bounds.step_s that the engine is looked after."""


class ServedRuns:
    """Runs (steps.py) over a ServedEngine. `find` gives the leg of a request's generation; `handle` puts an event into
    the core and performs its effects, which may add to `items`; `spawn` makes a task whose error ends the instance."""

    def __init__(
        self, context: RoleContext, engine: ServedEngine, find: Find, handle: Callable[[Event], None], spawn: Spawn
    ) -> None:
        self._context, self._engine = context, engine
        self._find, self._handle, self._spawn = find, handle, spawn
        self._loop = asyncio.get_running_loop()
        self.items: list[TokenItem] = []
        self.meter = SpeedMeter()
        self._times = JobTimes(engine.latency, self.meter)
        self._jobs: dict[tuple[RequestId, int], _Running] = {}
        self._heard_at = 0.0
        self._turn: asyncio.Handle | None = None

    async def run(self) -> None:
        """Raises EngineFailed when the engine is lost, stands still with work of ours, or keeps what was aborted."""
        limit_s = self._context.bounds.step_s
        self._spawn(self._engine.watch(), f"{self._context.instance_id}/watch", None)
        while True:
            await asyncio.sleep(limit_s / LOOKS)
            now = self._loop.time()
            for running in self._jobs.values():
                if running.cancelled_at is not None and now - running.cancelled_at > limit_s:
                    raise EngineFailed(
                        f"the engine did not let go of request {running.job.request_id} within {limit_s:g} s"
                    )
            # One that keeps its KV to itself says nothing while it computes a prompt, however long that is.
            if self._jobs and self._engine.shares_kv and now - self._heard_at > limit_s:
                raise EngineFailed(f"the engine was silent for {limit_s:g} s with {len(self._jobs)} requests to serve")

    def wake(self) -> None:
        """Nothing to do: the core launches by itself."""

    def beside_fetch_s(self, chunk: Chunk) -> float:
        return 0.0

    def perform(self, effect: Effect) -> None:
        match effect:
            case Launch():
                self._launch(effect.job)
            case Cancel():
                running = self._jobs.get((effect.request_id, effect.generation))
                if running is not None:
                    running.cancelled_at = self._loop.time()
                    if not running.finished and running.task is not None:
                        running.task.cancel()
            case Started():
                if (leg := self._find(effect.request_id, effect.generation)) is not None:
                    leg.started()
            case _:
                raise TypeError(f"the shell cannot perform {type(effect).__name__}")

    # --- one job --------------------------------------------------------------------------------------------

    def _launch(self, job: Job) -> None:
        if not self._jobs:
            self._heard_at = self._loop.time()
        running = self._jobs[job.request_id, job.generation] = _Running(job)
        running.task = self._spawn(self._run(running), f"job {job.request_id}", lambda: self._over(running))

    async def _run(self, running: _Running) -> None:
        job = running.job
        outputs = self._engine.run(job, partial(self._began, running), partial(self._saved, job))
        try:
            async with aclosing(outputs):
                async for output in outputs:
                    self._drew(running, output)
        except JobFailed as error:
            running.error = str(error)
        except EngineFailed as error:
            running.error = str(error)
            raise

    def _began(self, running: _Running) -> None:
        self._heard_at = self._loop.time()
        self._times.began(running.timed, self._heard_at)
        self._handle(Began(request_id=running.job.request_id, generation=running.job.generation))

    def _saved(self, job: Job, layer: int, first: int, count: int) -> None:
        self._heard_at = self._loop.time()
        leg = self._find(job.request_id, job.generation)
        stream = leg.stream() if leg is not None else None
        if stream is not None:
            stream.saved(layer, first, count)
        self._handle(Saved(request_id=job.request_id, generation=job.generation, layer=layer, first=first, count=count))

    def _drew(self, running: _Running, output: Output) -> None:
        self._heard_at = self._loop.time()
        running.finished = running.finished or output.finish is not None
        self._times.drew(running.timed, output)
        self._handle(Drew(request_id=running.job.request_id, generation=running.job.generation, output=output))
        self._end_turn_soon()

    def _over(self, running: _Running) -> None:
        """The task has ended, in whatever way."""
        job = running.job
        self._heard_at = self._loop.time()
        del self._jobs[job.request_id, job.generation]
        self._times.over(running.timed, well=running.error is None and running.cancelled_at is None)
        self._end_turn_soon()
        self._handle(JobOver(request_id=job.request_id, generation=job.generation, error=running.error))

    # --- what came together is told together ----------------------------------------------------------------

    def _end_turn_soon(self) -> None:
        if self._turn is None:
            self._turn = self._loop.call_soon(self._end_turn)

    def _end_turn(self) -> None:
        self._turn = None
        step_s, num_prefill_tokens = self._times.turn(self._loop.time())
        if self.items:
            items, self.items = tuple(self.items), []
            self._context.send(
                StepOutput(epoch=self._context.epoch, items=items, step_s=step_s, num_prefill_tokens=num_prefill_tokens)
            )


class _Running:
    """finished: its last output has come, and its end follows by itself: it is not disturbed any more."""

    __slots__ = ("cancelled_at", "error", "finished", "job", "task", "timed")

    def __init__(self, job: Job) -> None:
        self.job, self.timed = job, Timed(job)
        self.task: asyncio.Task[None] | None = None
        self.error: str | None = None
        self.cancelled_at: float | None = None
        self.finished = False
