"""The shell around one instance's batching core: performs its effects and routes them to legs (leg.py).

Roles (prefill.py, decode.py) add legs; the shell knows no order but Abort and decides nothing that the core decides.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec

from nodes.core.admission import Admission
from nodes.core.batching import BatchCore
from nodes.core.events import (
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
    Paused,
    Pinned,
    SequenceSpec,
    Tick,
    Unpinned,
)
from nodes.core.jobs import Keeping
from nodes.core.legs import Legs
from nodes.core.served import ServedCore
from nodes.core.served_residency import ServedConfig
from nodes.engines.engine import Chunk
from nodes.engines.served import ServedEngine
from nodes.roles.cache import CacheFeed
from nodes.roles.context import Link, RoleContext
from nodes.roles.keeper import Keeper
from nodes.roles.leg import Leg
from nodes.roles.served import ServedRuns
from nodes.roles.steps import Runs, Stepper
from nodes.roles.writer import PoolWriter
from transfer.terms import RequestId, TokenIds
from transfer.wire.messages import Abort, LoadReport, Released, TokenItem

CLOSE_S = 1.0
"""What tasks that were cancelled may take to end, before they are cancelled again."""


class BatchShell:
    """Owns the core, what has it computed, and the legs. `failed` is told what ends the instance (EngineFailed, a bug).

    Idempotent by (request_id, generation), see nodes/core/legs.py.
    """

    def __init__(self, context: RoleContext, failed: Callable[[Exception], None]) -> None:
        self.context, self._failed = context, failed
        self.cache = CacheFeed(context.epoch, context.send, context.bounds.cache_events_s)
        self.link = Link(context.engine)
        self.writer = PoolWriter(context, self.link, self.handle)
        self._loop = asyncio.get_running_loop()
        self.legs = Legs[Leg](self._began)
        self._events: deque[Event] = deque()
        self._handling = False
        self._empty = asyncio.Event()
        self._empty.set()
        self._ticker: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.core: Admission
        self._runs: Runs
        self.core, self._runs = self._parts()
        self._keeper = self._made_keeper()

    # --- lifecycle ------------------------------------------------------------------------------------------

    def start(self) -> None:
        self.spawn(self._runs.run(), f"{self.context.instance_id}/runs")
        self.spawn(self.writer.run(), f"{self.context.instance_id}/write-through")
        if self._keeper is not None:
            self.spawn(self._keeper.run(), f"{self.context.instance_id}/keep")

    def spawn(
        self, work: Coroutine[Any, Any, None], name: str, finally_: Callable[[], None] | None = None
    ) -> asyncio.Task[None]:
        """A task of this instance: cancelled by close; an exception out of it ends the instance. `finally_` runs
        when it has ended in whatever way, also when it was cancelled before its first line (as no `finally` does)."""
        task = self._loop.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(lambda done: self._task_done(done, finally_))
        return task

    async def drain(self, timeout_s: float) -> bool:
        """Wait until no leg is left; False when the time is over first."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._empty.wait()
        except TimeoutError:
            return False
        return True

    async def close(self) -> None:
        self.cache.close()
        if self._ticker is not None:
            self._ticker.cancel()
        for _ in range(2):  # a task may take a moment to let go, but not for ever
            for task in list(self._tasks):
                task.cancel()
            if self._tasks:
                await asyncio.wait(list(self._tasks), timeout=CLOSE_S)

    # --- what roles and the instance ask --------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        return self.legs.idle and self.core.idle

    def leg(self, request_id: RequestId, generation: int | None = None) -> Leg | None:
        """The leg of exactly this generation; of any when None."""
        return self.legs.find(request_id, generation)

    def role_changed(self) -> None:
        """The same engine and cache, another phase: measurements start anew."""
        self._runs.meter.restart()

    def snapshot(self) -> None:
        """Tell the directory everything that is in the prefix cache."""
        self.cache.snapshot(self.core.cached_hashes())

    def load(self) -> LoadReport:
        now = self._loop.time()
        report = self.core.load(now)
        values = {name: getattr(report, name) for name in report.__struct_fields__}
        meter, keeper = self._runs.meter, self._keeper
        unsettled = self.writer.num_pending + (keeper.num_pending if keeper is not None else 0)
        return LoadReport(**values | {"step_s": meter.step_s, "speed": meter.speed(now), "unsettled": unsettled})

    def beside_fetch_s(self, chunk: Chunk) -> float:
        """Seconds this chunk computes alone while its leading blocks are fetched; 0.0: it waits until all are here."""
        return self._runs.beside_fetch_s(chunk)

    def admit(self, leg: Leg) -> None:
        """Begin a leg, unless this generation or a newer one is here or has ended here."""
        self.legs.admit(leg)

    def abort(self, message: Abort) -> None:
        """End every leg of the request up to this generation; Released follows when it holds nothing."""
        if not self.legs.abort(message, self._loop.time()):
            self.handle(Drop(request_id=message.request_id, generation=message.generation, reason=message.reason))

    def drop_all(self, reason: str) -> None:
        """Forget every request: the control plane that placed them is gone."""
        self.legs.forget_all(reason)

    def ended(self, spec: SequenceSpec, tokens: TokenIds) -> None:
        """A request has ended as it should, with KV of `tokens`: that goes to a pool."""
        if self._keeper is not None:
            self._keeper.offer(spec, tokens)
        else:
            self._store(spec, tokens)

    def drop(self, leg: Leg, reason: str) -> None:
        """Give a leg's blocks back; nobody writes into them or reads them from here on."""
        self.context.port.revoke(leg.request_id, leg.generation)
        self.handle(Drop(request_id=leg.request_id, generation=leg.generation, reason=reason))

    def handle(self, event: Event) -> None:
        """One event into the core; its effects are performed before the next event enters. Whatever it raises is a
        bug or a lost engine: the instance ends (timers, port and task callbacks have nobody else to tell)."""
        self._events.append(event)
        if self._handling:
            return
        self._handling = True
        try:
            while self._events:
                for effect in self.core.handle(self._events.popleft(), self._loop.time()):
                    self._perform(effect)
        except Exception as error:
            self._events.clear()
            self._failed(error)
            raise
        finally:
            self._handling = False
        if self._keeper is not None and self.core.num_waiting:
            self._keeper.give_way()
        self._runs.wake()

    def _parts(self) -> tuple[Admission, Runs]:
        """The core for this kind of engine, and what has it computed."""
        context = self.context
        engine, config = context.engine, context.config
        if isinstance(engine, ServedEngine):
            served = ServedConfig(
                **msgspec.structs.asdict(config), capacity_blocks=engine.capacity_blocks, shares_kv=engine.shares_kv,
                num_layers=engine.layout.num_layers,
            )  # fmt: skip
            return ServedCore(served), ServedRuns(context, engine, self.leg, self.handle, self.spawn)
        core = BatchCore(config)
        return core, Stepper(context, engine, core, self.leg, self.handle)

    def _made_keeper(self) -> Keeper | None:
        engine, context = self.context.engine, self.context
        if not (isinstance(engine, ServedEngine) and engine.shares_kv and context.config.prefix_cache):
            return None
        return Keeper(context, engine, self.handle, self._store)

    def _store(self, spec: SequenceSpec, tokens: TokenIds) -> None:
        self.writer.offer(spec.request_id, tokens, spec.root)

    # --- effects --------------------------------------------------------------------------------------------

    def _perform(self, effect: Effect) -> None:
        match effect:
            case Emit():
                self._emit(effect)
            case Gone():
                self._gone(effect)
            case HandsChanged():
                for block in effect.blocks:
                    self.context.engine.arena.bump(block)
            case Cached():
                self.cache.change(effect.stored, effect.removed)
            case Pinned():
                self.writer.pinned(effect)
            case Unpinned():
                self.writer.unpinned(effect)
            case Keeping() if self._keeper is not None:
                self._keeper.granted(effect)
            case Admitted() | NotAdmitted() | Computed() | Grown() | Paused() | CannotPause():
                leg = self.leg(effect.request_id, effect.generation)
                if leg is not None:
                    self._tell(leg, effect)
            case _:
                self._runs.perform(effect)

    def _tell(self, leg: Leg, effect: Admitted | NotAdmitted | Computed | Grown | Paused | CannotPause) -> None:
        match effect:
            case Admitted():
                leg.admitted(effect)
            case NotAdmitted():
                self.writer.give_way()
                if self._keeper is not None:
                    self._keeper.give_way()
                self.legs.refused(leg)
                self._maybe_empty()
                leg.refused(effect)
                self.legs.begin_next(leg.request_id)
            case Computed():
                leg.computed(effect)
            case Grown():
                leg.grown(effect)
            case Paused():
                leg.paused(effect)
            case CannotPause():
                leg.cannot_pause(effect)

    def _emit(self, effect: Emit) -> None:
        leg = self.leg(effect.request_id, effect.generation)
        if leg is None or leg.aborted is not None:
            return
        leg.emitted(effect)
        self._runs.items.append(_item(effect))

    def _gone(self, effect: Gone) -> None:
        ended = self.legs.gone(effect, self._loop.time())
        if ended is not None:
            if effect.lost is not None:
                self.context.port.revoke(ended.request_id, ended.generation)
            self._maybe_empty()
            ended.gone(effect)
        aborted = self.legs.answered(effect, ended)
        if aborted is not None:
            self.context.send(Released(request_id=effect.request_id, generation=aborted, num_blocks=effect.num_blocks))
        self.legs.begin_next(effect.request_id)

    def _began(self) -> None:
        self._empty.clear()
        if self._ticker is None:
            self._tick_later()

    def _maybe_empty(self) -> None:
        if not self.legs.live:
            self._empty.set()

    def _tick_later(self) -> None:
        self._ticker = self._loop.call_later(self.context.bounds.tick_s, self._tick)

    def _tick(self) -> None:
        self._ticker = None
        if self.legs.live:
            self._tick_later()
        self.handle(Tick())

    def _task_done(self, task: asyncio.Task[None], finally_: Callable[[], None] | None) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and isinstance(error := task.exception(), Exception):
            self._failed(error)
        if finally_ is not None:
            finally_()


def _item(effect: Emit) -> TokenItem:
    return TokenItem(
        request_id=effect.request_id, generation=effect.generation, index=effect.index, token_ids=effect.token_ids,
        finish=effect.finish, logprobs=effect.logprobs, cached_tokens=effect.cached_tokens,
    )  # fmt: skip
