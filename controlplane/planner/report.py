"""What a plan says, as data: `phaseplane plan --json` prints it, view.py shows it to a person."""

from __future__ import annotations

from controlplane.planner.why import Phase
from transfer.said import Said
from transfer.terms import Struct


class Input(Struct, frozen=True):
    """is_default: nobody said so."""

    name: str
    value: str
    is_default: bool


class FleetReport(Struct, frozen=True):
    """One fleet as judged. max_rate: highest offered rate at the target attainment, low and high its 80 % interval.
    per_dollar: requests a second for a dollar an hour. label: what it stands for; note: what is special about it; both
    _said for other languages, where there is something."""

    label: str
    fleet: str
    xpyd: str
    num_gpus: int
    price_per_hour: float
    max_rate: float
    low: float
    high: float
    per_gpu: float
    per_dollar: float
    cost_per_good: float | None
    attainment: float
    policy: str
    forecast: float | None
    note: str = ""
    label_said: tuple[Said, ...] = ()
    note_said: Said | None = None


class Point(Struct, frozen=True):
    """Of the frontier: the most that any fleet for at most this price reaches."""

    price_per_hour: float
    max_rate: float
    fleet: str
    simulated: bool


class PlanReport(Struct, frozen=True):
    """disaggregate: whether the verdict is to. margin: how much more the chosen fleet serves than the best of the other
    kind (or, of a wanted rate, how much less it costs); None where the other kind reaches nothing. possible_rate: no
    policy reaches more with the chosen fleet and its roles at this target (bound.py); of_possible: the share that
    max_rate is. commands: what makes it so, in order. warnings_said, verdict_said, bottleneck_said: for other
    languages."""

    inputs: tuple[Input, ...]
    warnings: tuple[str, ...]
    warnings_said: tuple[Said, ...]
    verdict: str
    verdict_said: Said
    disaggregate: bool
    margin: float | None
    chosen: FleetReport
    frontier: tuple[Point, ...]
    phases: tuple[Phase, ...]
    bottleneck: str
    bottleneck_said: Said
    possible_rate: float | None
    of_possible: float | None
    best_per_gpu: FleetReport
    best_per_dollar: FleetReport
    alternatives: tuple[FleetReport, ...]
    provenance: tuple[str, ...]
    commands: tuple[str, ...]
    num_fleets: int
    num_runs: int
    wall_s: float
