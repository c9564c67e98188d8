"""A vLLM that splits its model over three workers, beside one that does not: their arenas hold the same KV."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import struct
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
from vllm_fleet import PYTHON, needs_vllm
from vllm_jobs import ENDLESS, TOKENS, alive, copy, idle, kv, run

from nodes.engines.served import Job
from nodes.engines.vllm.engine import VllmEngine, VllmOptions, start_vllm
from nodes.hardware import preset
from transfer.errors import EngineFailed
from transfer.terms import SamplingParams

pytestmark = [
    pytest.mark.vllm, pytest.mark.weights, needs_vllm, pytest.mark.timeout(600),
    pytest.mark.asyncio(loop_scope="module"),
]  # fmt: skip

NUM_WORKERS = 3
"""SmolLM2-135M has nine heads and three KV heads."""
NUM_TOKENS = 300
GREEDY = SamplingParams(max_tokens=10, temperature=0.0, ignore_eos=True)
ARGS = ("--enforce-eager", "--kv-cache-memory-bytes", str(256 << 20))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engines(smollm2_dir: Path) -> AsyncIterator[tuple[VllmEngine, VllmEngine]]:
    """One worker; three. In float32, so that sums in another order draw the same text."""
    options = VllmOptions(
        model_dir=smollm2_dir, python=Path(str(PYTHON)), dtype="float32", max_model_len=2048, num_blocks=64, args=ARGS,
        threads=1, hardware=preset("CPU"),
    )  # fmt: skip
    split = replace(options, args=(*ARGS, "--tensor-parallel-size", str(NUM_WORKERS)))
    one, three = await asyncio.gather(start_vllm(options), start_vllm(split))
    yield one, three
    await asyncio.gather(one.close(), three.close())


def job(sampling: SamplingParams | None, blocks: list[int], num_loaded: int, save_from: int, salt: str) -> Job:
    return Job("r", 1, TOKENS[:NUM_TOKENS], 0, sampling, blocks, num_loaded, save_from, salt=salt)


async def test_kv_of_one_worker_and_of_three_is_exchanged(engines: tuple[VllmEngine, VllmEngine]) -> None:
    one, three = engines
    assert one.layout == three.layout
    num_blocks = one.layout.num_blocks(NUM_TOKENS - 1)
    alone, blocks, into = {}, list(range(num_blocks)), list(range(40, 40 - num_blocks, -1))
    for engine in engines:
        alone[engine] = await run(engine, job(GREEDY, blocks, 0, num_blocks, "alone"))
        saved = await run(engine, job(None, blocks, 0, 0, "saved"))
        told = [(layer, block) for layer, first, count in saved.saved for block in range(first, first + count)]
        assert sorted(told) == [(layer, block) for layer in range(one.layout.num_layers) for block in blocks]
    ours, theirs = (kv(engine.arena, blocks, NUM_TOKENS - 1) for engine in engines)
    difference = np.abs(ours - theirs).max(axis=(1, 2, 3)) / np.abs(ours).max(axis=(1, 2, 3))
    print(f"KV differs by {difference.max():.2e} of its range at most, in the first layer by {difference[0]:.2e}")
    assert difference[0] < 1e-6  # the same products in the same order: zero, where kernels cut matrices alike
    assert difference.max() < 1e-4  # of another order it is about 1
    for source, target in ((one, three), (three, one)):
        copy(source.arena, blocks, target.arena, into)
        loaded = await run(target, job(GREEDY, into, NUM_TOKENS - 1, num_blocks, "loaded"))
        assert loaded.cached == NUM_TOKENS - 1
        assert loaded.tokens == alone[target].tokens
        assert loaded.tokens == alone[source].tokens

    # Of a prefix from the other one the rest is computed, and saved as if it had computed all.
    rest = into[:4] + list(range(50, 50 + num_blocks - 4))
    grown = await run(three, job(None, rest, 4 * three.layout.block_size, 4, "grown"))
    assert grown.cached == 4 * three.layout.block_size
    assert np.abs(kv(three.arena, rest, NUM_TOKENS - 1) - ours).max() < 1e-4 * np.abs(ours).max()


async def test_a_block_that_changed_hands_is_computed_by_all(
    engines: tuple[VllmEngine, VllmEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, three = engines
    num_blocks = three.layout.num_blocks(NUM_TOKENS - 1)
    blocks = list(range(num_blocks))
    alone = await run(three, job(GREEDY, blocks, 0, 0, "before"))
    grant = three._link.grant

    def grant_and_bump(*arguments: object) -> object:
        granted = grant(*arguments)  # type: ignore[arg-type]
        three.arena.bump(3)
        return granted

    monkeypatch.setattr(three._link, "grant", grant_and_bump)
    again = await run(three, job(GREEDY, blocks, NUM_TOKENS - 1, num_blocks, "after"))
    assert (again.tokens, again.cached, three.num_loads_failed) == (alone.tokens, 0, 1)


async def test_aborts_leave_nothing_behind(engines: tuple[VllmEngine, VllmEngine]) -> None:
    """Eight requests, ended while they wait, load, compute, save or draw."""
    _, three = engines
    blocks = list(range(three.layout.num_blocks(NUM_TOKENS - 1)))

    async def abort(index: int) -> None:
        tokens = [(token + index) % 20000 for token in TOKENS[:NUM_TOKENS]]
        save_from = 0 if index % 2 else len(blocks)
        one = Job(f"a{index}", 1, tokens, 0, ENDLESS, blocks, 150 if index % 3 else 0, save_from)
        task = asyncio.create_task(run(three, one))
        await asyncio.sleep(0.3 * index)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    await asyncio.gather(*map(abort, range(8)))
    await idle(three)
    assert three._link._jobs == {}


async def test_a_killed_worker_ends_the_engine_and_all_of_vllm(engines: tuple[VllmEngine, VllmEngine]) -> None:
    _, three = engines
    assert three.child is not None
    group = three.child.pid
    watching = asyncio.create_task(three.watch())
    running = asyncio.create_task(run(three, Job("k", 1, TOKENS[:NUM_TOKENS], 0, ENDLESS, [], 0, 0)))
    await asyncio.sleep(1.0)
    link = three._link._workers[2].get_extra_info("socket")
    victim, _, _ = struct.unpack("3i", link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    os.kill(victim, signal.SIGKILL)
    since = time.monotonic()
    for task in (watching, running):
        with pytest.raises(EngineFailed):
            await asyncio.wait_for(task, 5)
    assert time.monotonic() - since < 2
    await three.close()
    async with asyncio.timeout(5):
        while alive(group):  # noqa: ASYNC110 (others end there, who tell nobody)
            await asyncio.sleep(0.05)
