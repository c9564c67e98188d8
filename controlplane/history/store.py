"""Finished requests, audit, the autopilot's looks and a day of series in SQLite (WAL), behind one committing thread.

Survives restarts and SIGKILL up to the last batch; capped by rows and by age. Serving goes on when the disk does not.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import sqlite3
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from controlplane.core.events import AutopilotState, ClassesState, PlansState
from controlplane.core.series import SeriesRow
from controlplane.history import schema
from controlplane.history.schema import Row
from transfer.api import AuditRow, RequestRecord
from transfer.autopilot import LookRow
from transfer.errors import DeadlinePassed, PhaseplaneError

BATCH_ROWS = 500
BATCH_S = 0.2
TRIM_EVERY_S = 30.0
MAX_QUEUED = 50_000
READ_TIMEOUT_S = 10.0

T = TypeVar("T")
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Read:
    """A query for the thread."""

    work: Callable[[sqlite3.Connection], Any]
    answer: Future[Any]


_Job = Row | _Read | None
"""None: stop."""


class HistoryStore:
    """Writes never block and never raise: beyond MAX_QUEUED waiting rows new ones are dropped and counted.

    Idempotent: a request id that is there already is replaced.
    """

    def __init__(
        self, path: Path, *, max_rows: int = 1_000_000, max_age_s: float = 30 * 86400.0,
        now: Callable[[], float] = time.time,
    ) -> None:  # fmt: skip
        """now: Unix time. Opens or creates `path`. Raises ConfigError when it cannot or is of a newer release."""
        self._path, self._max_rows, self._max_age_s, self._now = path, max_rows, max_age_s, now
        self._jobs: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        self._hurry = threading.Event()
        self.num_dropped = 0
        self.num_failed = 0
        """Rows that could not be written (disk full, for example)."""
        self._closed = False
        schema.open_database(path).close()  # what is wrong is told here, to the caller
        self._thread = threading.Thread(target=self._run, name="history", daemon=True)
        self._thread.start()

    def add(self, row: Row) -> None:
        """Queue one row."""
        if self._closed or self._jobs.qsize() >= MAX_QUEUED:
            self.num_dropped += 1
        else:
            self._jobs.put(row)

    async def requests(self, limit: int, outcome: str | None = None) -> list[RequestRecord]:
        """The newest first, those still queued included."""
        where, values = ("WHERE outcome = ?", (outcome, limit)) if outcome else ("", (limit,))
        sql = f"SELECT doc FROM requests {where} ORDER BY seq DESC LIMIT ?"
        return await self._read(lambda db: _decode(db, sql, values, RequestRecord))

    async def request(self, request_id: str) -> RequestRecord | None:
        sql = "SELECT doc FROM requests WHERE request_id = ?"
        found = await self._read(lambda db: _decode(db, sql, (request_id,), RequestRecord))
        return found[0] if found else None

    async def audit(self, limit: int) -> list[AuditRow]:
        sql = "SELECT doc FROM audit ORDER BY seq DESC LIMIT ?"
        return await self._read(lambda db: _decode(db, sql, (limit,), AuditRow))

    async def looks(self, since: float, limit: int) -> list[LookRow]:
        """Of the autopilot, that ended after `since` (Unix time); the newest first."""
        sql = "SELECT doc FROM looks WHERE ended_at >= ? ORDER BY seq DESC LIMIT ?"
        return await self._read(lambda db: _decode(db, sql, (since, limit), LookRow))

    async def autopilot(self) -> AutopilotState | None:
        """What was last kept of it."""
        found = await self._read(lambda db: _decode(db, "SELECT doc FROM autopilot", (), AutopilotState))
        return found[0] if found else None

    async def classes(self) -> ClassesState | None:
        """As autopilot."""
        found = await self._read(lambda db: _decode(db, "SELECT doc FROM classes", (), ClassesState))
        return found[0] if found else None

    async def plans(self) -> PlansState | None:
        """As autopilot."""
        found = await self._read(lambda db: _decode(db, "SELECT doc FROM plans", (), PlansState))
        return found[0] if found else None

    async def series(self) -> list[SeriesRow]:
        """Of the last day, the oldest first; without what a clock that was ahead has kept."""
        sql, now = "SELECT doc FROM series WHERE at_s BETWEEN ? AND ? ORDER BY at_s", self._now()
        decode, day = msgspec.msgpack.Decoder(SeriesRow).decode, (now - schema.SERIES_KEPT_S, now)
        return await self._read(lambda db: [decode(doc) for (doc,) in db.execute(sql, day)])

    def close(self, timeout_s: float = 5.0) -> None:
        """Write what is queued, then end the thread. Idempotent; blocks up to timeout_s."""
        if not self._closed:
            self._closed = True
            self._jobs.put(None)
            self._hurry.set()
        self._thread.join(timeout_s)

    async def _read(self, work: Callable[[sqlite3.Connection], T]) -> T:
        answer: Future[T] = Future()
        if self._closed:
            raise PhaseplaneError("the history is closed because the server is stopping")
        self._jobs.put(_Read(work, answer))
        self._hurry.set()
        try:
            async with asyncio.timeout(READ_TIMEOUT_S):
                return await asyncio.wrap_future(answer)
        except TimeoutError:
            raise DeadlinePassed(f"the history did not answer within {READ_TIMEOUT_S:g} s; its disk is slow") from None

    # --- in the thread ------------------------------------------------------------------------------------------

    def _run(self) -> None:
        db = schema.open_database(self._path)
        trim_at = self._now()
        with contextlib.closing(db):
            going = True
            while going:
                rows, read, going = self._take()
                self._write(db, rows)
                if read is not None:
                    _answer(db, read)
                if self._now() >= trim_at:
                    self._guarded(lambda: schema.trim(db, self._max_rows, self._now(), self._max_age_s), 0)
                    trim_at = self._now() + TRIM_EVERY_S

    def _take(self) -> tuple[list[Row], _Read | None, bool]:
        """Rows until a batch is full or its time is over, a read wants them, or the end (False) comes.

        After the first row the thread sleeps: woken for each one it would take turns with the event loop.
        """
        rows: list[Row] = []
        job: _Job
        while len(rows) < BATCH_ROWS:
            try:
                job = self._jobs.get_nowait() if rows else self._jobs.get(timeout=TRIM_EVERY_S)
            except queue.Empty:
                break
            if job is None:
                return rows, None, False
            if isinstance(job, _Read):
                return rows, job, True
            if not rows:
                self._hurry.wait(BATCH_S)
                self._hurry.clear()
            rows.append(job)
        return rows, None, True

    def _write(self, db: sqlite3.Connection, rows: list[Row]) -> None:
        if rows:
            self._guarded(lambda: schema.insert(db, rows), len(rows))

    def _guarded(self, work: Callable[[], None], num_rows: int) -> None:
        """A failing disk costs rows, never the thread."""
        try:
            work()
        except sqlite3.Error as error:
            self.num_failed += num_rows
            _log.error("the history %s lost %d rows: %s", self._path, num_rows, error)


def _answer(db: sqlite3.Connection, read: _Read) -> None:
    if not read.answer.set_running_or_notify_cancel():
        return
    try:
        read.answer.set_result(read.work(db))
    except Exception as error:  # noqa: BLE001
        # A supervision boundary: this thread also writes everybody's rows, so nothing that one read asks of it may end
        # it, be it a damaged file, a record of another release or a number that SQLite has no room for.
        _log.error("the history could not answer a query", exc_info=error)
        read.answer.set_exception(PhaseplaneError(f"the history cannot be read: {error}"))


def _decode(db: sqlite3.Connection, sql: str, values: tuple[object, ...], kind: type[T]) -> list[T]:
    return [msgspec.json.decode(doc, type=kind) for (doc,) in db.execute(sql, values)]
