"""Two processes that move KV: through our ports, through a bare blocking socket; and memcpy within one.

The KV is that of a 30-layer, 3-head float32 model, blocks of 16 tokens (720 KiB each).
"""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import multiprocessing
import os
import random
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import numpy as np
import uvloop

from transfer.kv.arena import HostArena
from transfer.kv.links.tcp import TcpKvPort
from transfer.kv.port import KvAnswer, KvFetch, KvKind, KvOffer, KvTrailer
from transfer.terms import KvLayout
from transfer.wire.messages import KvPeer

LAYOUT = KvLayout(num_layers=30, num_kv_heads=3, head_dim=64, block_size=16, dtype="float32", rope="theta=100000")
TIMEOUT_S = 60.0
CHUNK_BYTES = 1 << 20
"""What the bare socket sends and receives at a time: its fastest here (all at once is a third slower)."""
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Case:
    """One way of ours. streams: pushes at once; scattered: hardly two neighbouring blocks are adjacent.

    checksum: None: as ports do by default. port_options: of the sending port, as TcpKvPort takes them.
    """

    name: str
    shm: bool
    checksum: bool | None = None
    scattered: bool = False
    streams: int = 1
    port_options: dict[str, Any] = field(default_factory=dict)

    @property
    def both_ports(self) -> dict[str, Any]:
        """What sender and receiver are told alike."""
        told: dict[str, Any] = {"epoch": 1, "host_id": "bench", "shm": self.shm}
        return told if self.checksum is None else told | {"checksum": self.checksum, "shm_checksum": self.checksum}


class Receiver:
    """The role behind the other process's port, reduced to handing out block ids in the order asked for."""

    def __init__(self, num_blocks: int, *, scattered: bool) -> None:
        self._table = table(num_blocks, scattered)

    def kv_offered(self, offer: KvOffer) -> Sequence[int]:
        return self._table[offer.first_block : offer.first_block + offer.num_blocks]

    def kv_progress(self, offer: KvOffer) -> None:
        pass

    def kv_arrived(self, offer: KvOffer, trailer: KvTrailer) -> None:
        pass

    def kv_failed(self, offer: KvOffer, reason: str) -> None:
        raise SystemExit(f"a push failed: {reason}")

    def kv_wanted(self, fetch: KvFetch) -> Sequence[int]:
        return self._table[: len(fetch.hashes)]

    def kv_served(self, fetch: KvFetch) -> None:
        pass

    def kv_asked(self, ask: object) -> KvAnswer:
        raise SystemExit("nobody asks here")


class Movers:
    """This process's memory, and the other process that receives. Async context manager."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks, self.num_bytes = num_blocks, LAYOUT.block_bytes * num_blocks
        self.arena = HostArena(LAYOUT, num_blocks, shared=True)
        self._source = np.frombuffer(self.arena.buffer, np.uint8)
        self._source[:] = np.random.default_rng(0).integers(0, 255, self.num_bytes, np.uint8)
        self._target = np.ones(self.num_bytes, np.uint8)
        self._ports: list[TcpKvPort] = []

    async def __aenter__(self) -> Movers:
        self._pipe, there = multiprocessing.Pipe()
        context = multiprocessing.get_context("spawn")
        self._process: BaseProcess = context.Process(target=_child, args=(there, self.num_blocks), daemon=True)
        self._process.start()
        there.close()
        sink_port = await asyncio.to_thread(self._pipe.recv)
        self._socket = socket.create_connection((LOOPBACK, sink_port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return self

    async def __aexit__(self, *_: object) -> None:
        for port in self._ports:
            await port.close()
        self._socket.close()
        self._pipe.send(None)
        await asyncio.to_thread(self._process.join, 10)
        del self._source
        self.arena.close()

    async def open(self, case: Case) -> Mover:
        """A port here and one in the other process, for as long as this lasts."""
        self._pipe.send(case)
        endpoint = await asyncio.to_thread(self._pipe.recv)
        port = TcpKvPort(instance_id="prefill", arena=self.arena, **case.both_ports, **case.port_options)
        await port.start()
        self._ports.append(port)
        return Mover(port, endpoint, case, table(self.num_blocks, case.scattered))

    async def over_socket(self) -> dict[str, float]:
        """The same bytes through one bare blocking socket (in a thread: it blocks)."""
        return {"write": await asyncio.to_thread(_timed_socket, self._socket, self.arena.buffer)}

    async def by_memcpy(self) -> dict[str, float]:
        """The same bytes from one array to another."""
        started = time.perf_counter()
        np.copyto(self._target, self._source)
        return {"write": time.perf_counter() - started}


class Mover:
    """Ours: pushes everything there, fetches everything back."""

    def __init__(self, port: TcpKvPort, endpoint: str, case: Case, blocks: list[int]) -> None:
        self._port, self._case, self._blocks = port, case, blocks
        self._peer = KvPeer(instance_id="decode", epoch=1, data_endpoint=endpoint, host_id="bench")

    async def both(self) -> dict[str, float]:
        """A push, then a fetch; a Contender."""
        return {"write": await self.push(), "read": await self.fetch()}

    async def push(self) -> float:
        """Open, push every layer, commit, on `case.streams` streams at once; seconds for all of it."""
        share = len(self._blocks) // self._case.streams

        async def one(number: int) -> None:
            first = number * share
            offer = KvOffer(
                kind=KvKind.HANDOFF, request_id=f"r{number}", generation=1, source="prefill", source_epoch=1,
                target_epoch=1, fingerprint=bytes(32), first_block=first, num_blocks=share,
            )  # fmt: skip
            sender = await self._port.open(self._peer, offer, self._blocks[first : first + share], TIMEOUT_S)
            for layer in range(LAYOUT.num_layers):
                sender.push(layer, first, share)
            await sender.commit(KvTrailer(num_tokens=len(self._blocks) * LAYOUT.block_size), TIMEOUT_S)

        with _on_first_core():
            started = time.perf_counter()
            await asyncio.gather(*(one(number) for number in range(self._case.streams)))
            return time.perf_counter() - started

    async def fetch(self) -> float:
        """All blocks, in one fetch; seconds."""
        hashes = tuple(number.to_bytes(32, "big") for number in range(len(self._blocks)))
        fetch = KvFetch(request_id="f", target_epoch=1, fingerprint=bytes(32), hashes=hashes)
        with _on_first_core():
            started = time.perf_counter()
            count = await self._port.fetch(self._peer, fetch, self._blocks, TIMEOUT_S)
            taken_s = time.perf_counter() - started
        if count != len(self._blocks):
            raise SystemExit(f"a fetch of {len(self._blocks)} blocks got {count}")
        return taken_s


def table(num_blocks: int, scattered: bool) -> list[int]:
    """A block table; scattered: shuffled, so that hardly two neighbours are adjacent in memory."""
    blocks = list(range(num_blocks))
    if scattered:
        random.Random(7).shuffle(blocks)
    return blocks


@contextlib.contextmanager
def _on_first_core() -> Iterator[None]:
    """This thread, the sending end, on the first core; the receiving process is on the last. Left alone, the kernel now
    and then puts both ends on one core, ours or the bare socket's, which halves that one's speed."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(before)[:1])
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _child(pipe: Connection, num_blocks: int) -> None:
    """The receiving process: a bare socket sink in a thread, and KV ports, one for each case as it is asked for."""
    listener = socket.create_server((LOOPBACK, 0))
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[-1:])  # see _on_first_core; threads inherit it
    threading.Thread(target=_sink, args=(listener, LAYOUT.block_bytes * num_blocks), daemon=True).start()
    pipe.send(listener.getsockname()[1])
    uvloop.run(_serve(pipe, num_blocks))


async def _serve(pipe: Connection, num_blocks: int) -> None:
    arena = HostArena(LAYOUT, num_blocks, shared=True)
    np.frombuffer(arena.buffer, np.uint8)[:] = 1
    ports: list[TcpKvPort] = []
    try:
        while (case := await asyncio.to_thread(pipe.recv)) is not None:
            role = Receiver(num_blocks, scattered=case.scattered)
            port = TcpKvPort(instance_id="decode", arena=arena, delegate=role, **case.both_ports)
            await port.start()
            ports.append(port)
            pipe.send(port.endpoint)
    except EOFError:  # the measuring process has ended
        pass
    finally:
        for port in ports:
            await port.close()
        arena.close()


def _sink(listener: socket.socket, size: int) -> None:
    """Receive `size` bytes into fixed memory, answer one byte; again until the sender leaves."""
    view = memoryview(mmap.mmap(-1, size))
    np.frombuffer(view, np.uint8)[:] = 1
    sock, _ = listener.accept()
    while True:
        got = 0
        while got < size:
            count = sock.recv_into(view[got : got + CHUNK_BYTES])
            if not count:
                return
            got += count
        sock.sendall(b"k")


def _timed_socket(sock: socket.socket, view: memoryview) -> float:
    with _on_first_core():
        started = time.perf_counter()
        for start in range(0, view.nbytes, CHUNK_BYTES):
            sock.sendall(view[start : start + CHUNK_BYTES])
        sock.recv(1)
        return time.perf_counter() - started
