"""The pool's client against a real pool role in this process: content, misses, deadlines, restarts, refusals."""

from __future__ import annotations

import asyncio
import os
import random
import re
from pathlib import Path
from typing import Any

import pytest
from kv_pool_client_harness import BLOCK, FINGERPRINT, LAYOUT, SHM, a_pool, client_of, data, keys

from transfer.errors import InvalidValue, KvTransferFailed
from transfer.kv.arena import SHM_DIR, SHM_PREFIX, HostArena
from transfer.kv.client import pool_stats
from transfer.kv.staging import Staging, opaque_layout, rows


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
    ("size", "num_layers"), [(2, 1), (4096, 1), (512 << 10, 1), (1 << 20, 2), (3 << 19, 3), (64 << 20, 128)]
)
def test_opaque_blocks_have_slabs_of_half_a_mebibyte_at_most(size: int, num_layers: int) -> None:
    layout = opaque_layout(size)
    assert (layout.block_bytes, layout.num_layers) == (size, num_layers)


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
