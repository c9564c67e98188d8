"""What the tests of policies speak in: instances with given load, and one question put to one policy."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping

import msgspec
from core_kit import BLOCK, H20, H800, LAYOUT, MODEL, hello

from controlplane.core.config import CoreConfig
from controlplane.core.directory import Match
from controlplane.core.estimate import Estimator
from controlplane.core.fleet import Group
from controlplane.core.instance import Charge, Instance
from controlplane.core.placement import Candidate, Wanted
from controlplane.core.policies.memory import Memory
from controlplane.core.policies.protocol import Answer, Running, Situation
from controlplane.core.policies.registry import POLICIES
from transfer.profile import HardwareProfile
from transfer.terms import Role, Slo
from transfer.wire.messages import LoadReport

SLO = Slo(ttft_s=2.0, tpot_s=0.05)


def make(
    name: str, role: Role, *, rows: int = 0, context: int = 0, blocks: int = 0, queued: int = 0,
    num_blocks: int = 10_000, free: int | None = None, hardware: HardwareProfile | None = None, picked: int = 0,
    tpot_s: float = 0.05, host: str | None = None, num_waiting: int = 0,
) -> Instance:  # fmt: skip
    """An instance with load charged. queued: prompt tokens, at 40 us each."""
    one = Instance(hello(name, role, num_blocks=num_blocks, hardware=hardware, host=host), 0.0)
    one.charge(Charge(queued, queued * 40, rows, context, blocks, 0), 0.0)
    if rows and role is not Role.PREFILL:
        one.paces[round(tpot_s * 1e6)] = rows
    one.load = LoadReport(
        num_blocks=num_blocks, free_blocks=num_blocks, queued_prefill_tokens=queued, num_waiting=num_waiting
    )
    one.free_blocks, one.picked = num_blocks - blocks if free is None else free, picked
    return one


def p(name: str, **load: object) -> Instance:
    return make(name, Role.PREFILL, **load)  # type: ignore[arg-type]


def d(name: str, **load: object) -> Instance:
    return make(name, Role.DECODE, **load)  # type: ignore[arg-type]


def m(name: str, **load: object) -> Instance:
    return make(name, Role.MIXED, **load)  # type: ignore[arg-type]


def k(name: str) -> Instance:
    return make(name, Role.KV_POOL)


def group(*instances: Instance) -> Group:
    """Instances of equal hardware share a taste, as in Fleet."""
    profiles: dict[object, int] = {}
    for one in instances:
        one.taste = profiles.setdefault(one.latency, len(profiles))
    of = {role: [one for one in instances if one.role is role] for role in Role}
    return Group(
        model=MODEL, layout=LAYOUT, members=[one for one in instances if one.role is not Role.KV_POOL],
        prefills=of[Role.PREFILL], decodes=of[Role.DECODE], mixed=of[Role.MIXED],
        pools={one.id: one for one in of[Role.KV_POOL]},
    )  # fmt: skip


def asked(
    *instances: Instance, tokens: int = 1000, output: float = 100.0, slo: Slo | None = SLO, waited_s: float = 0.0,
    held: Mapping[str, int] | None = None, memory: Memory | None = None, now: float = 0.0, tenant: str = "",
    running: Callable[[Instance], list[Running]] | None = None, resumed: bool = False, seed: int = 0,
    max_output: int = 400, **settings: object,
) -> Situation:  # fmt: skip
    """One request of `tokens`. held: leading tokens by instance."""
    config = msgspec.structs.replace(CoreConfig(), **settings)
    blocks = LAYOUT.num_blocks(tokens)
    wanted = Wanted(
        num_tokens=tokens, need_blocks=blocks, keep_blocks=LAYOUT.num_blocks(tokens + int(output)), usual_output=output,
        slo=slo, waited_s=waited_s, avoid={}, unfit={}, max_output=max_output, tenant=tenant, resumed=resumed,
    )  # fmt: skip
    matches = {name: Match(n // BLOCK, 0, n // BLOCK) for name, n in (held or {}).items()}
    served = group(*instances)
    return Situation(
        config, served, wanted, matches, Estimator(config, served, wanted, matches, now), now, memory or Memory(),
        random.Random(seed), running or (lambda one: []),
    )  # fmt: skip


def answer(policy: str, *instances: Instance, **question: object) -> Answer:
    return POLICIES[policy].place(asked(*instances, **question))  # type: ignore[arg-type]


def chosen(policy: str, *instances: Instance, **question: object) -> tuple[str | None, str]:
    """(prefill, decode) that a policy picks."""
    found = answer(policy, *instances, **question)
    assert isinstance(found, list), found
    return pair(found[0])


def pair(one: Candidate) -> tuple[str | None, str]:
    return (one.prefill.id if one.prefill is not None else None, one.decode.id)


__all__ = ["BLOCK", "H20", "H800", "SLO", "answer", "asked", "chosen", "d", "group", "k", "m", "make", "p", "pair"]
