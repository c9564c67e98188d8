"""From steppers to moves: how many instances of each model and hardware class should have which role. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from transfer.api import InstanceView
from transfer.terms import Role

ENGINE_ROLES = (Role.PREFILL.value, Role.DECODE.value, Role.MIXED.value)


class Group(NamedTuple):
    """Instances that can stand for each other."""

    model: str
    hardware: str


def groups(instances: Iterable[InstanceView]) -> dict[Group, list[InstanceView]]:
    """Engines that are there, by model and hardware class, in that order."""
    found: dict[Group, list[InstanceView]] = {}
    for view in sorted(instances, key=lambda one: (one.model, one.hardware)):
        if view.role in ENGINE_ROLES and view.state != "lost":
            found.setdefault(Group(view.model, view.hardware), []).append(view)
    return found


def counts(members: Iterable[InstanceView]) -> dict[str, int]:
    """How many have each role now."""
    roles = [view.role for view in members]
    return {role: roles.count(role) for role in ENGINE_ROLES}


def moves(members: Iterable[InstanceView], wanted: Mapping[str, int]) -> dict[str, str]:
    """Fewest moves that give one group these counts; of a role with too many, those with least to do go first.

    wanted adds up to the number of members.
    """
    members = list(members)
    now = counts(members)
    short = [role for role in ENGINE_ROLES for _ in range(wanted[role] - now[role])]
    spare = []
    for role in ENGINE_ROLES:
        idle_first = sorted(
            (view for view in members if view.role == role),
            key=lambda view: (view.num_running + view.num_waiting, view.queued_prefill_tokens, view.id),
        )
        spare += idle_first[: max(0, now[role] - wanted[role])]
    return {view.id: role for view, role in zip(spare, short, strict=True)}
