"""Jobs for a VllmEngine without an instance around it: their tokens, their KV in its arena, what they leave behind."""

from __future__ import annotations

import asyncio
import contextlib
import time
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from nodes.engines.served import Job, Output
from nodes.engines.vllm.engine import VllmEngine
from nodes.engines.vllm.mover import TORCH_DTYPES
from transfer.kv.arena import KvArena
from transfer.terms import SamplingParams, TokenIds

NUM_TOKENS, NUM_DRAWN = 600, 32
GREEDY = SamplingParams(max_tokens=NUM_DRAWN, temperature=0.0, ignore_eos=True)
ENDLESS = SamplingParams(max_tokens=2000, temperature=0.0, ignore_eos=True)
TOKENS = [1000 + (7 * index * index) % 20011 for index in range(NUM_TOKENS)]


@dataclass
class Ran:
    tokens: TokenIds
    saved: list[tuple[int, int, int]]
    cached: int | None
    first_s: float


async def run(engine: VllmEngine, job: Job) -> Ran:
    ran, since = Ran([], [], None, 0.0), time.perf_counter()
    outputs: list[Output] = []
    async with aclosing(engine.run(job, lambda: None, lambda *what: ran.saved.append(what))) as arriving:
        async for output in arriving:
            if not outputs:
                ran.first_s, ran.cached = time.perf_counter() - since, output.cached_tokens
            outputs.append(output)
            ran.tokens += output.token_ids
    assert outputs[-1].finish is not None
    return ran


async def leave(engine: VllmEngine, job: Job, began: asyncio.Event, *, num_outputs: int | None = None) -> None:
    """Run a job, and leave after so many outputs; None: when it has ended, or whoever runs this does."""
    num_seen = 0
    async with aclosing(engine.run(job, began.set, lambda *what: None)) as outputs:
        async for _ in outputs:
            num_seen += 1
            if num_seen == num_outputs:
                return


def job(sampling: SamplingParams | None, blocks: list[int], num_loaded: int, save_from: int, salt: str) -> Job:
    return Job("r", 1, TOKENS, 0, sampling, blocks, num_loaded, save_from, salt=salt)


def kv(arena: KvArena, blocks: list[int], num_tokens: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    """[num_layers, 2, num_tokens, num_kv_heads * head_dim]."""
    layout = arena.layout
    halves = [
        [b"".join(bytes(arena.views(layer, block, 1)[half]) for block in blocks) for half in (0, 1)]
        for layer in range(layout.num_layers)
    ]
    flat = torch.frombuffer(
        bytearray(b"".join(part for layer in halves for part in layer)), dtype=TORCH_DTYPES[layout.dtype]
    )
    rows = flat.float().view(layout.num_layers, 2, len(blocks) * layout.block_size, -1)
    return rows[:, :, :num_tokens].numpy()


def copy(source: KvArena, blocks: list[int], target: KvArena, into: list[int]) -> None:
    for layer in range(source.layout.num_layers):
        for one, other in zip(blocks, into, strict=True):
            for read, written in zip(source.views(layer, one, 1), target.views(layer, other, 1), strict=True):
                written[:] = read


def alive(group: int) -> list[str]:
    """Names of the group's processes that are not dead; who reaps them is not ours to say."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            name, _, rest = stat.read_text().rpartition(")")
            state, _, found_group = rest.split()[:3]
            if int(found_group) == group and state != "Z":
                found.append(name)
    return found


async def idle(engine: VllmEngine) -> None:
    """vLLM's own metrics say that it runs nothing and holds no block."""
    async with asyncio.timeout(20):
        while True:
            load = await engine.server.load()
            if (load.running, load.waiting, load.kv_usage) == (0, 0, 0.0):
                return
            await asyncio.sleep(0.05)
