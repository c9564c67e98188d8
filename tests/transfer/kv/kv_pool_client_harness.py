"""A pool, its client and a proxy between, for the tests of the client."""

from __future__ import annotations

import contextlib
import random
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from kv_helpers import Proxy

from nodes.pool.ssd import ssd_config
from nodes.pool.tiers import SsdTier
from nodes.roles.kv_pool import PoolRole
from transfer.kv.arena import HostArena
from transfer.kv.client import KvPoolClient, block_key
from transfer.kv.links.tcp import TcpKvPort
from transfer.kv.staging import opaque_layout
from transfer.terms import KvLayout

BLOCK = 4096
FINGERPRINT = bytes(range(32))
LAYOUT = KvLayout(num_layers=3, num_kv_heads=2, head_dim=8, block_size=16, dtype="float16", rope="theta=10000")
SHM = pytest.mark.parametrize("shm", [True, False], ids=["shm", "tcp"])


class Pool:
    """A pool without a control plane. `restart` begins another life at the same address, empty."""

    def __init__(self, layout: KvLayout, num_blocks: int, *, ssd_dir: Path | None = None, **options: object) -> None:
        self._layout, self._num_blocks, self._ssd_dir, self._options = layout, num_blocks, ssd_dir, options
        self.epoch, self._port_number = 6, 0

    async def start(self) -> None:
        self.epoch += 1
        self._arena = HostArena(self._layout, self._num_blocks, shared=True)
        self.port = TcpKvPort(
            instance_id="pool", epoch=self.epoch, arena=self._arena, port=self._port_number, **self._options
        )
        ssd = None
        if self._ssd_dir is not None:
            ssd = await SsdTier.open(ssd_config(self._ssd_dir, 4 << 20, self._layout), self._arena)
        self.role = PoolRole("pool", self.epoch, self._arena, self.port, lambda message: None, ssd=ssd)
        await self.port.start()
        self.role.start()
        self.port.delegate = self.role
        self._port_number = int(self.port.endpoint.rpartition(":")[2])

    async def stop(self) -> None:
        await self.port.close()
        await self.role.close()
        assert self.role.keeper.check() == 0
        self._arena.close()

    async def restart(self) -> None:
        await self.stop()
        await self.start()


@contextlib.asynccontextmanager
async def a_pool(layout: KvLayout | None = None, num_blocks: int = 64, **options: object) -> AsyncIterator[Pool]:
    pool = Pool(layout or opaque_layout(BLOCK), num_blocks, **options)
    await pool.start()
    try:
        yield pool
    finally:
        await pool.stop()


def client_of(pool: Pool, **options: object) -> KvPoolClient:
    values: dict[str, object] = {"block_bytes": BLOCK, "fingerprint": FINGERPRINT, "staging_bytes": 16 * BLOCK}
    return KvPoolClient(pool.port.endpoint, **(values | options))  # type: ignore[arg-type]


@contextlib.asynccontextmanager
async def through_proxy(pool: Pool, **options: object) -> AsyncIterator[tuple[Proxy, KvPoolClient]]:
    """A client that reaches the pool over TCP by way of a proxy that can do harm."""
    values: dict[str, object] = {"block_bytes": BLOCK, "fingerprint": FINGERPRINT, "shm": False}
    async with (
        Proxy(pool.port.endpoint) as proxy,
        KvPoolClient(proxy.endpoint, **(values | options)) as client,  # type: ignore[arg-type]
    ):
        yield proxy, client


def keys(count: int, seed: str = "") -> list[bytes]:
    return [block_key(FINGERPRINT, f"{seed}{number}".encode()) for number in range(count)]


def data(count: int, seed: int = 0, size: int = BLOCK) -> bytearray:
    return bytearray(random.Random(seed).randbytes(count * size))
