"""The link between an agent and its vLLM's connector, both ends real, vLLM's cache a tensor."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from nodes.engines.vllm.client import GRANT_WAIT_S, LinkClient
from nodes.engines.vllm.frames import (
    MAX_FRAME_BYTES,
    PROTOCOL,
    Hello,
    Refused,
    Unpacker,
    from_agent,
    from_connector,
    pack,
)
from nodes.engines.vllm.link import Link
from nodes.engines.vllm.mover import Cache, PlainCache, Span, read_span, write_span
from nodes.engines.vllm.plan import StepItem
from nodes.engines.vllm.worker import Worker
from transfer.errors import EngineFailed, InvalidValue, ProtocolError
from transfer.kv.arena import HostArena
from transfer.terms import KvLayout

LAYERS, HEADS, SIZE, DIM = 2, 2, 8, 4
LAYOUT = KvLayout(
    num_layers=LAYERS, num_kv_heads=HEADS, head_dim=DIM, block_size=SIZE, dtype="bfloat16", rope="none"
)  # fmt: skip
HELLO = Hello(
    protocol=PROTOCOL, version="0.32.0", pid=1, model="m", revision="a", tokenizer="b", dtype="bfloat16",
    cache_dtype="bfloat16", num_layers=LAYERS, num_kv_heads=HEADS, head_dim=DIM, block_size=SIZE, num_blocks=6,
    world_size=1, max_model_len=64, device="cpu",
)  # fmt: skip
CPU = torch.device("cpu")


@dataclass
class Pair:
    """An agent's link and a connector's worker over caches of 6 blocks. heard: what the agent was told."""

    link: Link
    arena: HostArena
    worker: Worker
    caches: list[Cache]
    heard: list[tuple[int, int, int]] = field(default_factory=list)
    started: list[str] = field(default_factory=list)

    def grant(self, blocks: list[int], num_loaded: int, save_from: int, num_tokens: int) -> int:
        job, watched = self.link.grant(
            blocks, num_loaded, save_from, num_tokens, self.arena,
            lambda: self.started.append("began"), lambda *saved: self.heard.append(saved),
        )  # fmt: skip
        self.watched = watched
        return job

    async def step(self, *items: StepItem) -> set[int]:
        """As vLLM's model runner calls a connector."""

        def run() -> set[int]:
            self.worker.begin(list(items), [])
            self.worker.load()
            for layer in range(LAYERS):
                self.worker.wait_layer(layer)
                self.worker.save_layer(layer)
            self.worker.fence()
            return self.worker.take_failed_blocks()

        return await asyncio.to_thread(run)


@pytest.fixture
async def pair(tmp_path: Path) -> AsyncIterator[Pair]:
    arena = HostArena(LAYOUT, 8, shared=True)

    async def welcome(hello: Hello) -> HostArena:
        return arena

    link = Link(tmp_path / "link", welcome)
    await link.listen()
    caches: list[Cache] = [PlainCache(torch.zeros(6, HEADS, SIZE, 2 * DIM).bfloat16()) for _ in range(LAYERS)]
    worker = Worker(caches, SIZE, CPU, tmp_path / "link", HELLO, launched=False)
    assert await asyncio.wait_for(link.joined, 5) == HELLO
    yield Pair(link, arena, worker, caches)
    worker.close()
    await link.close()
    arena.close()


async def eventually(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not is_so():  # noqa: ASYNC110 (what is awaited happens in a thread)
            await asyncio.sleep(0.005)


def random_kv(num_tokens: int) -> torch.Tensor:
    return torch.randn(2, num_tokens, HEADS, DIM).bfloat16()


async def test_kv_is_saved_layer_by_layer_and_loaded_elsewhere(pair: Pair) -> None:
    tokens = [random_kv(19) for _ in range(LAYERS)]
    for layer, halves in enumerate(tokens):
        write_span(pair.caches[layer], Span([4, 0, 2], (), 0, 19), SIZE, halves)
    job = pair.grant([7, 1, 5], 0, 0, 18)
    await pair.step(StepItem(job, [4, 0], 0, 10, 0, fresh=True))
    await pair.step(StepItem(job, [4, 0, 2], 10, 19, 10, fresh=False))
    await asyncio.wait_for(pair.link.until(pair.watched, lambda: pair.watched.num_missing == 0), 5)
    assert sorted(pair.heard) == [(0, 0, 1), (0, 1, 2), (1, 0, 1), (1, 1, 2)]
    assert (pair.started, pair.watched.num_cached) == (["began"], 0)

    taken = pair.grant([7, 1, 5], 18, 3, 18)
    assert await pair.step(StepItem(taken, [1, 3, 5], 18, 19, 0, fresh=True)) == set()
    await eventually(lambda: pair.watched.num_cached == 18)
    for layer, halves in enumerate(tokens):
        found = read_span(pair.caches[layer], Span([1, 3, 5], (), 0, 18), SIZE, CPU)
        assert torch.equal(torch.stack(found), halves[:, :18])


async def test_a_block_that_changed_hands_is_not_loaded_nor_what_follows_saved(pair: Pair) -> None:
    job = pair.grant([7, 1, 5], 16, 2, 18)
    pair.arena.bump(1)
    assert await pair.step(StepItem(job, [4, 0, 2], 16, 19, 0, fresh=True)) == {4, 0}
    await eventually(lambda: pair.watched.num_cached is not None)
    assert (pair.watched.loads_failed, pair.watched.num_cached, pair.heard) == (1, 0, [])
    await pair.step(StepItem(job, [4, 0, 2], 0, 19, 0, fresh=False))
    await eventually(lambda: pair.watched.num_missing == 0)
    assert sorted(pair.heard) == [(0, 2, 1), (1, 2, 1)]


async def test_what_shares_a_block_that_failed_to_load_is_saved_only_once_it_is_computed(pair: Pair) -> None:
    """vLLM lets requests of one step share the blocks of a prefix that one of them loads."""
    loads = pair.grant([7, 1], 8, 2, 16)
    shares = pair.grant([2, 3], 0, 0, 16)
    pair.arena.bump(7)
    first = StepItem(loads, [4, 0], 8, 16, 0, fresh=True)
    assert await pair.step(StepItem(shares, [4, 5], 8, 16, 8, fresh=True), first) == {4}
    await eventually(lambda: pair.watched.num_cached is not None)
    assert pair.heard == []
    first.start, first.fresh = 0, False
    await pair.step(first, StepItem(shares, [4, 5], 8, 16, 8, fresh=False))
    await eventually(lambda: pair.watched.num_missing == 0)
    assert sorted(pair.heard) == [(0, 0, 2), (1, 0, 2)]


async def test_once_revoked_nothing_is_read_or_written(pair: Pair) -> None:
    before = bytes(pair.arena.buffer)
    for layer in range(LAYERS):
        write_span(pair.caches[layer], Span([4, 0], (), 0, 16), SIZE, random_kv(16))
    job = pair.grant([7, 1], 8, 0, 16)
    item = StepItem(job, [4, 0], 8, 16, 8, fresh=True)
    await asyncio.to_thread(pair.worker.begin, [item], [])
    await asyncio.wait_for(pair.link.revoke(job), 5)
    for layer in range(LAYERS):
        pair.worker.save_layer(layer)
    assert bytes(pair.arena.buffer) == before
    assert await pair.step(StepItem(job, [4, 0], 8, 16, 0, fresh=True)) == {4}
    assert pair.heard == []


async def test_a_lost_agent_takes_its_grants_along(pair: Pair) -> None:
    job = pair.grant([7, 1], 8, 0, 16)
    await asyncio.to_thread(pair.worker.begin, [StepItem(job, [4, 0], 8, 16, 8, fresh=True)], [])
    before = bytes(pair.arena.buffer)
    await pair.link.close()
    await eventually(lambda: pair.worker._link.arena is None)
    pair.worker.save_layer(0)
    assert await pair.step(StepItem(job, [4, 0], 8, 16, 0, fresh=True)) == {4}
    assert bytes(pair.arena.buffer) == before


async def test_a_lost_connector_is_a_lost_engine(pair: Pair) -> None:
    job = pair.grant([7], 0, 0, 8)
    waiting = asyncio.create_task(pair.link.until(pair.watched, lambda: False))
    await asyncio.sleep(0)
    pair.worker.close()
    with pytest.raises(EngineFailed, match="connector is gone"):
        await asyncio.wait_for(waiting, 5)
    await asyncio.wait_for(pair.link.revoke(job), 5)
    assert "connector is gone" in pair.link.lost.result()


def test_a_link_that_is_closed_as_it_opens_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket(socket.AF_UNIX) as agent:
        agent.bind(str(tmp_path / "link"))
        agent.listen()
        client = LinkClient(tmp_path / "link", HELLO, launched=False, on_arena=lambda arena: None)
        closer = threading.Thread(target=client.close)

        def pack_late(frame: object) -> bytes:
            closer.start()
            closer.join(0.2)  # it is done, or waits for what goes on here
            return pack(frame)

        monkeypatch.setattr("nodes.engines.vllm.client.pack", pack_late)
        client.start()
        client._thread.join(5.0)
        assert not client._thread.is_alive()
        closer.join(5.0)


async def test_a_second_connector_is_refused_and_the_first_stays(pair: Pair, tmp_path: Path) -> None:
    assert (await converse(tmp_path / "link", pack(HELLO))).startswith("another vLLM has joined")
    assert not pair.link.lost.done()
    job = pair.grant([7], 0, 1, 8)
    await asyncio.wait_for(pair.link.revoke(job), 5)


async def test_one_that_does_not_fit_hears_why(tmp_path: Path) -> None:
    async def refuse(hello: Hello) -> HostArena:
        raise InvalidValue("its blocks are too small")

    link = Link(tmp_path / "link", refuse)
    await link.listen()
    assert await converse(tmp_path / "link", pack(HELLO)) == "its blocks are too small"
    with pytest.raises(InvalidValue, match="too small"):
        await link.joined
    await link.close()


async def test_what_is_no_hello_is_cut_off(pair: Pair, tmp_path: Path) -> None:
    for wrong in (b"GET / HTTP/1.1\r\n\r\n" * 9, b"\x01\x00\x00\x00\xc0", b"\xff\xff\xff\xff"):
        assert await converse(tmp_path / "link", wrong) == ""
    assert not pair.link.lost.done()


@pytest.fixture
def open_directory(tmp_path: Path) -> Path:
    tmp_path.chmod(0o750)
    return tmp_path


async def test_a_directory_that_others_can_enter_is_refused(open_directory: Path) -> None:
    async def never(hello: Hello) -> HostArena:
        raise AssertionError

    with pytest.raises(InvalidValue, match="others can enter"):
        await Link(open_directory / "link", never).listen()
    with pytest.raises(InvalidValue, match="create it with mode 700"):
        await Link(open_directory / "none" / "link", never).listen()


def test_frames_are_cut_anywhere_and_bounded() -> None:
    unpacker, data = Unpacker(), pack(HELLO) + pack(Refused(reason="no"))
    found = [body for at in range(len(data)) for body in unpacker.feed(data[at : at + 1])]
    assert from_connector(found[0]) == HELLO
    assert from_agent(found[1]) == Refused(reason="no")
    with pytest.raises(ProtocolError, match="is not a frame"):
        from_connector(found[1])
    with pytest.raises(ProtocolError, match="over the"):
        pack(Refused(reason="x" * MAX_FRAME_BYTES))


async def converse(path: Path, data: bytes) -> str:
    """What an agent refuses this with; empty where it just hangs up."""
    reader, writer = await asyncio.open_unix_connection(path)
    writer.write(data)
    if data.startswith(b"GET"):
        writer.write_eof()
    answer = b""
    with contextlib.suppress(ConnectionError):
        answer = await asyncio.wait_for(reader.read(), 5)
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()
    bodies = Unpacker().feed(answer)
    frame = from_agent(bodies[0]) if bodies else None
    return frame.reason if isinstance(frame, Refused) else ""


async def test_a_step_does_not_wait_for_a_grant_that_was_taken_back(pair: Pair) -> None:
    """It would hold every other request of vLLM up."""
    job = pair.grant([7], 0, 0, 8)
    await asyncio.wait_for(pair.link.revoke(job), 5)
    since = time.monotonic()
    await pair.step(StepItem(job, [4], 0, 8, 0, fresh=True))
    assert time.monotonic() - since < GRANT_WAIT_S / 2
    assert pair.heard == []
