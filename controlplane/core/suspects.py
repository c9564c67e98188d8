"""Requests that make engines fail: who is to blame, and a place where a suspect harms nobody but itself.

A failing engine does not say which request of its batch it choked on, so each of them is blamed. One blamed
suspect_after times runs alone from then on: its next failure is its own, and clears whoever shared the earlier ones.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import msgspec

from controlplane.core.config import CoreConfig
from controlplane.core.desk import Desk
from controlplane.core.fleet import Group
from controlplane.core.instance import Instance
from controlplane.core.ledger import Leg, LegKind
from controlplane.core.lifecycle import Request, RequestState
from controlplane.core.placement import Block, Blocked
from transfer.errors import EngineFailed
from transfer.said import Said, say
from transfer.terms import InstanceId

_SET_ASIDE = Blocked(Block.ROOM, say("wait.set_aside"))
_TIMES = {1: "ended.once", 2: "ended.twice", 3: "ended.thrice"}


def is_engine_failure(reason: str) -> bool:
    """Whether a node's own word on its end names its engine; a killed machine or a lost link says nothing."""
    return EngineFailed.__name__ in reason


def is_suspect(desk: Desk, request: Request) -> bool:
    return len(request.blame) >= desk.config.suspect_after


def is_convicted(desk: Desk, request: Request) -> bool:
    """It ran alone the last time, so that nothing else can have been the cause."""
    return len(request.blame) >= desk.config.max_engine_failures


def blame(desk: Desk, instance_id: InstanceId, legs: Iterable[Leg]) -> None:
    """The engine of this instance failed: blame every request that was in its batch."""
    desk.count("engine_failures")
    number = desk.counters["engine_failures"]
    for leg in legs:
        request = desk.requests.get(leg.request_id)
        if request is not None and _in_batch(request, leg):
            request.blame.append(number)
            request.avoid[instance_id] = request.avoid.get(instance_id, 0) + 1


def convict(desk: Desk, request: Request, reason: Said) -> Said:
    """The failures were this request's doing: clear the others that were there. Returns what its client is told."""
    guilty = set(request.blame)
    for other in desk.requests.values():
        if other is not request:
            other.blame = [number for number in other.blame if number not in guilty]
    desk.count("poisonous_requests")
    desk.stirred = True
    num = len(request.blame)
    return say("ended.convicted", times=say(_TIMES.get(num, "ended.times"), num=num), why=reason)


def open_to_others(desk: Desk, group: Group) -> Group:
    """The group without the instances that are set aside for suspects; the same object when there are none."""
    _forget_holds(desk)
    if not any(one.id in desk.held for one in (*group.decodes, *group.mixed)):
        return group
    return dataclasses.replace(
        group,
        decodes=[one for one in group.decodes if one.id not in desk.held],
        mixed=[one for one in group.mixed if one.id not in desk.held],
    )


def room_for(desk: Desk, request: Request, group: Group) -> tuple[CoreConfig, Group] | Blocked:
    """The part of the group that this request may be placed on now, and the settings to decide with."""
    if not is_suspect(desk, request):
        return desk.config, open_to_others(desk, group)
    _forget_holds(desk)
    need = group.layout.num_blocks(request.num_tokens)
    able = [
        one for one in (*group.decodes, *group.mixed) if one.id not in request.unfit and one.hello.num_blocks >= need
    ]
    if not able:
        return desk.config, group  # nothing can take it, alone or not: decide.py says why
    one = _set_aside(desk, request, able)
    if one is None:
        return Blocked(Block.ROOM, say("wait.others_alone"))
    if desk.ledger.legs_at(one.id):
        return Blocked(Block.ROOM, say("wait.alone", id=one.id))
    alone = dataclasses.replace(
        group, prefills=[], decodes=[one] if one in group.decodes else [], mixed=[one] if one in group.mixed else []
    )
    return msgspec.structs.replace(desk.config, without_prefill="serve_on_decode", colocate="auto"), alone


def blocked_by_others(group: Group, part: Group, found: Blocked) -> Blocked:
    """What stands in the way in a part of the group may not do so in the whole: then it is a matter of waiting."""
    lasting = found.block in (Block.NO_DECODE, Block.NO_PREFILL, Block.NEVER_FITS)
    return _SET_ASIDE if part is not group and lasting else found


def _set_aside(desk: Desk, request: Request, able: list[Instance]) -> Instance | None:
    """The instance that nobody else is placed on until this request has run: an empty one, else the one it has, else
    the one with least to finish. At most half of the instances are set aside at a time, and at least one."""
    mine = next((name for name, holder in desk.held.items() if holder == request.request_id), None)
    free = [one for one in able if one.id == mine or one.id not in desk.held]
    if not free or (mine is None and len(desk.held) >= max(1, len(able) // 2)):
        return None
    best = min(free, key=lambda one: _preference(desk, request, one, one.id == mine))
    if mine is not None:
        del desk.held[mine]
    desk.held[best.id] = request.request_id
    return best


def _preference(desk: Desk, request: Request, one: Instance, mine: bool) -> tuple[bool, bool, int, int, str]:
    num_legs = len(desk.ledger.legs_at(one.id))
    return (num_legs > 0, not mine, request.avoid.get(one.id, 0), num_legs, one.id)


def _forget_holds(desk: Desk) -> None:
    """A hold ends with its request, its instance or the suspicion."""
    for instance_id, request_id in list(desk.held.items()):
        request, instance = desk.requests.get(request_id), desk.fleet.live(instance_id)
        ended = request is None or request.state is RequestState.FAILING or not is_suspect(desk, request)
        if ended or instance is None or not instance.ready:
            del desk.held[instance_id]


def _in_batch(request: Request, leg: Leg) -> bool:
    """Whether the engine worked for the request in this leg: not one that waits there for a step or for KV."""
    if leg.closing or leg.generation != request.generation:
        return False
    if request.state is RequestState.PREFILLING:
        return leg.started
    return leg.kind is LegKind.DECODE and request.state in (RequestState.DECODING, RequestState.MIGRATING)
