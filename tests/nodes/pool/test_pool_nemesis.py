"""For any seed: every read returns exactly the bytes of its key or a miss, nothing leaks, nothing hangs.

Clients put, get, pin and leave at random over several lives of one directory, while the disk writes short, fails, fills
up, flips bits and the machine dies in the middle of a write. Virtual time, threads replaced by a seeded order.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from pathlib import Path

import pytest
from pool_harness import RECORD, Faults, FaultyDisk, Pool, SeededThreads, content, fill, name, peek, segments

from nodes.pool.policy import LruPolicy
from nodes.pool.policy_reuse import ReusePolicy
from transfer.actors.clock import run_virtual
from transfer.errors import Refused
from transfer.kv.port import KvAsk, KvAskKind, KvTrailer

LIVES, CLIENTS, OPS = 4, 5, 25
CHAINS, LENGTH = 6, 12
MEMORY, SSD, SLOTS = 24, 64, 6
OP_S = 60.0
"""Virtual seconds after which an operation counts as hanging."""


class History:
    """What happened, and what may be believed: only a key whose put was committed may ever be found."""

    def __init__(self) -> None:
        self.committed: set[bytes] = set()
        self.num_hits = self.num_misses = self.num_puts = self.num_loaded = 0

    def read(self, hashes: list[bytes], found: list[bytes]) -> None:
        for h, data in zip(hashes, found, strict=False):
            assert h in self.committed, "a read found a key that nobody has ever put"
            assert data == content(h), "a read returned bytes that are not its key's"
        self.num_hits += len(found)
        self.num_misses += len(hashes) - len(found)


class Nemesis:
    def __init__(self, seed: int, directory: Path) -> None:
        self.rng, self.seed, self.directory = random.Random(seed), seed, directory
        self.history = History()
        self.clean = seed % 4 == 0
        """Every fourth seed has a disk without faults: then nothing stored may be lost either."""

    async def run(self) -> None:
        kept: set[bytes] = set()
        for life in range(LIVES):
            disk = FaultyDisk(self.rng.randrange(1 << 30), self._faults())
            threads = SeededThreads(self.rng.randrange(1 << 30), self.rng.choice((0.0, 0.01, 0.5)))
            pool = await Pool.open(
                self.directory, disk=disk, threads=threads, num_blocks=MEMORY, ssd_blocks=SSD, slots=SLOTS,
                policy=LruPolicy() if self.seed % 3 else ReusePolicy(MEMORY),
            )  # fmt: skip
            if self.clean:
                assert kept <= set(pool.ssd.hashes()), "a restart lost what was on SSD"
            async with asyncio.timeout(OP_S * OPS * 4):
                await asyncio.gather(*(self._client(pool, life, client) for client in range(CLIENTS)))
            await self._rest(pool)
            kept = await self._end(pool)

    def _faults(self) -> Faults:
        rng = self.rng
        if self.clean:
            return Faults()
        return Faults(
            short=rng.choice((0.0, 0.2)), write_error=rng.choice((0.0, 0.1)), read_error=rng.choice((0.0, 0.1)),
            flip_written=rng.choice((0.0, 0.1)), flip_read=rng.choice((0.0, 0.1)),
            room=rng.choice((None, None, 20 * RECORD)), crash_after=rng.choice((None, rng.randrange(200))),
        )  # fmt: skip

    async def _end(self, pool: Pool) -> set[bytes]:
        if self.rng.random() < 0.5:
            pool.kill()
            return set()
        await asyncio.wait_for(pool.close(), OP_S)
        return set(pool.ssd.hashes())

    async def _rest(self, pool: Pool) -> None:
        """When all clients are gone and their leases over, every block is accounted for."""
        await asyncio.sleep(100.0)
        store = pool.role.store
        assert not pool.role.keeper.busy
        assert pool.role.keeper.check() == 0
        assert (store.writing_blocks, store.loading_blocks, store.spilling_blocks, store.pinned_blocks) == (0, 0, 0, 0)
        assert store.free_blocks == MEMORY

    async def _client(self, pool: Pool, life: int, client: int) -> None:
        rng = random.Random(f"{self.seed}/{life}/{client}")
        for op in range(OPS):
            await asyncio.sleep(rng.choice((0.0, 0.001, 0.1, 1.0)))
            what = rng.choices(("put", "get", "pin", "ask", "flip"), (8, 12, 1, 1, 0 if self.clean else 1))[0]
            async with asyncio.timeout(OP_S):
                match what:
                    case "put":
                        await self._put(pool, rng)
                    case "get":
                        await self._get(pool, rng)
                    case "pin":
                        await self._pin(pool, rng, f"{client}/{op % 3}")
                    case "ask":
                        self._lookup(pool, rng)
                    case "flip":
                        self._flip(rng)
            assert pool.role.load().leaked_blocks == 0
            if rng.random() < 0.1:
                assert pool.role.keeper.check() == 0

    def _chain(self, rng: random.Random) -> list[int]:
        chain = min(rng.randrange(CHAINS), rng.randrange(CHAINS))
        return [chain * 1000 + i for i in range(rng.randint(1, LENGTH))]

    async def _put(self, pool: Pool, rng: random.Random) -> None:
        hashes = [name(number) for number in self._chain(rng)]
        try:
            offer, blocks = pool.offer(*hashes)
        except Refused:
            return
        port = pool.role._port
        for h, block in zip(hashes, blocks, strict=True):
            if block >= 0:
                fill(pool.arena, block, b"\xee" * len(content(h)))  # half written: must never be seen
        for h, block in zip(hashes, blocks, strict=True):
            if rng.random() < 0.3:
                await asyncio.sleep(rng.choice((0.001, 0.1, 40.0 if rng.random() < 0.05 else 0.01)))
            if offer.request_id in port.revoked:  # type: ignore[attr-defined]
                return  # the port writes no more into what was revoked
            if rng.random() < 0.02:
                pool.role.kv_failed(offer, "the sender left")
                pool.role.kv_failed(offer, "the sender left")
                return
            if block >= 0:
                fill(pool.arena, block, content(h))
        with contextlib.suppress(Refused):
            self.history.committed |= {h for h, block in zip(hashes, blocks, strict=True) if block >= 0}
            pool.role.kv_arrived(offer, KvTrailer(num_tokens=0))
            self.history.num_puts += 1

    async def _get(self, pool: Pool, rng: random.Random) -> None:
        numbers = self._chain(rng)
        fetch = pool.fetch(*numbers)
        task = asyncio.ensure_future(pool.blocks(fetch))
        try:
            if rng.random() < 0.1:
                await asyncio.sleep(rng.choice((0.0, 0.005, 0.2)))
                task.cancel()
            await asyncio.wait([task])
            if task.cancelled():
                return
            blocks = task.result()
            self.history.num_loaded += pool.ssd.stats.num_reads
            for _ in range(2):  # what is served must hold while it is served, however slowly
                self.history.read(list(fetch.hashes), [peek(pool.arena, block) for block in blocks])
                await asyncio.sleep(rng.choice((0.0, 0.01, 1.0)))
        finally:
            pool.role.kv_served(fetch)

    async def _pin(self, pool: Pool, rng: random.Random, pin: str) -> None:
        hashes, ttl_s = tuple(name(number) for number in self._chain(rng)), rng.choice((0.5, 5.0, 50.0))
        ask = KvAsk(kind=KvAskKind.PIN, source="c", target_epoch=1, hashes=hashes, name=pin, ttl_s=ttl_s)
        try:
            count = pool.role.kv_asked(ask).num_blocks
        except Refused:
            return
        stats = pool.ssd.stats
        bad = stats.num_corrupt + stats.num_read_errors
        await asyncio.sleep(min(0.4, rng.random()))
        if stats.num_corrupt + stats.num_read_errors == bad and pool.role.store.pinned(hashes[0]) and count:
            assert pool.role.store.lookup(hashes[:1]) == 1, "a pinned block was evicted"
        if rng.random() < 0.5:
            pool.role.kv_asked(KvAsk(kind=KvAskKind.UNPIN, source="c", target_epoch=1, name=pin))

    def _lookup(self, pool: Pool, rng: random.Random) -> None:
        hashes = tuple(name(number) for number in self._chain(rng))
        answer = pool.role.kv_asked(KvAsk(kind=KvAskKind.LOOKUP, source="c", target_epoch=1, hashes=hashes))
        assert set(hashes[: answer.num_blocks]) <= self.history.committed

    def _flip(self, rng: random.Random) -> None:
        paths = [path for path in (*segments(self.directory), self.directory / "journal") if path.exists()]
        if paths:
            path = rng.choice(paths)
            data = bytearray(path.read_bytes())
            if data:
                data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
                with path.open("r+b") as file:
                    file.write(data)


def torture(seed: int, directory: Path) -> History:
    nemesis = Nemesis(seed, directory)
    run_virtual(nemesis.run(), limit_s=1e6)
    return nemesis.history


@pytest.fixture(autouse=True)
def _quiet() -> None:
    logging.getLogger("nodes.pool").setLevel(logging.CRITICAL)


@pytest.mark.parametrize("seed", range(20))
def test_every_read_is_its_keys_bytes_or_a_miss(seed: int, tmp_path: Path) -> None:
    history = torture(seed, tmp_path)
    assert history.num_puts > 50
    assert history.num_hits > 100
    assert history.num_misses > 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1000, 1200))
def test_every_read_is_its_keys_bytes_or_a_miss_for_many_seeds(seed: int, tmp_path: Path) -> None:
    torture(seed, tmp_path)


def test_the_same_seed_is_the_same_history(tmp_path: Path) -> None:
    first, second = (torture(5, tmp_path / str(i)) for i in range(2))
    assert vars(first) == vars(second)
