"""The connector in a small vLLM whose loads fail and whose requests are aborted and preempted at any moment: KV that it
saves, and text drawn from it, are right. The model's KV of a token is a digest of every token up to it."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm_stand_in import connector_of

from nodes.engines.vllm.copies import HostCopies
from nodes.engines.vllm.frames import Grant, Saved
from nodes.engines.vllm.mover import ArenaTensor, PlainCache
from nodes.engines.vllm.plan import PARAMS
from nodes.engines.vllm.worker import Worker
from transfer.terms import KvLayout

SIZE, NUM_BLOCKS = 4, 40
LAYOUT = KvLayout(num_layers=1, num_kv_heads=1, head_dim=2, block_size=2, dtype="float32", rope="none")
NUM_ARENA, ARENA_SIZE = 400, LAYOUT.block_size
BUDGET, STEPS = 24, 300
"""Tokens that a step computes at most; steps of one run."""


def digest(before: float, token: int) -> int:
    return (int(before) * 31 + token + 7) % 1_000_003  # a float32 holds it


def digests(tokens: list[int]) -> list[int]:
    found = [1]
    for token in tokens:
        found.append(digest(found[-1], token))
    return found[1:]


class Link:
    """The worker's end, without a socket. generations: of the arena's blocks."""

    def __init__(self) -> None:
        self.lock, self.arena = threading.Condition(), self
        self.layout, self.generations = LAYOUT, [0] * NUM_ARENA
        self.grants: dict[int, Grant] = {}
        self.sent: list[Any] = []

    def generation(self, block: int) -> int:
        return self.generations[block]

    def wait_granted(self, job: int) -> bool:
        return job in self.grants

    def granted(self, job: int) -> Grant | None:
        return self.grants.get(job)

    def send(self, frame: Any) -> None:
        self.sent.append(frame)


def worker_over(cache: torch.Tensor, link: Link) -> Worker:
    made = object.__new__(Worker)
    memory = memoryview(bytearray(LAYOUT.block_bytes * NUM_ARENA))
    vars(made).update(
        _copies=HostCopies([PlainCache(cache)], SIZE), _num_layers=1, _block_size=SIZE, _saves=True, _jobs={},
        _items=[], _complete=None, _failed_blocks=set(), _hello=SimpleNamespace(rank=0), _agree=lambda failed: failed,
        _link=link, _arena=ArenaTensor(memory, LAYOUT, NUM_ARENA, range(1)),
    )  # fmt: skip
    return made


@dataclass(eq=False)
class Request:
    request_id: str
    tokens: list[int]
    kv_transfer_params: dict[str, Any]
    grant: Grant
    num_prompt_tokens: int
    num_computed_tokens: int = 0
    table: list[int] = field(default_factory=list)
    num_hashed: int = 0
    drawn: int = 0
    """The digest of its last token, as the model had it."""

    def get_block_ids(self) -> tuple[list[int]]:
        return (self.table,)


class Cache:
    """vLLM's: blocks with counts, found by the tokens up to their end from when they are allocated."""

    def __init__(self) -> None:
        self.free = list(range(NUM_BLOCKS))
        self._refs = [0] * NUM_BLOCKS
        self._found: dict[tuple[int, ...], int] = {}

    def hits(self, tokens: list[int]) -> list[int]:
        found: list[int] = []
        while (block := self._found.get(tuple(tokens[: (len(found) + 1) * SIZE]))) is not None and (
            (len(found) + 1) * SIZE < len(tokens)
        ):
            found.append(block)
        return found

    def take(self, request: Request, hits: list[int], end: int) -> bool:
        """Blocks up to token `end`; False without room."""
        held = request.table or hits
        count = max(0, -(-end // SIZE) - len(held))
        if count > len([block for block in self.free if block not in hits]):
            return False
        for block in hits:
            self._refs[block] += 1
            if block in self.free:
                self.free.remove(block)
        new, self.free = self.free[:count], self.free[count:]
        self.evict_blocks(set(new))
        for block in new:
            self._refs[block] = 1
        request.table = [*held, *new]
        request.num_hashed = max(request.num_hashed, len(hits))
        for index in range(request.num_hashed, end // SIZE):
            self._found.setdefault(tuple(request.tokens[: (index + 1) * SIZE]), request.table[index])
        request.num_hashed = max(request.num_hashed, end // SIZE)
        return True

    def release(self, request: Request) -> None:
        for block in reversed(request.table):
            self._refs[block] -= 1
            if not self._refs[block]:
                self.free.append(block)
        request.table, request.num_hashed = [], 0

    def evict_blocks(self, blocks: set[int]) -> None:
        self._found = {key: block for key, block in self._found.items() if block not in blocks}


class SmallVllm:
    """num_failed: steps with failed loads. num_saved: tokens whose saved KV was looked at."""

    def __init__(self, seed: int, connector: Any, limit: int) -> None:
        self._random, self._connector, self._limit = random.Random(seed), connector, limit
        self._kv, self._link, self._blocks = torch.zeros(NUM_BLOCKS, 1, SIZE, 4), Link(), Cache()
        self._worker = worker_over(self._kv, self._link)
        self._waiting: list[Request] = []
        self._running: list[Request] = []
        self._stems = [[self._random.randrange(50) for _ in range(40)] for _ in range(2)]
        self._num_jobs = self.num_failed = self.num_saved = 0
        connector.bind_gpu_block_pool(self._blocks)

    def step(self) -> None:
        if self._random.random() < 0.5 and len(self._waiting) + len(self._running) < 8:
            for _ in range(self._random.choice((1, 1, 2, 3))):
                self._arrive()
        planned = self._schedule()
        if not planned:
            return
        self._compute(planned)
        self._look_at_saved()
        failed = self._worker.take_failed_blocks()
        self._abort_some()
        affected = self._truncate(planned, failed)
        for request in planned:
            if request in self._running and request not in affected:
                self._draw(request)
        self._connector.update_connector_output(SimpleNamespace(invalid_block_ids=failed))
        self._abort_some()

    def _arrive(self) -> None:
        some, stem = self._random, self._random.choice(self._stems)
        tokens = stem[: some.randrange(30)] + [some.randrange(50) for _ in range(some.randrange(2, 10))]
        wanted, held = len(tokens) - 1, {block for one in self._waiting + self._running for block in one.grant.blocks}
        blocks = some.sample([block for block in range(NUM_ARENA) if block not in held], -(-wanted // ARENA_SIZE))
        num_loaded = some.choice((0, some.randrange(wanted + 1)))
        for index, value in enumerate(digests(tokens)[:num_loaded]):
            self._saved(blocks, index)[:] = value
        self._num_jobs += 1
        grant = Grant(
            job=self._num_jobs, blocks=blocks, num_loaded=num_loaded, save_from=num_loaded // ARENA_SIZE,
            num_tokens=wanted, generations=[self._link.generations[block] for block in blocks],
        )  # fmt: skip
        if num_loaded and some.random() < 0.3:
            self._link.generations[blocks[some.randrange(-(-num_loaded // ARENA_SIZE))]] += 1
        self._link.grants[grant.job] = grant
        params = {PARAMS: {"job": grant.job, "num_loaded": num_loaded, "num_tokens": wanted}}
        self._waiting.append(Request(f"r{grant.job}", tokens, params, grant, len(tokens)))

    def _schedule(self) -> dict[Request, range]:
        planned: dict[Request, range] = {}
        new, resumed, counts, budget = [], list[tuple[str, list[int], int]](), dict[str, int](), BUDGET
        for request in list(self._running):
            if self._random.random() < 0.03:
                self._running.remove(request)
                self._blocks.release(request)
                request.num_computed_tokens = 0
                self._waiting.insert(0, request)
                continue
            start, before = request.num_computed_tokens, len(request.table)
            count = min(len(request.tokens) - start, budget, self._limit)
            if count and self._blocks.take(request, [], start + count):
                planned[request], budget = range(start, start + count), budget - count
                resumed.append((request.request_id, request.table[before:], start))
        fresh: set[str] = set()
        while self._waiting and budget:
            request = self._waiting[0]
            hits = self._blocks.hits(request.tokens)
            external, _ = self._connector.get_num_new_matched_tokens(request, len(hits) * SIZE)
            start = len(hits) * SIZE + external
            count = min(len(request.tokens) - start, budget, self._limit)
            if not self._blocks.take(request, hits, start + count):
                break
            self._connector.update_state_after_alloc(request, request, external)
            self._running.append(self._waiting.pop(0))
            planned[request], budget = range(start, start + count), budget - count
            resumed.append((request.request_id, list(request.table), start))
            fresh.add(request.request_id)
        for request, span in planned.items():
            counts[request.request_id], request.num_computed_tokens = len(span), span.stop
        ids, tables, starts = ([one[place] for one in resumed] for place in range(3))
        self._plan = self._connector.build_connector_meta(
            SimpleNamespace(
                num_scheduled_tokens=counts, scheduled_new_reqs=new, scheduled_cached_reqs=SimpleNamespace(
                    req_ids=ids, new_block_ids=[(table,) for table in tables], num_computed_tokens=starts,
                    resumed_req_ids=fresh,
                ),
            )
        )  # fmt: skip
        return planned

    def _compute(self, planned: dict[Request, range]) -> None:
        if self._random.random() < 0.1:
            self._link.grants.pop(self._random.choice(list(planned)).grant.job, None)
        self._worker.begin(self._plan.items, self._plan.over)
        self._worker.load()
        for place, request in sorted(
            ((place, request) for request, span in planned.items() for place in span), key=lambda one: one[0]
        ):
            before = float(self._cell(request, place - 1)[0]) if place else 1.0
            request.drawn = digest(before, request.tokens[place])
            self._cell(request, place)[:] = request.drawn
        self._worker.save_layer(0)
        self._worker.fence()

    def _look_at_saved(self) -> None:
        jobs, sent = {one.grant.job: one for one in self._running}, self._link.sent
        for frame in sent:
            if isinstance(frame, Saved) and (request := jobs.get(frame.job)) is not None:
                right = digests(request.tokens[: request.grant.num_tokens])
                end = min((frame.first + frame.count) * ARENA_SIZE, len(right))
                for index in range(frame.first * ARENA_SIZE, end):
                    self.num_saved += 1
                    assert self._saved(request.grant.blocks, index).unique().tolist() == [right[index]]
        sent.clear()

    def _truncate(self, planned: dict[Request, range], failed: set[int]) -> set[Request]:
        """As vLLM does: of those that share a block, the first computes it, and the others count on that."""
        affected, marked = set[Request](), set[int]()
        self.num_failed += bool(failed)
        for request in self._running:
            span = planned.get(request, range(request.num_computed_tokens, request.num_computed_tokens))
            shared = [index for index in range(-(-span.start // SIZE)) if request.table[index] in failed]
            own = [index for index in shared if request.table[index] not in marked]
            marked.update(request.table[index] for index in own)
            if shared:
                affected.add(request)
                request.num_computed_tokens = own[0] * SIZE if own else span.start
        return affected

    def _draw(self, request: Request) -> None:
        if request.num_computed_tokens < len(request.tokens):
            return
        assert request.drawn == digests(request.tokens)[-1], "wrong text"
        if len(request.tokens) < request.num_prompt_tokens + 4:
            request.tokens = [*request.tokens, self._random.randrange(50)]
        else:
            self._end(request)

    def _abort_some(self) -> None:
        for request in list(self._running):
            if self._random.random() < 0.06:
                self._end(request)

    def _end(self, request: Request) -> None:
        self._running.remove(request)
        self._blocks.release(request)
        self._connector.request_finished(request, [])
        self._link.grants.pop(request.grant.job, None)

    def _cell(self, request: Request, place: int) -> torch.Tensor:
        return self._kv[request.table[place // SIZE], 0, place % SIZE]

    def _saved(self, blocks: list[int], index: int) -> torch.Tensor:
        arena = self._worker._arena
        assert arena is not None
        return arena.tensor[0, :, blocks[index // ARENA_SIZE], index % ARENA_SIZE]


@pytest.fixture
def connector() -> Iterator[Any]:
    with connector_of(SIZE) as made:
        yield made


@pytest.mark.parametrize(("seed", "limit"), [(seed, 8 if seed < 12 else BUDGET) for seed in range(18)])
def test_what_is_saved_is_right_whatever_fails(connector: Any, seed: int, limit: int) -> None:
    """limit: tokens of one prompt that a step computes at most."""
    vllm = SmallVllm(seed, connector, limit)
    for _ in range(STEPS):
        vllm.step()
    assert vllm.num_failed > 5
    assert vllm.num_saved > 500
