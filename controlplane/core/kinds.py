"""What a forecast is made of: recorded requests put together by size, and instances put together by kind.

Both once for a window of traffic, so that many splits can be looked at cheaply (forecast.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from controlplane.core.instance import Instance
from controlplane.core.queues import Steps
from controlplane.core.traffic import Arrival
from transfer.terms import Role, Slo

MAX_BINS = 16
"""Sizes that the recorded requests are put together to, by class and length of prompt."""
SPEED_STEP = 1.25
"""Instances whose speed differs by less than half of this factor are of one kind."""
ROLES = (Role.PREFILL, Role.DECODE, Role.MIXED)


class Bin(NamedTuple):
    """Requests of one class and about one size. slo None: they load the fleet and do not count."""

    share: float
    slo: Slo | None
    prompt_tokens: int
    cached_tokens: int
    output_tokens: float


@dataclass(slots=True)
class Kind:
    """Instances alike in profile, KV room and deviation from the speed usual for their profile and role.

    compute_s: of each bin, a prompt by itself; work_s: in the batch of a busy instance; mean_work_s and work_cv2 over
    all of them. idle_s: a step that computes one token and reads no KV. Times are the profile's, before `speed`.
    """

    instance: Instance
    members: list[Instance]
    speed: dict[Role, float]
    compute_s: list[float]
    work_s: list[float]
    mean_work_s: float
    work_cv2: float
    decode: Steps
    chunk_s: float
    idle_s: float


def bins_of(shapes: Sequence[Arrival], slos: Mapping[str, Slo | None]) -> list[Bin]:
    """The shapes sorted by class and tokens to compute, put together to about MAX_BINS means."""
    found = []
    size = max(1, math.ceil(len(shapes) / MAX_BINS))
    sizes: dict[str, list[tuple[int, int, int]]] = {}
    for one in shapes:
        new = max(0, one.prompt_tokens - one.cached_tokens)
        sizes.setdefault(one.traffic_class, []).append((new, one.prompt_tokens, one.output_tokens or 1))
    for name, own in sorted(sizes.items()):
        own.sort()
        for first in range(0, len(own), size):
            part = own[first : first + size]
            new, prompt, output = (sum(column) / len(part) for column in zip(*part, strict=True))
            found.append(Bin(len(part) / len(shapes), slos.get(name), round(prompt), round(prompt - new), output))
    return found


def kind_of(
    members: list[Instance], usual: Mapping[tuple[int, Role], float], bins: Sequence[Bin], context: float
) -> Kind:
    """members: alike; usual: as usual_speeds says; context: KV tokens of a running request."""
    one = members[0]
    profile, budget = one.profile, max(one.hello.token_budget, 256)
    chunk_s, idle_s = profile.prefill_s(budget), profile.step_s(1, 1, 1)
    alone = [profile.prefill_s(max(1, each.prompt_tokens - each.cached_tokens), each.cached_tokens) for each in bins]
    work = [
        _work_s(each, alone_s, budget, chunk_s, idle_s) / profile.pp for each, alone_s in zip(bins, alone, strict=True)
    ]
    weighted = [(each.share, work_s) for each, work_s in zip(bins, work, strict=True)]
    block_size = one.hello.layout.block_size if one.hello.layout is not None else 1
    fits = one.hello.num_blocks / max(1.0, context / block_size)
    return Kind(
        instance=one, members=members, speed=_speeds(members, usual), compute_s=alone, work_s=work,
        mean_work_s=sum(share * work_s for share, work_s in weighted), work_cv2=cv2(weighted),
        decode=Steps(lambda rows: profile.decode_step_s(rows, round(rows * context)), fits),
        chunk_s=chunk_s, idle_s=idle_s,
    )  # fmt: skip


def _work_s(one: Bin, alone_s: float, budget: int, chunk_s: float, idle_s: float) -> float:
    """What a prompt adds to the work of a busy instance: short ones share their steps' constant part with others."""
    tokens = max(1, one.prompt_tokens - one.cached_tokens)
    if tokens >= budget:
        return alone_s
    share = tokens / budget
    return max(share * chunk_s, alone_s - (1.0 - share) * idle_s)


def group_alike(instances: Sequence[Instance]) -> list[list[Instance]]:
    """The instances by kind, in the order of the first of each."""
    usual = usual_speeds(instances)
    groups: dict[tuple[int, int, int], list[Instance]] = {}
    for one in instances:
        off = one.speed / usual[one.taste, one.role]
        deviation = 0 if 0.9 < off < 1.1 else round(math.log(max(0.01, off)) / math.log(SPEED_STEP))
        groups.setdefault((one.taste, one.hello.num_blocks, deviation), []).append(one)
    return list(groups.values())


def usual_speeds(instances: Sequence[Instance]) -> dict[tuple[int, Role], float]:
    """Median of the measured / predicted step times of the instances with a profile in a role."""
    speeds: dict[tuple[int, Role], list[float]] = {}
    for one in instances:
        speeds.setdefault((one.taste, one.role), []).append(one.speed)
    return {name: sorted(found)[(len(found) - 1) // 2] for name, found in speeds.items()}


def _speeds(members: list[Instance], usual: Mapping[tuple[int, Role], float]) -> dict[Role, float]:
    """Expected speed of a kind in each role. One that is slow in its role is expected to be as slow in another: moving
    a straggler must not look like healing it."""
    taste = members[0].taste
    off = sum(one.speed / usual[taste, one.role] for one in members) / len(members)
    return {role: usual.get((taste, role), 1.0) * off for role in ROLES}


def cv2(weighted: Sequence[tuple[float, float]]) -> float:
    """Squared coefficient of variation of (weight, value)."""
    total = sum(weight for weight, _ in weighted)
    mean = sum(weight * value for weight, value in weighted) / total if total else 0.0
    if mean <= 0:
        return 0.0
    return sum(weight * (value - mean) ** 2 for weight, value in weighted) / total / (mean * mean)
