"""What a good request costs an instance at the very least, as linear charges: the coefficients of bound.py.

A step lasts as long as the longer of computing and reading (transfer/profile.py), which is not linear; each View is
one linear lower bound of it, so that any set of views is a relaxation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from controlplane.sim.spec import NodeSpec
from transfer.profile import LatencyProfile
from transfer.terms import Role

Floats = NDArray[np.float64]
Spread = Literal["pace", "rows", "kv", "tokens"]
Roles = Literal["fixed", "free"]


class View(NamedTuple):
    """compute, pairs: whether linear layers and attention are counted as computing or as reading. spread: over what
    the part of a step that does not depend on what is in it is spread: TPOT, running requests, KV room, tokens."""

    compute: bool
    pairs: bool
    spread: Spread


PREFILL_VIEWS = (View(True, True, "tokens"),)
VIEWS = (
    View(True, True, "pace"), View(True, False, "pace"), View(False, False, "pace"), View(False, False, "rows"),
    View(False, False, "kv"),
)  # fmt: skip


class Sizes(NamedTuple):
    """Of each request. unseen: prompt tokens that no cache can have; own: prompt tokens that no other request shares;
    ttft_s, tpot_s, e2e_s: its objectives (inf: none)."""

    at_s: Floats
    prompt: Floats
    output: Floats
    unseen: Floats
    own: Floats
    ttft_s: Floats
    tpot_s: Floats
    e2e_s: Floats


@dataclass(frozen=True)
class Device:
    """Instances that are alike. prefills, decodes: what they may do."""

    profile: LatencyProfile
    count: int
    token_budget: int
    max_running: int
    kv_tokens: int
    prefills: bool
    decodes: bool

    @property
    def views(self) -> tuple[View, ...]:
        return VIEWS if self.decodes else PREFILL_VIEWS


def devices(nodes: Sequence[NodeSpec], roles: Roles, block_size: int) -> list[Device]:
    """The engines of a fleet, put together by what they are; decode instances may prefill what they then generate."""
    found: dict[tuple[LatencyProfile, int, int, int, bool], int] = {}
    for node in nodes:
        if node.latency is None or node.role is Role.KV_POOL:
            continue
        decodes = roles == "free" or node.role is not Role.PREFILL
        key = (node.latency, node.token_budget, node.max_running, node.num_blocks * block_size, decodes)
        found[key] = found.get(key, 0) + 1
    return [
        Device(profile, count, budget, running, kv_tokens, True, decodes)
        for (profile, budget, running, kv_tokens, decodes), count in found.items()
    ]


class _Line(NamedTuple):
    """A step lasts at least: constant + tokens * token + pairs * pair + near * near_pair + prompts * prompt, of which
    context tokens cost `context` each, + rows * row + their KV tokens * row_context + their KV within the window *
    row_near."""

    constant: float
    token: float
    pair: float
    near_pair: float
    context: float
    prompt: float
    row: float
    row_context: float
    row_near: float


def prefill_s(device: Device, view: View, sizes: Sizes) -> Floats:
    """Seconds that each prompt takes of a device's time at least."""
    line = _line(device, view)
    share = line.constant / device.token_budget if view.spread == "tokens" else 0.0
    return _prompt_s(device, line, sizes) + share * sizes.unseen


def least_prefill_s(device: Device, sizes: Sizes) -> Floats:
    """Seconds from a prompt's start to its end at least, on an instance that does nothing else."""
    steps = np.ceil(sizes.unseen / device.token_budget)
    lines = [_line(device, View(compute, pairs, "tokens")) for compute in (True, False) for pairs in (True, False)]
    least: Floats = np.maximum.reduce([steps * line.constant + _prompt_s(device, line, sizes) for line in lines])
    return least


def decode_s(device: Device, view: View, sizes: Sizes) -> Floats:
    """Seconds that each answer after its first token takes of a device's time at least; inf where no pace is enough."""
    line = _line(device, view)
    steps = np.maximum(0.0, sizes.output - 1.0)
    window = device.profile.unit_costs.window
    row_s = line.row + line.row_near * np.minimum(sizes.prompt + 1.0, window)
    first_s = row_s + line.row_context * (sizes.prompt + 1.0)
    later_s = line.row_context * (sizes.output / 2.0 - 1.0)  # what a row of usual length takes beyond the first
    if view.spread == "pace":
        left = 1.0 - line.constant / sizes.tpot_s
        paced_s = np.divide(first_s, left, out=np.full_like(first_s, np.inf), where=left > 0.0)
        paced: Floats = np.multiply(steps, paced_s + later_s, out=np.zeros_like(steps), where=steps > 0.0)
        return paced
    if view.spread == "rows":
        share: Floats | float = 1.0 / device.max_running
    elif view.spread == "kv":
        share = (sizes.own + sizes.output / 2.0) / device.kv_tokens
    else:
        share = 1.0 / device.token_budget
    return np.asarray(steps * (first_s + later_s + line.constant * share), dtype=np.float64)


def least_step_s(device: Device, sizes: Sizes) -> Floats:
    """Seconds of a decode step of this request alone."""
    longest = sizes.prompt.astype(np.int64)
    known = {int(tokens): device.profile.decode_step_s(1, int(tokens)) for tokens in np.unique(longest)}
    return np.array([known[int(tokens)] for tokens in longest], dtype=np.float64)


def _prompt_s(device: Device, line: _Line, sizes: Sizes) -> Floats:
    """Without the constant part of its steps."""
    total, cached = sizes.prompt, sizes.prompt - sizes.unseen
    pairs = (total * (total + 1.0) - cached * (cached + 1.0)) / 2.0
    seconds = line.prompt + line.token * sizes.unseen + line.pair * pairs + line.context * total
    window = device.profile.unit_costs.window
    if window:
        near = _near_pairs(total, window) - _near_pairs(cached, window)
        seconds = seconds + line.near_pair * near
    return np.asarray(seconds, dtype=np.float64)


def _near_pairs(tokens: Floats, window: float) -> Floats:
    """Pairs of the first `tokens` tokens with those at most `window` before them."""
    inside = np.minimum(tokens, window)
    return np.asarray(inside * (inside + 1.0) / 2.0 + (tokens - inside) * window, dtype=np.float64)


def _line(device: Device, view: View) -> _Line:
    """max(a, b) + e min(a, b) is at least a + e b and at least b + e a. Experts that a batch touches are a concave
    function of its rows, at least the chord from one row for each stage to as many as may run. Decode steps alone may
    be split over the stages of a pipeline (pp), steps with prompts are not."""
    profile = device.profile
    costs, stages, exposed = profile.unit_costs, profile.pp, 1.0 - profile.overlap
    first, slope = _touched(device)
    hidden = exposed if view.compute else 1.0
    computed = 1.0 if view.compute else exposed
    paired, read = (1.0, exposed) if view.pairs else (exposed, 1.0)
    linear = computed * (costs.linear / costs.dp + costs.experts)
    return _Line(
        constant=hidden * (costs.weights + first) + costs.collectives + profile.alpha_s,
        token=linear + costs.send,
        pair=paired * min(costs.attention, costs.attention_decode) / costs.dp,
        near_pair=paired * costs.window_attention / costs.dp,
        context=read * costs.kv / costs.dp,
        prompt=profile.beta_s,
        row=(linear + hidden * slope + costs.send + profile.beta_s) / stages,
        row_context=(paired * costs.attention_decode + read * costs.kv) / costs.dp / stages,
        row_near=(paired * costs.window_attention + read * costs.window_kv) / costs.dp / stages,
    )


def _touched(device: Device) -> tuple[float, float]:
    """Reading experts takes at least first + slope * rows seconds."""
    costs, stages, most = device.profile.unit_costs, device.profile.pp, device.max_running
    if not costs.expert_weights:
        return 0.0, 0.0
    least = costs.expert_weights * (1.0 - costs.unrouted)
    if most <= stages:
        return least, 0.0
    slope = (costs.expert_weights * (1.0 - costs.unrouted ** (most / stages)) - least) / (most - stages)
    return least - slope * stages, slope
