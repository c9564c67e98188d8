"""Slots and segments, without files: every reclaim gains room, what is kept is bounded, nothing is given out twice."""

from __future__ import annotations

import random

import pytest
from pool_harness import name

from nodes.pool.slots import MAX_SEGMENTS, MIN_SEGMENTS, Place, SlotIndex
from transfer.errors import InvalidValue


def nothing(h: bytes) -> bool:
    return False


def write(index: SlotIndex, *numbers: int) -> None:
    for number in numbers:
        place = index.allocate()
        assert place is not None
        index.commit(name(number), place)


def read(index: SlotIndex, number: int) -> None:
    place = index.begin_read(name(number))
    assert place is not None
    index.end_read(place)


def test_segments_are_neither_too_few_nor_too_many() -> None:
    small, large = SlotIndex(8, 1000), SlotIndex(100_000, 10)
    assert (small.slots, small.max_segments) == (1, MIN_SEGMENTS)
    assert large.max_segments <= MAX_SEGMENTS
    assert large.slots * large.max_segments <= 100_000
    with pytest.raises(InvalidValue, match="at least 8 blocks, got 7"):
        SlotIndex(7, 1)


def test_room_is_reclaimed_from_the_oldest_segment_and_one_is_kept_in_reserve() -> None:
    index = SlotIndex(32, 4)
    write(index, *range(24))
    assert index.reclaim(nothing) is None
    write(index, *range(24, 28))
    assert index.allocate() is None
    spare = index.allocate(again=True)
    assert spare is not None
    index.fail(spare)
    plan = index.reclaim(nothing)
    assert plan is not None
    assert (plan.segment, plan.again) == (0, [])
    assert index.reclaim(nothing) is None  # one at a time


def test_half_a_segment_at_most_is_kept_for_having_been_read_and_all_that_is_pinned() -> None:
    index = SlotIndex(32, 4)
    write(index, *range(28))
    for number in range(4):
        read(index, number)
    plan = index.reclaim(nothing)
    assert plan is not None
    assert plan.again == [name(0), name(1)]
    index.give_up(plan.segment)
    pinned = index.reclaim(lambda h: h in {name(1), name(2), name(3)})
    assert pinned is not None
    assert pinned.again == [name(1), name(2), name(3)]


def test_a_nearly_empty_segment_goes_before_the_oldest() -> None:
    index = SlotIndex(160, 16)
    write(index, *range(16 * 9))
    for number in range(16 * 3, 16 * 4 - 1):
        index.remove(name(number))
    plan = index.reclaim(nothing)
    assert plan is not None
    assert plan.segment == 3


def test_a_segment_that_is_still_being_written_is_not_reclaimed() -> None:
    """What lands in it after its end would keep it for ever, and with it all other reclaims."""
    index = SlotIndex(32, 4)
    places = [index.allocate() for _ in range(28)]
    assert index.reclaim(nothing) is None
    for number, place in enumerate(places[4:], start=4):
        assert place is not None
        index.commit(name(number), place)
    plan = index.reclaim(nothing)
    assert plan is not None
    assert plan.segment == 1


def test_a_file_goes_only_when_nobody_reads_it() -> None:
    index = SlotIndex(32, 4)
    write(index, *range(5))
    place = index.begin_read(name(0))
    assert place is not None
    for number in range(4):
        index.remove(name(number))
        index.remove(name(number))
    assert index.take_empty() == []
    index.end_read(place)
    assert index.take_empty() == [0]
    assert index.num_segments == 2  # until its file is gone
    index.gone(0)
    assert (index.num_segments, index.check()) == (1, 0)


def test_a_full_disk_gives_up_no_segment_with_something_pinned() -> None:
    index = SlotIndex(32, 4)
    write(index, *range(9))
    read(index, 4)
    plan = index.reclaim(lambda h: h == name(0), now=True)
    assert plan is not None
    assert (plan.segment, plan.again) == (1, [])
    index.give_up(1)
    assert index.reclaim(lambda h: h in {name(0), name(4)}, now=True) is None


@pytest.mark.parametrize("seed", range(5))
def test_no_slot_is_lost_or_given_out_twice(seed: int) -> None:
    rng, index = random.Random(seed), SlotIndex(40, 5)
    writing: list[tuple[bytes, Place]] = []
    reading: list[Place] = []
    for _ in range(3000):
        h = name(rng.randrange(60))
        match rng.randrange(6):
            case 0 | 1:
                place = index.allocate()
                if place is not None:
                    assert place not in [other for _, other in writing]
                    writing.append((h, place))
            case 2 if writing:
                h, place = writing.pop(rng.randrange(len(writing)))
                index.commit(h, place) if rng.random() < 0.9 else index.fail(place)
            case 3:
                found = index.begin_read(h)
                if found is not None:
                    reading.append(found)
            case 4 if reading:
                index.end_read(reading.pop(rng.randrange(len(reading))))
            case _:
                plan = index.reclaim(nothing)
                if plan is not None:
                    for gone in index.live(plan.segment):
                        index.remove(gone)
                for number in index.take_empty():
                    index.gone(number)
        assert index.check() == 0
        assert index.num_segments <= index.max_segments
        assert index.busy() == len(writing) + len(reading)
