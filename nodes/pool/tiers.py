"""The SSD tier of a pool: moves blocks between the arena and segment files, in threads, and keeps within its size.

The event loop decides (slots.py) and never waits for the disk. A write that the disk or the size cap does not take is
refused and counted; a record that cannot be read as what it should be is dropped and counted. Never a wrong byte.
"""

from __future__ import annotations

import asyncio
import errno
import logging
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from nodes.pool.journal import Op
from nodes.pool.journaling import Journaling
from nodes.pool.recovery import Opened, open_directory
from nodes.pool.slots import Place, Reclaim
from nodes.pool.ssd import SsdConfig, SsdStats
from transfer.errors import ConfigError, KvCorrupt
from transfer.kv.arena import KvArena

T = TypeVar("T")
RETRY_S = 5.0
"""A disk that had no room even after a segment was given up is not asked again for this long."""
STUCK_S = 1.0

_log = logging.getLogger(__name__)


class SsdTier:
    """Made by `open`. removed: called for each content whose record is gone; pinned: what must not be dropped.

    Everything but the files belongs to the event loop.
    """

    def __init__(
        self, config: SsdConfig, arena: KvArena, opened: Opened, executors: tuple[Executor, Executor]
    ) -> None:  # fmt: skip
        self._disk, self._arena, self._index, self._files = config.disk, arena, opened.index, opened.files
        self._lock, self.found = opened.lock, opened.found
        self._readers, self._writers = executors
        self._config = config
        self._tasks: dict[asyncio.Task[None], None] = {}
        self._reclaiming = self._closed = False
        self._full_until = self._stuck_until = float("-inf")
        self.stats = SsdStats()
        self._journal = Journaling(opened.journal, opened.index, self._writers, self._spawn)
        self.removed: Callable[[bytes], None] = lambda h: None
        self.pinned: Callable[[bytes], bool] = lambda h: False

    @classmethod
    async def open(cls, config: SsdConfig, arena: KvArena) -> SsdTier:
        """Own the directory and find what is in it. Raises ConfigError when another pool uses it or it cannot be used,
        InvalidValue when the size is too small."""
        executors = _executors(config)
        try:
            opened = await asyncio.wrap_future(executors[1].submit(partial(open_directory, config, arena.layout)))
        except OSError as error:
            _shutdown(config, executors)
            raise ConfigError(
                f"the SSD tier cannot use {config.directory}: {error}; give another --ssd-dir or none"
            ) from None
        except BaseException:
            _shutdown(config, executors)
            raise
        return cls(config, arena, opened, executors)

    @property
    def num_blocks(self) -> int:
        return len(self._index)

    @property
    def capacity(self) -> int:
        """Blocks it may hold on disk."""
        return self._index.max_segments * self._index.slots

    @property
    def num_segments(self) -> int:
        return self._index.num_segments

    def hashes(self) -> list[bytes]:
        """All that can be read, the oldest segment first."""
        return [h for h, _ in self._index.places()]

    def check(self, *, at_rest: bool) -> int:
        """Books that do not agree; at rest also slots still in use. Must be 0."""
        return self._index.check() + (self._index.busy() if at_rest and not self._tasks else 0)

    # --- blocks -------------------------------------------------------------------------------------------------

    async def write(self, h: bytes, block: int) -> bool:
        """Put this block, which nobody changes meanwhile. False: refused or failed, and counted."""
        if self._closed or asyncio.get_running_loop().time() < self._full_until:
            self.stats.num_refused += 1
            return False
        for attempt in (1, 2):
            place = self._index.allocate()
            self._make_room()
            if place is None:
                self.stats.num_refused += 1
                return False
            try:
                await self._in(self._writers, partial(self._files.write, place, h, self._views(block)))
            except OSError as error:
                self._failed(place)
                if not await self._may_retry(error, attempt):
                    return False
            else:
                self.stats.num_writes += 1
                self._put(h, place)
                return True
        return False

    async def read(self, h: bytes, block: int) -> bool:
        """Get it into this block, which is nobody's yet. False: not here, or dropped because it could not be read."""
        place = None if self._closed else self._index.begin_read(h)
        if place is None:
            return False
        try:
            await self._in(self._readers, partial(self._files.read, place, h, self._views(block)))
        except (OSError, KvCorrupt) as error:
            self._bad(h, place, error)
            return False
        finally:
            self._index.end_read(place)
            self._files_to_remove()
        self.stats.num_reads += 1
        return True

    def tick(self) -> None:
        """Go on with what had to wait: a reclaim given up, a journal that could not be written."""
        self._make_room()
        self._journal.write()

    async def close(self, timeout_s: float = 5.0) -> None:
        """Write what the journal lacks and let the directory go. Reads and writes under way end first, in time."""
        self._closed = True
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while (self._tasks or self._index.busy()) and loop.time() < deadline:
            if self._tasks:
                await asyncio.wait([*self._tasks], timeout=max(0.0, deadline - loop.time()))
            else:
                await asyncio.sleep(0.005)  # the caller's own reads and writes, which are not our tasks
        if self._tasks or self._index.busy():
            _log.error("the SSD hangs; its files stay open, and locked, until the process ends")
            return  # a thread may use their descriptors still
        try:
            await self._journal.close()
        finally:
            self._files.close()
            self._disk.release(self._lock)
            _shutdown(self._config, (self._readers, self._writers))

    # --- room -------------------------------------------------------------------------------------------------------

    def _make_room(self) -> None:
        """Reclaim in the background when room will be short."""
        if not (self._reclaiming or self._closed) and asyncio.get_running_loop().time() >= self._stuck_until:
            plan = self._index.reclaim(self.pinned)
            if plan is not None:
                self._reclaiming = True
                self._spawn(self._reclaim(plan), "reclaim")

    async def _reclaim(self, plan: Reclaim) -> None:
        try:
            for h in plan.again:
                await self._write_again(h, plan.segment)
            for h in self._index.live(plan.segment):
                if self.pinned(h):
                    await self._write_again(h, plan.segment)  # pinned since
            self._drop_segment(plan.segment)
        finally:
            self._reclaiming = False
            self._files_to_remove()

    def _drop_segment(self, number: int) -> None:
        for h in self._index.live(number):
            if not self.pinned(h):
                self.stats.num_dropped += 1
                self._forget(h)
        if self._index.live(number):  # something pinned could not be written elsewhere: another time
            self._index.give_up(number)
            self._stuck_until = asyncio.get_running_loop().time() + STUCK_S
        self._files_to_remove()

    async def _write_again(self, h: bytes, segment: int) -> None:
        old = self._index.place(h)
        new = self._index.allocate(again=True) if old is not None and old.segment == segment else None
        if old is None or new is None:
            return
        self._index.begin_read(h, counts=False)
        try:
            await self._in(self._writers, partial(self._files.copy, old, new, h))
        except (OSError, KvCorrupt) as error:
            self._failed(new)
            if isinstance(error, KvCorrupt):
                self._bad(h, old, error)
            else:
                self.stats.num_write_errors += 1
        else:
            self.stats.num_rewritten += 1
            if self._index.place(h) == old:
                self._put(h, new)
            else:
                self._failed(new)
        finally:
            self._index.end_read(old)

    async def _may_retry(self, error: OSError, attempt: int) -> bool:
        """After a failed write: a full disk gives the oldest segment up, once."""
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            self.stats.num_write_errors += 1
            return False
        self.stats.num_disk_full += 1
        plan = self._index.reclaim(self.pinned, now=True) if attempt == 1 and not self._reclaiming else None
        if plan is None:
            self._full_until = asyncio.get_running_loop().time() + RETRY_S
            _log.warning("the SSD of the KV pool is full; it takes no writes for %g s", RETRY_S)
            return False
        self._drop_segment(plan.segment)
        await self._settled()
        return True

    def _files_to_remove(self) -> None:
        for number in self._index.take_empty():
            self._spawn(self._remove_file(number), f"remove {number}")

    async def _remove_file(self, number: int) -> None:
        try:
            await self._in(self._writers, partial(self._files.remove, number))
        except OSError as error:
            _log.warning("segment %d of the SSD tier could not be removed: %s; the next start does", number, error)
        self._index.gone(number)
        self._journal.add((Op.GONE, number))

    async def _settled(self) -> None:
        """Wait until files that are being removed are gone."""
        removing = [task for task in self._tasks if task.get_name().startswith("remove")]
        if removing:
            await asyncio.wait(removing)

    # --- index and journal ------------------------------------------------------------------------------------------

    def _put(self, h: bytes, place: Place) -> None:
        self._index.commit(h, place)
        self._journal.add((Op.PUT, h, *place))
        self._slot_done(place)

    def _failed(self, place: Place) -> None:
        self._index.fail(place)
        self._slot_done(place)

    def _slot_done(self, place: Place) -> None:
        for number in (place.segment - 1, place.segment):  # the one before was sealed when this one was begun
            if self._index.completed(number):
                self._journal.add((Op.SEALED, number))
        self._files_to_remove()

    def _bad(self, h: bytes, place: Place, error: Exception) -> None:
        """What is at `place` is not `h`, or cannot be read."""
        if isinstance(error, KvCorrupt):
            self.stats.num_corrupt += 1
        else:
            self.stats.num_read_errors += 1
        _log.warning("the SSD tier dropped a block: %s", error)
        if self._index.place(h) == place:
            self._forget(h)

    def _forget(self, h: bytes) -> None:
        self._index.remove(h)
        self._journal.add((Op.DROP, h))
        self.removed(h)

    # --- helpers ------------------------------------------------------------------------------------------------

    def _views(self, block: int) -> list[memoryview]:
        return [view for layer in range(self._arena.layout.num_layers) for view in self._arena.views(layer, block, 1)]

    async def _in(self, executor: Executor, work: Callable[[], T]) -> T:
        return await asyncio.wrap_future(executor.submit(work))

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        self._tasks[task] = None
        task.add_done_callback(lambda done: self._tasks.pop(done, None))


def _executors(config: SsdConfig) -> tuple[Executor, Executor]:
    """Reads never wait behind writes."""
    if config.executor is not None:
        return config.executor, config.executor
    return (
        ThreadPoolExecutor(config.num_readers, thread_name_prefix="pool-read"),
        ThreadPoolExecutor(config.num_writers, thread_name_prefix="pool-write"),
    )


def _shutdown(config: SsdConfig, executors: tuple[Executor, Executor]) -> None:
    if config.executor is None:
        for executor in executors:
            executor.shutdown(wait=False)
