"""VllmEngine over two real vLLMs on CPUs: one computes KV, the other goes on from it. Needs vLLM; some minutes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from socket import create_server
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from vllm_fleet import PYTHON, needs_vllm
from vllm_jobs import ENDLESS, GREEDY, NUM_DRAWN, NUM_TOKENS, TOKENS, alive, copy, idle, job, kv, leave, run

from nodes.engines.engine import Chunk, StepBatch
from nodes.engines.native.engine import NativeEngine
from nodes.engines.served import Job
from nodes.engines.vllm.engine import VllmEngine, VllmOptions, start_vllm
from nodes.engines.vllm.launch import CONNECTOR, CONNECTOR_MODULE, launch
from nodes.hardware import preset
from transfer.errors import EngineFailed, InvalidValue, JobFailed
from transfer.terms import SamplingParams

pytestmark = [
    pytest.mark.vllm, pytest.mark.weights, needs_vllm, pytest.mark.timeout(600),
    pytest.mark.asyncio(loop_scope="module"),
]  # fmt: skip


@pytest.fixture(scope="module")
def options(smollm2_dir: Path) -> VllmOptions:
    return VllmOptions(
        model_dir=smollm2_dir, python=Path(str(PYTHON)), dtype="bfloat16", max_model_len=4096, num_blocks=128,
        args=("--enforce-eager",), env={"VLLM_CPU_KVCACHE_SPACE": "1"}, threads=1, hardware=preset("CPU"),
    )  # fmt: skip


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(options: VllmOptions) -> AsyncIterator[tuple[VllmEngine, VllmEngine]]:
    one, two = await asyncio.gather(start_vllm(options), start_vllm(options))
    yield one, two
    await asyncio.gather(one.close(), two.close())


async def test_text_goes_on_elsewhere_as_if_it_had_not_moved(pair: tuple[VllmEngine, VllmEngine]) -> None:
    """Prefill on one, decode on the other; KV in scattered blocks; the text is that of one vLLM alone."""
    one, two = pair
    num_blocks = one.layout.num_blocks(NUM_TOKENS - 1)
    alone = await run(one, job(GREEDY, list(range(num_blocks)), 0, num_blocks, "alone"))
    assert len(alone.tokens) == NUM_DRAWN
    assert (alone.saved, alone.cached) == ([], 0)
    blocks, into = list(range(90, 90 - num_blocks, -1)), list(range(40, 40 + num_blocks))
    prefilled = await run(one, job(None, blocks, 0, 0, "one"))
    told = [(layer, block) for layer, first, count in prefilled.saved for block in range(first, first + count)]
    assert sorted(told) == [(layer, block) for layer in range(one.layout.num_layers) for block in range(num_blocks)]
    assert prefilled.tokens == []
    copy(one.arena, blocks, two.arena, into)
    decoded = await run(two, job(GREEDY, into, NUM_TOKENS - 1, num_blocks, "two"))
    assert decoded.tokens == alone.tokens
    assert decoded.cached == NUM_TOKENS - 1

    # Of a prefix in the arena the rest is computed and saved, and serves as well.
    rest = into[:8] + list(range(100, 100 + num_blocks - 8))
    grown = await run(two, job(None, rest, 8 * two.layout.block_size, 8, "three"))
    assert grown.cached == 8 * two.layout.block_size
    assert sum(count for _, _, count in grown.saved) == two.layout.num_layers * (num_blocks - 8)
    assert (await run(two, job(GREEDY, rest, NUM_TOKENS - 1, num_blocks, "four"))).tokens == alone.tokens

    # A block that changes hands before it is read is noticed, and computed.
    job_lost = job(GREEDY, into, NUM_TOKENS - 1, num_blocks, "five")
    grant = two._link.grant

    def grant_and_bump(*arguments: object) -> object:
        granted = grant(*arguments)  # type: ignore[arg-type]
        two.arena.bump(into[3])
        return granted

    two._link.grant = grant_and_bump  # type: ignore[method-assign, assignment]
    try:
        recomputed = await run(two, job_lost)
    finally:
        two._link.grant = grant  # type: ignore[method-assign]
    assert recomputed.tokens == alone.tokens
    assert (recomputed.cached, two.num_loads_failed) == (0, 1)
    await idle(two)


async def test_kv_is_that_of_the_native_engine(pair: tuple[VllmEngine, VllmEngine], options: VllmOptions) -> None:
    """The same numbers in the same places; kernels differ in their last bits. Layouts, and so keys, are equal."""
    one, _ = pair
    num_tokens = 128
    num_blocks = one.layout.num_blocks(num_tokens)
    blocks = list(range(num_blocks))
    await run(one, Job("n", 1, TOKENS[: num_tokens + 1], 0, None, blocks, 0, 0, salt="native"))
    native = await asyncio.to_thread(
        NativeEngine, options.model_dir, dtype="bfloat16", num_blocks=num_blocks, block_size=one.layout.block_size,
        measure=False, hardware=preset("CPU"),
    )  # fmt: skip
    await native.step(StepBatch([Chunk("n", TOKENS[:num_tokens], 0, blocks)]))
    assert (one.layout, one.model) == (native.layout, native.model)
    ours, theirs = kv(native.arena, blocks, num_tokens), kv(one.arena, blocks, num_tokens)
    await native.close()
    errors = np.linalg.norm(ours - theirs, axis=-1) / np.linalg.norm(ours, axis=-1)
    print(f"relative errors: first layer at most {errors[0].max():.4f}, all layers {np.median(errors):.4f}")
    assert errors[0].max() < 0.01  # a bfloat16 has 8 bits; of another order, the error is about 1.4
    assert np.median(errors) < 0.03


async def test_aborts_leave_nothing_behind(pair: tuple[VllmEngine, VllmEngine]) -> None:
    """Twelve requests, ended while they wait, load, compute, save or draw: vLLM holds no block, nor do we."""
    _, two = pair
    num_blocks = two.layout.num_blocks(NUM_TOKENS - 1)

    async def abort(index: int) -> None:
        tokens = [(token + index) % 20000 for token in TOKENS]
        blocks = list(range(num_blocks))
        save_from = 0 if index % 2 else num_blocks
        task = asyncio.create_task(
            run(two, Job(f"a{index}", 1, tokens, 0, ENDLESS, blocks, 300 if index % 3 else 0, save_from))
        )
        await asyncio.sleep(0.15 * index)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    await asyncio.gather(*map(abort, range(12)))
    await idle(two)
    assert two._link._jobs == {}


async def test_a_request_that_vllm_refuses_fails_alone(pair: tuple[VllmEngine, VllmEngine]) -> None:
    one, _ = pair
    with pytest.raises(JobFailed, match="refused the request with 400"):
        await run(one, Job("long", 1, [5] * 5000, 0, GREEDY, [], 0, 0))
    sampling = SamplingParams(max_tokens=4, seed=7, temperature=0.8, logprobs=2, top_k=50)
    twice = [await run(one, Job("s", 1, TOKENS[:50], 0, sampling, [0, 1], 0, 2)) for _ in range(2)]
    assert twice[0].tokens == twice[1].tokens


async def test_a_killed_vllm_is_noticed_and_another_takes_its_place(options: VllmOptions) -> None:
    """Whichever of its processes is killed, within two seconds; nothing of it is left when it is closed."""
    for victim in ("worker", "server"):
        engine = await start_vllm(options)
        assert engine.child is not None
        watching = asyncio.create_task(engine.watch())
        running = asyncio.create_task(run(engine, Job("k", 1, TOKENS, 0, ENDLESS, [], 0, 0)))
        await asyncio.sleep(1.0)
        group = engine.child.pid
        os.kill(engine._link.joined.result().pid if victim == "worker" else group, signal.SIGKILL)
        since = time.monotonic()
        for task in (watching, running):
            with pytest.raises(EngineFailed):
                await asyncio.wait_for(task, 5)
        assert time.monotonic() - since < 2
        await engine.close()
        async with asyncio.timeout(5):
            while alive(group):  # noqa: ASYNC110 (others end there, who tell nobody)
                await asyncio.sleep(0.05)


async def test_one_without_what_moving_kv_rests_on_is_refused(options: VllmOptions) -> None:
    """Asynchronous scheduling is refused so as well; vLLM for CPUs never has it."""
    with pytest.raises(InvalidValue, match="runs without --scheduling-policy priority, on which moving KV rests"):
        await start_vllm(replace(options, args=(*options.args, "--scheduling-policy", "fcfs")))


async def test_a_vllm_outlives_the_agents_that_attach_to_it(options: VllmOptions, tmp_path: Path) -> None:
    """It serves each of them, with an arena of its own each; vLLM's blocks are four of ours here."""
    socket = tmp_path / "link"
    extra = json.dumps({
        "kv_connector": CONNECTOR, "kv_connector_module_path": CONNECTOR_MODULE, "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute", "kv_connector_extra_config": {"socket": str(socket)},
    })  # fmt: skip
    with contextlib.closing(create_server(("127.0.0.1", 0))) as free:
        port = free.getsockname()[1]
    line = [
        str(options.python), "-m", "vllm.entrypoints.cli.main", "serve", str(options.model_dir), "--host", "127.0.0.1",
        "--port", str(port), "--max-model-len", "2048", "--block-size", "128", "--kv-transfer-config", extra,
        "--no-async-scheduling", "--scheduling-policy", "priority", *options.args,
    ]  # fmt: skip
    child = await launch(line, tmp_path, tmp_path / "log", {**options.env, "OMP_NUM_THREADS": "2"})
    try:
        attach = replace(
            options, python=None, threads=None, url=f"http://127.0.0.1:{port}", socket=socket, num_blocks=40
        )  # fmt: skip
        texts = []
        for _ in range(2):
            engine = await start_vllm(attach)
            assert engine.layout.block_size == 32
            assert engine.capacity_blocks % 4 == 0
            num_blocks = engine.layout.num_blocks(NUM_TOKENS - 1)
            saved = await run(engine, job(None, list(range(num_blocks)), 0, 0, "a"))
            assert sum(count for _, _, count in saved.saved) == engine.layout.num_layers * num_blocks
            ran = await run(engine, job(GREEDY, list(range(num_blocks)), NUM_TOKENS - 1, num_blocks, "b"))
            texts.append(ran.tokens)
            await idle(engine)
            await engine.close()
        assert texts[0] == texts[1]
        with pytest.raises(InvalidValue, match="computes in bfloat16, but dtype float32 is set"):
            await start_vllm(replace(attach, dtype="float32"))
        with pytest.raises(InvalidValue, match="no multiple of the fleet's 48"):
            await start_vllm(replace(attach, block_size=48))
    finally:
        await child.stop()


async def test_kv_that_failed_to_load_is_no_prefix_for_others_once_its_request_is_aborted(
    pair: tuple[VllmEngine, VllmEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, blocks, began = pair[0], list(range(19)), asyncio.Event()
    alone = await run(engine, job(GREEDY, blocks, 0, len(blocks), "alone"))
    grant = engine._link.grant

    def spoiled(*given: Any) -> Any:
        granted = grant(*given)
        engine.arena.bump(blocks[3])
        return granted

    with monkeypatch.context() as patched:
        patched.setattr(engine._link, "grant", spoiled)
        task = asyncio.create_task(leave(engine, job(GREEDY, blocks, 320, len(blocks), "shared"), began))
        await asyncio.wait_for(began.wait(), 30)  # the step is under way whose load has failed
        task.cancel()
        await asyncio.wait([task])
    again = await run(engine, job(GREEDY, blocks, 0, len(blocks), "shared"))
    assert again.tokens == alone.tokens


async def test_whoever_shares_kv_that_failed_to_load_computes_it_too(
    pair: tuple[VllmEngine, VllmEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two that wait for the same step: the second finds in vLLM's prefix cache what the first was to load."""
    engine, blocks, others, began = pair[0], list(range(19)), list(range(40, 59)), asyncio.Event()
    alone = await run(engine, job(GREEDY, blocks, 0, len(blocks), "alone"))
    right = await run(engine, job(None, blocks, 0, 0, "right"))
    assert right.saved
    grant, num_granted, busy = engine._link.grant, 0, asyncio.Event()

    def spoiled(given: list[int], num_loaded: int, *more: Any) -> Any:
        nonlocal num_granted
        num_granted += 1
        granted = grant(given, num_loaded, *more)
        if num_loaded:
            engine.arena.bump(given[3])
        return granted

    tokens = [token + 1 for token in TOKENS] * 3
    long = Job("long", 1, tokens, 0, SamplingParams(max_tokens=1), list(range(60, 117)), 0, 57, salt="long")
    doomed = job(GREEDY, blocks, 320, len(blocks), "both")
    with monkeypatch.context() as patched:
        patched.setattr(engine._link, "grant", spoiled)
        first = asyncio.create_task(leave(engine, long, busy))
        await asyncio.wait_for(busy.wait(), 30)
        second = asyncio.create_task(leave(engine, doomed, began, num_outputs=1))
        await asyncio.sleep(0.02)
        third = asyncio.create_task(run(engine, job(GREEDY, others, 0, 0, "both")))
        shared = await asyncio.wait_for(third, 60)
        await asyncio.gather(first, second)
    assert num_granted == 3
    assert shared.tokens == alone.tokens
    saved, wanted = (kv(engine.arena, one, NUM_TOKENS - 1) for one in (others, blocks))
    assert np.abs(saved - wanted).max() <= 0.02 * np.abs(wanted).max()
    await idle(engine)
