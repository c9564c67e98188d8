"""A fleet whose engines have four layers of KV, so that a fetch can come and fail layer by layer in virtual time."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import numpy as np
from roles_harness import BLOCK, Fleet

from nodes.core.events import Event
from nodes.engines.emulated import EmulatedEngine, emulated_identity, emulated_layout
from nodes.engines.engine import Engine, LayerGate, OnLayer, StepBatch, StepResult
from nodes.hardware import preset
from nodes.instance import PoolMemory
from nodes.shapes import latency_profile, shape
from transfer.kv.arena import HostArena
from transfer.terms import KvLayout, Role

LAYERS = 4
MODEL = msgspec.structs.replace(shape("llama-3.1-8b"), num_layers=LAYERS)


def layered(layout: KvLayout) -> KvLayout:
    return msgspec.structs.replace(layout, num_layers=LAYERS)


class LayeredEngine(EmulatedEngine):
    """Every layer holds the same checkable KV and is computed, and waited for, by itself."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(
            latency_profile(preset("H800"), MODEL), emulated_identity("llama-3.1-8b"), num_blocks, block_size=BLOCK
        )
        self.layout = layered(emulated_layout(BLOCK))
        self._host_arena.close()
        self._host_arena = HostArena(self.layout, num_blocks)
        self.arena = self._host_arena
        halves = np.frombuffer(self._host_arena.buffer, dtype=np.uint16).reshape(LAYERS, 2, num_blocks, BLOCK)
        self._layers = [(halves[layer][0], halves[layer][1]) for layer in range(LAYERS)]
        self.num_abandoned = 0

    async def step(
        self, batch: StepBatch, on_layer: OnLayer | None = None, before_layer: LayerGate | None = None
    ) -> StepResult:
        loop = asyncio.get_running_loop()
        started, waited_s = loop.time(), 0.0
        duration_s, sampled = self._duration_s(batch), {}
        for layer in range(LAYERS):
            since = loop.time()
            if before_layer is not None:
                try:
                    await before_layer.ready(layer)
                except BaseException:
                    self.num_abandoned += 1
                    raise
            waited_s += loop.time() - since
            self._low, self._high = self._layers[layer]
            self._followed.clear()
            sampled = {c.request_id: token for c in batch.chunks if (token := self._run(c)) is not None}
            await asyncio.sleep(duration_s / LAYERS)
            if on_layer is not None:
                on_layer(layer)
        return StepResult(sampled=sampled, duration_s=loop.time() - started, waited_s=waited_s)

    def handoff_s(self, num_tokens: int) -> float:
        return 0.0

    async def close(self) -> None:
        self._layers = []
        await super().close()


class LayeredFleet(Fleet):
    def _engine_maker(self, role: Role) -> Callable[[], Awaitable[Engine | PoolMemory]]:
        options, usual = self.options, super()._engine_maker(role)

        async def make() -> Engine | PoolMemory:
            if role is not Role.KV_POOL:
                return LayeredEngine(options.num_blocks)
            memory = await usual()
            assert isinstance(memory, PoolMemory)
            return dataclasses.replace(memory, layout=layered(memory.layout))

        return make

    async def fill_pool(self, *prompts: list[int]) -> None:
        """The whole blocks of these prompts, which must differ in their first, are written through to k0."""
        for number, tokens in enumerate(prompts):
            await self.control.hand_off(f"fill{number}", tokens, max_tokens=1)
            await self.control.text(f"fill{number}", tokens, 1)
        whole = sum((len(tokens) - 1) // BLOCK for tokens in prompts)
        await self.control.until(lambda: self.pool("k0").load().cached_blocks >= whole, "write-through")

    def on_layers(self, name: str, react: Callable[[int], None]) -> None:
        """Call `react` with every layer that an instance's fetches are told of, after they are."""
        port = self.shell(name).context.port
        fetch = port.fetch

        async def fetch_and_tell(*args: Any) -> int:
            *others, on_layer = args

            def tell(layer: int, count: int) -> None:
                on_layer(layer, count)
                react(layer)

            return int(await fetch(*others, tell))

        port.fetch = fetch_and_tell


def record_events(fleet: Fleet, name: str) -> list[tuple[float, Event]]:
    """What enters an instance's core from now on, and when."""
    seen: list[tuple[float, Event]] = []
    core, loop = fleet.shell(name).core, asyncio.get_running_loop()
    handle = core.handle

    def record(event: Event, now: float) -> Any:
        seen.append((loop.time(), event))
        return handle(event, now)

    core.handle = record
    return seen
