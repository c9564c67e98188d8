"""Which candidates compete for a request, and what stands in the way when there is none."""

from __future__ import annotations

from enum import StrEnum
from heapq import nsmallest
from typing import NamedTuple

from controlplane.core.config import CoreConfig
from controlplane.core.estimate import Estimator, Matches
from controlplane.core.fleet import Group
from controlplane.core.instance import Instance
from controlplane.core.placement import Candidate, Wanted, choose


class Block(StrEnum):
    """Why a request has no place now."""

    NO_DECODE = "no_decode"
    NO_PREFILL = "no_prefill"
    ROOM = "room"
    BACKLOG = "backlog"
    NEVER_FITS = "never_fits"


class Blocked(NamedTuple):
    block: Block
    sentence: str


def decide(config: CoreConfig, group: Group, wanted: Wanted, matches: Matches) -> list[Candidate] | Blocked:
    """Candidates for serving a request now, best first; or what it has to wait for."""
    estimator = Estimator(config, group, wanted, matches)
    has_pairs = bool(group.prefills and group.decodes)
    candidates: list[Candidate] = []
    if group.mixed and (config.colocate != "never" or not has_pairs):
        candidates += [estimator.local(one) for one in estimator.mixed()]
    if group.decodes and not (config.colocate == "always" and group.mixed):
        candidates += _with_decode(config, group, wanted, estimator)
    if candidates:
        return choose(candidates, wanted, config)
    return _blocked(config, group, wanted, estimator)


def migration_target(config: CoreConfig, group: Group, wanted: Wanted, source: Instance) -> Instance | None:
    """Who can take over a running request: the quickest decode instance with room, else a mixed one."""
    estimator = Estimator(config, group, wanted, {})
    for instances in (group.decodes, group.mixed):
        usable = [one for one in instances
                  if one is not source and one.id not in wanted.unfit and estimator.has_room(one)]  # fmt: skip
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


def _with_decode(config: CoreConfig, group: Group, wanted: Wanted, estimator: Estimator) -> list[Candidate]:
    """Pairs of a prefill and a decode instance; and decode alone where little is missing or no prefill is ready."""
    decodes = estimator.decodes()
    alone = not group.prefills and config.without_prefill == "serve_on_decode"
    found = [
        estimator.local(one)
        for one in decodes
        if (alone and estimator.takes_work(one)) or estimator.uncached(one) <= config.local_prefill_tokens
    ]
    if wanted.num_tokens > 1 and decodes:
        found += [estimator.pair(option, decode) for option in estimator.prefills() for decode in decodes]
    return found


def unserved(config: CoreConfig, model: str, group: Group | None) -> Blocked | None:
    """Which role has no ready instance, in a sentence; None when the model can be served."""
    if group is None or not (group.decodes or group.mixed):
        return Blocked(Block.NO_DECODE, f"no decode instance of {model} is ready")
    if not group.prefills and not group.mixed and config.without_prefill == "refuse":
        return Blocked(Block.NO_PREFILL, f"no prefill instance of {model} is ready")
    return None


def _blocked(config: CoreConfig, group: Group, wanted: Wanted, estimator: Estimator) -> Blocked:
    model = group.model.name
    if missing := unserved(config, model, group):
        return missing
    holders = [one for one in (*group.decodes, *group.mixed) if one.id not in wanted.unfit]
    if not holders:
        return Blocked(Block.NEVER_FITS, next(iter(wanted.unfit.values())))
    if wanted.need_blocks > group.largest_blocks:
        return Blocked(Block.NEVER_FITS, (
            f"{wanted.num_tokens} tokens need {wanted.need_blocks} KV blocks and the largest instance has "
            f"{group.largest_blocks}; shorten the prompt or give the instances more KV memory"))  # fmt: skip
    if not any(estimator.has_room(one) for one in holders):
        return Blocked(Block.ROOM, f"no decode instance of {model} has {wanted.need_blocks} free KV blocks")
    return Blocked(Block.BACKLOG, f"every prefill instance of {model} has {config.prefill_backlog_s:g} s of work")
