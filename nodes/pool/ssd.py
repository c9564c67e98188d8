"""What an SSD tier is told and what it counts. Plain data."""

from __future__ import annotations

from concurrent.futures import Executor
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote

from nodes.pool.disk import Disk
from transfer.kv.blob import HEADER_BYTES
from transfer.terms import KvLayout


@dataclass(frozen=True)
class SsdConfig:
    """directory: this pool's own, made when missing. num_blocks: how many it may hold. segment_bytes: of one file, less
    where the tier is small. disk, threads: tests replace them."""

    directory: Path
    num_blocks: int
    segment_bytes: int = 256 << 20
    disk: Disk = field(default_factory=Disk)
    num_readers: int = 8
    num_writers: int = 2
    executor: Executor | None = None


def ssd_config(directory: Path, num_bytes: int, layout: KvLayout) -> SsdConfig:
    """For as many blocks of this layout as `num_bytes` of files hold."""
    return SsdConfig(directory, num_bytes // (HEADER_BYTES + layout.block_bytes))


@dataclass(slots=True)
class SsdStats:
    num_reads: int = 0
    num_writes: int = 0
    num_corrupt: int = 0
    num_read_errors: int = 0
    num_write_errors: int = 0
    num_disk_full: int = 0
    num_refused: int = 0
    num_dropped: int = 0
    """Blocks dropped for room."""
    num_rewritten: int = 0
    """Blocks written again when their segment was reclaimed."""

    @property
    def num_failed(self) -> int:
        """Writes that were not done."""
        return self.num_refused + self.num_write_errors + self.num_disk_full


def pool_directory(root: Path, instance_id: str) -> Path:
    """Where the pool of this name keeps its files."""
    return root / f"pool-{quote(instance_id, safe='')}"
