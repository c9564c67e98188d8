"""A disk that fails on purpose, threads that take their turn by a seed, and a pool over both."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import os
import random
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from nodes.pool.disk import Buffer, Disk
from nodes.pool.policy import EvictionPolicy, LruPolicy
from nodes.pool.ssd import SsdConfig
from nodes.pool.tiers import SsdTier
from nodes.roles.kv_pool import PoolRole
from transfer.kv.arena import HostArena
from transfer.kv.port import KvFetch, KvKind, KvOffer, KvTrailer
from transfer.terms import KvLayout
from transfer.wire.messages import Message

T = TypeVar("T")
LAYOUT = KvLayout(num_layers=2, num_kv_heads=1, head_dim=4, block_size=4, dtype="uint8", rope="none")
RECORD = 112 + LAYOUT.block_bytes
ROOT = b"r" * 32


def name(number: int) -> bytes:
    return hashlib.sha256(b"block %d" % number).digest()


def content(h: bytes) -> bytes:
    """The only right bytes of a block of this name."""
    return (hashlib.sha512(h).digest() * (LAYOUT.block_bytes // 64 + 1))[: LAYOUT.block_bytes]


def fill(arena: HostArena, block: int, data: bytes) -> None:
    slab = LAYOUT.slab_bytes
    for i, view in enumerate(view for layer in range(LAYOUT.num_layers) for view in arena.views(layer, block, 1)):
        view[:] = data[i * slab : (i + 1) * slab]


def peek(arena: HostArena, block: int) -> bytes:
    return b"".join(bytes(view) for layer in range(LAYOUT.num_layers) for view in arena.views(layer, block, 1))


@dataclass
class Faults:
    """Chances for each operation, and what is wrong for good. room: bytes all files together may take."""

    short: float = 0.0
    write_error: float = 0.0
    read_error: float = 0.0
    flip_written: float = 0.0
    flip_read: float = 0.0
    room: int | None = None
    crash_after: int | None = None
    """Writes until the machine dies in the middle of one."""


@dataclass
class FaultyDisk(Disk):
    seed: int = 0
    faults: Faults = field(default_factory=Faults)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.dead = False
        self.sizes: dict[Path, int] = {}
        self.paths: dict[int, Path] = {}
        self.reading = self.most_reading = 0
        self.hold_reads: threading.Event | None = None
        self.num_written = 0
        self._counting = threading.Lock()

    def kill(self) -> None:
        """As SIGKILL: nothing more reaches the files, and the lock is free."""
        self.dead = True
        for fd in list(self.paths):
            os.close(fd)
        self.paths.clear()

    def lock(self, path: Path) -> int:
        fd = super().lock(path)
        self.paths[fd] = path
        return fd

    def release(self, fd: int) -> None:
        if self.paths.pop(fd, None):
            super().release(fd)

    def files(self, directory: Path) -> list[Path]:
        self._live()
        found = super().files(directory)
        self.sizes = {path: path.stat().st_size for path in found}
        return found

    def open(self, path: Path) -> int:
        self._live()
        fd = super().open(path)
        self.paths[fd] = path
        return fd

    def close(self, fd: int) -> None:
        if self.paths.pop(fd, None):
            super().close(fd)

    def write(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        self._live()
        data = b"".join(bytes(buffer) for buffer in buffers)
        faults, draw = self.faults, self.random.random
        if faults.crash_after is not None:
            faults.crash_after -= 1
            if faults.crash_after < 0:
                os.pwrite(fd, data[: self.random.randrange(len(data) + 1)], offset)
                self.kill()
                raise OSError(errno.EIO, "the machine died")
        if draw() < faults.write_error:
            raise OSError(errno.EIO, "bad sector")
        if draw() < faults.short and len(data) > 1:
            data = data[: self.random.randrange(1, len(data))]
        path = self.paths[fd]
        others = sum(size for other, size in list(self.sizes.items()) if other != path)  # two threads write
        if faults.room is not None and others + offset + len(data) > faults.room:
            data = data[: max(0, faults.room - others - offset)]
            if not data:
                raise OSError(errno.ENOSPC, "no space left")
        if draw() < faults.flip_written:
            data = flipped(data, self.random)
        self.sizes[path] = max(self.sizes.get(path, 0), offset + len(data))
        self.num_written += len(data)
        return os.pwrite(fd, data, offset)

    def read(self, fd: int, buffers: Sequence[bytearray | memoryview], offset: int) -> int:
        self._live()
        with self._counting:
            self.reading += 1
            self.most_reading = max(self.most_reading, self.reading)
        try:
            if self.hold_reads is not None and not self.hold_reads.wait(20.0):
                raise OSError(errno.EIO, "the disk hangs")
            faults, draw = self.faults, self.random.random
            if draw() < faults.read_error:
                raise OSError(errno.EIO, "bad sector")
            count = super().read(fd, buffers, offset)
            if count and draw() < faults.flip_read:
                buffer = memoryview(self.random.choice(buffers)).cast("B")
                at = self.random.randrange(len(buffer))
                buffer[at] ^= 1 << self.random.randrange(8)
            return count
        finally:
            with self._counting:
                self.reading -= 1

    def truncate(self, fd: int, size: int) -> None:
        self._live()
        super().truncate(fd, size)

    def rename(self, old: Path, new: Path) -> None:
        self._live()
        super().rename(old, new)
        self.sizes[new] = self.sizes.pop(old, 0)
        self.paths = {fd: new if path == old else path for fd, path in self.paths.items()}

    def unlink(self, path: Path) -> None:
        self._live()
        super().unlink(path)
        self.sizes.pop(path, None)

    def _live(self) -> None:
        if self.dead:
            raise OSError(errno.EIO, "the machine is dead")


def flipped(data: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(data))
    return data[:at] + bytes([data[at] ^ (1 << rng.randrange(8))]) + data[at + 1 :]


class SeededThreads(Executor):
    """Runs work on the loop, each piece after a time drawn from the seed: any order that threads could take."""

    def __init__(self, seed: int, most_s: float = 0.01) -> None:
        self._random, self._most_s = random.Random(seed), most_s

    def submit(self, work: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                result = work(*args, **kwargs)
            except Exception as error:  # noqa: BLE001  (as an executor: whatever it is belongs to who waits)
                future.set_exception(error)
            else:
                future.set_result(result)

        asyncio.get_running_loop().call_later(self._random.uniform(0.0, self._most_s), run)
        return future


class NoPort:
    """The KvPort of a pool that nobody reaches but the test itself."""

    endpoint = "none"

    def __init__(self) -> None:
        self.revoked: list[str] = []

    def revoke(self, request_id: str, generation: int) -> None:
        self.revoked.append(request_id)


class Pool:
    """One life of a pool node over a directory, driven as its port would."""

    def __init__(self, role: PoolRole, arena: HostArena, disk: Disk, sent: list[Message]) -> None:
        self.role, self.arena, self.disk, self.sent = role, arena, disk, sent
        self._num = 0

    @classmethod
    async def open(
        cls, directory: Path, *, disk: Disk | None = None, threads: Executor | None = None, num_blocks: int = 16,
        ssd_blocks: int = 64, slots: int = 8, layout: KvLayout = LAYOUT, policy: EvictionPolicy | None = None,
    ) -> Pool:  # fmt: skip
        arena, disk = HostArena(layout, num_blocks), disk or Disk()
        config = SsdConfig(directory, ssd_blocks, segment_bytes=slots * RECORD, disk=disk, executor=threads)
        ssd = await SsdTier.open(config, arena)
        sent: list[Message] = []
        role = PoolRole("k0", 1, arena, NoPort(), sent.append, ssd=ssd, policy=policy or LruPolicy())  # type: ignore[arg-type]
        role.start()
        return cls(role, arena, disk, sent)

    @property
    def ssd(self) -> SsdTier:
        assert self.role.keeper.ssd is not None
        return self.role.keeper.ssd

    def offer(self, *hashes: bytes) -> tuple[KvOffer, Sequence[int]]:
        self._num += 1
        offer = KvOffer(
            kind=KvKind.STORE, request_id=f"w{self._num}", generation=0, source="p0", source_epoch=1, target_epoch=1,
            fingerprint=ROOT, first_block=0, num_blocks=len(hashes), hashes=hashes,
        )  # fmt: skip
        return offer, self.role.kv_offered(offer)

    def put(self, *numbers: int) -> None:
        hashes = [name(number) for number in numbers]
        offer, blocks = self.offer(*hashes)
        for h, block in zip(hashes, blocks, strict=True):
            if block >= 0:
                fill(self.arena, block, content(h))
        self.role.kv_arrived(offer, KvTrailer(num_tokens=len(hashes) * LAYOUT.block_size))

    def fetch(self, *numbers: int) -> KvFetch:
        self._num += 1
        hashes = tuple(name(number) for number in numbers)
        return KvFetch(request_id=f"r{self._num}", target_epoch=1, fingerprint=ROOT, hashes=hashes)

    async def blocks(self, fetch: KvFetch) -> Sequence[int]:
        wanted = self.role.kv_wanted(fetch)
        return wanted if isinstance(wanted, Sequence) else await wanted

    async def get(self, *numbers: int) -> int:
        """How many leading blocks came; their bytes must be right."""
        fetch = self.fetch(*numbers)
        blocks = await self.blocks(fetch)
        try:
            for h, block in zip(fetch.hashes, blocks, strict=False):
                assert peek(self.arena, block) == content(h)
            return len(blocks)
        finally:
            self.role.kv_served(fetch)

    async def spilled(self) -> None:
        """Until nothing moves between the tiers."""
        async with asyncio.timeout(30.0):
            while self.role.keeper.busy or self.ssd._tasks:  # noqa: ASYNC110  (the pool has no signal for rest)
                await asyncio.sleep(0.001)
        assert self.role.keeper.check() == 0

    async def to_ssd(self, *numbers: int) -> None:
        """Put these and push them out of memory."""
        self.put(*numbers)
        await self.spilled()
        self.forget()
        await self.spilled()

    def forget(self) -> None:
        """Empty the memory of what is on SSD."""
        store = self.role.store
        for h in store.hashes():
            if store.on_ssd(h):
                store._evict(h)
        self.role.keeper.settle()

    async def close(self) -> None:
        await self.role.close()

    def kill(self) -> None:
        assert isinstance(self.disk, FaultyDisk)
        self.disk.kill()
        self.role._feed.close()
        if self.role._ticker is not None:
            self.role._ticker.cancel()


def segments(directory: Path) -> list[Path]:
    return sorted(directory.glob("segment-*.kv"))


def damage(path: Path, at: int, bit: int = 0) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ (1 << bit)]))
