"""An SSD tier that is opened again: what was written is found, what was torn, lost or left over is not served."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest
from pool_harness import (
    RECORD,
    Faults,
    FaultyDisk,
    Pool,
    damage,
    segments,
)

from transfer.errors import ConfigError


async def test_files_are_used_again_after_a_restart(tmp_path: Path) -> None:
    """LMCache#2273, Mooncake#1196: also what was in memory only when the pool was told to stop."""
    pool = await Pool.open(tmp_path)
    await pool.to_ssd(1, 2, 3)
    pool.put(4, 5)
    await pool.close()
    second = await Pool.open(tmp_path)
    assert second.ssd.found.num_blocks == 5
    assert await second.get(1, 2, 3, 4, 5) == 5
    assert second.role.load().ssd_blocks == 5
    await second.close()


async def test_a_killed_pool_finds_what_it_had_written(tmp_path: Path) -> None:
    disk = FaultyDisk()
    pool = await Pool.open(tmp_path, disk=disk)
    await pool.to_ssd(*range(10))
    pool.kill()
    second = await Pool.open(tmp_path)
    assert await second.get(*range(10)) == 10
    await second.close()


async def test_without_a_journal_segments_are_scanned(tmp_path: Path) -> None:
    pool = await Pool.open(tmp_path)
    await pool.to_ssd(*range(10))
    await pool.close()
    (tmp_path / "journal").unlink()
    second = await Pool.open(tmp_path)
    assert (second.ssd.found.num_blocks, second.ssd.found.num_scanned) == (10, 10)
    assert await second.get(*range(10)) == 10
    await second.close()


@pytest.mark.parametrize("cut", [1, 7, 40, 200])
async def test_the_torn_tail_of_a_journal_is_cut_and_what_it_named_is_scanned(tmp_path: Path, cut: int) -> None:
    pool = await Pool.open(tmp_path)
    await pool.to_ssd(*range(12))
    await pool.close()
    journal = tmp_path / "journal"
    journal.write_bytes(journal.read_bytes()[:-cut])
    second = await Pool.open(tmp_path)
    assert second.ssd.found.torn_bytes < 90
    assert second.ssd.found.num_scanned >= (cut == 200)  # a smaller cut may only take what says that a segment is full
    assert await second.get(*range(12)) == 12
    await second.close()


@pytest.mark.parametrize("at", [0, 1, 30, 150, 400])
async def test_a_flipped_bit_in_the_journal_costs_no_content(tmp_path: Path, at: int) -> None:
    pool = await Pool.open(tmp_path)
    await pool.to_ssd(*range(12))
    await pool.close()
    damage(tmp_path / "journal", at, bit=6)
    second = await Pool.open(tmp_path)
    assert second.ssd.found.torn_bytes > 0
    assert await second.get(*range(12)) == 12
    await second.close()


async def test_a_torn_write_is_not_served(tmp_path: Path) -> None:
    """LMCache PR 2892: the machine dies in the middle of a record; only whole ones are there afterwards."""
    for crash_after in range(30):
        directory = tmp_path / str(crash_after)
        disk = FaultyDisk(seed=crash_after, faults=Faults())
        pool = await Pool.open(directory, disk=disk)
        disk.faults.crash_after = crash_after
        pool.put(*range(12))
        await pool.spilled()
        pool.kill()
        second = await Pool.open(directory)
        for number in range(12):
            assert await second.get(number) in (0, 1)
        assert second.role.keeper.check() == 0
        await second.close()


async def test_leftover_files_are_removed_and_counted(tmp_path: Path) -> None:
    pool = await Pool.open(tmp_path)
    await pool.to_ssd(1)
    await pool.close()
    (tmp_path / "journal.tmp").write_bytes(b"half a journal")
    (tmp_path / "segment-00000077.kv").write_bytes(b"half a record")
    (tmp_path / "notes.txt").write_text("somebody else's")
    second = await Pool.open(tmp_path)
    assert second.ssd.found.num_leftovers == 2
    assert sorted(path.name for path in pool.disk.files(tmp_path)) == [
        "journal",
        "lock",
        "notes.txt",
        "segment-00000000.kv",
    ]
    assert await second.get(1) == 1
    await second.close()


async def test_blocks_whose_segment_is_missing_or_short_are_dropped_and_counted(tmp_path: Path) -> None:
    pool = await Pool.open(tmp_path, slots=8)
    await pool.to_ssd(*range(12))
    await pool.close()
    first, second = segments(tmp_path)
    first.unlink()
    second.write_bytes(second.read_bytes()[: 3 * RECORD + 5])
    pool = await Pool.open(tmp_path)
    assert (pool.ssd.found.num_dropped, pool.ssd.found.num_blocks) == (9, 3)
    assert pool.role.keeper.check() == 0
    await pool.close()


async def test_the_journal_is_bounded(tmp_path: Path) -> None:
    """Mooncake#3452 on disk: a rewrite keeps it in proportion to what is stored."""
    pool = await Pool.open(tmp_path, num_blocks=16, ssd_blocks=64, slots=8)
    largest = 0
    for number in range(0, 3000, 8):
        await pool.to_ssd(*range(number, number + 8))
        largest = max(largest, (tmp_path / "journal").stat().st_size)
    assert largest < 100 * (2 * 64 + 1024 + 64)
    await pool.close()
    second = await Pool.open(tmp_path)
    assert second.ssd.num_blocks > 20
    await second.close()


async def test_two_pools_never_share_a_directory(tmp_path: Path) -> None:
    pool = await Pool.open(tmp_path)
    with pytest.raises(ConfigError, match=r"another KV pool uses .* of its own"):
        await Pool.open(tmp_path)
    script = f"""
import asyncio
from nodes.pool.slots import Reclaim
from nodes.pool.ssd import SsdConfig
from nodes.pool.tiers import SsdTier
from nodes.engines.emulated import emulated_layout
from transfer.kv.arena import HostArena
from pathlib import Path
asyncio.run(SsdTier.open(SsdConfig(Path({str(tmp_path)!r}), 64), HostArena(emulated_layout(4), 1)))
"""
    done = await asyncio.to_thread(
        subprocess.run, [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    assert "another KV pool uses" in done.stderr
    await pool.close()
    again = await Pool.open(tmp_path)
    await again.close()
