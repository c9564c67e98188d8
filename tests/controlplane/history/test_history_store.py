"""Finished requests and audit on disk: survive restarts, capped, and a bad disk costs rows, not serving."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import stat
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from controlplane.core.events import AutopilotState, ClassesState
from controlplane.core.series import SeriesBook, SeriesRow
from controlplane.history import schema, store
from controlplane.history.store import HistoryStore
from transfer.api import AuditRow, CandidateView, Prediction, RequestRecord
from transfer.autopilot import LookRow
from transfer.errors import ConfigError, PhaseplaneError
from transfer.terms import Slo


def record(number: int, outcome: str = "ok", arrived_at: float | None = None) -> RequestRecord:
    return RequestRecord(
        request_id=f"r{number}", model="m", traffic_class="chat", arrived_at=arrived_at or time.time(),
        outcome=outcome, finish_reason="stop", prompt_tokens=3, output_tokens=4, cached_tokens=1, ttft_s=0.1,  # type: ignore[arg-type]
        tpot_s=0.01, e2e_s=0.2, max_itl_s=0.02, good=True, stages_s={"queue": 0.1},
        why=(CandidateView(prefill="p", decode="d", ttft_s=0.1, tpot_s=0.01, cached_tokens=0, queue_s=0.0,
                           prefill_s=0.1, transfer_s=0.0, chosen=True),),
    )  # fmt: skip


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / "history.sqlite"


@pytest.fixture
def history(path: Path) -> Iterator[HistoryStore]:
    made = HistoryStore(path)
    yield made
    made.close()


async def test_rows_are_read_back_whole_even_right_after_they_were_added(history: HistoryStore) -> None:
    rows = [record(number, "error" if number % 2 else "ok") for number in range(10)]
    for row in rows:
        history.add(row)
    assert await history.requests(3) == rows[:-4:-1]
    assert await history.requests(2, "error") == [rows[9], rows[7]]
    assert await history.request("r4") == rows[4]
    assert await history.request("nope") is None
    audit = AuditRow(at_s=1.5, actor="a", action="apply", subject="p", predicted=Prediction(duration_s=2.0))
    history.add(audit)
    assert await history.audit(5) == [audit]


async def test_what_was_added_survives_a_restart(path: Path) -> None:
    first = HistoryStore(path)
    first.add(record(1))
    first.add(AuditRow(at_s=time.time(), actor="a", action="x", subject="s"))
    first.close()
    first.close()
    second = HistoryStore(path)
    assert [row.request_id for row in await second.requests(5)] == ["r1"]
    assert len(await second.audit(5)) == 1
    second.add(record(1, "error"))
    assert [row.outcome for row in await second.requests(5)] == ["error"]
    second.close()
    with pytest.raises(PhaseplaneError, match="closed"):
        await second.requests(1)
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600  # noqa: PTH116


async def test_a_commit_does_not_wait_for_more_rows(path: Path, history: HistoryStore) -> None:
    history.add(record(1))
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        with sqlite3.connect(path) as other:
            found = other.execute("SELECT count(*) FROM requests").fetchone()[0]
        other.close()
        if found:
            return
        await asyncio.sleep(0.02)
    raise AssertionError("the row was never committed")


def test_the_oldest_rows_go_first_by_count_and_by_age(path: Path) -> None:
    db = schema.open_database(path)
    schema.insert(db, [record(number, arrived_at=100.0 + number) for number in range(10)])
    schema.trim(db, 4, 1000.0, 1000.0)
    assert db.execute("SELECT request_id FROM requests ORDER BY seq").fetchall() == [(f"r{n}",) for n in range(6, 10)]
    schema.trim(db, 4, 1000.0, 891.5)
    assert db.execute("SELECT request_id FROM requests").fetchall() == [("r9",)]
    schema.insert(db, [AuditRow(at_s=1.0, actor="", action="", subject="")])
    schema.trim(db, 4, 1000.0, 999.5)
    schema.trim(db, 0, 1000.0, 999.5)
    assert db.execute("SELECT count(*) FROM audit").fetchone() == (0,)
    schema.insert(db, [SeriesRow(at_s=at_s, values={}) for at_s in (900, 910)])
    schema.trim(db, 4, 1000.0, 95.0)
    assert db.execute("SELECT at_s FROM series").fetchall() == [(910,)]
    schema.trim(db, 4, 911.0 + schema.SERIES_KEPT_S, 1e9)
    assert db.execute("SELECT at_s FROM series").fetchall() == []
    db.close()


async def test_series_outlive_the_control_plane_and_a_database_of_the_release_before_gets_their_table(
    path: Path,
) -> None:
    db = schema.open_database(path)
    db.executescript(
        "DROP TABLE series; DROP TABLE looks; DROP TABLE autopilot; DROP TABLE classes; DROP TABLE plans;"
        "PRAGMA user_version = 1;"
    )
    db.close()
    rows = [SeriesRow(at_s=1000 + 10 * number, values={"in_flight": (number, 0.0, 9.5)}) for number in range(3)]
    history = HistoryStore(path, now=lambda: 1010.0 + schema.SERIES_KEPT_S)
    for row in (rows[2], rows[0], rows[1], rows[2]):
        history.add(row)
    history.close()
    again = HistoryStore(path, now=lambda: 1010.0 + schema.SERIES_KEPT_S)
    assert await again.series() == rows[1:]
    again.close()


async def test_series_of_a_clock_that_was_ahead_do_not_stand_in_the_way_of_new_ones(path: Path) -> None:
    rows = [SeriesRow(at_s=at_s, values={"in_flight": (1.0, 1.0, 1.0)}) for at_s in (1000, 1010, 5000)]
    history = HistoryStore(path, now=lambda: 1015.0)
    for row in rows:
        history.add(row)
    book = SeriesBook()
    book.load(await history.series())
    history.close()
    for second in range(1020, 1040):
        book.put(second, {"in_flight": 2.0})
    column = book.column("in_flight", book.window(1000, 1039, 10))
    assert column is not None
    assert column.last == (1.0, 1.0, 2.0, 2.0)


async def test_looks_are_kept_by_their_id_and_the_autopilots_state_is_the_last(path: Path) -> None:
    db = schema.open_database(path)
    dropped = "DROP TABLE looks; DROP TABLE autopilot; DROP TABLE classes; DROP TABLE plans;"
    db.executescript(f"{dropped} PRAGMA user_version = 2;")
    db.close()
    history = HistoryStore(path)
    assert await history.autopilot() is None
    states = [AutopilotState(mode, 1, None, ("advise", 1, None), at_s=5.0) for mode in ("off", "auto")]  # type: ignore[arg-type]
    rows = [LookRow("e-1", "m", "met", "hold", 1, 10.0, 10.0), LookRow("e-2", "m", "busy", "hold", 1, 70.0, 70.0)]
    more = msgspec.structs.replace(rows[0], num=20, ended_at=67.0)
    for row in (*rows, more, *states):
        history.add(row)
    history.close()
    again = HistoryStore(path, now=lambda: 80.0)
    assert await again.looks(0.0, 10) == [rows[1], more]
    assert await again.looks(68.0, 10) == [rows[1]]
    assert await again.looks(0.0, 1) == [rows[1]]
    assert await again.autopilot() == states[1]
    again.close()


async def test_the_store_trims_while_it_runs(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "TRIM_EVERY_S", 0.0)
    history = HistoryStore(path, max_rows=5)
    for number in range(20):
        history.add(record(number))
    await history.requests(1)
    await history.requests(1)
    assert len(await history.requests(100)) == 5
    history.close()


def test_a_newer_version_is_refused_and_a_broken_file_set_aside(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    db = schema.open_database(path)
    db.execute("PRAGMA user_version = 99")
    db.close()
    with pytest.raises(ConfigError, match="version 99"):
        HistoryStore(path)
    for suffix in ("-wal", "-shm"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)
    path.write_bytes(b"this is no database at all" * 100)
    history = HistoryStore(path)
    history.close()
    assert len(list(path.parent.glob("history.sqlite.broken-*"))) == 1
    assert "set aside" in caplog.text


def test_a_place_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match=r"choose another history\.directory"):
        HistoryStore(tmp_path / "file" / "history.sqlite")
    (tmp_path / "dir.sqlite").mkdir()
    with pytest.raises(ConfigError, match="cannot open the history"):
        HistoryStore(tmp_path / "dir.sqlite")


async def test_a_failing_disk_costs_rows_and_nothing_else(
    history: HistoryStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(schema, "insert", full)
    history.add(record(1))
    assert await history.requests(5) == []
    assert history.num_failed == 1
    assert "lost 1 rows" in caplog.text
    monkeypatch.undo()
    history.add(record(2))
    assert [row.request_id for row in await history.requests(5)] == ["r2"]


async def test_the_queue_is_bounded(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "MAX_QUEUED", 0)
    history = HistoryStore(path)
    history.add(record(1))
    assert history.num_dropped == 1
    assert await history.requests(1) == []
    history.close()


async def test_a_record_of_another_release_is_told_not_raised_through(path: Path) -> None:
    history = HistoryStore(path)
    history.add(record(1))
    await history.requests(1)
    with sqlite3.connect(path) as other:
        other.execute("UPDATE requests SET doc = ?", (msgspec.json.encode({"new": 1}),))
    other.close()
    with pytest.raises(PhaseplaneError, match="cannot be read"):
        await history.requests(1)
    history.close()


async def test_a_read_that_cannot_work_fails_alone_and_is_logged(
    history: HistoryStore, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(PhaseplaneError, match="cannot be read"):
        await history.requests(1 << 64)
    assert "could not answer a query" in caplog.text
    assert "OverflowError" in caplog.text
    history.add(record(1))
    assert [row.request_id for row in await history.requests(5)] == ["r1"]


async def test_objectives_are_kept_as_they_were_last_set(path: Path) -> None:
    db = schema.open_database(path)
    db.executescript("DROP TABLE classes; DROP TABLE plans; PRAGMA user_version = 3;")
    db.close()
    history = HistoryStore(path)
    assert await history.classes() is None
    states = [ClassesState(classes={"chat": Slo(ttft_s, 0.1), "batch": None}, configured={}) for ttft_s in (1.0, 2.0)]
    for state in states:
        history.add(state)
    history.close()
    again = HistoryStore(path)
    assert await again.classes() == states[-1]
    again.close()
