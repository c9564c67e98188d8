"""What the KV tests share: a small model's layout, random arenas, a role that records, a proxy that does harm."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

from transfer.errors import Refused
from transfer.kv.arena import HostArena
from transfer.kv.links.tcp import TcpKvPort
from transfer.kv.port import KvAnswer, KvAsk, KvFetch, KvKind, KvOffer, KvPort, KvTrailer
from transfer.terms import KvLayout
from transfer.wire.messages import KvPeer

LAYOUT = KvLayout(num_layers=30, num_kv_heads=3, head_dim=64, block_size=16, dtype="float32", rope="theta=100000")
TINY = KvLayout(num_layers=3, num_kv_heads=1, head_dim=4, block_size=4, dtype="uint8", rope="none")
FINGERPRINT = bytes(range(32))
TIMEOUT_S = 10.0
TRAILER = KvTrailer(num_tokens=100)
VIAS = ("tcp", "shm")


class RecordingRole:
    """A KvDelegate that grants what it was told to and remembers every call."""

    def __init__(self, granted: Sequence[int] = ()) -> None:
        self.granted = list(granted)
        self.pool: dict[bytes, int] = {}
        self.refuse_offer = self.refuse_arrival = ""
        self.offered: list[KvOffer] = []
        self.progress: list[KvOffer] = []
        self.arrived: list[tuple[KvOffer, KvTrailer]] = []
        self.failed: list[tuple[KvOffer, str]] = []
        self.wanted: list[KvFetch] = []
        self.served: list[KvFetch] = []
        self.asked: list[KvAsk] = []
        self.refuse_ask = ""

    def kv_offered(self, offer: KvOffer) -> Sequence[int]:
        self.offered.append(offer)
        if self.refuse_offer:
            raise Refused(self.refuse_offer)
        taken, self.granted = self.granted[: offer.num_blocks], self.granted[offer.num_blocks :]
        return taken

    def kv_progress(self, offer: KvOffer) -> None:
        self.progress.append(offer)

    def kv_arrived(self, offer: KvOffer, trailer: KvTrailer) -> None:
        self.arrived.append((offer, trailer))
        if self.refuse_arrival:
            raise Refused(self.refuse_arrival)

    def kv_failed(self, offer: KvOffer, reason: str) -> None:
        self.failed.append((offer, reason))

    def kv_wanted(self, fetch: KvFetch) -> Sequence[int] | Awaitable[Sequence[int]]:
        self.wanted.append(fetch)
        found = []
        for name in fetch.hashes:
            if name not in self.pool:
                break
            found.append(self.pool[name])
        return found

    def kv_served(self, fetch: KvFetch) -> None:
        self.served.append(fetch)

    def kv_asked(self, ask: KvAsk) -> KvAnswer:
        self.asked.append(ask)
        if self.refuse_ask:
            raise Refused(self.refuse_ask)
        return KvAnswer(epoch=11, num_blocks=len(ask.hashes), stats={"hits": 0.5})


def make_arena(
    num_blocks: int, *, layout: KvLayout = LAYOUT, shared: bool = False, seed: int | None = None
) -> HostArena:
    """Zeros, or random bytes when a seed is given."""
    arena = HostArena(layout, num_blocks, shared=shared)
    if seed is not None:
        arena.buffer[:] = random.Random(seed).randbytes(arena.buffer.nbytes)
    return arena


def block_bytes(arena: HostArena, block: int) -> bytes:
    """All bytes of one block: every layer, K and V."""
    return b"".join(
        bytes(half) for layer in range(arena.layout.num_layers) for half in arena.views(layer, block, 1)
    )  # fmt: skip


def make_offer(num_blocks: int, **changes: Any) -> KvOffer:
    values: dict[str, Any] = {
        "kind": KvKind.HANDOFF, "request_id": "r1", "generation": 1, "source": "prefill", "source_epoch": 7,
        "target_epoch": 11, "fingerprint": FINGERPRINT, "first_block": 0, "num_blocks": num_blocks,
    }  # fmt: skip
    return KvOffer(**(values | changes))


def make_fetch(hashes: Sequence[bytes], **changes: Any) -> KvFetch:
    values: dict[str, Any] = {
        "request_id": "r1", "target_epoch": 11, "fingerprint": FINGERPRINT, "hashes": tuple(hashes)
    }  # fmt: skip
    return KvFetch(**(values | changes))


def peer_of(port: KvPort, endpoint: str | None = None) -> KvPeer:
    """How another instance is told of `port` (or of a proxy before it)."""
    return KvPeer(instance_id="decode", epoch=11, data_endpoint=endpoint or port.endpoint, host_id="here")


def push_all(sender: Any, first: int, count: int, layout: KvLayout = LAYOUT) -> None:
    for layer in range(layout.num_layers):
        sender.push(layer, first, count)


async def until(condition: Callable[[], bool], within_s: float = 5.0) -> None:
    """Wait for something another task or thread brings about."""
    async with asyncio.timeout(within_s):
        while not condition():  # noqa: ASYNC110  (nothing tells)
            await asyncio.sleep(0.005)


class Pair:
    """A prefill and a decode instance on loopback, each with an arena; used as `async with`."""

    def __init__(self, num_blocks: int, *, via: str = "tcp", layout: KvLayout = LAYOUT, **options: Any) -> None:
        shared = via == "shm"
        self.layout = layout
        self.source = make_arena(num_blocks, layout=layout, shared=shared, seed=1)
        self.target = make_arena(num_blocks, layout=layout)
        self.role, self.sender_role = RecordingRole(range(num_blocks)), RecordingRole()
        common = {"host_id": "here", "shm": shared} | options
        self.prefill = TcpKvPort(
            instance_id="prefill", epoch=7, arena=self.source, delegate=self.sender_role, **common
        )  # fmt: skip
        self.decode = TcpKvPort(instance_id="decode", epoch=11, arena=self.target, delegate=self.role, **common)

    async def __aenter__(self) -> Pair:
        await self.prefill.start()
        await self.decode.start()
        return self

    async def __aexit__(self, kind: object, *_: object) -> None:
        if kind is None:  # whatever happened, no stream may be left behind
            await until(lambda: self.prefill.num_streams == self.decode.num_streams == 0)
        await self.prefill.close()
        await self.decode.close()
        self.source.close()
        self.target.close()

    @property
    def peer(self) -> KvPeer:
        return peer_of(self.decode)

    def same(self, source_blocks: Sequence[int], target_blocks: Sequence[int]) -> bool:
        return all(
            block_bytes(self.source, a) == block_bytes(self.target, b)
            for a, b in zip(source_blocks, target_blocks, strict=True)
        )

    def same_layer(self, layer: int, count: int) -> bool:
        """The first `count` blocks of one layer are equal on both sides."""
        here, there = self.source.views(layer, 0, count), self.target.views(layer, 0, count)
        return [bytes(half) for half in here] == [bytes(half) for half in there]


class Proxy:
    """A TCP relay before a port. Counts bytes from the opener; can change one, hold them back, or cut both sides."""

    def __init__(self, endpoint: str) -> None:
        host, port = endpoint.removeprefix("tcp://").rsplit(":", 1)
        self._target = host, int(port)
        self.flip_at: int | None = None
        self.hold_at: int | None = None
        self.passed = 0
        self.refusing = False
        self.released = asyncio.Event()
        self._writers: list[asyncio.StreamWriter] = []
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def endpoint(self) -> str:
        return f"tcp://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def cut(self) -> None:
        """Both sides see the connection reset, as when the machine between them dies."""
        for writer in self._writers:
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.append(writer)
        if self.refusing or not self._server.is_serving():
            writer.transport.abort()
            return
        if (task := asyncio.current_task()) is not None:
            self._tasks.append(task)
        try:
            there_reader, there_writer = await asyncio.open_connection(*self._target)
        except OSError:
            writer.transport.abort()
            return
        self._writers.append(there_writer)
        self._tasks.append(asyncio.create_task(self._relay(reader, there_writer, forward=True)))
        self._tasks.append(asyncio.create_task(self._relay(there_reader, writer, forward=False)))

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, forward: bool) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(64 << 10):
                if forward:
                    data = await self._harm(data, writer)
                writer.write(data)
                await writer.drain()
        writer.close()

    async def _harm(self, data: bytes, writer: asyncio.StreamWriter) -> bytes:
        if self.hold_at is not None and self.passed + len(data) > self.hold_at:
            head = max(self.hold_at - self.passed, 0)
            writer.write(data[:head])
            self.passed += head
            data = data[head:]
            self.hold_at = None
            await self.released.wait()
        if self.flip_at is not None and self.passed <= self.flip_at < self.passed + len(data):
            at = self.flip_at - self.passed
            data = data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :]
        self.passed += len(data)
        return data

    async def __aenter__(self) -> Proxy:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        self.released.set()
        self.cut()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.sleep(0.02)  # what was accepted just now reaches _serve, and is cut there
        self.cut()
        await asyncio.sleep(0.02)  # an abort takes turns of the loop, too


@contextlib.asynccontextmanager
async def proxied_links(pair: Pair, num_links: int) -> AsyncIterator[tuple[list[Proxy], KvPeer]]:
    """Several proxies before the pair's receiver, and the peer that is reached through all of them."""
    async with contextlib.AsyncExitStack() as stack:
        proxies = [await stack.enter_async_context(Proxy(pair.decode.endpoint)) for _ in range(num_links)]
        yield proxies, peer_of(pair.decode, ",".join(proxy.endpoint for proxy in proxies))


@contextlib.asynccontextmanager
async def proxied(pair: Pair) -> AsyncIterator[tuple[Proxy, KvPeer]]:
    """A proxy before the pair's receiver, and the peer that goes through it."""
    async with Proxy(pair.decode.endpoint) as proxy:
        yield proxy, peer_of(pair.decode, proxy.endpoint)


async def push(pair: Pair, source: list[int], target: list[int], **changes: Any) -> Any:
    """One whole push; its stats."""
    pair.role.granted = list(target)
    sender = await pair.prefill.open(pair.peer, make_offer(len(source), **changes), source, TIMEOUT_S)
    push_all(sender, changes.get("first_block", 0), len(source), pair.layout)
    return await sender.commit(TRAILER, TIMEOUT_S)
