"""The connector's half beside vLLM's cache: loads before a step, saves layer by layer in it, and says so to the agent.

Knows nothing of vLLM but the tensors it is given; connector.py fits it into vLLM's interface.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from nodes.engines.vllm.client import LinkClient, log
from nodes.engines.vllm.copies import Copies, CudaCopies, HostCopies
from nodes.engines.vllm.frames import Began, Grant, Hello, LoadFailed, Saved
from nodes.engines.vllm.mover import ArenaTensor, Cache, Span, arena_span
from nodes.engines.vllm.plan import Progress, StepItem, share
from transfer.kv.arena import MappedArena

Agree = Callable[[list[bool]], list[bool]]
"""Element by element whether any of a vLLM's workers says so; all of them call it in the same steps, and wait."""


class Worker:
    """caches: one a layer, in order, of this worker's heads. block_size: of vLLM's cache. Methods but `arrived` are the
    engine thread's."""

    def __init__(
        self, caches: list[Cache], block_size: int, device: torch.device, socket: Path, hello: Hello, *, launched: bool,
        agree: Agree = lambda failed: failed,
    ) -> None:  # fmt: skip
        self._copies: Copies = (
            HostCopies(caches, block_size) if device.type == "cpu" else CudaCopies(caches, block_size, device)
        )
        self._num_layers, self._block_size = len(caches), block_size
        self._hello, self._agree = hello, agree
        self._saves = False
        self._arena: ArenaTensor | None = None
        self._jobs: dict[int, Progress] = {}
        self._items: list[StepItem] = []
        self._complete: list[tuple[StepItem, range]] | None = None
        self._failed_blocks: set[int] = set()
        self._link = LinkClient(socket, hello, launched=launched, on_arena=self.arrived)
        self._link.start()

    def arrived(self, arena: MappedArena) -> None:
        """The agent has shown its memory."""
        mine = share(self._hello.rank, self._hello.world_size, arena.layout.num_kv_heads)
        self._arena = ArenaTensor(arena.buffer, arena.layout, arena.num_blocks, mine.heads)
        self._saves = mine.saves

    def begin(self, items: list[StepItem], over: list[int]) -> None:
        """A step follows. over: jobs that no step concerns any more."""
        for job in over:
            self._jobs.pop(job, None)
        self._items, self._complete = items, None
        for item in items:
            if item.fresh:
                self._admit(item)
            if item.job in self._jobs:
                self._jobs[item.job].begin(item)
            if item.fresh and item.load_from == item.start:
                self._tell(Began(job=item.job, num_cached=item.start))

    def load(self) -> None:
        """What the step's requests have in the arena, into vLLM's cache. What one worker cannot load has failed in all:
        each computes its heads from what the others have."""
        loads = [item for item in self._items if item.load_from < item.start]
        if not loads:
            return
        reasons = [self._load(item) for item in loads]
        failed = self._agree([bool(reason) for reason in reasons])
        for item, reason, has_failed in zip(loads, reasons, failed, strict=True):
            if has_failed:
                self._load_failed(item, reason or "another worker of this vLLM could not load it")
            self._tell(Began(job=item.job, num_cached=item.load_from if has_failed else item.start))

    def wait_layer(self, layer: int) -> None:
        self._copies.loaded(layer)

    def save_layer(self, layer: int) -> None:
        """The step has written this layer's KV."""
        if not self._saves:
            return
        if self._complete is None:
            self._complete = [
                (item, blocks) for item in self._items
                if item.job in self._jobs and self._is_sound(item) and (blocks := self._jobs[item.job].complete(item))
            ]  # fmt: skip
        for item, blocks in self._complete:
            self._save(layer, item, blocks)

    def fence(self) -> None:
        self._copies.fence()

    def take_failed_blocks(self) -> set[int]:
        """Of vLLM's cache, those whose KV failed to load since the last call."""
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def close(self) -> None:
        self._copies.close()
        self._link.close()

    def _admit(self, item: StepItem) -> None:
        """A job that is scheduled again after a preemption keeps what it has saved."""
        if item.job in self._jobs or not self._link.wait_granted(item.job):
            return
        with self._link.lock:
            grant = self._link.granted(item.job)
            if grant is not None and self._arena is not None:
                self._jobs[item.job] = Progress(self._arena.layout.block_size, grant.num_tokens, grant.save_from)

    def _load(self, item: StepItem) -> str:
        """Why it failed, or nothing. Layers are read under the lock, one after the other, so that a revocation waits
        for one layer at most; generations are compared after the last."""
        for layer in range(self._num_layers):
            with self._link.lock:
                grant, arena = self._link.granted(item.job), self._arena
                if grant is None or arena is None or self._link.arena is None:
                    return "the agent has taken the blocks back"
                span = Span(item.blocks, grant.blocks, item.load_from, item.start)
                blocks, skip = arena_span(span, arena.layout.block_size)
                halves = arena.read(layer, blocks, skip, span.last - span.first)
                if layer == self._num_layers - 1 and not _unchanged(grant, self._link.arena, span.last):
                    return "a block has changed hands"
            self._copies.load(layer, span, halves)
        return ""

    def _is_sound(self, item: StepItem) -> bool:
        """Whether what it goes on from is right: it may share blocks that another one of the step failed to load. vLLM
        repeats the step of both."""
        return self._failed_blocks.isdisjoint(item.blocks[: -(-item.start // self._block_size)])

    def _load_failed(self, item: StepItem, reason: str) -> None:
        log.warning("KV of %d tokens of job %d is computed: %s", item.start - item.load_from, item.job, reason)
        first, last = item.load_from // self._block_size, -(-item.start // self._block_size)
        self._failed_blocks.update(item.blocks[first:last])
        if item.job in self._jobs:
            self._jobs[item.job].load_failed(item.load_from)
        self._tell(LoadFailed(job=item.job, reason=reason))

    def _tell(self, frame: Began | LoadFailed) -> None:
        """What is so in all workers, once."""
        if self._hello.rank == 0:
            self._link.send(frame)

    def _save(self, layer: int, item: StepItem, blocks: range) -> None:
        progress, job = self._jobs[item.job], item.job
        size = progress.block_size
        first, last = blocks.start * size, min(blocks.stop * size, progress.num_tokens)

        def store(keys: torch.Tensor, values: torch.Tensor) -> None:
            with self._link.lock:
                grant, arena = self._link.granted(job), self._arena
                if grant is None or arena is None or self._link.arena is None:
                    return
                arena.write(layer, grant.blocks[blocks.start : blocks.stop], keys, values)
                self._link.send(Saved(job=job, layer=layer, first=blocks.start, count=len(blocks)))

        self._copies.save(layer, Span(item.blocks, (), first, last), store)


def _unchanged(grant: Grant, arena: MappedArena, num_tokens: int) -> bool:
    needed = arena.layout.num_blocks(num_tokens)
    return needed <= len(grant.generations) and all(
        arena.generation(block) == generation
        for block, generation in zip(grant.blocks[:needed], grant.generations, strict=False)
    )
