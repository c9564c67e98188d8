"""The parts of the validation, in the order of the report."""

from __future__ import annotations

from pathlib import Path

from controlplane.validation.cluster import splitwise_clusters
from controlplane.validation.goodput import distserve_goodput
from controlplane.validation.mooncake import mooncake_policies
from controlplane.validation.recorded import TITLE as RECORDED
from controlplane.validation.recorded import recorded_fleet
from controlplane.validation.report import Part
from controlplane.validation.silicon import TITLE as SERVED
from controlplane.validation.silicon import report as served_models
from controlplane.validation.sources import AZURE, DISTSERVE, MOONCAKE, SILICON, SPLITWISE
from controlplane.validation.steps import distserve_steps, splitwise_steps

NAMES = (
    "distserve-steps", "splitwise-steps", "distserve-goodput", "mooncake-policies", "splitwise-clusters", "silicon",
    "recorded",
)  # fmt: skip


def make_parts(recording: Path | None) -> list[Part]:
    """All of them; recording: of a fleet, for the last."""
    parts = (
        ("Step times: DistServe's profiles", (DISTSERVE,), distserve_steps),
        ("Step times: Splitwise's measurements", (SPLITWISE,), splitwise_steps),
        ("SLO attainment over rate: DistServe's Table 2", (DISTSERVE,), distserve_goodput),
        ("Placement policies: Mooncake's mean TTFT", (MOONCAKE, SPLITWISE), mooncake_policies),
        ("Clusters: Splitwise's simulator", (SPLITWISE, AZURE), splitwise_clusters),
        (SERVED, (SILICON,), served_models),
        (RECORDED, (), lambda data: recorded_fleet(recording)),
    )
    return [Part(name, *part) for name, part in zip(NAMES, parts, strict=True)]
