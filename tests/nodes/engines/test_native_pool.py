"""A prompt's front comes from a pool while a real model computes the rest: the text is as if it were computed whole."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import transformers
from native_helpers import reference_greedy, save_tiny_model
from roles_harness import BLOCK, Fleet, Options
from roles_layered import record_events

from nodes.core.events import Arriving, StepUndone
from nodes.engines.engine import Engine
from nodes.engines.native.engine import NativeEngine
from nodes.hardware import preset
from nodes.instance import PoolMemory
from nodes.roles.fetch import PoolFetch
from transfer.terms import Role
from transfer.wire.messages import PrefillDone, Reserved

PREFIX = [3 + (7 * index * index + index) % 150 for index in range(160)]
TURN = [*PREFIX, *(3 + (11 * index) % 150 for index in range(90))]
NUM_LAYERS = 3


class NativeFleet(Fleet):
    def __init__(self, *names: str, model_dir: Path) -> None:
        super().__init__(*names, options=Options(token_budget=256))
        self.model_dir = model_dir

    def _engine_maker(self, role: Role) -> Callable[[], Awaitable[Engine | PoolMemory]]:
        async def make() -> Engine | PoolMemory:
            engine = NativeEngine(
                self.model_dir, dtype="float32", device="cpu", num_blocks=512, block_size=BLOCK, num_threads=1,
                measure=False, hardware=preset("H800"),
            )  # fmt: skip
            if role is not Role.KV_POOL:
                return engine
            await engine.close()
            return PoolMemory(engine.layout, 256, preset("H800"))

        return make


@pytest.mark.parametrize("cut_at", [None, 0, 1])
async def test_text_with_a_fetch_beside_compute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cut_at: int | None
) -> None:
    """Layers come 60 ms apart and the step waits in the engine's thread for each; `cut_at`: the pool is lost then."""
    expected = reference_greedy(save_tiny_model(tmp_path, transformers.LlamaConfig), TURN, 12)
    monkeypatch.setattr(PoolFetch, "_predict_first_step_s", lambda self: 10.0)  # begin with the first layer
    async with NativeFleet("p0", "p1", "d0", "d1", "k0", model_dir=tmp_path) as fleet:
        control = fleet.control
        await control.hand_off("fill", [*PREFIX, 1], max_tokens=1)
        await control.until(
            lambda: fleet.pool("k0").load().cached_blocks >= len(PREFIX) // BLOCK, "write-through", within=8
        )
        layer_bytes = len(PREFIX) * fleet.shell("p1").context.engine.layout.token_bytes / NUM_LAYERS
        usual, fleet.kv.bytes_per_s = fleet.kv.bytes_per_s, layer_bytes / 0.06
        events, told = record_events(fleet, "p1"), PoolFetch._on_layer

        def on_layer(self: PoolFetch, layer: int, count: int) -> None:
            told(self, layer, count)
            if layer == cut_at:
                asyncio.get_running_loop().call_later(0.02, fleet.kv.cut, "k0")
            if layer == (NUM_LAYERS - 1 if cut_at is None else cut_at):
                fleet.kv.bytes_per_s = usual

        monkeypatch.setattr(PoolFetch, "_on_layer", on_layer)
        control.reserve("d1", "r", TURN, max_tokens=12, temperature=0.0, ignore_eos=True)
        await control.expect(Reserved, "r")
        control.prefill("p1", "r", TURN, "d1", source="k0", source_blocks=40)
        await control.until(lambda: "r" in control.finished, "the end")
        done = await control.expect(PrefillDone, "r")
        assert control.output["r"] == expected
        assert done.fetched_tokens == (160 if cut_at is None else 0)
        assert done.fetch_s > 0.06
        kinds = [type(event) for _, event in events]
        assert kinds.count(Arriving) == 1
        assert kinds.count(StepUndone) == (cut_at is not None)
