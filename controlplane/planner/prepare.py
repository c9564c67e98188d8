"""From what `phaseplane plan` is told to what a search needs: inventory, workload and traffic of one model."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from msgspec.structs import replace

from controlplane.planner.capacity import Workload
from controlplane.planner.fleets import Inventory, parse_inventory
from controlplane.planner.judge import Judge, OnRun
from controlplane.sim.options import core_config, read_input
from controlplane.sim.spec import SimConfig
from nodes.shapes import shape
from transfer.said import Said
from transfer.terms import Struct
from transfer.traces.cutting import cut
from transfer.traces.generating import is_generated
from transfer.traces.loading import Wanted
from transfer.traces.request import TraceRequest

TRACE = "generated:conversation"
NUM_GENERATED = 8000


class Prepared(Struct, frozen=True):
    """notes: where a default decides, or a trace was mended. num: requests simulated at each rate, at least."""

    inventory: Inventory
    workload: Workload
    config: SimConfig
    trace: Sequence[TraceRequest]
    notes: tuple[Said, ...]
    num: int

    def judge(self, on_run: OnRun | None, wanted: float | None, *, enough: bool = False) -> Judge:
        workload = self.workload
        return Judge(self.trace, self.config, workload.model, workload.target, self.num, on_run, wanted, enough)


def prepare(
    flags: argparse.Namespace, model: str, fleet: str, slos: Sequence[str], source: str | None, format: str | None
) -> Prepared:  # fmt: skip
    """source, format: of the trace. Raises InvalidValue."""
    model_shape = shape(model)
    core, notes = core_config(flags.policy, slos)
    trace = read_input(source or TRACE, format, _wanted(flags, source or TRACE), flags.block_size)
    config = SimConfig(
        core=replace(core, autopilot="off"), model=model, token_bytes=model_shape.kv_token_bytes,
        block_size=flags.block_size, seed=flags.seed,
    )  # fmt: skip
    part = cut(trace.requests, num=flags.num)
    workload = Workload(part, core.classes, model_shape, flags.block_size, flags.target, core.default_class)
    inventory = parse_inventory(fleet, model, flags.block_size)
    return Prepared(inventory, workload, config, trace.requests, (*notes, *trace.notes), flags.num)


def _wanted(flags: argparse.Namespace, source: str) -> Wanted:
    """Of generated traffic whose text does not say how much: enough for any rate."""
    endless = is_generated(source) and "num=" not in source
    return Wanted(num=max(flags.num, NUM_GENERATED) if endless else None, seed=flags.seed)
