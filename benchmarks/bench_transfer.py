"""KV transfer between two processes on this host, side by side with a bare blocking socket and with memcpy.

Every round runs ours and the yardstick one after the other; medians are printed and, with --json, written as JSON
lines {name, ours, peer, peer_name, unit, ratio}. The KV is that of a 30-layer, 3-head float32 model, blocks of 16.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import mmap
import multiprocessing
import random
import socket
import statistics
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from transfer.kv.arena import HostArena
from transfer.kv.links.tcp import TcpKvPort
from transfer.kv.port import KvKind, KvOffer, KvTrailer
from transfer.terms import KvLayout
from transfer.wire.messages import KvPeer

LAYOUT = KvLayout(num_layers=30, num_kv_heads=3, head_dim=64, block_size=16, dtype="float32", rope="theta=100000")
TIMEOUT_S = 60.0
GB = 1e9
CHUNK_BYTES = 1 << 20
"""What the bare socket sends and receives at a time: its fastest here (all at once is a third slower)."""


@dataclass(frozen=True)
class Case:
    """One line of the result. streams: pushes at once; scattered: hardly two neighbouring blocks are adjacent."""

    name: str
    shm: bool
    checksum: bool
    scattered: bool = False
    streams: int = 1


CASES = (
    Case("kv_tcp", shm=False, checksum=True),
    Case("kv_tcp_no_checksum", shm=False, checksum=False),
    Case("kv_tcp_scattered", shm=False, checksum=True, scattered=True),
    Case("kv_tcp_16_streams", shm=False, checksum=True, streams=16),
    Case("kv_shm", shm=True, checksum=True),
    Case("kv_shm_no_checksum", shm=True, checksum=False),
    Case("kv_shm_scattered", shm=True, checksum=True, scattered=True),
)


class Receiver:
    """The decode role's door, reduced to handing out block ids in the order asked for."""

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

    def kv_wanted(self, fetch: object) -> Sequence[int]:
        return []

    def kv_served(self, fetch: object) -> None:
        pass


def table(num_blocks: int, scattered: bool) -> list[int]:
    """A block table; scattered: shuffled, so that hardly two neighbours are adjacent in memory."""
    blocks = list(range(num_blocks))
    if scattered:
        random.Random(7).shuffle(blocks)
    return blocks


def run_loop(main: Coroutine[Any, Any, Any]) -> Any:
    import uvloop

    return uvloop.run(main)


def child(pipe: Connection, num_blocks: int) -> None:
    """The receiving process: a bare socket sink in a thread, and KV ports, one for each case as it is asked for."""
    size = LAYOUT.block_bytes * num_blocks
    listener = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=sink, args=(listener, size), daemon=True).start()
    pipe.send(listener.getsockname()[1])
    run_loop(serve(pipe, num_blocks))


async def serve(pipe: Connection, num_blocks: int) -> None:
    arena = HostArena(LAYOUT, num_blocks)
    np.frombuffer(arena.buffer, np.uint8)[:] = 1
    while (case := await asyncio.to_thread(pipe.recv)) is not None:
        port = TcpKvPort(
            instance_id="decode", epoch=1, arena=arena, shm=case.shm, host_id="bench",
            checksum=case.checksum, shm_checksum=case.checksum,
            delegate=Receiver(num_blocks, scattered=case.scattered),
        )  # fmt: skip
        await port.start()
        pipe.send(port.endpoint)
        await asyncio.to_thread(pipe.recv)
        await port.close()
    arena.close()


def sink(listener: socket.socket, size: int) -> None:
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


def timed_socket(sock: socket.socket, view: memoryview) -> float:
    started = time.perf_counter()
    for start in range(0, view.nbytes, CHUNK_BYTES):
        sock.sendall(view[start : start + CHUNK_BYTES])
    sock.recv(1)
    return time.perf_counter() - started


def timed_memcpy(source: np.ndarray[Any, Any], target: np.ndarray[Any, Any]) -> float:
    started = time.perf_counter()
    np.copyto(target, source)
    return time.perf_counter() - started


async def timed_push(port: TcpKvPort, peer: KvPeer, case: Case, blocks: list[int]) -> float:
    """Open, push every layer, commit, on `case.streams` streams at once; seconds for all of it."""
    share = len(blocks) // case.streams

    async def one(number: int) -> None:
        first = number * share
        offer = KvOffer(
            kind=KvKind.HANDOFF, request_id=f"r{number}", generation=1, source="prefill", source_epoch=1,
            target_epoch=1, fingerprint=bytes(32), first_block=first, num_blocks=share,
        )  # fmt: skip
        sender = await port.open(peer, offer, blocks[first : first + share], TIMEOUT_S)
        for layer in range(LAYOUT.num_layers):
            sender.push(layer, first, share)
        await sender.commit(KvTrailer(num_tokens=len(blocks) * LAYOUT.block_size), TIMEOUT_S)

    started = time.perf_counter()
    await asyncio.gather(*(one(number) for number in range(case.streams)))
    return time.perf_counter() - started


async def measure(pipe: Connection, sink_port: int, num_blocks: int, rounds: int) -> list[dict[str, Any]]:
    size = LAYOUT.block_bytes * num_blocks
    arena = HostArena(LAYOUT, num_blocks, shared=True)
    source = np.frombuffer(arena.buffer, np.uint8)
    source[:] = np.random.default_rng(0).integers(0, 255, size, np.uint8)
    target = np.ones(size, np.uint8)
    sock = socket.create_connection(("127.0.0.1", sink_port))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    yardsticks: dict[str, Callable[[], float]] = {
        "blocking socket": partial(timed_socket, sock, arena.buffer),
        "memcpy": partial(timed_memcpy, source, target),
    }
    lines = []
    try:
        for case in CASES:
            pipe.send(case)
            peer = KvPeer(instance_id="decode", epoch=1, data_endpoint=pipe.recv(), host_id="bench")
            port = TcpKvPort(instance_id="prefill", epoch=1, arena=arena, host_id="bench", shm=case.shm)
            await port.start()
            blocks = table(num_blocks, case.scattered)
            peer_name = "memcpy" if case.shm else "blocking socket"
            ours, theirs = [], []
            for number in range(rounds + 1):
                pair = await timed_push(port, peer, case, blocks), yardsticks[peer_name]()
                if number:  # the first warms caches and page tables
                    ours.append(size / pair[0] / GB)
                    theirs.append(size / pair[1] / GB)
            await port.close()
            pipe.send("next")
            lines.append(line(case.name, statistics.median(ours), statistics.median(theirs), peer_name))
    finally:
        pipe.send(None)
        sock.close()
        yardsticks.clear()
        arena.close()
    return lines


def line(name: str, ours: float, peer: float, peer_name: str) -> dict[str, Any]:
    print(f"{name:22} {ours:6.2f} GB/s   {peer_name:16} {peer:6.2f} GB/s   ratio {ours / peer:.2f}", flush=True)
    return {
        "name": name, "ours": round(ours, 3), "peer": round(peer, 3), "peer_name": peer_name, "unit": "GB/s",
        "ratio": round(ours / peer, 3),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="also write the results here, as JSON lines")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--blocks", type=int, default=256, help="KV blocks moved in each round (720 KiB each)")
    args = parser.parse_args()
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=child, args=(there, args.blocks), daemon=True)
    process.start()
    lines = run_loop(measure(here, here.recv(), args.blocks, args.rounds))
    process.join(10)
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text("".join(json.dumps(entry) + "\n" for entry in lines))


if __name__ == "__main__":
    main()
