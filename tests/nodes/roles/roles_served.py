"""A fleet whose engines batch by themselves: a toy whose text depends on the KV bytes it loads from the arena.

KV is as the emulated engine's (a rolling hash of the tokens so far), the same in each layer; the token drawn is the
emulated one's only where every position of every layer that was loaded is right.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from functools import reduce
from operator import xor

import numpy as np
from roles_harness import BLOCK
from roles_layered import LAYERS, MODEL, LayeredFleet, layered

from nodes.engines.emulated import ROOT, continuation, emulated_identity, emulated_layout
from nodes.engines.emulated import _draw as draw
from nodes.engines.emulated import _next as next_state
from nodes.engines.engine import Engine
from nodes.engines.served import Job, OnSaved, OnStarted, Output, ServedEngine
from nodes.hardware import preset
from nodes.instance import InstanceActor, PoolMemory
from nodes.shapes import latency_profile
from transfer.errors import EngineFailed, JobFailed
from transfer.kv.arena import HostArena, KvArena
from transfer.terms import FinishReason, Role

CHUNK = 24
"""Prompt tokens of one pass through the layers; no whole number of blocks is needed."""
ABORT_S = 0.003
"""What the engine takes to let go of a request."""


class ToyServed:
    """A ServedEngine. slow: times as long as the profile says. fails: what its run of a request raises."""

    kind, version = "toy", "1.0"

    def __init__(self, num_blocks: int, *, capacity_blocks: int = 4096, shares_kv: bool = True) -> None:
        self.latency = latency_profile(preset("H800"), MODEL)
        self.hardware = self.latency.hardware
        self.model = emulated_identity("llama-3.1-8b")
        self.layout = layered(emulated_layout(BLOCK))
        self.num_blocks, self.capacity_blocks, self.shares_kv = num_blocks, capacity_blocks, shares_kv
        self.max_length = self.model.max_context
        self._host = HostArena(self.layout, num_blocks)
        self.arena: KvArena = self._host
        self.slow = 1.0
        self.fails: dict[str, JobFailed | EngineFailed] = {}
        self.silent = self.keeps = False
        """silent: nothing comes any more. keeps: it does not let go of what is aborted."""
        self.tidy_s, self.num_disturbed = 0.0, 0
        self.running: dict[str, Job] = {}
        self.jobs: list[Job] = []
        self.answers: list[Job] = []
        """Those that only save what a request which ended had generated."""
        self._decoding: dict[str, int] = {}
        self._stepping: asyncio.Event | None = None
        self._prefill = asyncio.Lock()
        self._lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def run(self, job: Job, on_started: OnStarted, on_saved: OnSaved) -> AsyncGenerator[Output, None]:
        assert job.request_id not in self.running
        self.running[job.request_id] = job
        (self.answers if "/keep-" in job.request_id else self.jobs).append(job)
        try:
            async with aclosing(self._serve(job, on_started, on_saved)) as outputs:
                async for output in outputs:
                    yield output
            await self._tidy()
        except (asyncio.CancelledError, GeneratorExit):
            await asyncio.sleep(1e9 if self.keeps else ABORT_S)
            raise
        finally:
            self._decoding.pop(job.request_id, None)
            del self.running[job.request_id]

    async def _tidy(self) -> None:
        """After the last output, before the end."""
        try:
            await asyncio.sleep(self.tidy_s)
        except asyncio.CancelledError:
            self.num_disturbed += 1
            raise

    async def watch(self) -> None:
        await asyncio.shield(self._lost)

    async def close(self) -> None:
        if not self._lost.done():
            self._lost.cancel()
        self._host.close()

    def lose(self) -> None:
        self._lost.set_exception(EngineFailed("the engine's process has ended with status 137"))

    # --- what it computes -----------------------------------------------------------------------------------

    async def _serve(self, job: Job, on_started: OnStarted, on_saved: OnSaved) -> AsyncGenerator[Output, None]:
        async with self._prefill:
            on_started()
            if job.request_id in self.fails:
                raise self.fails[job.request_id]
            states, wrong = self._load(job)
            tokens = job.tokens[:-1]
            while len(states) < len(tokens):
                chunk = tokens[len(states) : len(states) + CHUNK]
                first = len(states) // BLOCK
                for token in chunk:
                    states.append(next_state(states[-1] if states else ROOT, token))
                await self._pass(job, states, first, len(chunk), on_saved)
        if job.sampling is None:
            yield Output((), finish=FinishReason.LENGTH, cached_tokens=job.num_loaded)
            return
        state, num_output = states[-1] if states else ROOT, job.num_output
        state, cached = next_state(state, job.tokens[-1]), job.num_loaded
        while True:
            self._decoding[job.request_id] = len(job.tokens) + num_output - job.num_output
            await self._step()
            token = draw(state ^ wrong, ())
            state, num_output = next_state(state, token), num_output + 1
            finish = FinishReason.LENGTH if num_output >= job.sampling.max_tokens else None
            yield Output((token,), finish=finish, cached_tokens=cached)
            if finish is not None:
                return

    async def _pass(self, job: Job, states: list[int], first: int, num_new: int, on_saved: OnSaved) -> None:
        """Layer after layer, each saved when it is computed: blocks that are full, and at the end the last one."""
        whole = len(states) == len(job.tokens) - 1
        end = -(-len(states) // BLOCK) if whole else len(states) // BLOCK
        first = max(first, job.save_from)
        duration_s = self.latency.prefill_s(num_new, len(states) - num_new) * self.slow
        for layer in range(LAYERS) if whole else reversed(range(LAYERS)):
            await asyncio.sleep(duration_s / LAYERS)
            await self._stand_still()
            if self.shares_kv and end > first:
                for index in range(first, end):
                    self._write(layer, job.blocks[index], states[index * BLOCK : (index + 1) * BLOCK])
                on_saved(layer, first, end - first)

    async def _step(self) -> None:
        """One token of everybody who generates, at the same moment."""
        if self._stepping is None:
            self._stepping = asyncio.Event()
            step_s = self.latency.decode_step_s(len(self._decoding), sum(self._decoding.values())) * self.slow
            asyncio.get_running_loop().call_later(step_s, self._step_over)
        await self._stepping.wait()
        await self._stand_still()

    def _step_over(self) -> None:
        if self._stepping is not None:
            self._stepping.set()
            self._stepping = None

    async def _stand_still(self) -> None:
        if self.silent:
            await asyncio.Event().wait()

    # --- the arena ------------------------------------------------------------------------------------------

    def _load(self, job: Job) -> tuple[list[int], int]:
        """KV of the tokens to load, and 0 where every layer of it is what these tokens make."""
        layers = [
            [state for block in job.blocks for state in self._read(layer, block)][: job.num_loaded]
            for layer in range(LAYERS if self.shares_kv else 0)
        ]
        states: list[int] = []
        for token in job.tokens[: job.num_loaded]:
            states.append(next_state(states[-1] if states else ROOT, token))
        wrong = reduce(xor, (have ^ right for layer in layers for have, right in zip(layer, states, strict=True)), 0)
        return layers[0] if layers else [], wrong

    def _read(self, layer: int, block: int) -> list[int]:
        low, high = (np.frombuffer(view, dtype=np.uint16) for view in self.arena.views(layer, block, 1))
        return [int(a) | int(b) << 16 for a, b in zip(low, high, strict=True)]

    def _write(self, layer: int, block: int, states: list[int]) -> None:
        low, high = (np.frombuffer(view, dtype=np.uint16) for view in self.arena.views(layer, block, 1))
        low[: len(states)] = [state & 0xFFFF for state in states]
        high[: len(states)] = [state >> 16 for state in states]


class ServedFleet(LayeredFleet):
    """As Fleet, over ToyServed; `native` instances step a LayeredEngine, `alone` ones keep their KV to themselves."""

    native: tuple[str, ...] = ()
    alone: tuple[str, ...] = ()
    capacity_blocks = 4096
    _making = ""

    def engine(self, name: str) -> ToyServed:
        engine = self.shell(name).context.engine
        assert isinstance(engine, ToyServed)
        return engine

    async def at_rest(self, within: float = 30.0) -> None:
        await super().at_rest(within)
        for name in self.actors:
            if name[0] != "k" and name not in self.native:
                assert not self.engine(name).running

    def _idle(self) -> bool:
        settled = all(actor.role is not None and not actor.role.load().unsettled for actor in self.actors.values())
        return settled and super()._idle()

    def _make(self, name: str) -> InstanceActor:
        self._making = name
        return super()._make(name)

    def _engine_maker(self, role: Role) -> Callable[[], Awaitable[Engine | ServedEngine | PoolMemory]]:
        name, usual, num_blocks = self._making, super()._engine_maker(role), self.options.num_blocks

        async def make() -> Engine | ServedEngine | PoolMemory:
            if role is Role.KV_POOL or name in self.native:
                return await usual()
            alone = name in self.alone
            return ToyServed(1 if alone else num_blocks, capacity_blocks=self.capacity_blocks, shares_kv=not alone)

        return make


class Mixed(ServedFleet):
    """Both kinds of engine in one fleet."""

    native = ("p1", "d1")


class Alone(ServedFleet):
    alone = ("m0",)


__all__ = ["ABORT_S", "Alone", "Mixed", "ServedFleet", "ToyServed", "continuation"]
