"""Keeps the SSD tier's journal up in the background: batches what happened, rewrites the file when it got long."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from functools import partial
from typing import Any

from nodes.pool.journal import Journal, Record
from nodes.pool.slots import SlotIndex

MAX_PENDING = 65_536
"""Records waiting for the disk; beyond, the journal is rewritten instead."""
MIN_REWRITE_RECORDS = 1024

_log = logging.getLogger(__name__)


class Journaling:
    """On the event loop; one write at a time, in `threads`. spawn: runs a coroutine as a task that its owner knows."""

    def __init__(
        self, journal: Journal, index: SlotIndex, threads: Executor,
        spawn: Callable[[Coroutine[Any, Any, None], str], None],
    ) -> None:  # fmt: skip
        self._journal, self._index, self._threads, self._spawn = journal, index, threads, spawn
        self._records: list[Record] = []
        self._writing = False
        self.num_failed = 0

    def add(self, record: Record) -> None:
        if self._journal.broken and not self._writing:
            return  # a later rewrite takes everything from the index
        self._records.append(record)
        self.write()

    def write(self) -> None:
        """Begin to write what waits, or to mend what could not be written."""
        if not self._writing and (self._records or self._journal.broken):
            self._writing = True
            self._spawn(self._write(), "journal")

    async def close(self) -> None:
        """Write what waits and close the file. Nothing may be added any more."""
        try:
            if self._records and not self._journal.broken:
                await self._in_thread(partial(self._journal.append, self._take()))
        except OSError as error:
            self._failed(error)
        finally:
            self._journal.close()

    async def _write(self) -> None:
        """Everything that waits, in one write; from the start when the file got long."""
        try:
            long = self._journal.num_records > 2 * len(self._index) + MIN_REWRITE_RECORDS
            if self._journal.broken or long or len(self._records) > MAX_PENDING:
                self._records.clear()
                state = (self._index.places(), self._index.complete())
                await self._in_thread(partial(self._journal.rewrite, *state))
            else:
                await self._in_thread(partial(self._journal.append, self._take()))
        except OSError as error:
            self._failed(error)
        finally:
            self._writing = False
        if self._records and not self._journal.broken:
            self.write()

    async def _in_thread(self, work: Callable[[], None]) -> None:
        await asyncio.wrap_future(self._threads.submit(work))

    def _take(self) -> list[Record]:
        records, self._records = self._records, []
        return records

    def _failed(self, error: OSError) -> None:
        self.num_failed += 1
        _log.warning("the SSD tier's journal could not be written: %s; a start would scan the segments", error)
