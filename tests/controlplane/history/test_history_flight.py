"""The flight recorder's files: whole, private, rotated, bounded; a bad disk ends recording, not serving."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from controlplane.core.config import CoreConfig
from controlplane.core.events import ApplyWanted, Ended, Event, FirstToken, Tick
from controlplane.core.recorder import read
from controlplane.history import recorder
from controlplane.history.recorder import FlightFiles, chunks
from transfer.api import ApplyRequest
from transfer.errors import ConfigError

EVENTS: list[Event] = [Tick(), FirstToken(request_id="r")]


def files(directory: Path, **options: int) -> FlightFiles:
    sizes = {"file_bytes": 1 << 20, "num_files": 3} | options
    return FlightFiles(directory, CoreConfig(lease_s=7.0), 5, 9, **sizes)  # type: ignore[arg-type]


def test_what_was_recorded_is_read_back(tmp_path: Path) -> None:
    flight = files(tmp_path / "flight")
    for place, event in enumerate(EVENTS):
        flight.record(float(place), event)
    flight.close()
    flight.record(9.0, Tick())
    flight.close()
    header, entries = read(chunks(flight.path))
    assert (header.control_epoch, header.seed, header.part, header.config.lease_s) == (5, 9, 0, 7.0)
    assert [(entry.now, entry.event) for entry in entries] == [(0.0, EVENTS[0]), (1.0, EVENTS[1])]
    assert flight.path.stat().st_mode & 0o777 == 0o600
    assert flight.path.parent.stat().st_mode & 0o777 == 0o700


def test_a_file_is_there_while_it_is_written(tmp_path: Path) -> None:
    flight = files(tmp_path)
    flight.record(1.0, Tick())
    deadline = time.monotonic() + 5
    while len(list(read(chunks(flight.path))[1])) < 1:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    flight.close()


def test_files_rotate_and_only_the_newest_are_kept(tmp_path: Path) -> None:
    stranger = tmp_path / "flight-0000000000000001-000000.msgpack"
    stranger.write_bytes(b"an earlier life")
    os.utime(stranger, (1, 1))
    other = tmp_path / "notes.txt"
    other.write_text("mine")
    flight = files(tmp_path, file_bytes=200)
    ended = Ended(
        request_id="r" * 100, outcome="ok", finish_reason="stop", output_tokens=1, ttft_s=0.1, tpot_s=None, e2e_s=0.2,
        max_itl_s=None,
    )  # fmt: skip
    for place in range(10):
        flight.record(float(place), ended)
        flight.record(float(place), Tick())
    flight.close()
    kept = sorted(tmp_path.glob("flight-*"))
    assert len(kept) == 3
    assert kept[-1] == flight.path
    parts = [read(chunks(path))[0].part for path in kept]
    assert parts == [parts[-1] - 2, parts[-1] - 1, parts[-1]]
    assert other.exists()


def test_a_disk_that_cannot_follow_ends_the_recording_with_a_valid_beginning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    flight = files(tmp_path)
    flight.record(0.0, Tick())
    monkeypatch.setattr(recorder, "MAX_QUEUED_BYTES", -1)
    flight.record(1.0, Tick())
    monkeypatch.undo()
    flight.record(2.0, Tick())
    flight.close()
    assert [entry.now for entry in read(chunks(flight.path))[1]] == [0.0]
    assert "the flight recorder stops" in caplog.text


def test_a_write_error_is_logged_once_and_survived(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("this system has no /dev/full")
    flight = files(tmp_path)
    flight._file.close()
    flight._file = full.open("wb")
    flight.record(1.0, Tick())
    flight.close()
    flight.record(2.0, Tick())
    assert caplog.text.count("the flight recorder stops: it cannot write") == 1


def test_a_directory_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match="cannot write the flight recorder"):
        files(tmp_path / "file" / "flight")


def test_an_event_that_cannot_be_encoded_ends_recording_not_serving(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    flight = files(tmp_path)
    flight.record(1.0, Tick())
    huge = ApplyRequest(base_version=1 << 70)
    flight.record(2.0, ApplyWanted(ask_id="a", plan_id="p", apply=huge))
    flight.record(3.0, FirstToken(request_id="\ud800"))
    flight.close()
    assert [entry.now for entry in read(chunks(flight.path))[1]] == [1.0]
    assert "cannot write a ApplyWanted" in caplog.text
