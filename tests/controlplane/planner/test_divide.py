"""Who gets which GPUs: answers worked out by hand, every division of small fleets tried, and what that costs."""

from __future__ import annotations

import itertools
import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controlplane.planner.divide import Demand, Limits, Option, divide, within

PRICES = (2.0, 1.0)


def option(rate: float, *gpus: int, price: float | None = None) -> Option:
    worth = sum(one * each for one, each in zip(gpus, PRICES, strict=False))
    return Option(gpus, worth if price is None else price, rate)


def each(per_gpu: float, most: int) -> list[Option]:
    """Instances of one GPU of one class."""
    return [option(per_gpu * count, count) for count in range(1, most + 1)]


def chosen(demands: list[Demand], limits: Limits) -> list[Option] | None:
    picks = divide(demands, limits)
    return None if picks is None else [one.options[place] for one, place in zip(demands, picks, strict=True)]


# --- by hand -----------------------------------------------------------------------------------------------------


def test_the_worst_served_model_gets_the_most_that_it_can() -> None:
    """12 GPUs; 10/s at 1/s a GPU beside 30/s at 5/s a GPU: 8 and 4 serve .8 and .67, 7 and 5 serve .7 and .83."""
    slow, fast = Demand(10.0, each(1.0, 12)), Demand(30.0, each(5.0, 12))
    found = chosen([slow, fast], Limits((12,)))
    assert found == [option(7.0, 7), option(25.0, 5)]


def test_what_meets_every_rate_is_the_cheapest_that_does() -> None:
    """4/s takes two GPUs of the first class for $4 or three of the second for $3."""
    demand = Demand(4.0, [option(4.0, 2, 0), option(4.0, 0, 3), option(9.0, 4, 0)])
    assert chosen([demand, demand], Limits((8, 6))) == [option(4.0, 0, 3), option(4.0, 0, 3)]
    found = chosen([demand, demand], Limits((8, 5)))
    assert found is not None
    assert sorted(found) == [option(4.0, 0, 3), option(4.0, 2, 0)], "the second class has no six any more"


def test_scarce_hardware_goes_to_who_has_no_other() -> None:
    """The first class serves both models best, but only it holds the second model's weights."""
    small = Demand(10.0, [option(10.0, 2, 0), option(8.0, 0, 4)])
    large = Demand(10.0, [option(9.0, 2, 0)])
    assert chosen([small, large], Limits((2, 4))) == [option(8.0, 0, 4), option(9.0, 2, 0)]


def test_what_is_left_over_goes_where_it_adds_most_for_its_price() -> None:
    """The third model holds the smallest share at .5 whatever else: 4 GPUs are left, for +2/s each or +3/s each."""
    stuck = Demand(10.0, [option(5.0, 1)])
    two, three = Demand(20.0, each(2.0, 10)), Demand(30.0, each(3.0, 10))
    found = chosen([stuck, two, three], Limits((15,)))
    assert found == [option(5.0, 1), option(10.0, 5), option(27.0, 9)], (
        "5 and 5 are half of each; 4 more go to the last"
    )
    assert chosen([stuck, two, three], Limits((30,))) == [option(5.0, 1), option(20.0, 10), option(30.0, 10)], (
        "more than wanted is worth nothing"
    )


def test_a_budget_binds_like_hardware() -> None:
    demand = Demand(4.0, each(1.0, 8))
    assert chosen([demand, demand], Limits((8,), 8.0)) == [option(2.0, 2)] * 2, "$2 a GPU: four of them"
    found = chosen([demand, demand], Limits((8,), 11.9))
    assert found is not None
    assert sorted(found) == [option(2.0, 2), option(3.0, 3)]
    assert chosen([demand, demand], Limits((8,), 3.9)) is None


def test_a_model_without_an_option_leaves_no_division() -> None:
    able, unable = Demand(1.0, each(1.0, 4)), Demand(1.0, [option(0.0, 1), option(9.0, 5)])
    assert divide([able, unable], Limits((4,))) is None
    assert divide([able, Demand(1.0, [])], Limits((4,))) is None
    assert divide([able] * 5, Limits((4,))) is None, "each takes a GPU at least"


def test_one_model_takes_the_best_that_it_has_room_for() -> None:
    demand = Demand(5.0, [option(4.0, 2), option(5.0, 4), option(5.0, 3), option(9.0, 8)])
    assert within(demand, Limits((8,))) == 2, "the cheapest of those with all that is wanted"
    assert within(demand, Limits((2,))) == 0
    assert within(demand, Limits((1,))) is None


# --- against every division --------------------------------------------------------------------------------------


def least(demands: list[Demand], options: tuple[Option, ...]) -> float:
    return min(demand.share(one) for demand, one in zip(demands, options, strict=True))


def fits(options: tuple[Option, ...], limits: Limits) -> bool:
    gpus = [sum(column) for column in zip(*(one.gpus for one in options), strict=True)]
    return limits.hold(gpus, sum(one.price for one in options))


@st.composite
def divisions(draw: st.DrawFn) -> tuple[list[Demand], Limits]:
    classes = draw(st.integers(1, 3))
    counts = st.tuples(*[st.integers(0, 4)] * classes)
    options = st.builds(
        Option, counts, st.integers(1, 9).map(float), st.integers(0, 12).map(float)
    )  # fmt: skip
    demands = draw(
        st.lists(
            st.builds(Demand, st.integers(1, 12).map(float), st.lists(options, max_size=6)), min_size=1, max_size=4
        )
    )
    budget = draw(st.none() | st.integers(1, 24).map(float))
    return demands, Limits(draw(st.tuples(*[st.integers(0, 7)] * classes)), budget)


@given(divisions())
@settings(max_examples=150, deadline=None)
def test_no_division_is_better(case: tuple[list[Demand], Limits]) -> None:
    demands, limits = case
    every = [one for one in itertools.product(*(demand.options for demand in demands)) if fits(one, limits)]
    best = max((least(demands, one) for one in every), default=0.0)
    found = chosen(demands, limits)
    if best <= 0:
        assert found is None
        return
    assert found is not None
    own = tuple(found)
    assert fits(own, limits)
    assert least(demands, own) == pytest.approx(best)
    if best >= 1.0:
        cheapest = min(sum(part.price for part in one) for one in every if least(demands, one) >= 1.0)
        assert sum(part.price for part in own) == pytest.approx(cheapest)
    for place, demand in enumerate(demands):  # nothing better for one model is left lying about
        for other in demand.options:
            changed = (*own[:place], other, *own[place + 1 :])
            assert demand.share(other) <= demand.share(own[place]) + 1e-9 or not fits(changed, limits)


def test_a_large_fleet_of_many_models_is_divided_soon() -> None:
    """6 models, 3 classes, 215 options each: the states that are kept have to stay few."""
    draw = random.Random(1)
    demands = []
    for _ in range(6):
        speeds = [draw.uniform(0.5, 2.0) for _ in range(3)]
        demands.append(Demand(300.0, [
            Option(gpus, sum(gpus), sum(count * speed for count, speed in zip(gpus, speeds, strict=True)))
            for gpus in itertools.product(range(0, 96, 16), repeat=3) if any(gpus)
        ]))  # fmt: skip
    began = time.process_time()
    assert divide(demands, Limits((160, 160, 160))) is not None
    assert time.process_time() - began < 5.0
