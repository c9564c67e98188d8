"""The pool's client against a real pool role in this process: content, misses, deadlines, restarts, refusals."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from kv_helpers import Proxy, until

from nodes.pool.ssd import ssd_config
from nodes.pool.tiers import SsdTier
from nodes.roles.kv_pool import PoolRole
from transfer.errors import InvalidValue, KvTransferFailed
from transfer.keys import load_data_key, make_keys
from transfer.kv.arena import SHM_DIR, SHM_PREFIX, HostArena
from transfer.kv.client import KvPoolClient, block_key, pool_stats
from transfer.kv.links.tcp import TcpKvPort
from transfer.kv.staging import Staging, opaque_layout, rows
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


@SHM
async def test_what_was_put_is_got_and_what_is_there_is_not_sent_again(shm: bool) -> None:
    values, into = data(10), bytearray(10 * BLOCK)
    async with a_pool() as pool, client_of(pool, shm=shm) as client:
        assert await client.put(keys(10), values) == 10
        assert await client.put(keys(10), values) == 0
        assert await client.put(keys(12), data(12)) == 2
        assert await client.get(keys(10), into) == 10
        assert into == values


@SHM
async def test_more_than_the_staging_memory_goes_through_it(shm: bool) -> None:
    values, into = data(45), bytearray(45 * BLOCK)
    async with a_pool() as pool, client_of(pool, shm=shm) as client:
        assert await client.put(keys(45), values) == 45
        assert await client.get(keys(45), into) == 45
        assert into == values
        assert client._staging is not None
        assert client._staging.free_blocks == 16


@SHM
async def test_large_blocks_of_many_layers_keep_their_bytes(shm: bool) -> None:
    size = 3 << 19
    values, into = data(7, size=size), bytearray(7 * size)
    async with (
        a_pool(opaque_layout(size), 8) as pool,
        client_of(pool, block_bytes=size, staging_bytes=3 * size, shm=shm) as client,
    ):
        assert await client.put(keys(7), values) == 7
        assert await client.get(keys(7), into) == 7
        assert into == values


async def test_a_miss_ends_the_count_and_is_no_error() -> None:
    values = data(6)
    into = [bytearray(BLOCK) for _ in range(6)]
    async with a_pool() as pool, client_of(pool) as client:
        wanted = keys(6)
        await client.put(wanted[:3] + wanted[4:], [values[at * BLOCK : (at + 1) * BLOCK] for at in (0, 1, 2, 4, 5)])
        assert await client.lookup(wanted) == 3
        assert await client.get(wanted, into) == 3
        assert b"".join(into[:3]) == values[: 3 * BLOCK]
        assert await client.get(keys(2, "unknown"), bytearray(2 * BLOCK)) == 0
        assert await client.get([], b"") == 0
        assert await client.put([], []) == 0


@SHM
async def test_the_callers_own_arena_is_read_and_written_in_place(shm: bool) -> None:
    arena = HostArena(LAYOUT, 20, shared=shm)
    arena.buffer[:] = random.Random(3).randbytes(arena.buffer.nbytes)
    before = bytes(arena.buffer)
    try:
        async with a_pool(LAYOUT) as pool, client_of(pool, block_bytes=None, layout=LAYOUT, arena=arena) as client:
            wanted = keys(5)
            assert await client.put_blocks(wanted, [3, 4, 9, 8, 0]) == 5
            assert await client.get_blocks(wanted, [10, 11, 12, 13, 19]) == 5
            for layer in range(LAYOUT.num_layers):
                for source, target in zip([3, 4, 9, 8, 0], [10, 11, 12, 13, 19], strict=True):
                    assert arena.views(layer, source, 1) == arena.views(layer, target, 1)
            arena.buffer[:] = bytes(arena.buffer.nbytes)
            assert await client.get_blocks(wanted, [3, 4, 9, 8, 0]) == 5
            for layer in range(LAYOUT.num_layers):
                k, v = arena.views(layer, 9, 1)
                at = (2 * layer * 20 + 9) * LAYOUT.slab_bytes
                assert k == before[at : at + LAYOUT.slab_bytes]
                assert v == before[at + 20 * LAYOUT.slab_bytes : at + 21 * LAYOUT.slab_bytes]
            with pytest.raises(InvalidValue, match="staging"):
                await client.put(wanted, bytes(5 * LAYOUT.block_bytes))
    finally:
        arena.close()


async def test_blocks_are_lent_and_taken_back() -> None:
    async with a_pool() as pool, client_of(pool) as client:
        async with client.reserve(16) as blocks:
            client.arena.views(0, blocks[2], 1)[0][:] = b"x" * (BLOCK // 2)
            await client.put_blocks(keys(16), blocks)
            with pytest.raises(KvTransferFailed, match="were not free"):
                await client.put(keys(1, "other"), bytes(BLOCK), timeout_s=0.05)
        into = bytearray(3 * BLOCK)
        assert await client.get(keys(3), into) == 3
        assert into[2 * BLOCK : 2 * BLOCK + BLOCK // 2] == b"x" * (BLOCK // 2)


async def test_a_pin_keeps_blocks_until_it_ends() -> None:
    async with a_pool(num_blocks=16) as pool, client_of(pool) as client:
        await client.put(keys(4), data(4))
        assert await client.pin("mine", keys(6), ttl_s=60.0) == 4
        for turn in range(6):
            await client.put(keys(8, f"turn {turn} "), data(8))
        assert await client.lookup(keys(4)) == 4
        await client.unpin("mine")
        await client.unpin("mine")
        for turn in range(6):
            await client.put(keys(8, f"later {turn} "), data(8))
        assert await client.lookup(keys(4)) == 0
        with pytest.raises(KvTransferFailed, match="ttl_s"):
            await client.pin("mine", keys(1), ttl_s=-1.0)


async def test_a_restarted_pool_is_met_again_and_the_call_repeated() -> None:
    async with a_pool() as pool, client_of(pool) as client:
        await client.put(keys(5), data(5))
        await pool.restart()
        assert await client.get(keys(5), bytearray(5 * BLOCK)) == 0
        await pool.restart()
        assert await client.put(keys(5), data(5)) == 5
        await pool.stop()
        putting = asyncio.create_task(client.put(keys(3, "while away"), data(3)))
        await asyncio.sleep(0.1)
        assert not putting.done()
        await pool.start()
        assert await putting == 3


async def test_a_connection_that_breaks_in_a_put_is_made_again() -> None:
    async with a_pool() as pool, through_proxy(pool, staging_bytes=64 * BLOCK) as (proxy, client):
        proxy.hold_at = proxy.passed + 9 * BLOCK
        putting = asyncio.create_task(client.put(keys(40), data(40)))
        await until(lambda: pool.role.store.writing_blocks == 40 and proxy.hold_at is None)
        proxy.cut()
        assert await putting == 40
        into = bytearray(40 * BLOCK)
        assert await client.get(keys(40), into) == 40
        assert into == data(40)


async def test_bytes_damaged_on_the_way_are_sent_again_and_never_stored() -> None:
    async with a_pool() as pool, through_proxy(pool) as (proxy, client):
        proxy.flip_at = proxy.passed + 2 * BLOCK
        assert await client.put(keys(4), data(4)) == 4
        assert proxy.passed > 7 * BLOCK
        into = bytearray(4 * BLOCK)
        assert await client.get(keys(4), into) == 4
        assert into == data(4)


async def test_a_silent_pool_is_given_up_at_the_deadline() -> None:
    async with a_pool() as pool, through_proxy(pool) as (proxy, client):
        proxy.hold_at = proxy.passed
        loop = asyncio.get_running_loop()
        started = loop.time()
        for call in (
            client.put(keys(4), data(4), timeout_s=0.3),
            client.get(keys(4), bytearray(4 * BLOCK), timeout_s=0.3),
            client.lookup(keys(4), timeout_s=0.3),
        ):
            with pytest.raises(KvTransferFailed):
                await call
        assert loop.time() - started < 3.0
        assert client._staging is not None
        assert client._staging.free_blocks == client._staging.num_blocks


@pytest.mark.parametrize("what", ["get", "put", "lent", "waiting"])
async def test_calls_under_way_fail_in_a_sentence_when_the_client_is_closed(what: str) -> None:
    async with a_pool() as pool, through_proxy(pool, staging_bytes=16 * BLOCK) as (proxy, client):
        await client.put(keys(8), data(8))
        proxy.hold_at = proxy.passed
        assert client._staging is not None
        if what == "waiting":
            await client._staging.take(16, 1.0)

        async def call() -> None:
            if what == "get":
                await client.get(keys(8), bytearray(8 * BLOCK))
            elif what == "lent":
                async with client.reserve(3) as blocks:
                    await client.get_blocks(keys(3), blocks)
            else:
                await client.put(keys(8, "new"), data(8))

        calling = asyncio.create_task(call())
        await asyncio.sleep(0.05)
        await client.close()
        with pytest.raises(KvTransferFailed, match="closed"):
            await asyncio.wait_for(calling, 2.0)


async def test_no_pool_is_said_at_once() -> None:
    client = KvPoolClient("tcp://127.0.0.1:1", block_bytes=BLOCK, fingerprint=FINGERPRINT)
    with pytest.raises(KvTransferFailed, match="cannot connect"):
        await client.__aenter__()
    with pytest.raises(InvalidValue, match="closed"):
        await client.lookup(keys(1))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"block_bytes": 2 * BLOCK}, "another KV layout: block_bytes 8192 against 4096"),
        ({"block_bytes": None, "layout": LAYOUT}, "another KV layout"),
        ({"fingerprint": b"f" * 32}, "another KV fingerprint"),
    ],
)
async def test_other_blocks_or_weights_are_refused_in_a_sentence(options: dict[str, object], words: str) -> None:
    async with a_pool(fingerprint=FINGERPRINT) as pool:
        with pytest.raises(KvTransferFailed, match=words):
            await client_of(pool, **options).__aenter__()
        async with client_of(pool):
            pass


async def test_beyond_the_key_nobody_enters(tmp_path: Path) -> None:
    make_keys(tmp_path / "a")
    make_keys(tmp_path / "b")
    async with a_pool(auth_key=load_data_key(tmp_path / "a" / "data.key")) as pool:
        for key_file in (None, tmp_path / "b" / "data.key"):
            with pytest.raises(KvTransferFailed, match="key"):
                await client_of(pool, key_file=key_file).__aenter__()
        async with client_of(pool, key_file=tmp_path / "a" / "data.key") as client:
            assert await client.put(keys(2), data(2)) == 2


async def test_no_two_clients_name_their_puts_and_gets_alike() -> None:
    names: list[str] = []
    async with a_pool() as pool, client_of(pool) as one, client_of(pool) as other:
        reserve, lease = pool.role.store.reserve, pool.role.store.lease

        def reserved(key: Any, *rest: Any) -> Any:
            names.append(key[2])
            return reserve(key, *rest)

        def leased(key: Any, *rest: Any) -> Any:
            names.append(key.request_id)
            return lease(key, *rest)

        pool.role.store.reserve, pool.role.store.lease = reserved, leased  # type: ignore[method-assign]
        for client in (one, other):
            await client.put(keys(1, "new"), data(1))
            await client.get(keys(1), bytearray(BLOCK))
    assert len(set(names)) == len(names) == 4


async def test_a_pool_that_is_too_small_refuses_in_a_sentence() -> None:
    async with a_pool(num_blocks=4) as pool, client_of(pool) as client:
        with pytest.raises(KvTransferFailed, match="room"):
            await client.put(keys(8), data(8), timeout_s=2.0)


async def test_a_cancelled_put_leaves_neither_blocks_nor_bytes() -> None:
    size = 512 << 10
    async with a_pool(opaque_layout(size), 20) as pool, through_proxy(pool, block_bytes=size) as (proxy, client):
        proxy.hold_at = proxy.passed + 3 * size
        putting = asyncio.create_task(client.put(keys(16), data(16, size=size)))
        await until(lambda: pool.role.store.writing_blocks == 16)
        putting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await putting
        proxy.released.set()
        await until(lambda: pool.role.store.writing_blocks == 0)
        assert await client.lookup(keys(16)) == 0
        assert client._staging is not None
        assert client._staging.free_blocks == client._staging.num_blocks


@SHM
async def test_many_calls_at_once_share_the_staging_memory(shm: bool) -> None:
    async with a_pool(num_blocks=256) as pool, client_of(pool, shm=shm) as client:

        async def one(number: int) -> None:
            values, into = data(5, number), bytearray(5 * BLOCK)
            assert await client.put(keys(5, f"{number} "), values) == 5
            assert await client.get(keys(5, f"{number} "), into) == 5
            assert into == values

        await asyncio.gather(*(one(number) for number in range(40)))
        assert client._staging is not None
        assert client._staging.free_blocks == 16


async def test_the_shared_memory_goes_with_the_client() -> None:
    def arenas() -> set[str]:
        return {path.name for path in SHM_DIR.glob(f"{SHM_PREFIX}{os.getpid()}-*")}

    async with a_pool() as pool:
        before = arenas()
        async with client_of(pool):
            assert len(arenas()) == len(before) + 1
        assert arenas() == before


async def test_the_shared_memory_of_killed_clients_goes_with_the_next_one() -> None:
    process = await asyncio.create_subprocess_exec("true")
    await process.wait()
    stale, stuck = (SHM_DIR / f"{SHM_PREFIX}{process.pid}-{name}" for name in ("stale", "stuck"))
    stale.touch()
    stuck.mkdir()  # as another user's: it cannot be removed
    try:
        async with a_pool() as pool, client_of(pool):
            assert not stale.exists()
            assert stuck.exists()
    finally:
        stuck.rmdir()


async def test_statistics_need_no_layout() -> None:
    async with a_pool() as pool, client_of(pool) as client:
        await client.put(keys(3), data(3))
        assert await client.get(keys(4), bytearray(4 * BLOCK)) == 3
        stats = await client.stats()
        assert (stats["dram_blocks"], stats["num_hits"], stats["leaked_blocks"]) == (3, 3, 0)
        assert await pool_stats(pool.port.endpoint) == stats


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (bytes(BLOCK), "2 values of 4096 bytes"),
        ([bytes(BLOCK), bytes(1)], "2 values of 4096 bytes"),
        ([bytes(BLOCK)] * 3, "2 values of 4096 bytes"),
        (memoryview(bytes(4 * BLOCK))[::2], "contiguous"),
    ],
)
async def test_memory_that_does_not_fit_is_refused(values: object, words: str) -> None:
    async with a_pool() as pool, client_of(pool) as client:
        with pytest.raises(InvalidValue, match=words):
            await client.put(keys(2), values)  # type: ignore[arg-type]


async def test_wrong_arguments_are_refused() -> None:
    async with a_pool() as pool, client_of(pool) as client:
        with pytest.raises(InvalidValue, match="read-only"):
            await client.get(keys(1), bytes(BLOCK))
        with pytest.raises(InvalidValue, match="32 bytes"):
            await client.get([b"short"], bytearray(BLOCK))
        with pytest.raises(InvalidValue, match="keys are a list of bytes, 32 each; one of them is int"):
            await client.lookup(keys(1)[0])  # type: ignore[arg-type]
        with pytest.raises(InvalidValue, match="staging"):
            async with client.reserve(17):
                pass
        with pytest.raises(InvalidValue, match="up to 65536 keys, got 65537"):
            await client.lookup(keys(1) * 65537)
        assert await client.lookup(keys(1) * 65536) == 0
        for name in ("", "n" * 128):
            with pytest.raises(InvalidValue, match=r"a pin needs a name of 1 to \d+ characters"):
                await client.pin(name, keys(1), 1.0)
        with pytest.raises(InvalidValue, match="either layout or block_bytes"):
            client_of(pool, layout=LAYOUT)
        with pytest.raises(InvalidValue, match="fingerprint"):
            client_of(pool, fingerprint=b"")


@pytest.mark.parametrize(
    ("size", "num_layers"), [(2, 1), (4096, 1), (512 << 10, 1), (1 << 20, 2), (3 << 19, 3), (64 << 20, 128)]
)
def test_opaque_blocks_have_slabs_of_half_a_mebibyte_at_most(size: int, num_layers: int) -> None:
    layout = opaque_layout(size)
    assert (layout.block_bytes, layout.num_layers) == (size, num_layers)


@pytest.mark.parametrize("size", [-2, 0, 1, 4097, (512 << 10) + 2, (1 << 20) + 2])
def test_sizes_without_a_layout_are_refused(size: int) -> None:
    with pytest.raises(InvalidValue, match=f"{size} bytes"):
        opaque_layout(size)


async def test_lent_blocks_change_hands_so_that_a_late_reader_notices() -> None:
    arena = HostArena(opaque_layout(BLOCK), 4)
    staging = Staging(arena)
    blocks = await staging.take(2, 1.0)
    await staging.load(blocks, rows(data(2), 2, BLOCK))
    staging.give(blocks)
    assert [arena.generation(block) for block in range(4)] == [1, 1, 0, 0]
    staging.close()
    arena.close()


async def test_the_documented_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    text = (Path(__file__).parents[3] / "docs" / "kv.md").read_text()
    names: dict[str, Any] = {}
    exec(text.split("```python\n")[1].split("```")[0], names)
    async with a_pool(opaque_layout(1 << 20), 8) as pool:
        await names["use"](pool.port.endpoint, FINGERPRINT)
    assert capsys.readouterr().out == "new to the pool: 4\nleading blocks found: 3\n4 4.0\n"


async def test_the_statistics_are_those_documented(tmp_path: Path) -> None:
    text = (Path(__file__).parents[3] / "docs" / "kv.md").read_text().split("## Statistics")[1]
    async with a_pool(ssd_dir=tmp_path) as pool:
        stats = await pool_stats(pool.port.endpoint)
    assert [name for name in stats if f"`{name}`" not in text] == []
    assert set(re.findall(r"`([a-z]+_[a-z_]*(?:blocks|num_[a-z_]+|bytes))`", text)) <= stats.keys()


async def test_counting_ends_at_the_first_miss_whatever_follows_in_later_parts() -> None:
    async with a_pool() as pool, client_of(pool) as client:
        wanted = keys(40)
        await client.put(wanted[:5] + wanted[6:], bytes(39 * BLOCK))
        assert await client.get(wanted, bytearray(40 * BLOCK)) == 5
        assert await client.lookup(wanted) == 5


async def test_who_stops_waiting_for_memory_keeps_none() -> None:
    arena = HostArena(opaque_layout(BLOCK), 4)
    staging = Staging(arena)
    blocks = await staging.take(4, 1.0)
    for granted_first in (False, True):
        waiting = asyncio.create_task(staging.take(2, 1.0))
        await asyncio.sleep(0)
        if granted_first:
            staging.give(blocks)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
    assert staging.free_blocks == 4
    assert sorted(await staging.take(4, 0.0)) == [0, 1, 2, 3]
    staging.close()
    arena.close()


async def test_a_lost_pool_costs_each_call_its_own_deadline_and_closing_ends_them_all() -> None:
    pool = Pool(opaque_layout(BLOCK), 8)
    await pool.start()
    async with client_of(pool, timeout_s=20.0) as client:
        await pool.stop()
        loop = asyncio.get_running_loop()
        started = loop.time()
        patient = asyncio.create_task(client.lookup(keys(1)))
        await asyncio.sleep(0.05)
        with pytest.raises(KvTransferFailed):
            await client.lookup(keys(1), timeout_s=0.2)
        assert loop.time() - started < 2.0
        assert not patient.done()
    with pytest.raises(KvTransferFailed):
        await patient
    assert loop.time() - started < 4.0
