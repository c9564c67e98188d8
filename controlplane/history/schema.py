"""The history's tables, their version and the statements on them. Called from the store's thread only."""

from __future__ import annotations

import logging
import sqlite3
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from transfer.api import AuditRow, RequestRecord
from transfer.errors import ConfigError

VERSION = 1
_TABLES = """
CREATE TABLE requests (
  seq INTEGER PRIMARY KEY AUTOINCREMENT, request_id TEXT NOT NULL UNIQUE, arrived_at REAL NOT NULL,
  outcome TEXT NOT NULL, traffic_class TEXT NOT NULL, doc BLOB NOT NULL);
CREATE INDEX requests_outcome ON requests (outcome, seq);
CREATE INDEX requests_arrived ON requests (arrived_at);
CREATE TABLE audit (seq INTEGER PRIMARY KEY AUTOINCREMENT, at_s REAL NOT NULL, doc BLOB NOT NULL);
"""
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


def insert(db: sqlite3.Connection, requests: Sequence[RequestRecord], audit: Sequence[AuditRow]) -> None:
    """One transaction."""
    encode = msgspec.json.encode
    with db:
        db.executemany(
            "INSERT OR REPLACE INTO requests (request_id, arrived_at, outcome, traffic_class, doc)"
            " VALUES (?, ?, ?, ?, ?)",
            [(row.request_id, row.arrived_at, row.outcome, row.traffic_class, encode(row)) for row in requests],
        )
        db.executemany("INSERT INTO audit (at_s, doc) VALUES (?, ?)", [(row.at_s, encode(row)) for row in audit])


def trim(db: sqlite3.Connection, max_rows: int, oldest: float) -> None:
    """Drop rows beyond max_rows in either table, and those from before Unix time `oldest`."""
    with db:
        for table, moment in (("requests", "arrived_at"), ("audit", "at_s")):
            db.execute(f"DELETE FROM {table} WHERE {moment} < ?", (oldest,))
            db.execute(f"DELETE FROM {table} WHERE seq <= (SELECT max(seq) FROM {table}) - ?", (max_rows,))


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
        if version == 0:
            db.executescript(f"BEGIN IMMEDIATE;{_TABLES}PRAGMA user_version = {VERSION};COMMIT;")
    except BaseException:
        db.close()
        raise
    return db
