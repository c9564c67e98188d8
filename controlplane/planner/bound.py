"""How many requests of a trace a fleet could serve within their objectives at the very most, whatever the policy.

A linear program (HiGHS). It is a relaxation, so its value is at least what any policy reaches that decides for every
request when and where it is prefilled and decoded, with the step times of the profiles and `roles` as given:

1. Let a policy serve the set G well. Put x = 1 for G and 0 elsewhere, and let the parts of x say on which kind of
   instance each phase of a request ran. It has to satisfy every constraint below; then |G| <= the optimum.
2. Prompts. A good request has its unseen tokens (those that no earlier arrival has; an endless cache has the rest)
   computed between its arrival and its TTFT, and its last decode step after that where prefill does not decode. If an
   earlier arrival left a block uncomputed and a later one computes it for both, that is still within the window of the
   earlier. Steps of an instance follow each other and last at least what charges.py adds up for what is in them.
3. Answers. Tokens 2 to n of a good request come in n - 1 steps, after its first token, which together last at most
   (n - 1) TPOT. Let w be the part of a step that does not depend on what is in it, m_r what row r adds, M the sum of
   m_r, t >= w + M the step. Weigh each request's pace by v_r = w m_r / (T_r - w)^2, T_r its TPOT, and add
   sum v_r (t - T_r) <= 0 over all steps to the time they take. With y_c the rows of pace T_c in units of T_c - w,
     t + sum v_r (t - T_r) - sum m_r T_r / (T_r - w) >= w (1 - sum y_c)^2 >= 0,
   by the inequality of arithmetic and geometric means for y_c y_d. So the steps of any set of good requests take at
   least sum m_r T_r / (T_r - w) seconds: equality where batches are as large as the pace allows. Rows grow longer;
   what they grow by counts once. Where a batch may have at most B rows, w >= w rows / B; where KV has room for K
   tokens, w >= w tokens / K, of which those that others share are left out.
4. Time. For all s < t, what must happen between s and t takes at most (t - s) a device: sums of 2 and 3 over the
   requests whose windows lie inside. Instances of a kind count together, prompts and batches may be divided, KV moves
   at once: each allows more than there is.

Point 3 takes all of an answer to run on one kind of instance: what moving running answers between kinds of hardware
could gain by uneven paces is not in it. Faults and role switches (roles="fixed") are not either.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import numpy as np

from controlplane.core.config import DEFAULT_CLASS
from controlplane.planner.charges import (
    Device,
    Floats,
    Roles,
    Sizes,
    View,
    decode_s,
    devices,
    least_prefill_s,
    least_step_s,
    prefill_s,
)
from controlplane.planner.prefixes import prefixes
from controlplane.planner.program import Load, Option, Program, solve
from controlplane.sim.spec import NodeSpec
from transfer.terms import Slo, Struct
from transfer.traces.request import TraceRequest

INFINITE = float("inf")
Resource = tuple[str, str]
"""prefill or time, and of which kind of instance."""


class Bound(Struct, frozen=True):
    """good: requests within their objectives, at most; counted: requests that have objectives. goodput_per_s: over the
    time from the first to the last arrival, which every run takes. hopeless: counted requests that no instance could
    serve in time even alone. limits: what holds it down, the strongest first, with what one per cent more of it would
    add, in requests. seconds: that finding it took."""

    good: float
    counted: int
    hopeless: int
    goodput_per_s: float
    limits: tuple[tuple[Resource, float], ...]
    roles: Roles
    seconds: float
    how: str

    @property
    def attainment(self) -> float:
        return self.good / self.counted if self.counted else 0.0


def upper_bound(
    nodes: Sequence[NodeSpec], trace: Sequence[TraceRequest], slos: Mapping[str, Slo | None],
    default_class: str = DEFAULT_CLASS, roles: Roles = "fixed", block_size: int = 512,
) -> Bound:  # fmt: skip
    """The most good requests of the trace. roles: "fixed", as the nodes have them (decode and mixed instances may also
    prefill); "free": any split, changing at any time. Raises InvalidValue for spans that are not whole blocks."""
    began = time.perf_counter()
    ordered = sorted(trace, key=lambda one: one.at_s)
    sizes = sizes_of(ordered, slos, default_class, block_size)
    fleet = devices(nodes, roles, block_size)
    counted = len(sizes.at_s)
    program, names, hopeless = _program(fleet, sizes)
    found = solve(program)
    span_s = ordered[-1].at_s - ordered[0].at_s if ordered else 0.0
    prices: dict[Resource, float] = {}
    for name, price, capacity in zip(names, found.prices, program.capacities, strict=True):
        prices[name] = prices.get(name, 0.0) + price * capacity / 100
    limits = tuple(sorted(((name, worth) for name, worth in prices.items() if worth > 1e-6), key=lambda one: -one[1]))
    early = "" if found.is_tight else ", stopped early"
    how = (
        f"linear program of {found.num_columns} variables, {found.num_cuts} intervals, {found.num_rounds} rounds"
        f"{early}; roles {roles}"
    )
    return Bound(
        good=found.value, counted=counted, hopeless=hopeless, goodput_per_s=found.value / span_s if span_s > 0 else 0.0,
        limits=limits, roles=roles, seconds=time.perf_counter() - began, how=how,
    )  # fmt: skip


def sizes_of(
    trace: Sequence[TraceRequest], slos: Mapping[str, Slo | None], default_class: str, block_size: int
) -> Sizes:  # fmt: skip
    """Of the requests that count, what an endless cache knows from the others included; trace: in order of arrival."""
    cached = prefixes(trace, block_size)
    default = slos.get(default_class)
    found = [slos.get(one.traffic_class or default_class, default) for one in trace]
    kept = np.array([slo is not None for slo in found], dtype=bool)
    goals = [slo for slo in found if slo is not None]
    chosen = [one for one, keep in zip(trace, kept, strict=True) if keep]
    return Sizes(
        at_s=_array([one.at_s for one in chosen]),
        prompt=_array([one.prompt_tokens for one in chosen]),
        output=_array([one.output_tokens for one in chosen]),
        unseen=cached.unseen[kept],
        own=cached.own[kept],
        ttft_s=_array([slo.ttft_s for slo in goals]),
        tpot_s=_array([slo.tpot_s for slo in goals]),
        e2e_s=_array([INFINITE if slo.e2e_s is None else slo.e2e_s for slo in goals]),
    )


def _array(values: Sequence[float]) -> Floats:
    return np.array(values, dtype=np.float64)


def _program(fleet: Sequence[Device], sizes: Sizes) -> tuple[Program, list[Resource], int]:
    """The program, what its resources are called, and how many requests no instance could serve in time."""
    makers, runners = [one for one in fleet if one.prefills], [one for one in fleet if one.decodes]
    num = len(sizes.at_s)
    if not num or not makers or not runners:
        return Program(0, (), []), [], num
    alone_s = [least_prefill_s(one, sizes) for one in makers]
    step_s = [least_step_s(one, sizes) for one in runners]
    steps = np.maximum(0.0, sizes.output - 1.0)
    begin_s, last_s = np.minimum.reduce(alone_s), np.minimum.reduce(step_s)
    left_s = [sizes.ttft_s - (0.0 if one.decodes else last_s) for one in makers]
    makes = [
        (alone <= left) & (sizes.prompt <= one.kv_tokens)
        for one, alone, left in zip(makers, alone_s, left_s, strict=True)
    ]  # fmt: skip
    runs = [
        ((step <= sizes.tpot_s) | (steps == 0)) & (begin_s + steps * step <= sizes.e2e_s)
        & (sizes.prompt + sizes.output - 1.0 <= one.kv_tokens)
        for one, step in zip(runners, step_s, strict=True)
    ]  # fmt: skip
    able = np.logical_or.reduce(makes) & np.logical_or.reduce(runs)
    few, first_s = Sizes(*(values[able] for values in sizes)), begin_s[able]
    last_at_s = few.at_s + np.minimum(few.ttft_s + few.tpot_s * steps[able], few.e2e_s)
    resources = _Resources()
    prompts = [
        Option(made[able], [
            resources.load(one, view, prefill_s(one, view, few), few.at_s, few.at_s + left[able]) for view in one.views
        ])
        for one, made, left in zip(makers, makes, left_s, strict=True)
    ]  # fmt: skip
    answers = [
        Option(run[able], [
            resources.load(one, view, decode_s(one, view, few), few.at_s + first_s, last_at_s) for view in one.views
        ])
        for one, run in zip(runners, runs, strict=True)
    ]  # fmt: skip
    return Program(len(few.at_s), (prompts, answers), resources.capacities), resources.names, num - int(able.sum())


class _Resources:
    """Each view of each device is one."""

    def __init__(self) -> None:
        self.names: list[Resource] = []
        self.capacities: list[float] = []
        self._numbers: dict[tuple[int, View], int] = {}

    def load(self, device: Device, view: View, work: Floats, start_s: Floats, end_s: Floats) -> Load:
        """Work without an end of its window, or that its device cannot do, binds nothing."""
        number = self._numbers.setdefault((id(device), view), len(self.names))
        if number == len(self.names):
            self.names.append(("time" if device.decodes else "prefill", _name(device)))
            self.capacities.append(float(device.count))
        real = np.isfinite(end_s) & np.isfinite(work)
        return Load(number, np.where(real, work, 0.0), start_s, np.where(real, end_s, start_s))


def _name(device: Device) -> str:
    gpus = device.profile.num_gpus
    return f"{device.profile.hardware.name}{f'@{gpus}' if gpus > 1 else ''}"
