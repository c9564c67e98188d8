"""What a fleet shape would do with the traffic of the last minutes: a closed-form estimate, with its interval.

Prefill instances, and the room for running requests on decode, are queues of k servers: waits by Sakasegawa's
approximation for M/G/k (1977), as DistServe (OSDI'24, 3.1) uses M/D/1. The pace of decode is a fixed point: running
requests = arrivals x output x step(running requests).
Says nothing (None, and why) where there was too little traffic.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from controlplane.core.config import CoreConfig
from controlplane.core.fleet import Group
from controlplane.core.instance import Instance
from controlplane.core.traffic import Arrival, Traffic
from transfer.api import Prediction
from transfer.terms import InstanceId, Role, Slo

Z80 = 1.2816
"""Half-width of an 80 % interval of the normal distribution, in standard deviations."""
MAX_SHAPES = 256
MAX_ROWS = 4096
SATURATED = 0.98


@dataclass(frozen=True, slots=True)
class Forecast:
    """attainment: share of offered requests that would be good. Utilisations above 1 mean overload."""

    rate_per_s: float
    attainment: float
    ttft_p50_s: float
    tpot_p50_s: float
    prefill_use: float
    decode_use: float


def forecast(
    instances: Sequence[Instance],
    roles: dict[InstanceId, Role],
    shapes: Sequence[Arrival],
    rate_per_s: float,
    slos: dict[str, Slo | None],
) -> Forecast | None:
    """The fleet with these roles under `rate_per_s` requests of these shapes; None when a phase has no instance."""
    prefills = [one for one in instances if roles[one.id] in (Role.PREFILL, Role.MIXED)]
    decodes = [one for one in instances if roles[one.id] in (Role.DECODE, Role.MIXED)]
    if not prefills or not decodes or not shapes:
        return None
    prefill = _prefill(prefills, shapes, rate_per_s)
    share = sum(one in prefills for one in decodes) / len(decodes)
    stolen = share * min(SATURATED, prefill.queue.use)  # a mixed instance decodes in what its prefills leave
    decode = _decode_level(decodes, shapes, rate_per_s, stolen)
    good = ttft = 0.0
    for shape, compute_s in zip(shapes, prefill.compute_s, strict=True):
        fixed_s = compute_s + _transfer_s(prefills[0], decodes[0], shape) + decode.step_s
        ttft += fixed_s
        slo = slos.get(shape.traffic_class)
        if slo is not None:
            slack_s = slo.ttft_s - fixed_s
            good += prefill.queue.within(slack_s) * decode.queue.within(slack_s) * decode.within(slo.tpot_s)
    counted = sum(slos.get(shape.traffic_class) is not None for shape in shapes)
    served = min(1.0, 1.0 / max(prefill.queue.use, decode.queue.use, 1e-9))
    wait_s = prefill.queue.median_wait_s + decode.queue.median_wait_s
    return Forecast(
        rate_per_s=rate_per_s, attainment=served * good / counted if counted else 0.0,
        ttft_p50_s=ttft / len(shapes) + wait_s, tpot_p50_s=decode.step_s,
        prefill_use=prefill.queue.use, decode_use=decode.queue.use,
    )  # fmt: skip


def predict(
    config: CoreConfig, group: Group | None, roles: dict[InstanceId, Role], traffic: Traffic, now: float
) -> Prediction:
    """Goodput of a model's group after its instances take `roles`, from the recorded traffic."""
    if group is None:
        return Prediction(basis="no engine serves a model")
    num, span_s = traffic.offered(now, group.model.name)
    shapes = traffic.shapes(now, group.model.name)[-MAX_SHAPES:]
    if num < config.min_traffic or not shapes:
        lacks = f"{config.min_traffic} are needed" if num < config.min_traffic else "none has finished yet"
        return Prediction(basis=f"no prediction: {num} requests arrived in the last {span_s:.0f} s, {lacks}")
    found = forecast(group.members, roles, shapes, num / span_s, dict(config.classes))
    if found is None:
        return Prediction(basis="no prediction: a phase has no instance")
    goodput = found.rate_per_s * found.attainment
    # Poisson noise of what was recorded, and of the window in which the effect will be measured.
    spread = Z80 * math.sqrt(goodput / span_s + goodput / config.measure_s)
    provenance = sorted({one.profile.provenance for one in group.members})
    return Prediction(
        goodput_per_s=goodput, goodput_low=max(0.0, goodput - spread), goodput_high=goodput + spread,
        ttft_p50_s=found.ttft_p50_s, tpot_p50_s=found.tpot_p50_s,
        basis=f"{num} arrivals in {span_s:.0f} s; prefill use {found.prefill_use:.0%}, decode use "
              f"{found.decode_use:.0%}; latency {', '.join(provenance)}",
    )  # fmt: skip


@dataclass(slots=True)
class _Queue:
    """M/G/k waits: probability of any wait, and its mean when there is one."""

    use: float
    waits: float
    mean_wait_s: float

    def within(self, slack_s: float) -> float:
        """Probability that the wait is at most `slack_s`."""
        if slack_s < 0:
            return 0.0
        return 1.0 - self.waits * math.exp(-slack_s / self.mean_wait_s) if self.mean_wait_s > 0 else 1.0

    @property
    def median_wait_s(self) -> float:
        return self.mean_wait_s * math.log(2 * self.waits) if self.waits > 0.5 else 0.0


@dataclass(slots=True)
class _Prefill:
    queue: _Queue
    compute_s: list[float]
    """Of each recorded shape."""


@dataclass(slots=True)
class _Level:
    """How many requests an average decode instance runs, and how many it can within a step time."""

    queue: _Queue
    """For the blocks a request needs to run at all."""
    rows: float
    step_s: float
    instance: Instance
    context: float
    stretch: float

    def within(self, tpot_s: float) -> float:
        """Probability that the step stays within `tpot_s` while the number of requests varies as Poisson does."""
        low, high = 0, MAX_ROWS
        while low < high:
            middle = (low + high + 1) // 2
            if _step_s(self.instance, middle, self.context) * self.stretch <= tpot_s:
                low = middle
            else:
                high = middle - 1
        if low == 0:
            return 0.0
        return 0.5 * (1 + math.erf((low + 0.5 - self.rows) / math.sqrt(2 * max(self.rows, 0.25))))


def _queue(use: float, servers: int, service_s: float, scatter: float) -> _Queue:
    """scatter: (1 + squared coefficient of variation) / 2 of the service time."""
    load = min(SATURATED, use)
    waits = load ** (math.sqrt(2 * (servers + 1)) - 1)
    return _Queue(use, waits, scatter * service_s / (servers * (1 - load)))


def _prefill(prefills: Sequence[Instance], shapes: Sequence[Arrival], rate_per_s: float) -> _Prefill:
    per_server = [[_compute_s(one, shape) for shape in shapes] for one in _kinds(prefills)]
    compute_s = [sum(column) / len(per_server) for column in zip(*per_server, strict=True)]
    use = rate_per_s * sum(compute_s) / len(compute_s) / len(prefills)
    return _Prefill(_queue(use, len(prefills), sum(compute_s) / len(compute_s), _scatter(compute_s)), compute_s)


def _decode_level(decodes: Sequence[Instance], shapes: Sequence[Arrival], rate_per_s: float, stolen: float) -> _Level:
    """Fixed point of rows = rate x output x step(rows), at most what fits into the KV blocks."""
    outputs = [float(max(1, shape.output_tokens or 1)) for shape in shapes]
    output = sum(outputs) / len(outputs)
    context = sum(shape.prompt_tokens for shape in shapes) / len(shapes) + output / 2
    instance, stretch = decodes[0], 1.0 / (1.0 - stolen)
    block_size = instance.hello.layout.block_size if instance.hello.layout is not None else 1
    fits = min(one.hello.num_blocks for one in decodes) // max(1.0, context / block_size)
    most = max(1.0, min(float(MAX_ROWS), fits))
    each = rate_per_s / len(decodes) * output
    rows = 1.0
    for _ in range(60):
        wanted = each * _step_s(instance, rows, context) * stretch
        rows = 0.5 * rows + 0.5 * min(most, max(wanted, 1e-3))
    full_s = _step_s(instance, most, context) * stretch
    queue = _queue(each * full_s / most, int(most) * len(decodes), output * full_s, _scatter(outputs))
    return _Level(queue, rows, _step_s(instance, max(1.0, rows), context) * stretch, instance, context, stretch)


def _scatter(values: Sequence[float]) -> float:
    mean = sum(values) / len(values)
    variance = sum((one - mean) ** 2 for one in values) / len(values)
    return (1 + variance / (mean * mean)) / 2 if mean > 0 else 0.5


def _kinds(instances: Sequence[Instance]) -> list[Instance]:
    """One instance for each distinct profile: the others would only repeat the figure."""
    return list({one.taste: one for one in instances}.values())


def _compute_s(one: Instance, shape: Arrival) -> float:
    return one.profile.prefill_s(max(1, shape.prompt_tokens - shape.cached_tokens), shape.cached_tokens) * one.speed


def _step_s(one: Instance, rows: float, context: float) -> float:
    batch = max(1, round(rows))
    return one.profile.decode_step_s(batch, round(batch * context)) * one.speed


def _transfer_s(prefill: Instance, decode: Instance, shape: Arrival) -> float:
    """The last layer's share: the others move while the next ones are computed."""
    if prefill is decode or prefill.hello.layout is None:
        return 0.0
    return prefill.profile.transfer_s(shape.prompt_tokens) / prefill.hello.layout.num_layers
