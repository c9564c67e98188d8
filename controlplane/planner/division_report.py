"""What a plan of several models says, as data: `phaseplane plan --json` prints it, division_view.py shows it."""

from __future__ import annotations

from typing import Literal

from controlplane.planner.report import FleetReport, Input
from transfer.said import Said
from transfer.terms import Struct

Kind = Literal["chosen", "equal", "now"]


class ModelReport(Struct, frozen=True):
    """What one model gets. wanted: requests a second; share: of it that is served with the target attainment, low and
    high its 80 % interval. gpus: by class. fleet: judged at no more than the wanted rate; None: no instance."""

    model: str
    wanted: float
    share: float
    low: float
    high: float
    gpus: dict[str, int]
    fleet: FleetReport | None


class DivisionReport(Struct, frozen=True):
    """now: what the models said serves them. served: requests a second of all models. spare: GPUs by class that nobody
    gets."""

    kind: Kind
    least_share: float
    served: float
    price_per_hour: float
    cost_per_good: float | None
    spare: dict[str, int]
    models: tuple[ModelReport, ...]


class FrontierPoint(Struct, frozen=True):
    """The most that one model was found to serve with so many GPUs of each class, up to its wanted rate."""

    gpus: dict[str, int]
    rate: float
    fleet: str
    simulated: bool


class DivisionPlan(Struct, frozen=True):
    """config: what the control plane reads to serve these models. commands: what starts and ends instances, in order.
    frontiers: by model. warnings_said and verdict_said: for other languages."""

    inputs: tuple[Input, ...]
    warnings: tuple[str, ...]
    warnings_said: tuple[Said, ...]
    verdict: str
    verdict_said: Said
    chosen: DivisionReport
    alternatives: tuple[DivisionReport, ...]
    frontiers: dict[str, tuple[FrontierPoint, ...]]
    provenance: tuple[str, ...]
    config: str
    commands: tuple[str, ...]
    num_fleets: int
    num_runs: int
    wall_s: float
