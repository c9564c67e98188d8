"""The past in memory: seconds, tens with their extremes, gaps, bounds, clocks that jump, and what an answer holds."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest

from controlplane.core import series
from controlplane.core.series import (
    BYTES_A_SERIES,
    COARSE_S,
    COARSE_SLOTS,
    FINE_SLOTS,
    MAX_POINTS,
    SeriesBook,
    SeriesRow,
)
from transfer.screens import Column

T = 1_800_000_000
"""A whole number of tens."""


def ask(book: SeriesBook, name: str, since: float, until: float, step: float = 1.0) -> tuple[list[int], Column]:
    window = book.window(since, until, step)
    column = book.column(name, window)
    assert column is not None
    assert len(column.last) == len(window.times)
    return list(window.times), column


def test_seconds_come_back_as_they_were_told_and_gaps_as_none() -> None:
    book = SeriesBook()
    for at, value in ((0, 0.1), (1, 2.0), (4, 5.0)):
        book.put(T + at + 0.7, {"x": value, "later": value if at > 1 else None})
    times, column = ask(book, "x", T - 1, T + 10)
    assert times == [T - 1, T, T + 1, T + 2, T + 3, T + 4]
    assert column == Column(last=(None, 0.1, 2.0, None, None, 5.0))
    assert ask(book, "later", T, T + 4)[1].last == (None, None, None, None, 5.0)
    assert book.column("unknown", book.window(T, T + 4, 1)) is None
    assert book.names() == ["later", "x"]


def test_a_wider_step_has_the_last_and_the_extremes() -> None:
    book = SeriesBook()
    for at in range(9):
        book.put(T + at, {"x": float((at * 4) % 9)})  # 0 4 8 3 7 2 6 1 5
    times, column = ask(book, "x", T, T + 8, 3)
    assert times == [T, T + 3, T + 6]
    assert column == Column(last=(8.0, 2.0, 5.0), low=(0.0, 2.0, 1.0), high=(8.0, 7.0, 6.0))


def test_tens_are_kept_a_day_and_told_once_for_the_disk() -> None:
    book = SeriesBook()
    kept = [row for at in range(35) if (row := book.put(T + at, {"x": at % 7, "instance.a.x": 1.0})) is not None]
    assert kept == [
        SeriesRow(at_s=T, values={"x": (2, 0, 6)}), SeriesRow(at_s=T + 10, values={"x": (5, 0, 6)}),
        SeriesRow(at_s=T + 20, values={"x": (1, 0, 6)}),
    ]  # fmt: skip
    times, column = ask(book, "x", T, T + 60, 10)
    assert times == [T, T + 10, T + 20, T + 30]
    assert column == Column(last=(2.0, 5.0, 1.0, 6.0), low=(0.0, 0.0, 0.0, 2.0), high=(6.0, 6.0, 6.0, 6.0)), (
        "the ten seconds that are not over are in it too"
    )
    assert ask(book, "x", T, T + 60, 20)[1] == Column(last=(5.0, 6.0), low=(0.0, 0.0), high=(6.0, 6.0))


def test_what_the_disk_kept_is_the_past_of_a_new_life() -> None:
    rows = [SeriesRow(at_s=T + 10 * ten, values={"x": (ten, ten - 1.0, ten + 1.0)}) for ten in range(3)]
    book = SeriesBook()
    book.load(rows)
    book.put(T + 45, {"x": 9.0})
    times, column = ask(book, "x", T, T + 45, 10)
    assert times == [T, T + 10, T + 20, T + 30, T + 40]
    assert column.last == (0.0, 1.0, 2.0, None, 9.0)
    assert column.high == (1.0, 2.0, 3.0, None, 9.0)
    assert ask(book, "x", T, T + 45, 1) == (times, column), "of the life before there are no seconds"
    assert ask(book, "x", T + 30, T + 45, 1)[0] == list(range(T + 30, T + 46))


def test_both_rings_turn_over_and_stay_in_their_bounds() -> None:
    book = SeriesBook()
    start = T
    line = series._Line(4)
    for slot in range(100, 111):
        line.put(slot, float(slot))
        shown = [value for value in line.span(100, 112) if not math.isnan(value)]
        assert shown == [float(one) for one in range(max(100, slot - 3), slot + 1)], slot
        assert len(line._values) <= 4
    for second in range(start, start + FINE_SLOTS + 25):
        book.put(second, {"x": float(second - start)})
    newest = start + FINE_SLOTS + 24
    times, column = ask(book, "x", newest - FINE_SLOTS + 1, newest, 3)
    assert times[0] <= newest - FINE_SLOTS + 1
    assert column.last[-1] == FINE_SLOTS + 24
    assert column.low is not None
    assert min(value for value in column.low if value is not None) == 25.0, "the first 25 seconds are gone"
    assert BYTES_A_SERIES == 4 * (3600 + 3 * 8640)
    assert COARSE_S * COARSE_SLOTS == 86400


def test_an_answer_has_a_bounded_number_of_steps_and_reads_the_tens_when_it_reaches_far_back() -> None:
    book = SeriesBook()
    for second in range(0, 86400, 10):
        book.put(T + second, {"x": 1.0})
    newest = T + 86390
    for since, step in ((newest - 3599, 1.0), (newest - 86400, 1.0), (0.0, 0.001), (newest - 40000, 1e300)):
        window = book.window(since, newest, step)
        assert len(window.times) <= MAX_POINTS + 1
        column = book.column("x", window)
        assert column is not None
        assert any(value == 1.0 for value in column.last)
    assert not book.window(newest - 1000, newest, 1.0).coarse
    assert book.window(newest - 4000, newest, 1.0)[2:] == (10, True)
    assert len(book.window(newest + 100, newest, 1.0).times) == 0


def test_a_clock_that_jumps() -> None:
    book = SeriesBook()
    for at in (0, 1, 2):
        book.put(T + at, {"x": float(at)})
    assert book.put(T + 1, {"x": 99.0}) is None
    assert ask(book, "x", T, T + 2)[1].last == (0.0, 1.0, 2.0)
    book.put(T + 10 * FINE_SLOTS, {"x": 7.0})
    assert ask(book, "x", T + 10 * FINE_SLOTS - 1, T + 10 * FINE_SLOTS)[1].last == (None, 7.0)
    book.put(T - 5000, {"x": 5.0})  # set back: the future it had seen is forgotten
    assert ask(book, "x", T - 5001, T + 10 * FINE_SLOTS)[1].last == (None, 5.0)


def test_instances_that_left_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(series, "MAX_SERIES", 3)
    book = SeriesBook()
    book.put(T, {"a": 1.0, "b": 1.0, "old": 1.0})
    book.put(T + 1, {"a": 1.0, "b": 1.0, "new": 1.0})
    assert book.names() == ["a", "b", "old"], "who was told a second ago stays"
    book.put(T + 2, {"a": 1.0, "b": 1.0, "new": 1.0})
    book.put(T + 3, {"a": 1.0, "b": 1.0, "new": 1.0, "one more": 1.0})
    assert book.names() == ["a", "b", "new"]


def test_a_fleet_with_far_more_series_than_there_is_room_for_costs_little() -> None:
    class Counted(dict[str, Any]):
        num_scans = 0

        def __iter__(self) -> Iterator[str]:
            self.num_scans += 1
            return super().__iter__()

    book = SeriesBook()
    told = {f"instance.n{number}.kv_use": 1.0 for number in range(8000)}
    book.put(T, told)
    book._series = held = Counted(book._series)
    book.put(T + 1, told)
    assert 1 <= held.num_scans <= 2, "the oldest is looked for once a second, not for each that has no room"
    assert len(book.names()) == series.MAX_SERIES


def test_names_by_their_beginning() -> None:
    book = SeriesBook()
    book.put(T, dict.fromkeys(("kv_use", "class.a.x", "class.b.x", "class.a.y"), 1.0))
    assert book.names(["kv_use", "class.a.*", "nothing", "class.a.x"]) == ["kv_use", "class.a.x", "class.a.y"]
    assert book.names(["*"]) == sorted(("kv_use", "class.a.x", "class.b.x", "class.a.y"))
