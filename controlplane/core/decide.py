"""Asks the policy for a place, and says what stands in the way where it has none."""

from __future__ import annotations

from heapq import nsmallest

from controlplane.core.config import CoreConfig
from controlplane.core.estimate import Estimator
from controlplane.core.fleet import Group
from controlplane.core.instance import Instance
from controlplane.core.placement import Block, Blocked, Wanted
from controlplane.core.policies.protocol import Answer, Situation
from controlplane.core.policies.registry import POLICIES
from transfer.said import say

__all__ = ["Block", "Blocked", "decide", "has_other_place", "migration_target", "unserved"]


def decide(at: Situation) -> Answer:
    """Candidates for serving a request now, best first; what it has to wait for; or a rejection."""
    answer = POLICIES[at.config.policy].place(at)
    return _blocked(at) if isinstance(answer, list) and not answer else answer


def migration_target(config: CoreConfig, group: Group, wanted: Wanted, source: Instance) -> Instance | None:
    """Who can take over a running request: the quickest decode instance with room, else a mixed one."""
    estimator = Estimator(config, group, wanted, {})
    for instances in (group.decodes, group.mixed):
        usable = [one for one in instances if one is not source and one.hello.shares_kv
                  and one.id not in wanted.unfit and estimator.has_room(one)]  # fmt: skip
        best = nsmallest(
            1,
            usable,
            key=lambda one: (
                wanted.avoid.get(one.id, 0),
                one.room < wanted.keep_blocks,
                one.step_hint_s(),
                one.picked,
                one.id,
            ),
        )
        if best:
            return best[0]
    return None


def has_other_place(config: CoreConfig, group: Group, wanted: Wanted, source: Instance) -> bool:
    """Whether a request that runs on `source` would find room elsewhere if it were placed anew."""
    estimator = Estimator(config, group, wanted, {})
    return any(one is not source and one.id not in wanted.unfit and estimator.has_room(one)
               for one in (*group.decodes, *group.mixed))  # fmt: skip


def unserved(config: CoreConfig, model: str, group: Group | None) -> Blocked | None:
    """Which role has no ready instance, in a sentence; None when the model can be served."""
    if group is None or not (group.decodes or group.mixed):
        return Blocked(Block.NO_DECODE, say("wait.no_decode", model=model))
    if not group.prefills and not group.mixed and config.without_prefill == "refuse":
        return Blocked(Block.NO_PREFILL, say("wait.no_prefill", model=model))
    return None


def _blocked(at: Situation) -> Blocked:
    config, group, wanted = at.config, at.group, at.wanted
    model = group.model.name
    if missing := unserved(config, model, group):
        return missing
    holders = [one for one in (*group.decodes, *group.mixed) if one.id not in wanted.unfit]
    if not holders:
        return Blocked(Block.NEVER_FITS, say("text", text=next(iter(wanted.unfit.values()))))
    if wanted.need_blocks > group.largest_blocks:
        return Blocked(Block.NEVER_FITS, say("wait.never_fits", tokens=wanted.num_tokens, num=wanted.need_blocks,
                                             most=group.largest_blocks))  # fmt: skip
    if not any(at.estimator.has_room(one) for one in holders):
        return Blocked(Block.ROOM, say("wait.no_room", model=model, num=wanted.need_blocks))
    return Blocked(Block.BACKLOG, say("wait.backlog", model=model, seconds=f"{config.prefill_backlog_s:g}"))
