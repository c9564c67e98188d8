"""What one instance can do in closed form: requests a second of each phase. For pruning; it simulates nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from controlplane.core.config import DEFAULT_CLASS
from controlplane.core.forecast import forecast
from controlplane.core.instance import Instance
from controlplane.core.traffic import Arrival
from controlplane.planner.bound import sizes_of
from controlplane.planner.charges import Device, Floats, Sizes, View, decode_s, least_prefill_s, least_step_s, prefill_s
from controlplane.planner.fleets import Fleet, Part, Shape, build
from controlplane.planner.prefixes import prefixes
from controlplane.sim.spec import NodeSpec
from transfer.profile import ModelShape
from transfer.terms import InstanceId, KvLayout, ModelIdentity, Role, Slo
from transfer.traces.request import TraceRequest
from transfer.wire.messages import PROTOCOL_VERSION, Hello

MAX_SHAPES = 96
"""Requests that closed forms look at."""
PRECISION, WIDEN, MAX_WIDENINGS = 0.02, 1.5, 12
CHUNK = View(compute=True, pairs=True, spread="tokens")


class Rates(NamedTuple):
    """Requests a second of one instance that only prefills, only decodes, or does both; 0: it cannot."""

    prefill: float
    decode: float
    mixed: float


class Workload:
    """A trace as closed forms see it. target: attainment; what fewer requests could meet is no use."""

    def __init__(
        self, trace: Sequence[TraceRequest], slos: Mapping[str, Slo | None], model: ModelShape, block_size: int,
        target: float, default_class: str = DEFAULT_CLASS,
    ) -> None:  # fmt: skip
        self.model, self.block_size, self.target, self.slos = model, block_size, target, dict(slos)
        ordered = sorted(trace, key=lambda one: one.at_s)
        self.sizes = sizes_of(ordered, slos, default_class, block_size)
        every, default = max(1, len(ordered) // MAX_SHAPES), default_class
        unseen = prefixes(ordered, block_size).unseen
        self.arrivals = [
            Arrival(
                at_s=one.at_s, model="", traffic_class=one.traffic_class if one.traffic_class in slos else default,
                prompt_tokens=one.prompt_tokens, cached_tokens=one.prompt_tokens - int(unseen[index]),
                output_tokens=one.output_tokens,
            )
            for index, one in enumerate(ordered) if index % every == 0
        ]  # fmt: skip
        self._rates: dict[Shape, Rates] = {}

    def rates(self, shape: Shape) -> Rates:
        """By the charges of the bound: what an instance could do with full batches and no queue."""
        if shape not in self._rates:
            self._rates[shape] = self._measure(shape)
        return self._rates[shape]

    def max_rate(self, fleet: Fleet) -> float:
        """Highest rate at the target by the queues of the online forecast; 0 where the fleet cannot serve."""
        nodes = [node for node in build(fleet, self.model, self.block_size, lanes=False) if node.latency is not None]
        instances = [_instance(node, self.model, self.block_size) for node in nodes]
        profiles = [one.profile for one in instances]
        for one in instances:
            one.taste = profiles.index(one.profile)
        roles: dict[InstanceId, Role] = {node.id: node.role for node in nodes}

        def reaches(rate: float) -> bool:
            found = forecast(instances, roles, self.arrivals, rate, self.slos)
            return found is not None and found.attainment >= self.target

        guess = estimate(fleet, self)
        return highest(reaches, guess, PRECISION)[0] if guess > 0 else 0.0

    def _measure(self, shape: Shape) -> Rates:
        def rate(role: Role) -> float:
            fleet = Fleet((Part(shape, role, 1),))
            node = build(fleet, self.model, self.block_size, lanes=False)[0]
            assert node.latency is not None
            device = Device(
                node.latency, 1, node.token_budget, node.max_running, node.num_blocks * self.block_size, True,
                role is not Role.PREFILL,
            )  # fmt: skip
            fits = (self.sizes.prompt + self.sizes.output <= device.kv_tokens) | (role is Role.PREFILL)
            if role is not Role.DECODE:
                fits &= least_prefill_s(device, self.sizes) <= self.sizes.ttft_s
            if role is not Role.PREFILL:
                fits &= (least_step_s(device, self.sizes) <= self.sizes.tpot_s) | (self.sizes.output <= 1)
            if fits.mean() < self.target:
                return 0.0
            few = Sizes(*(values[fits] for values in self.sizes))
            return _per_s(device, role, few)

        return Rates(rate(Role.PREFILL), rate(Role.DECODE), rate(Role.MIXED) if shape.pp == 1 else 0.0)


def estimate(fleet: Fleet, workload: Workload) -> float:
    """Requests a second by the work of each phase alone."""
    prefill = decode = mixed = 0.0
    for part in fleet.parts:
        rates = workload.rates(part.shape)
        prefill += part.count * rates.prefill * (part.role is Role.PREFILL)
        decode += part.count * rates.decode * (part.role is Role.DECODE)
        mixed += part.count * rates.mixed * (part.role is Role.MIXED)
    return mixed + min(prefill, decode)


def highest(reaches: Callable[[float], bool], guess: float, precision: float) -> tuple[float, float]:
    """(highest rate known to reach, lowest known not to), within `precision` of each other; (0, rate) where none does.
    Takes it that whoever reaches at a rate reaches below it."""
    low, high = 0.0, 0.0
    rate = guess
    for _ in range(MAX_WIDENINGS):
        if reaches(rate):
            low = rate
            if high:
                break
            rate *= WIDEN
        else:
            high = rate
            if low:
                break
            rate /= WIDEN
    if not low or not high:
        return low, high or rate
    while high > low * (1.0 + precision):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if reaches(middle) else (low, middle)
    return low, high


def _per_s(device: Device, role: Role, sizes: Sizes) -> float:
    if role is Role.PREFILL:
        return device.profile.pp / float(prefill_s(device, CHUNK, sizes).mean())
    costs: list[Floats] = []
    for view in device.views:
        cost = decode_s(device, view, sizes)
        costs.append(cost + prefill_s(device, view, sizes) if role is Role.MIXED else cost)
    return 1.0 / max(1e-9, *(float(np.mean(cost)) for cost in costs))


def _instance(node: NodeSpec, model: ModelShape, block_size: int) -> Instance:
    """As the control plane would know it."""
    assert node.latency is not None
    identity = ModelIdentity(
        name="planned", revision="", tokenizer="", vocab_size=2, max_context=1 << 20, eos_token_ids=()
    )  # fmt: skip
    layout = KvLayout(
        num_layers=model.num_layers, num_kv_heads=1, block_size=block_size,
        head_dim=max(1, round(model.kv_token_bytes / 2 / model.num_layers)), dtype="uint8", rope="planned",
    )  # fmt: skip
    hello = Hello(
        protocol=PROTOCOL_VERSION, instance_id=node.id, epoch=1, role=node.role, model=identity, layout=layout,
        engine="emulated", hardware=node.latency.hardware, latency=node.latency, num_blocks=node.num_blocks,
        data_endpoint="", host_id=node.id, token_budget=node.token_budget,
    )  # fmt: skip
    return Instance(hello, 0.0)
