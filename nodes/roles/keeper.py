"""Has an engine that batches by itself save what it generated: when a request has ended, a job for its KV alone, which
the engine takes from its own prefix cache. So the next turn of a chat finds the answer in the arena or in a pool.

Never in the way: one at a time, behind whatever else the engine has to do, with a deadline; or not at all.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import aclosing

from nodes.core.events import Event, SequenceSpec
from nodes.core.jobs import Keep, Keeping, Kept
from nodes.engines.served import Job, OnStarted, ServedEngine
from nodes.roles.context import RoleContext
from transfer.errors import JobFailed
from transfer.terms import TokenIds

LAST = 1_000_000
"""A priority behind those of requests."""
MAX_COMPUTED, REST_S = 256, 60.0
"""An engine that computed more tokens than the first has no prefix cache, or none left: it is left alone so long. So is
one that has begun and is not done by the deadline."""


class Keeper:
    """`handle` puts an event into the core; the core answers Keep through `granted` before it returns. `store` is told
    of each request once its KV is as far in the arena as it will be."""

    def __init__(
        self, context: RoleContext, engine: ServedEngine, handle: Callable[[Event], None],
        store: Callable[[SequenceSpec, TokenIds], None],
    ) -> None:  # fmt: skip
        self._context, self._engine, self._handle, self._store = context, engine, handle, store
        self._queue: deque[tuple[SequenceSpec, TokenIds]] = deque()
        self._queued = asyncio.Event()
        self._granted: Keeping | None = None
        self._timeout: asyncio.Timeout | None = None
        self._rests_until_s = 0.0
        self._num_keeps = self.num_kept = 0

    @property
    def num_pending(self) -> int:
        return len(self._queue) + (self._timeout is not None)

    def offer(self, spec: SequenceSpec, tokens: TokenIds) -> None:
        """The engine has KV of `tokens`, of a request that ended. Never blocks."""
        if len(self._queue) >= self._context.bounds.store_queue:
            self._store(spec, tokens)
            return
        self._queue.append((spec, tokens))
        self._queued.set()

    def give_way(self) -> None:
        """Blocks are short: end what is being saved."""
        if self._timeout is not None and not self._timeout.expired():
            self._timeout.reschedule(asyncio.get_running_loop().time())

    def granted(self, effect: Keeping) -> None:
        self._granted = effect

    async def run(self) -> None:
        """Save what is offered, until cancelled. Raises EngineFailed when the engine is lost."""
        while True:
            while not self._queue:
                self._queued.clear()
                await self._queued.wait()
            spec, tokens = self._queue.popleft()
            if asyncio.get_running_loop().time() >= self._rests_until_s:
                await self._keep(spec, tokens)
            self._store(spec, tokens)

    async def _keep(self, spec: SequenceSpec, tokens: TokenIds) -> None:
        self._num_keeps += 1
        name = f"{self._context.instance_id}/keep-{self._num_keeps}"
        self._handle(Keep(name=name, tokens=tokens, root=spec.root))
        granted, self._granted = self._granted, None
        if granted is None or not granted.blocks:
            return
        is_saved, began, loop = False, asyncio.Event(), asyncio.get_running_loop()
        deadline = loop.time() + self._context.bounds.store_s
        try:
            async with asyncio.timeout_at(deadline) as self._timeout:
                await self._save(name, spec.salt, tokens, granted, began.set)
            is_saved = True
            self.num_kept += 1
        except (JobFailed, TimeoutError):  # the next turn computes it
            if began.is_set() and loop.time() >= deadline:
                self._rests_until_s = loop.time() + REST_S
        finally:
            self._timeout = None
            self._handle(Kept(name=name, is_saved=is_saved))

    async def _save(
        self, name: str, salt: str, tokens: TokenIds, granted: Keeping, on_started: OnStarted
    ) -> None:  # fmt: skip
        size, blocks = self._context.block_size, granted.blocks
        wanted = tokens[: len(blocks) * size]
        job = Job(
            name, 0, [*wanted, wanted[-1]], 0, None, blocks, num_loaded=granted.num_cached * size,
            save_from=granted.num_cached, salt=salt, priority=LAST,
        )  # fmt: skip
        async with aclosing(self._engine.run(job, on_started, lambda layer, first, count: None)) as outputs:
            async for output in outputs:
                if output.cached_tokens is not None and len(wanted) - output.cached_tokens > MAX_COMPUTED:
                    self._rests_until_s = asyncio.get_running_loop().time() + REST_S
