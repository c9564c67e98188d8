"""Max goodput of a fleet by simulation: the highest offered rate at a target attainment, by bisection."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from msgspec.structs import replace

from controlplane.planner.capacity import highest
from controlplane.planner.fleets import Fleet, build
from controlplane.sim.driver import simulate
from controlplane.sim.spec import NodeSpec, SimConfig, SimResult
from transfer.profile import ModelShape
from transfer.terms import Role, Struct
from transfer.traces.cutting import cut
from transfer.traces.request import TraceRequest

PRECISION = 0.04
MIN_SPAN_S = 45.0
"""Fewer seconds of traffic would show how a fleet fills up, not how it runs."""
OnRun = Callable[[str, int], None]
"""(what is simulated, runs so far)."""


class Judged(Struct, frozen=True):
    """max_rate: highest simulated rate that reached the target, next_rate the lowest that did not; requests a second.
    result: the run at max_rate, None where no rate reached it."""

    fleet: Fleet
    max_rate: float
    next_rate: float
    result: SimResult | None
    policy: str

    @property
    def per_gpu(self) -> float:
        return self.max_rate / max(1, self.fleet.num_gpus)

    @property
    def per_dollar(self) -> float:
        """Requests a second for a dollar an hour."""
        return self.max_rate / max(1e-9, self.fleet.price_per_hour)

    def use(self, role: Role) -> float | None:
        """Share of the span that steps took on the instances of a role at max_rate."""
        result = self.result
        if result is None or result.span_s <= 0:
            return None
        letter = {Role.PREFILL: "p", Role.DECODE: "d", Role.MIXED: "m"}[role]
        busy = [seconds for name, seconds in result.busy_s.items() if name.startswith(letter)]
        return sum(busy) / len(busy) / result.span_s if busy else None


class Judge:
    """Simulates the same requests on fleets, as fast as the target allows. num: the first so many of the trace, or as
    many more as MIN_SPAN_S seconds have at a rate. wanted: a rate of which it must be known whether it is served."""

    def __init__(
        self, trace: Sequence[TraceRequest], config: SimConfig, model: ModelShape, target: float, num: int,
        on_run: OnRun | None = None, wanted: float | None = None, enough: bool = False,
    ) -> None:  # fmt: skip
        self.config, self.model, self.target = config, model, target
        self._wanted, self._most = wanted, wanted if enough else None
        self.trace, self._num, self._on_run = trace, num, on_run
        self.is_short = False
        """Whether the trace had too few requests for a rate that was simulated."""
        self.num_runs = 0
        self._known: dict[tuple[str, str], Judged] = {}

    def judge(self, fleet: Fleet, guess: float, policy: str | None = None) -> Judged:
        """guess: the rate to begin with. policy: by default the one that serves."""
        policy = policy or self.config.core.policy
        name = (str(fleet), policy)
        if name not in self._known:
            self._known[name] = self._search(fleet, build(fleet, self.model, self.config.block_size), guess, policy)
        return self._known[name]

    def run(
        self, nodes: Sequence[NodeSpec], rate: float, policy: str, what: str,
        trace: Sequence[TraceRequest] | None = None,
    ) -> SimResult:  # fmt: skip
        """The trace, or another one, at this rate."""
        self.num_runs += 1
        if self._on_run is not None:
            self._on_run(what, self.num_runs)
        config = replace(self.config, core=replace(self.config.core, policy=policy, autopilot="off"))
        return simulate(nodes, self.offered(rate, trace), config)

    def offered(self, rate: float, trace: Sequence[TraceRequest] | None = None) -> list[TraceRequest]:
        wanted = max(self._num, math.ceil(rate * MIN_SPAN_S))
        self.is_short = self.is_short or wanted > max(self._num, len(self.trace))
        return cut(self.trace if trace is None else trace, num=wanted, rate=rate)

    def _search(self, fleet: Fleet, nodes: Sequence[NodeSpec], guess: float, policy: str) -> Judged:
        reached: dict[float, SimResult] = {}

        def reaches(rate: float) -> bool:
            if self._most is not None and rate > self._most:
                return False
            result = self.run(nodes, rate, policy, str(fleet))
            if result.attainment >= self.target:
                reached[rate] = result
                return True
            return False

        if self._most is not None and reaches(self._most):
            return Judged(fleet, self._most, self._most, reached[self._most], policy)
        low, high = highest(reaches, guess, PRECISION)
        high = high if self._most is None else min(high, self._most)
        if self._wanted is not None and low < self._wanted < high:
            low, high = (self._wanted, high) if reaches(self._wanted) else (low, self._wanted)
        return Judged(fleet, low, high, reached.get(low), policy)
