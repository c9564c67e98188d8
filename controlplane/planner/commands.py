"""What to type to get the fleet of a plan: a rebalance where its instances are there already, else what starts them."""

from __future__ import annotations

import shlex
from collections import Counter

from controlplane.planner.fleets import Fleet, Shape
from transfer.terms import Role

UP_FLAGS = {Role.PREFILL: "--prefill", Role.DECODE: "--decode", Role.MIXED: "--mixed"}
CONTROL = "tcp://CONTROL:PORT"


def commands(fleet: Fleet, current: Fleet | None, model: str) -> tuple[str, ...]:
    """current: what there is now, None where nobody said. Emulated where a program of ours starts instances; an engine
    of your own is started with the tp and pp of the plan."""
    if current is not None and _instances(current) == _instances(fleet):
        return (f"phaseplane rebalance {fleet.xpyd}",)
    sizes = {part.shape.num_gpus for part in fleet.parts}
    classes = {role: {part.shape.hardware for part in fleet.parts if part.role is role} for role in UP_FLAGS}
    first = classes[Role.PREFILL] | classes[Role.MIXED]
    staged = any(part.shape.pp > 1 for part in fleet.parts)
    if not staged and len(sizes) == 1 and len(first) <= 1 and len(classes[Role.DECODE]) <= 1:
        counts = " ".join(f"{flag} {fleet.count(role)}" for role, flag in UP_FLAGS.items())
        pools = f" --pool {len(fleet.pools)}" if fleet.pools else ""
        hardware = ",".join(dict.fromkeys([*first, *classes[Role.DECODE]]))
        return (
            f"PHASEPLANE_TP={sizes.pop()} phaseplane up --engine emulated {counts}{pools} --model {shlex.quote(model)} "
            f"--hardware {hardware}",
        )
    return agents(fleet, model)


def agents(fleet: Fleet, model: str, prefix: str = "", there: Fleet | None = None) -> tuple[str, ...]:
    """What starts these instances at a control plane that runs. prefix: of their names, which are numbered from where
    those `there` end."""
    start = f"python -m nodes.agent --engine emulated --control {CONTROL} --model {shlex.quote(model)} --hardware"
    numbers = {role: 0 if there is None else there.count(role) for role in UP_FLAGS}
    lines = []
    for part in fleet.parts:
        span = _span(numbers[part.role], part.count)
        numbers[part.role] += part.count
        stages = f"  # as {part.shape}: {part.shape.pp} stages" if part.shape.pp > 1 else ""
        lines.append(
            f"{start} {part.shape.hardware} --tp {part.shape.num_gpus} "
            f"--instance={prefix}{part.role.value}-{span}={part.role.value}{stages}"
        )
    if fleet.pools:
        span = _span(0, len(fleet.pools))
        lines.append(f"{start} {fleet.pools[0].hardware} --instance={prefix}pool-{span}={Role.KV_POOL.value}")
    return tuple(lines)


def _span(first: int, count: int) -> str:
    return str(first) if count == 1 else f"{{{first}..{first + count - 1}}}"


def _instances(fleet: Fleet) -> Counter[Shape]:
    found: Counter[Shape] = Counter()
    for part in fleet.parts:
        found[part.shape] += part.count
    return found
