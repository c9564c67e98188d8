"""What an operator's move would be: parses XPYD, chooses which instances change role, refuses what cannot serve.

Decides on paper only; planrun.py carries a plan out. Fewest moves; among equals the least loaded instance goes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from controlplane.core.fleet import Fleet, xpyd
from controlplane.core.instance import Instance, InstanceState
from controlplane.text import natural, shown
from transfer.api import PlanRequest, PlanStep
from transfer.errors import InvalidValue
from transfer.said import Said, counted, say
from transfer.terms import InstanceId, Role

_XPYD = re.compile(r"(?:(\d+)P(\d+)D)?(?:\+?(\d+)M)?", re.IGNORECASE)
ENGINE_ROLES = (Role.PREFILL, Role.DECODE, Role.MIXED)
MAX_COUNT = 4096
MAX_NAMED = 32
"""Instances that one sentence lists."""


@dataclass(frozen=True, slots=True)
class Target:
    num_prefill: int
    num_decode: int
    num_mixed: int = 0

    @property
    def total(self) -> int:
        return self.num_prefill + self.num_decode + self.num_mixed

    def of(self, role: Role) -> int:
        return {Role.PREFILL: self.num_prefill, Role.DECODE: self.num_decode, Role.MIXED: self.num_mixed}.get(role, 0)

    def __str__(self) -> str:
        return xpyd(self.num_prefill, self.num_decode, self.num_mixed)


def parse_xpyd(text: str) -> Target:
    """ "1P2D", "1P2D+1M" or "3M". Raises InvalidValue with a sentence."""
    found = _XPYD.fullmatch(text.strip())
    if found is None or not text.strip():
        raise InvalidValue(say("refused.shape", text=shown(text)))
    counts = [int(part) if part and len(part) <= 4 else (MAX_COUNT + 1 if part else 0) for part in found.groups()]
    if max(counts) > MAX_COUNT:
        raise InvalidValue(say("refused.more_than", text=shown(text), most=MAX_COUNT))
    return Target(*counts)


def plan_steps(fleet: Fleet, request: PlanRequest) -> tuple[Target, tuple[PlanStep, ...]]:
    """The moves that lead to the wanted shape, in the order they are made. Raises InvalidValue with a sentence."""
    if (request.xpyd is None) == (request.moves is None):
        raise InvalidValue(say("refused.one_of"))
    engines = fleet.engines()
    if not engines:
        raise InvalidValue(say("refused.no_engine"))
    if request.moves is not None:
        moves = _named_moves(fleet, request.moves)
    else:
        moves = _fewest_moves(fleet, engines, parse_xpyd(request.xpyd or ""))
    roles = {one.id: one.role for one in engines} | {one.id: role for one, role in moves}
    target = Target(*(sum(role is wanted for role in roles.values()) for wanted in ENGINE_ROLES))
    _check_serves(target)
    _check_models(engines, roles)
    ordered = _shrink_first(moves, fleet)
    steps = (PlanStep(instance_id=one.id, from_role=one.role.value, to_role=role.value) for one, role in ordered)
    return target, tuple(steps)


def _named_moves(fleet: Fleet, wanted: dict[str, str]) -> list[tuple[Instance, Role]]:
    if len(wanted) > (num_engines := len(fleet.engines())):
        raise InvalidValue(say("refused.too_many_moves", num=len(wanted), count=num_engines))
    moves = []
    for name, text in sorted(wanted.items(), key=lambda item: natural(item[0])):
        instance = fleet.live(name)
        if instance is None:
            raise InvalidValue(say("refused.none_to_move", id=shown(name), known=_known(fleet)))
        if instance.role is Role.KV_POOL:
            raise InvalidValue(say("refused.pool", id=name, role=shown(text)))
        try:
            role = Role(text)
        except ValueError:
            role = Role.KV_POOL
        if role not in ENGINE_ROLES:
            raise InvalidValue(say("refused.no_role", id=name, role=shown(text)))
        _check_movable(instance)
        if role is not instance.role:
            if not instance.hello.shares_kv:
                raise InvalidValue(say("refused.keeps_kv", id=name, role=role.value))
            moves.append((instance, role))
    return moves


def _known(fleet: Fleet) -> str | Said:
    listed = [one.id for one in fleet.engines()]
    some = ", ".join(listed[:MAX_NAMED])
    return some if len(listed) <= MAX_NAMED else say("names_more", some=some, num=len(listed) - MAX_NAMED)


def _fewest_moves(fleet: Fleet, engines: list[Instance], target: Target) -> list[tuple[Instance, Role]]:
    if len(fleet.groups) > 1:
        raise InvalidValue(say("refused.several_models"))
    if target.total != len(engines):
        raise InvalidValue(say("refused.total", xpyd=target, num=target.total, count=len(engines)))
    have = {role: [one for one in engines if one.role is role] for role in ENGINE_ROLES}
    missing = [role for role in ENGINE_ROLES for _ in range(target.of(role) - len(have[role]))]
    moves: list[tuple[Instance, Role]] = []
    for role in ENGINE_ROLES:
        able = [one for one in sorted(have[role], key=_load) if one.hello.shares_kv]
        num_leaving = max(0, len(have[role]) - target.of(role))
        if num_leaving > len(able):
            kept = len(have[role]) - len(able)
            raise InvalidValue(
                say("refused.stay", xpyd=target, num=target.of(role), role=role.value, kept=kept)
            )  # fmt: skip
        for one in able[:num_leaving]:
            _check_movable(one)
            moves.append((one, missing.pop(0)))
    return moves


def _check_serves(target: Target) -> None:
    """A fleet must be able to compute prompts and to decode."""
    if target.num_mixed:
        return
    for count, role in ((target.num_prefill, "prefill"), (target.num_decode, "decode")):
        if not count:
            raise InvalidValue(say("refused.leaves_none", xpyd=target, role=role))


def _check_models(engines: list[Instance], roles: dict[InstanceId, Role]) -> None:
    """Each model by itself must stay servable."""
    by_model: dict[str, list[Role]] = {}
    for one in engines:
        if one.hello.model is not None and not one.held:
            by_model.setdefault(one.hello.model.name, []).append(roles[one.id])
    for model, kept in by_model.items():
        if Role.MIXED not in kept and Role.DECODE not in kept:
            raise InvalidValue(say("refused.model_none", role="decode", model=model))
        if Role.MIXED not in kept and Role.PREFILL not in kept:
            raise InvalidValue(say("refused.model_none", role="prefill", model=model))


def _check_movable(instance: Instance) -> None:
    if instance.state is not InstanceState.READY:
        state = say(f"states.{instance.state.value}")
        raise InvalidValue(say("refused.not_movable", id=instance.id, state=state))


def _load(one: Instance) -> tuple[bool, int, float, str]:
    """Ready ones first, then the least loaded."""
    return (one.state is not InstanceState.READY, one.rows, one.queue_s(), one.id)


def _shrink_first(moves: list[tuple[Instance, Role]], fleet: Fleet) -> list[tuple[Instance, Role]]:
    """Take from the role that has most instances first, so that no role runs dry before it is refilled."""
    counts = _serving(fleet)
    left, ordered = list(moves), []
    while left:
        best = max(left, key=lambda move: counts[move[0].role] - counts[move[1]])
        left.remove(best)
        ordered.append(best)
        counts[best[0].role] -= 1
        counts[best[1]] += 1
    return ordered


def _serving(fleet: Fleet) -> dict[Role, int]:
    """Engines by role, without those that are set aside."""
    counts = fleet.counts()
    for one in fleet.engines():
        counts[one.role] -= one.held
    return counts


def risks(fleet: Fleet, target: Target, steps: tuple[PlanStep, ...]) -> tuple[Said, ...]:
    """What an operator should know before applying."""
    found = []
    if not steps:
        found.append(say("risk.nothing"))
    for count, role in ((target.num_prefill, "prefill"), (target.num_decode, "decode")):
        if count == 1 and steps and not target.num_mixed:
            found.append(say("risk.one_left", role=role))
    counts = _serving(fleet)
    for step in steps:
        counts[Role(step.from_role)] -= 1
        if not counts[Role(step.from_role)] and not counts[Role.MIXED]:
            found.append(say("risk.none_serves", role=step.from_role, id=step.instance_id))
        counts[Role(step.to_role)] += 1
    running = sum(one.rows for step in steps if (one := fleet.live(step.instance_id)) and step.from_role != "prefill")
    if running:
        found.append(counted("risk.running", running))
    return tuple(found)
