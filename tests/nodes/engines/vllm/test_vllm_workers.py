"""A tensor parallel vLLM: workers that have some heads each, their links real, vLLM's collectives a barrier."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest
import torch

from nodes.engines.vllm.engine import VllmOptions, _latency
from nodes.engines.vllm.frames import PROTOCOL, Grant, Hello, Refused, Saved, Unpacker, Welcome, from_agent, pack
from nodes.engines.vllm.link import Link
from nodes.engines.vllm.mover import Cache, PlainCache, Span, read_span, write_span
from nodes.engines.vllm.plan import StepItem, share
from nodes.engines.vllm.preflight import check_worker
from nodes.engines.vllm.worker import Worker
from nodes.hardware import preset
from transfer.errors import EngineFailed, InvalidValue
from transfer.kv.arena import HostArena
from transfer.terms import KvLayout, ModelIdentity

LAYERS, SIZE, DIM = 2, 8, 4
CPU = torch.device("cpu")
SPLITS = [(2, 4), (3, 3), (4, 2)]
"""(workers, KV heads): several heads each, one head each, each head twice."""


def hello(rank: int, world_size: int, num_kv_heads: int, engine: str = "one") -> Hello:
    return Hello(
        protocol=PROTOCOL, version="0.32.0", pid=rank, model="m", revision="a", tokenizer="b", dtype="bfloat16",
        cache_dtype="bfloat16", num_layers=LAYERS, num_kv_heads=num_kv_heads, head_dim=DIM, block_size=SIZE,
        num_blocks=6, world_size=world_size, max_model_len=64, device="cpu", rank=rank, engine=engine,
    )  # fmt: skip


class Collective:
    """What vLLM's group of workers does for Worker's agree."""

    def __init__(self, world_size: int) -> None:
        self._said: list[list[bool]] = [[] for _ in range(world_size)]
        self._barrier = threading.Barrier(world_size)

    def agree(self, rank: int, failed: list[bool]) -> list[bool]:
        self._said[rank] = failed
        self._barrier.wait(5)
        found = [any(said) for said in zip(*self._said, strict=True)]
        self._barrier.wait(5)
        return found


@dataclass
class Group:
    """One vLLM's workers, each with caches of 6 blocks of its heads. heard: what the agent was told."""

    link: Link
    arena: HostArena
    workers: list[Worker]
    caches: list[list[Cache]]
    heads: list[range]
    heard: list[tuple[int, int, int]] = field(default_factory=list)

    def grant(self, blocks: list[int], num_loaded: int, save_from: int, num_tokens: int) -> int:
        job, self.watched = self.link.grant(
            blocks, num_loaded, save_from, num_tokens, self.arena, lambda: None, lambda *saved: self.heard.append(saved)
        )
        return job

    def fill(self, table: list[int], tokens: list[torch.Tensor]) -> None:
        """As each worker's attention writes the heads that it has: tokens [2, num_tokens, num_kv_heads, head_dim]."""
        for caches, heads in zip(self.caches, self.heads, strict=True):
            for cache, halves in zip(caches, tokens, strict=True):
                mine = halves[..., heads.start : heads.stop, :].contiguous()
                write_span(cache, Span(table, (), 0, halves.shape[1]), SIZE, mine)

    def found(self, rank: int, layer: int, table: list[int], num_tokens: int) -> torch.Tensor:
        return torch.stack(read_span(self.caches[rank][layer], Span(table, (), 0, num_tokens), SIZE, CPU))

    async def step(self, *items: StepItem) -> list[set[int]]:
        """As vLLM's model runners call their connectors, side by side."""

        def run(worker: Worker) -> set[int]:
            worker.begin(list(items), [])
            worker.load()
            for layer in range(LAYERS):
                worker.wait_layer(layer)
                worker.save_layer(layer)
            worker.fence()
            return worker.take_failed_blocks()

        return list(await asyncio.gather(*(asyncio.to_thread(run, worker) for worker in self.workers)))

    async def until_saved(self) -> None:
        await asyncio.wait_for(self.link.until(self.watched, lambda: self.watched.num_missing == 0), 5)


@asynccontextmanager
async def group_of(tmp_path: Path, world_size: int, num_kv_heads: int) -> AsyncIterator[Group]:
    layout = KvLayout(
        num_layers=LAYERS, num_kv_heads=num_kv_heads, head_dim=DIM, block_size=SIZE, dtype="bfloat16", rope="none"
    )
    async with AsyncExitStack() as undo:
        arena = HostArena(layout, 8, shared=True)
        undo.callback(arena.close)

        async def welcome(hello: Hello) -> HostArena:
            return arena

        path = tmp_path / f"link{world_size}"
        link = Link(path, welcome)
        await link.listen()
        undo.push_async_callback(link.close)
        collective, workers, caches, heads = Collective(world_size), [], [], []
        for rank in range(world_size):
            mine = share(rank, world_size, num_kv_heads).heads
            own: list[Cache] = [PlainCache(torch.zeros(6, len(mine), SIZE, 2 * DIM).bfloat16()) for _ in range(LAYERS)]
            workers.append(
                Worker(
                    own,
                    SIZE,
                    CPU,
                    path,
                    hello(rank, world_size, num_kv_heads),
                    launched=False,
                    agree=lambda failed, rank=rank: collective.agree(rank, failed),  # type: ignore[misc]
                )
            )
            undo.callback(workers[-1].close)
            caches.append(own)
            heads.append(mine)
        await asyncio.wait_for(link.joined, 5)
        yield Group(link, arena, workers, caches, heads)


@pytest.fixture
async def pair(tmp_path: Path) -> AsyncIterator[Group]:
    async with group_of(tmp_path, 2, 4) as group:
        yield group


def random_kv(num_tokens: int, num_heads: int = 4) -> list[torch.Tensor]:
    return [torch.randn(2, num_tokens, num_heads, DIM).bfloat16() for _ in range(LAYERS)]


def test_heads_are_shared_as_vllm_shares_them() -> None:
    assert [share(rank, 2, 8).heads for rank in range(2)] == [range(4), range(4, 8)]
    assert [share(rank, 3, 3).heads for rank in range(3)] == [range(1), range(1, 2), range(2, 3)]
    twice = [share(rank, 4, 2) for rank in range(4)]
    assert [(one.heads.start, one.saves) for one in twice] == [(0, True), (0, False), (1, True), (1, False)]


@pytest.mark.parametrize(("world_size", "num_kv_heads"), SPLITS)
async def test_the_arena_holds_whole_blocks_however_many_workers_there_are(
    tmp_path: Path, world_size: int, num_kv_heads: int
) -> None:
    """Saved by several they are, byte by byte, what one saves; and are loaded by one or several."""
    tokens = random_kv(19, num_kv_heads)
    async with group_of(tmp_path, world_size, num_kv_heads) as many, group_of(tmp_path, 1, num_kv_heads) as one:
        for group in (many, one):
            group.fill([4, 0, 2], tokens)
            job = group.grant([7, 1, 5], 0, 0, 18)
            await group.step(StepItem(job, [4, 0], 0, 10, 0, fresh=True))
            await group.step(StepItem(job, [4, 0, 2], 10, 19, 10, fresh=False))
            await group.until_saved()
            assert sorted(group.heard) == [(0, 0, 1), (0, 1, 2), (1, 0, 1), (1, 1, 2)]
            assert group.watched.num_cached == 0
        assert bytes(many.arena.buffer) == bytes(one.arena.buffer)
        for source, target in ((many, one), (one, many)):
            target.arena.buffer[:] = source.arena.buffer
            taken = target.grant([7, 1, 5], 18, 3, 18)
            assert not any(await target.step(StepItem(taken, [1, 3, 5], 18, 19, 0, fresh=True)))
            for rank, heads in enumerate(target.heads):
                for layer, halves in enumerate(tokens):
                    mine = halves[:, :18, heads.start : heads.stop]
                    assert torch.equal(target.found(rank, layer, [1, 3, 5], 18), mine)


async def test_a_layer_is_saved_when_the_last_worker_has_saved_it(pair: Group) -> None:
    pair.fill([4, 0], random_kv(16))
    job = pair.grant([7, 1], 0, 0, 16)
    item = StepItem(job, [4, 0], 0, 16, 0, fresh=True)
    await asyncio.gather(*(asyncio.to_thread(worker.begin, [item], []) for worker in pair.workers))
    pair.workers[1].save_layer(0)
    pair.workers[1].save_layer(1)
    async with asyncio.timeout(5):
        while pair.watched.ends[1] != [2] * LAYERS:  # noqa: ASYNC110 (another thread sends)
            await asyncio.sleep(0.005)
    assert pair.heard == []
    pair.workers[0].save_layer(0)
    await asyncio.wait_for(pair.link.until(pair.watched, lambda: pair.watched.num_missing == 2), 5)
    assert pair.heard == [(0, 0, 2)]


async def test_what_one_worker_cannot_load_has_failed_in_all(pair: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each computes its heads from what the others have, so none of them saves what it computed in that step."""
    pair.fill([4, 0, 2], random_kv(19))
    before = bytes(pair.arena.buffer)
    job = pair.grant([7, 1, 5], 16, 2, 18)
    with monkeypatch.context() as patched:
        patched.setattr(pair.workers[1], "_load", lambda item: "it was not to be read")
        assert await pair.step(StepItem(job, [4, 0, 2], 16, 19, 0, fresh=True)) == [{4, 0}, {4, 0}]
    await asyncio.wait_for(pair.link.until(pair.watched, lambda: pair.watched.num_cached is not None), 5)
    assert (pair.watched.num_cached, pair.watched.loads_failed, pair.heard) == (0, 1, [])
    assert bytes(pair.arena.buffer) == before
    await pair.step(StepItem(job, [4, 0, 2], 0, 19, 0, fresh=False))
    await pair.until_saved()
    assert sorted(pair.heard) == [(0, 2, 1), (1, 2, 1)]


async def test_blocks_are_given_back_when_no_worker_copies(pair: Group) -> None:
    job = pair.grant([7, 1], 0, 0, 16)
    with pair.workers[1]._link.lock:  # as in a copy
        revoked = asyncio.create_task(pair.link.revoke(job))
        async with asyncio.timeout(5):
            while pair.watched.holders != {1}:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        assert not revoked.done()
    await asyncio.wait_for(revoked, 5)
    assert pair.link._jobs == {}


async def test_one_lost_worker_is_a_lost_engine(pair: Group) -> None:
    job = pair.grant([7], 0, 0, 8)
    waiting = asyncio.create_task(pair.link.until(pair.watched, lambda: False))
    await asyncio.sleep(0)
    pair.workers[1].close()
    with pytest.raises(EngineFailed, match="connector is gone"):
        await asyncio.wait_for(waiting, 5)
    await asyncio.wait_for(pair.link.revoke(job), 5)


async def test_with_one_lost_worker_the_others_write_no_more(pair: Group) -> None:
    """Blocks that a request gave back are others' by then; another agent is found later."""
    job = pair.grant([7], 0, 0, 8)
    async with asyncio.timeout(5):
        while pair.workers[0]._link.granted(job) is None:  # noqa: ASYNC110 (a thread takes it)
            await asyncio.sleep(0.005)
        pair.workers[1].close()
        await pair.link.lost
        await pair.link.revoke(job)
        while pair.workers[0]._link.granted(job) is not None:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    assert not pair.link._conversations


async def test_what_is_refused_again_and_again_is_logged_once(pair: Group, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(3):
        raw = Raw(*await asyncio.open_unix_connection(pair.link._path))
        raw.say(hello(0, 2, 4, "another"))
        assert isinstance(await raw.hear(), Refused)
        await raw.close()
    async with asyncio.timeout(5):
        while len(pair.link._conversations) > 2:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    assert [record.message for record in caplog.records].count(
        f"a connector at {pair.link._path}: another vLLM has joined this agent already; give each a socket of its own"
    ) == 1  # fmt: skip


async def test_the_workers_of_a_vllm_that_runs_join_the_next_agent(pair: Group) -> None:
    await pair.link.close()

    async def welcome(hello: Hello) -> HostArena:
        return pair.arena

    pair.link = Link(pair.link._path, welcome)
    await pair.link.listen()
    try:
        await asyncio.wait_for(pair.link.joined, 5)
        pair.fill([4, 0], random_kv(16))
        job = pair.grant([7, 1], 0, 0, 16)
        await pair.step(StepItem(job, [4, 0], 0, 16, 0, fresh=True))
        await pair.until_saved()
    finally:
        await pair.link.close()


class Raw:
    """A worker of which a test sends every frame."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer, self._unpacker = reader, writer, Unpacker()

    async def hear(self) -> object:
        async with asyncio.timeout(5):
            while not (bodies := self._unpacker.feed(await self._reader.read(1 << 16))):
                pass
        (body,) = bodies
        return from_agent(body)

    def say(self, frame: Hello | Saved) -> None:
        self._writer.write(pack(frame))

    async def close(self) -> None:
        self._writer.close()
        await self._writer.wait_closed()


@pytest.fixture
async def lonely(tmp_path: Path) -> AsyncIterator[tuple[Link, HostArena, list[Raw]]]:
    """A link, and three workers that have not spoken yet."""
    layout = KvLayout(num_layers=LAYERS, num_kv_heads=4, head_dim=DIM, block_size=SIZE, dtype="bfloat16", rope="none")
    arena, first = HostArena(layout, 8, shared=True), list[Hello]()

    async def welcome(hello: Hello) -> HostArena:
        first.append(hello)
        check_worker(first[0], hello)
        return arena

    link = Link(tmp_path / "link", welcome)
    await link.listen()
    raw = [Raw(*await asyncio.open_unix_connection(tmp_path / "link")) for _ in range(3)]
    yield link, arena, raw
    await link.close()
    for one in raw:
        await one.close()
    arena.close()


async def test_a_vllm_has_joined_when_all_of_its_workers_have(lonely: tuple[Link, HostArena, list[Raw]]) -> None:
    link, _, (first, other, second) = lonely
    assert link.absent() == ""
    first.say(hello(1, 2, 4))
    assert isinstance(await first.hear(), Welcome)
    assert not link.joined.done()
    assert link.absent().startswith(" (1 of its 2 workers have come to ")
    other.say(hello(0, 2, 4, "another"))
    refused = await other.hear()
    assert isinstance(refused, Refused)
    assert refused.reason.startswith("another vLLM has joined")
    assert not link.joined.done()
    second.say(hello(0, 2, 4))
    assert isinstance(await second.hear(), Welcome)
    assert (await link.joined).engine == "one"
    assert link.absent() == ""


async def test_workers_that_differ_are_refused(lonely: tuple[Link, HostArena, list[Raw]]) -> None:
    link, _, (first, second, _) = lonely
    first.say(hello(0, 2, 4))
    await first.hear()
    second.say(msgspec.structs.replace(hello(1, 2, 4), num_blocks=7))
    refused = await second.hear()
    assert isinstance(refused, Refused)
    with pytest.raises(InvalidValue, match=r"differ in num_blocks \(7, the first says 6\)"):
        await link.joined


@pytest.mark.parametrize("wrong", [Saved(job=0, layer=0, first=1, count=1), Saved(job=0, layer=2, first=0, count=1)])
async def test_a_worker_that_leaves_blocks_out_is_not_believed(
    lonely: tuple[Link, HostArena, list[Raw]], wrong: Saved
) -> None:
    """The count of who has saved what rests on each layer's blocks coming in order."""
    link, arena, (first, second, _) = lonely
    for rank, one in enumerate((first, second)):
        one.say(hello(rank, 2, 4))
        await one.hear()
    heard: list[object] = []
    job, watched = link.grant([3, 4], 0, 0, 16, arena, lambda: None, lambda *saved: heard.append(saved))
    assert isinstance(await first.hear(), Grant)
    first.say(msgspec.structs.replace(wrong, job=job))
    with pytest.raises(EngineFailed, match="out of turn"):
        await asyncio.wait_for(link.until(watched, lambda: False), 5)
    assert heard == []


@pytest.mark.parametrize(("device", "num_gpus"), [("cuda", 4), ("cpu", 1)])
def test_what_a_step_takes_is_foretold_for_all_gpus_of_the_vllm(tmp_path: Path, device: str, num_gpus: int) -> None:
    """Workers on CPUs share one machine's. What `calibrate` fitted to another number of workers is not taken."""
    config = {
        "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 4,
        "intermediate_size": 64, "vocab_size": 50, "max_position_embeddings": 64,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = ModelIdentity(name="m", revision="a", tokenizer="b", vocab_size=50, max_context=64)
    options = VllmOptions(model_dir=tmp_path, hardware=preset("H800"))
    keys = []
    for world_size in (1, 4):
        said = msgspec.structs.replace(hello(0, world_size, 4), device=device)
        latency, key = _latency(options, model, said)
        keys.append(key)
    assert (latency.tp, latency.num_gpus) == (num_gpus, num_gpus)
    assert keys[0] != keys[1]
