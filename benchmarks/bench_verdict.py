"""What the cells of bench_policies.py come to: ours beside the best peer of each, and beside what is possible."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

LEAST = 1e-9


class Outcome(NamedTuple):
    """of_bound: None where no bound is known."""

    goodput_per_s: float
    of_bound: float | None


class Compared(NamedTuple):
    """One cell at one load, by seed. Only seeds that both have count: they are the same requests."""

    cell: str
    load: float
    mixed_classes: bool
    peer: str
    ours: Mapping[int, Outcome]
    theirs: Mapping[int, Outcome]

    @property
    def ratios(self) -> list[float]:
        return [one.goodput_per_s / max(self.theirs[seed].goodput_per_s, LEAST)
                for seed, one in self.ours.items() if seed in self.theirs]  # fmt: skip

    @property
    def ratio(self) -> float:
        return _geometric(self.ratios)

    @property
    def noise(self) -> float:
        """Half the range of the ratio between seeds."""
        return (max(self.ratios) - min(self.ratios)) / 2

    @property
    def spread(self) -> str:
        return f" ± {self.noise:.1g}" if len(self.ratios) > 1 else ""

    @property
    def most_ratio(self) -> float | None:
        """How far ahead of this peer any policy could be at most."""
        shares = _shares(self.theirs)
        return 1.0 / max(statistics.fmean(shares), LEAST) if shares else None


def verdict(compared: Sequence[Compared]) -> Iterator[str]:
    """One line for each kind of fleet and load, then the cells where ours is not the best, then the share of what is
    possible."""
    for mixed, name in ((True, "heterogeneous"), (False, "homogeneous")):
        for load in sorted({one.load for one in compared}):
            part = [one for one in compared if one.mixed_classes is mixed and one.load == load]
            if not part:
                continue
            line = (
                f"{name} fleets at {load:g} of the knee: ours / best peer of each cell "
                f"{_geometric([one.ratio for one in part]):.3f} in the geometric mean of {len(part)} cells, "
                f"least {min(one.ratio for one in part):.3f}"
            )
            most = [one.most_ratio for one in part if one.most_ratio is not None]
            yield line + (f"; no policy could exceed {_geometric(most):.3f}" if most else "")
    behind = [one for one in compared if one.ratio < 1.0 - one.noise]
    best = len(compared) - len(behind)
    yield f"ours is the best within the spread of seeds in {best} of {len(compared)}"
    for one in behind:
        yield f"  not in {one.cell} at {one.load:g} of the knee: {one.ratio:.3f}{one.spread} of {one.peer}"
    shares = [statistics.fmean(found) for one in compared if (found := _shares(one.ours))]
    if shares:
        yield f"ours reaches {statistics.median(shares):.0%} of the bound in the median cell, least {min(shares):.0%}"


def _shares(outcomes: Mapping[int, Outcome]) -> list[float]:
    return [one.of_bound for one in outcomes.values() if one.of_bound is not None]


def _geometric(values: Sequence[float]) -> float:
    return math.exp(statistics.fmean(math.log(max(one, LEAST)) for one in values))
