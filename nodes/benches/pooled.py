"""A real pool process and our client beside it: one value put and got back, and blocks through the SSD tier."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np

from nodes.benches.measuring import PeerFailed
from nodes.pool.disk import Disk, read_all, write_all
from nodes.pool.ssd import ssd_config
from nodes.pool.tiers import SsdTier
from transfer.kv.arena import HostArena
from transfer.kv.client import KvPoolClient, block_key
from transfer.kv.staging import opaque_layout

BLOCK_BYTES = 1 << 20
FINGERPRINT = bytes(32)
START_S = 30.0
AT_ONCE = 64
"""Blocks that the pool has under way to SSD at once."""


Move = Callable[[bytes, int], Awaitable[bool]]


class Value:
    """One value of `num_bytes`, in blocks, under new keys each time it is put."""

    def __init__(self, num_bytes: int) -> None:
        self.count = num_bytes // BLOCK_BYTES
        self._data = bytearray(secrets.token_bytes(self.count * BLOCK_BYTES))
        self._into = bytearray(b"\1" * len(self._data))
        self._number = 0

    async def through(self, client: KvPoolClient) -> dict[str, float]:
        """Put it and get it back, from and to this process's own memory; a Contender."""
        keys = self._keys()
        started = time.perf_counter()
        stored = await client.put(keys, self._data)
        between = time.perf_counter()
        found = await client.get(keys, self._into)
        ended = time.perf_counter()
        if (stored, found) != (self.count, self.count) or self._into != self._data:
            raise PeerFailed(f"the pool stored {stored} and returned {found} of {self.count} blocks")
        return {"write": between - started, "read": ended - between}

    async def in_place(self, client: KvPoolClient) -> dict[str, float]:
        """The same from and to blocks that the client shares with the pool: no copy on this side."""
        keys = self._keys()
        async with client.reserve(self.count) as blocks:
            started = time.perf_counter()
            stored = await client.put_blocks(keys, blocks)
            between = time.perf_counter()
            found = await client.get_blocks(keys, blocks)
            ended = time.perf_counter()
        if (stored, found) != (self.count, self.count):
            raise PeerFailed(f"the pool stored {stored} and returned {found} of {self.count} blocks")
        return {"write": between - started, "read": ended - between}

    def _keys(self) -> list[bytes]:
        self._number += 1
        return [block_key(FINGERPRINT, f"{id(self)} {self._number} {index}".encode()) for index in range(self.count)]


@asynccontextmanager
async def pool_process(num_bytes: int) -> AsyncIterator[str]:
    """A pool with memory for `num_bytes`; yields its endpoint. Raises PeerFailed when it does not start."""
    with tempfile.TemporaryDirectory() as folder:
        ready = Path(folder) / "ready"
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "nodes.kvpool", f"--block-bytes={BLOCK_BYTES}", f"--dram-gib={num_bytes / (1 << 30)}",
            f"--ready-file={ready}", f"--parent-pid={os.getpid()}", "--log-level=warning",
            stdout=asyncio.subprocess.DEVNULL,
        )  # fmt: skip
        try:
            async with asyncio.timeout(START_S):
                while not ready.exists():
                    if process.returncode is not None:
                        raise PeerFailed(f"the pool ended with status {process.returncode} before it was ready")
                    await asyncio.sleep(0.02)
            yield json.loads(ready.read_text())["endpoint"]
        finally:
            if process.returncode is None:
                process.send_signal(signal.SIGTERM)
            await process.wait()


class Ssd:
    """The pool's SSD tier and a plain file in the same folder, each written and read through the page cache."""

    def __init__(self, folder: Path, num_bytes: int, rounds: int) -> None:
        self.count = num_bytes // BLOCK_BYTES
        self._folder = folder
        self._arena = HostArena(opaque_layout(BLOCK_BYTES), self.count)
        np.frombuffer(self._arena.buffer, np.uint8)[:] = np.random.default_rng(0).integers(
            0, 255, self._arena.buffer.nbytes, np.uint8
        )
        self._config = ssd_config(folder / "tier", (rounds + 3) * 2 * num_bytes, self._arena.layout)
        self._number = 0

    async def __aenter__(self) -> Ssd:
        self._tier = await SsdTier.open(self._config, self._arena)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._tier.close()
        self._arena.close()

    async def tier(self) -> dict[str, float]:
        """Write every block under a new key, with a checksum, and read it back, verified; a Contender."""
        self._number += 1
        keys = [block_key(FINGERPRINT, f"{self._number} {block}".encode()) for block in range(self.count)]
        limit = asyncio.Semaphore(AT_ONCE)

        async def one(move: Move, block: int) -> None:
            async with limit:
                if not await move(keys[block], block):
                    raise PeerFailed("the SSD tier refused a block; give --directory a folder with more room")

        async def all_of(move: Move) -> float:
            started = time.perf_counter()
            await asyncio.gather(*(one(move, block) for block in range(self.count)))
            return time.perf_counter() - started

        return {"write": await all_of(self._tier.write), "read": await all_of(self._tier.read)}

    async def plain(self) -> dict[str, float]:
        """One new file of the same size, from and to the same memory (in a thread: it blocks)."""
        return await asyncio.to_thread(self._plain)

    def _plain(self) -> dict[str, float]:
        disk, path = Disk(), self._folder / "plain"
        memory = self._arena.buffer
        parts = [memory[at : at + BLOCK_BYTES] for at in range(0, memory.nbytes, BLOCK_BYTES)]
        descriptor = disk.open(path)
        try:
            started = time.perf_counter()
            for number, part in enumerate(parts):
                write_all(disk, descriptor, [part], number * BLOCK_BYTES)
            between = time.perf_counter()
            for number, part in enumerate(parts):
                read_all(disk, descriptor, [part], number * BLOCK_BYTES)
            return {"write": between - started, "read": time.perf_counter() - between}
        finally:
            disk.close(descriptor)
            disk.unlink(path)
