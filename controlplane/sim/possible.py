"""How much of what is possible a run reached: the place where the planner's upper bound enters the report."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

from controlplane.sim.spec import NodeSpec, SimConfig
from transfer.traces.request import TraceRequest


def most_goodput_per_s(
    nodes: Sequence[NodeSpec], trace: Sequence[TraceRequest], config: SimConfig, span_s: float
) -> float | None:  # fmt: skip
    """Good requests a second, over the same span, that no policy can exceed with this fleet and trace; with roles as
    they are unless the run may change them. None: no bound is known, since the packages it needs are not there."""
    if span_s <= 0 or importlib.util.find_spec("scipy") is None:
        return None
    from controlplane.planner.bound import upper_bound

    changes = bool(config.orders) or config.core.autopilot == "auto"
    core = config.core
    found = upper_bound(
        nodes, trace, core.classes, core.default_class, "free" if changes else "fixed", config.block_size
    )
    return found.good / span_s
