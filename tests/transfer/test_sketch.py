"""The count-min sketch: what it guarantees, how far it errs, and that it ages."""

from __future__ import annotations

import random
import time
from collections import Counter

import pytest

from transfer.errors import InvalidValue
from transfer.sketch import MAX_COUNT, CountMin


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def skewed(seed: int, count: int) -> list[int]:
    rng = random.Random(seed)
    return [int(rng.paretovariate(0.7)) % 5000 for _ in range(count)]


def test_estimates_are_never_too_low_and_seldom_too_high() -> None:
    sketch, truth = CountMin(width=4096), Counter[int]()
    for number in skewed(1, 20_000):
        truth[number] += 1
        assert sketch.add(key(number)) >= truth[number]
    errors = {number: sketch.estimate(key(number)) - count for number, count in truth.items()}
    assert min(errors.values()) == 0
    assert sum(error > 2 for error in errors.values()) < 0.02 * len(truth)


def test_more_keys_than_counters_still_tell_hot_from_cold() -> None:
    sketch = CountMin(width=1024)
    for number in range(5000):
        sketch.add(key(number + 100_000))
        if number % 10 == 0:
            sketch.add(key(7))
    cold = max(sketch.estimate(key(number)) for number in range(200_000, 201_000))
    assert cold < 25
    assert 500 <= sketch.estimate(key(7)) <= 510


def test_ageing_halves_every_count() -> None:
    sketch, counts = CountMin(width=1 << 15), {number: number % 9 for number in range(300)}
    for number, count in counts.items():
        for _ in range(count):
            sketch.add(key(number))
    for _ in range(3):
        sketch.age()
        counts = {number: count // 2 for number, count in counts.items()}
        assert {number: sketch.estimate(key(number)) for number in counts} == counts
    assert sketch.add(key(8)) == 2


def test_counts_end_at_a_ceiling() -> None:
    sketch = CountMin(width=2, depth=1)
    for _ in range(MAX_COUNT + 10):
        count = sketch.add(b"x")
    assert count == sketch.estimate(b"x") == MAX_COUNT
    sketch.age()
    assert sketch.estimate(b"x") == MAX_COUNT // 2


def test_places_depend_on_the_key_alone() -> None:
    """Known answers: the same in every process and on every machine."""
    sketch = CountMin(width=256, depth=4)
    assert [place & 255 for place in sketch._hashed(b"phaseplane")] == [187, 65, 72, 2]


def test_a_large_sketch_ages_without_a_pause_that_anybody_would_notice() -> None:
    sketch = CountMin(width=1 << 17)
    sketch.add(b"x")
    started = time.process_time()
    sketch.age()
    assert time.process_time() - started < 0.05


@pytest.mark.parametrize(("width", "depth"), [(0, 4), (1000, 4), (-8, 4), (1 << 40, 1), (8, 0), (8, 17)])
def test_sizes_that_cannot_work_are_refused(width: int, depth: int) -> None:
    with pytest.raises(InvalidValue, match="power of two"):
        CountMin(width, depth)
