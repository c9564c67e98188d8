"""What to type to get the fleet of a plan: a rebalance where its instances are there already, else what starts them."""

from __future__ import annotations

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
            f"PHASEPLANE_TP={sizes.pop()} phaseplane up --engine emulated {counts}{pools} --model {model} "
            f"--hardware {hardware}",
        )
    numbers = dict.fromkeys(UP_FLAGS, 0)
    lines = []
    for part in fleet.parts:
        before, last = numbers[part.role], numbers[part.role] + part.count - 1
        numbers[part.role] += part.count
        span = str(before) if before == last else f"{{{before}..{last}}}"
        name = f"{part.role.value}-{span}={part.role.value}"
        stages = f"  # as {part.shape}: {part.shape.pp} stages" if part.shape.pp > 1 else ""
        lines.append(
            f"python -m nodes.agent --engine emulated --control {CONTROL} --model {model} "
            f"--hardware {part.shape.hardware} --tp {part.shape.num_gpus} --instance={name}{stages}"
        )
    return tuple(lines)


def _instances(fleet: Fleet) -> Counter[Shape]:
    found: Counter[Shape] = Counter()
    for part in fleet.parts:
        found[part.shape] += part.count
    return found
