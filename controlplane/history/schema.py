"""The history's tables, their version and the statements on them. Called from the store's thread only."""

from __future__ import annotations

import logging
import sqlite3
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from controlplane.core.events import AutopilotState, ClassesState, PlansState
from controlplane.core.series import SeriesRow
from transfer.api import AuditRow, RequestRecord
from transfer.autopilot import LookRow
from transfer.errors import ConfigError

VERSION = 5
_SERIES = """
CREATE TABLE series (at_s INTEGER PRIMARY KEY, doc BLOB NOT NULL);
"""
_AUTOPILOT = """
CREATE TABLE looks (
  seq INTEGER PRIMARY KEY AUTOINCREMENT, look_id TEXT NOT NULL UNIQUE, ended_at REAL NOT NULL, doc BLOB NOT NULL);
CREATE INDEX looks_ended ON looks (ended_at);
CREATE TABLE autopilot (only INTEGER PRIMARY KEY CHECK (only = 1), doc BLOB NOT NULL);
"""
_CLASSES = """
CREATE TABLE classes (only INTEGER PRIMARY KEY CHECK (only = 1), doc BLOB NOT NULL);
"""
_PLANS = """
CREATE TABLE plans (only INTEGER PRIMARY KEY CHECK (only = 1), doc BLOB NOT NULL);
"""
_TABLES = f"""
CREATE TABLE requests (
  seq INTEGER PRIMARY KEY AUTOINCREMENT, request_id TEXT NOT NULL UNIQUE, arrived_at REAL NOT NULL,
  outcome TEXT NOT NULL, traffic_class TEXT NOT NULL, doc BLOB NOT NULL);
CREATE INDEX requests_outcome ON requests (outcome, seq);
CREATE INDEX requests_arrived ON requests (arrived_at);
CREATE TABLE audit (seq INTEGER PRIMARY KEY AUTOINCREMENT, at_s REAL NOT NULL, doc BLOB NOT NULL);
{_SERIES}{_AUTOPILOT}{_CLASSES}{_PLANS}"""
_UPGRADES = {
    0: _TABLES, 1: _SERIES + _AUTOPILOT + _CLASSES + _PLANS, 2: _AUTOPILOT + _CLASSES + _PLANS, 3: _CLASSES + _PLANS,
    4: _PLANS,
}  # fmt: skip
"""What makes a database of that version one of VERSION."""
MAX_LOOKS = 100_000
"""Rows of looks; three days at least of one model's, were no two alike."""
SERIES_KEPT_S = 24 * 3600.0
"""As long as the control plane's memory of them is."""
Row = RequestRecord | AuditRow | SeriesRow | LookRow | AutopilotState | ClassesState | PlansState
_log = logging.getLogger(__name__)


def open_database(path: Path) -> sqlite3.Connection:
    """Create or open. A file that is no database is set aside as NAME.broken-TIME. Raises ConfigError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.touch(mode=0o600)
        return _prepare(path)
    except sqlite3.OperationalError as error:
        raise ConfigError(f"cannot open the history {path}: {error}; choose another history.directory") from None
    except sqlite3.DatabaseError as error:
        aside = path.with_name(f"{path.name}.broken-{int(time.time())}")
        path.rename(aside)
        _log.error("the history %s cannot be read (%s): set aside as %s, starting a new one", path, error, aside.name)
        return _prepare(path)
    except OSError as error:
        raise ConfigError(
            f"cannot create the history {path}: {error.strerror}; choose another history.directory"
        ) from None


def insert(db: sqlite3.Connection, rows: Sequence[Row]) -> None:
    """One transaction."""
    encode = msgspec.json.encode
    requests = [row for row in rows if isinstance(row, RequestRecord)]
    audit = [row for row in rows if isinstance(row, AuditRow)]
    series = [row for row in rows if isinstance(row, SeriesRow)]
    looks = [row for row in rows if isinstance(row, LookRow)]
    kept = {"autopilot": AutopilotState, "classes": ClassesState, "plans": PlansState}
    with db:
        db.executemany(
            "INSERT OR REPLACE INTO requests (request_id, arrived_at, outcome, traffic_class, doc)"
            " VALUES (?, ?, ?, ?, ?)",
            [(row.request_id, row.arrived_at, row.outcome, row.traffic_class, encode(row)) for row in requests],
        )
        db.executemany("INSERT INTO audit (at_s, doc) VALUES (?, ?)", [(row.at_s, encode(row)) for row in audit])
        db.executemany(
            "INSERT OR REPLACE INTO series (at_s, doc) VALUES (?, ?)",
            [(row.at_s, msgspec.msgpack.encode(row)) for row in series],
        )
        db.executemany(
            "INSERT INTO looks (look_id, ended_at, doc) VALUES (?, ?, ?)"
            " ON CONFLICT (look_id) DO UPDATE SET ended_at = excluded.ended_at, doc = excluded.doc",
            [(row.look_id, row.ended_at, encode(row)) for row in looks],
        )
        for table, kind in kept.items():
            states = [row for row in rows if isinstance(row, kind)]
            sql = f"INSERT OR REPLACE INTO {table} (only, doc) VALUES (1, ?)"
            db.executemany(sql, [(encode(row),) for row in states[-1:]])


def trim(db: sqlite3.Connection, max_rows: int, now: float, max_age_s: float) -> None:
    """Drop rows beyond max_rows, and those that are older than max_age_s, or SERIES_KEPT_S. now: Unix time."""
    oldest = now - max_age_s
    with db:
        most = {"requests": max_rows, "audit": max_rows, "looks": min(max_rows, MAX_LOOKS)}
        for table, moment in (("requests", "arrived_at"), ("audit", "at_s"), ("looks", "ended_at")):
            db.execute(f"DELETE FROM {table} WHERE {moment} < ?", (oldest,))
            db.execute(f"DELETE FROM {table} WHERE seq <= (SELECT max(seq) FROM {table}) - ?", (most[table],))
        db.execute("DELETE FROM series WHERE at_s < ?", (now - min(max_age_s, SERIES_KEPT_S),))


def _prepare(path: Path) -> sqlite3.Connection:
    db = sqlite3.connect(path, timeout=5.0, check_same_thread=False)
    try:
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = NORMAL")
        version = int(db.execute("PRAGMA user_version").fetchone()[0])
        if version > VERSION:
            raise ConfigError(
                f"the history {path} is of version {version}, newer than this release's {VERSION}; "
                "run the newer release or choose another history.directory"
            )
        if version < VERSION:
            db.executescript(f"BEGIN IMMEDIATE;{_UPGRADES[version]}PRAGMA user_version = {VERSION};COMMIT;")
    except BaseException:
        db.close()
        raise
    return db
