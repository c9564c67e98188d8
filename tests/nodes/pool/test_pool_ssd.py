"""The SSD tier with real files and threads, and everything that can be wrong with them: never a wrong byte, never a
write in the way. Each test names the fault it is about; see docs for the reports behind them."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path

import pytest
from pool_harness import (
    LAYOUT,
    RECORD,
    Faults,
    FaultyDisk,
    Pool,
    content,
    damage,
    fill,
    name,
    segments,
)

from nodes.pool.slots import Reclaim
from nodes.pool.ssd import SsdConfig
from nodes.pool.tiers import SsdTier
from transfer.errors import ConfigError, InvalidValue, Refused
from transfer.kv.arena import HostArena
from transfer.kv.port import KvTrailer
from transfer.terms import KvLayout


async def test_blocks_go_to_ssd_and_come_back_byte_for_byte(tmp_path: Path) -> None:
    pool = await Pool.open(tmp_path)
    await pool.to_ssd(*range(12))
    assert (pool.role.store.cached_blocks, pool.ssd.num_blocks) == (0, 12)
    assert await pool.get(*range(12), 99) == 12
    assert (pool.ssd.stats.num_reads, pool.ssd.stats.num_corrupt) == (12, 0)
    assert pool.role.load().leaked_blocks == 0
    await pool.close()


async def test_memory_is_served_at_once_and_without_the_disk(tmp_path: Path) -> None:
    pool = await Pool.open(tmp_path)
    pool.put(1, 2)
    fetch = pool.fetch(1, 2)
    assert isinstance(pool.role.kv_wanted(fetch), list)
    pool.role.kv_served(fetch)
    await pool.close()


# --- H: wrong KV ----------------------------------------------------------------------------------------------------


async def test_a_disk_read_never_returns_another_blocks_kv(tmp_path: Path) -> None:
    """LMCache#4385: the record of another key, whole and with a good checksum, lies where ours should."""
    pool = await Pool.open(tmp_path)
    await pool.to_ssd(1, 2)
    (path,) = segments(tmp_path)
    data = path.read_bytes()
    path.write_bytes(data[RECORD:] + data[:RECORD])
    assert await pool.get(1, 2) == 0
    assert await pool.get(2) == 0
    assert pool.ssd.stats.num_corrupt == 2
    assert (pool.ssd.num_blocks, pool.role.load().leaked_blocks) == (0, 0)
    pool.put(1)  # it can be stored again
    assert await pool.get(1) == 1
    await pool.close()


async def test_a_failed_load_is_a_miss_and_the_prefix_before_it_is_kept(tmp_path: Path) -> None:
    """LMCache#3388: a failed retrieve is recomputed."""
    pool = await Pool.open(tmp_path)
    await pool.to_ssd(1, 2, 3)
    place = pool.ssd._index.place(name(2))
    assert place is not None
    damage(segments(tmp_path)[0], place.slot * RECORD + RECORD - 1)
    assert await pool.get(1, 2, 3) == 1
    assert await pool.get(3) == 1
    assert await pool.get(2) == 0
    assert pool.ssd.stats.num_corrupt == 1
    await pool.close()


@pytest.mark.parametrize("at", [0, 9, 17, 50, 85, 90, 105, 111, 112, RECORD - 1])
async def test_any_flipped_bit_on_disk_is_found(tmp_path: Path, at: int) -> None:
    pool = await Pool.open(tmp_path)
    await pool.to_ssd(1)
    damage(segments(tmp_path)[0], at, bit=3)
    assert await pool.get(1) == 0
    assert pool.ssd.stats.num_corrupt == 1
    await pool.close()


async def test_what_is_being_written_is_not_read(tmp_path: Path) -> None:
    """LMCache#207: visible only after commit, from memory and from SSD."""
    pool = await Pool.open(tmp_path)
    offer, blocks = pool.offer(name(1), name(2))
    fill(pool.arena, blocks[0], content(name(1)))
    assert await pool.get(1) == 0
    await pool.spilled()
    assert pool.ssd.num_blocks == 0
    fill(pool.arena, blocks[1], content(name(2)))
    pool.role.kv_arrived(offer, KvTrailer(num_tokens=8))
    assert await pool.get(1, 2) == 2
    await pool.close()


async def test_a_block_that_is_loading_is_not_read_and_its_memory_not_given_away(tmp_path: Path) -> None:
    """Also Mooncake#850: the memory of a slow read keeps its owner until the read has ended."""
    disk = FaultyDisk()
    pool = await Pool.open(tmp_path, disk=disk, num_blocks=2)
    await pool.to_ssd(1)
    disk.hold_reads = threading.Event()
    fetch = pool.fetch(1)
    task = asyncio.ensure_future(pool.blocks(fetch))
    await asyncio.sleep(0.01)
    task.cancel()  # the client is gone, the thread still writes
    await asyncio.gather(task, return_exceptions=True)
    pool.role.kv_served(fetch)
    with pytest.raises(Refused):
        pool.offer(name(7), name(8))
    pool.put(9)
    assert pool.role.store.loading_blocks == 1
    disk.hold_reads.set()
    await pool.spilled()
    assert await pool.get(1) == 1
    assert await pool.get(9) == 1
    await pool.close()


async def test_a_reader_of_memory_that_changes_hands_is_told_by_its_generation(tmp_path: Path) -> None:
    """Mooncake#850: puts and loads bump the generation of every block they take."""
    pool = await Pool.open(tmp_path, num_blocks=1)
    before = pool.arena.generation(0)
    await pool.to_ssd(1)
    await pool.to_ssd(2)
    assert await pool.get(1) == 1
    assert pool.arena.generation(0) == before + 3
    await pool.close()


async def test_another_dtype_or_layout_finds_nothing_of_ours(tmp_path: Path) -> None:
    """vllm PR 45767, lmdeploy#4930: the same keys over the same directory, with other bytes behind them."""
    pool = await Pool.open(tmp_path)
    await pool.to_ssd(1, 2)
    await pool.close()
    other = KvLayout(num_layers=2, num_kv_heads=1, head_dim=2, block_size=4, dtype="float16", rope="none")
    assert other.block_bytes == LAYOUT.block_bytes
    second = await Pool.open(tmp_path, layout=other)
    assert (second.ssd.num_blocks, second.ssd.found.num_leftovers) == (0, 1)
    assert await second.get(1) == 0
    await second.close()


async def test_keys_that_differ_in_their_last_byte_do_not_meet(tmp_path: Path) -> None:
    """Mooncake#644: no part of the digest is cut off, in memory, in the journal or in the record."""
    pool = await Pool.open(tmp_path)
    twin = name(1)[:-1] + bytes([name(1)[-1] ^ 1])
    await pool.to_ssd(1)
    store = pool.role.store
    assert (store.lookup([name(1)]), store.lookup([twin])) == (1, 0)
    await pool.close()
    second = await Pool.open(tmp_path)
    assert (second.role.store.lookup([name(1)]), second.role.store.lookup([twin])) == (1, 0)
    await second.close()


# --- I: leaks, growth, disk -----------------------------------------------------------------------------------------


async def test_a_full_disk_evicts_the_oldest_and_serving_goes_on(tmp_path: Path) -> None:
    """Mooncake#2475."""
    disk = FaultyDisk(faults=Faults(room=20 * RECORD + 4000))
    pool = await Pool.open(tmp_path, disk=disk, num_blocks=64, ssd_blocks=640, slots=8)
    for start in range(0, 64, 8):
        await pool.to_ssd(*range(start, start + 8))
    assert pool.ssd.stats.num_disk_full > 0
    assert pool.ssd.stats.num_dropped > 0
    assert sum(await asyncio.gather(*(pool.get(number) for number in range(64)))) >= 8
    await pool.close()


async def test_a_disk_without_any_room_refuses_writes_and_memory_serves(tmp_path: Path) -> None:
    """Mooncake#2475: nothing to evict on SSD; puts and gets go on, refusals are counted and not repeated at once."""
    disk = FaultyDisk()
    pool = await Pool.open(tmp_path, disk=disk)
    disk.faults.room = 0
    for number in range(100):
        pool.put(number)
        assert await pool.get(number) == 1
        await asyncio.sleep(0)
    await pool.spilled()
    stats = pool.ssd.stats
    pool.put(1000)
    await pool.spilled()
    assert (stats.num_writes, pool.ssd.num_blocks) == (0, 0)
    assert 1 <= stats.num_disk_full <= 64
    assert stats.num_refused > 0
    assert pool.role.load().leaked_blocks == 0
    await pool.close()


async def test_failing_writes_and_reads_cost_content_only(tmp_path: Path) -> None:
    disk = FaultyDisk(seed=3)
    pool = await Pool.open(tmp_path, disk=disk)
    disk.faults = Faults(short=0.3, write_error=0.2, read_error=0.2)
    for start in range(0, 60, 6):
        await pool.to_ssd(*range(start, start + 6))
        for number in range(start + 6):
            assert await pool.get(number) in (0, 1)
    assert pool.ssd.stats.num_write_errors > 0
    assert pool.ssd.stats.num_read_errors > 0
    assert pool.role.keeper.check() == 0
    await pool.close()


async def test_the_size_cap_holds_and_what_is_read_outlives_what_is_not(tmp_path: Path) -> None:
    pool = await Pool.open(tmp_path, num_blocks=16, ssd_blocks=64, slots=8)
    for number in range(400):
        await pool.to_ssd(number)
        assert await pool.get(number % 2) == 1  # the first two are read all the time
        pool.forget()
        assert len(segments(tmp_path)) <= 8
    await pool.spilled()
    assert pool.ssd.num_blocks <= 64
    assert sum(path.stat().st_size for path in segments(tmp_path)) <= 64 * RECORD
    assert pool.ssd.stats.num_rewritten > 0
    assert pool.ssd.stats.num_dropped > 0
    await pool.close()


async def test_what_is_pinned_stays_whatever_is_written(tmp_path: Path) -> None:
    pool = await Pool.open(tmp_path, num_blocks=16, ssd_blocks=64, slots=8)
    await pool.to_ssd(1, 2, 3)
    pool.role.store.pin("p", [name(1), name(2), name(3)], asyncio.get_running_loop().time() + 1000.0)
    for number in range(100, 400):
        await pool.to_ssd(number)
    assert await pool.get(1, 2, 3) == 3
    pool.role.store.unpin("p")
    await pool.close()


async def test_an_ssd_smaller_than_memory_is_not_written_for_ever(tmp_path: Path) -> None:
    pool = await Pool.open(tmp_path, num_blocks=64, ssd_blocks=16, slots=2)
    pool.put(*range(50))
    await pool.spilled()
    for _ in range(20):
        pool.role.keeper.tick()
        await pool.spilled()
    assert pool.ssd.stats.num_writes <= 50
    await pool.close()


async def test_short_writes_lose_nothing(tmp_path: Path) -> None:
    """A disk that takes a part is asked for the rest."""
    disk = FaultyDisk(seed=1, faults=Faults(short=0.7))
    pool = await Pool.open(tmp_path, disk=disk)
    await pool.to_ssd(*range(12))
    assert await pool.get(*range(12)) == 12
    await pool.close()
    second = await Pool.open(tmp_path)
    assert (second.ssd.found.num_blocks, second.ssd.found.torn_bytes) == (12, 0)
    await second.close()


async def test_what_is_pinned_stays_when_its_segment_cannot_be_written_again(tmp_path: Path) -> None:
    disk = FaultyDisk()
    pool = await Pool.open(tmp_path, disk=disk)
    await pool.to_ssd(*range(8))
    pool.role.store.pin("p", [name(1)], asyncio.get_running_loop().time() + 1000.0)
    disk.faults.write_error = 1.0
    tier = pool.ssd
    await tier._reclaim(Reclaim(0, [name(1)]))
    assert tier.stats.num_write_errors > 0
    assert [await pool.get(number) for number in range(3)] == [0, 1, 0]
    await pool.close()


async def test_what_is_dropped_while_its_segment_is_written_again_stays_dropped(tmp_path: Path) -> None:
    disk = FaultyDisk()
    pool = await Pool.open(tmp_path, disk=disk)
    await pool.to_ssd(1, 2)
    tier = pool.ssd
    place = tier._index.place(name(1))
    assert place is not None
    disk.hold_reads = threading.Event()
    again = asyncio.ensure_future(tier._write_again(name(1), place.segment))
    await asyncio.sleep(0.01)
    tier._forget(name(1))
    disk.hold_reads.set()
    await again
    await pool.spilled()
    assert (await pool.get(1), await pool.get(2)) == (0, 1)
    await pool.close()


async def test_loads_run_at_the_same_time(tmp_path: Path) -> None:
    """vllm#44294: eight reads are under way at once, of one fetch and of several."""
    disk = FaultyDisk()
    pool = await Pool.open(tmp_path, disk=disk, num_blocks=32)
    await pool.to_ssd(*range(12))
    disk.hold_reads = threading.Event()
    gets = [asyncio.ensure_future(pool.get(*range(start, start + 4))) for start in (0, 4, 8)]
    async with asyncio.timeout(10.0):
        while disk.reading < 8:  # noqa: ASYNC110  (threads do not signal)
            await asyncio.sleep(0.001)
    assert not any(get.done() for get in gets)
    disk.hold_reads.set()
    assert await asyncio.gather(*gets) == [4, 4, 4]
    await pool.close()


async def test_a_disk_that_hangs_does_not_stop_puts_and_gets_from_memory(tmp_path: Path) -> None:
    disk = FaultyDisk()
    pool = await Pool.open(tmp_path, disk=disk, num_blocks=32)
    await pool.to_ssd(1)
    disk.hold_reads = threading.Event()
    slow = asyncio.ensure_future(pool.get(1))
    await asyncio.sleep(0.01)
    pool.put(2, 3)
    assert await pool.get(2, 3) == 2
    assert not slow.done()
    disk.hold_reads.set()
    assert await slow == 1
    await pool.close()


# --- the directory --------------------------------------------------------------------------------------------------


async def test_files_are_the_owners_alone_and_links_are_not_followed(tmp_path: Path) -> None:
    directory, elsewhere = tmp_path / "pool", tmp_path / "elsewhere"
    elsewhere.write_bytes(b"precious")
    before = os.umask(0)
    try:
        pool = await Pool.open(directory)
    finally:
        os.umask(before)
    await pool.to_ssd(1, 2)
    assert directory.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in directory.iterdir()} == {0o600}
    pool.ssd._index._next = 7
    (directory / "segment-00000007.kv").symlink_to(elsewhere)
    for number in range(3, 20):
        await pool.to_ssd(number)
    assert pool.ssd.stats.num_write_errors >= 8  # all slots of that one
    await pool.close()
    for link in ("journal", "segment-00000042.kv"):
        (directory / link).unlink(missing_ok=True)
        (directory / link).symlink_to(elsewhere)
    pool = await Pool.open(directory)
    assert await pool.get(1, 2) == 2
    await pool.close()
    (directory / "lock").unlink()
    (directory / "lock").symlink_to(tmp_path / "new")
    with pytest.raises(ConfigError, match="cannot use"):
        await Pool.open(directory)
    assert elsewhere.read_bytes() == b"precious"
    assert not (tmp_path / "new").exists()


async def test_a_segment_number_that_cannot_be_ours_is_left_alone(tmp_path: Path) -> None:
    stranger = tmp_path / f"segment-{1 << 64}.kv"
    stranger.write_bytes(b"")
    pool = await Pool.open(tmp_path)
    await pool.to_ssd(1)
    await pool.close()
    pool = await Pool.open(tmp_path)
    assert await pool.get(1) == 1
    await pool.close()
    assert stranger.exists()


async def test_what_cannot_be_used_is_refused_in_a_sentence(tmp_path: Path) -> None:
    arena = HostArena(LAYOUT, 4)
    with pytest.raises(InvalidValue, match="at least 8 blocks, got 7; raise --ssd-gib"):
        await SsdTier.open(SsdConfig(tmp_path, 7), arena)
    file = tmp_path / "file"
    file.write_text("not a directory")
    with pytest.raises(ConfigError, match="cannot use"):
        await SsdTier.open(SsdConfig(file / "pool", 64), arena)
