"""Placement: which instance prefills, where its KV comes from and which one decodes, by predicted attainment.

Prefill and decode decouple (one fixes the wait, the other the pace), so the best few of each are found by cheap
figures and only their pairs are weighed in full (estimate.py). The policy itself is `choose`, at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from controlplane.core.config import CoreConfig
from controlplane.core.fetching import Fetch
from controlplane.core.instance import Charge, Instance
from transfer.api import CandidateView, KvWay
from transfer.terms import InstanceId, Slo

MAX_VIEWS = 8


@dataclass(slots=True)
class Wanted:
    """What is to be placed. num_tokens: prompt + output so far; keep_blocks: to run it until its usual end."""

    num_tokens: int
    need_blocks: int
    keep_blocks: int
    usual_output: float
    slo: Slo | None
    waited_s: float
    avoid: dict[InstanceId, int]
    unfit: dict[InstanceId, str]


@dataclass(slots=True, eq=False)
class Candidate:
    """One way to serve a request. remote False: decode (or mixed) computes the prompt itself.

    cached_tokens: found there or fetched; compute_tokens: the others, the last token left out where remote.
    short_blocks: KV blocks it lacks to keep the request until its usual end without preempting another.
    """

    decode: Instance
    prefill: Instance | None
    fetch: Fetch | None
    compute_tokens: int
    cached_tokens: int
    queue_s: float
    prefill_s: float
    transfer_s: float
    ttft_s: float
    tpot_s: float
    short_blocks: int
    faults: int
    charge_prefill: Charge
    charge_decode: Charge
    misses: int = 0
    cost: float = 0.0

    @property
    def remote(self) -> bool:
        return self.prefill is not None

    @property
    def pool(self) -> Instance | None:
        """Where KV is fetched from."""
        return self.fetch.pool if self.fetch is not None else None

    @property
    def way(self) -> KvWay:
        if self.fetch is None:
            return "compute"
        return "both" if self.compute_tokens * self.fetch.blocks >= self.cached_tokens else "fetch"

    @property
    def order(self) -> tuple[int, str, int, str]:
        """Breaks ties: whoever was picked longest ago, then by id."""
        first = self.prefill or self.decode
        return (first.picked, first.id, self.decode.picked, self.decode.id)

    def view(self, chosen: bool, reason: str) -> CandidateView:
        return CandidateView(
            prefill=self.prefill.id if self.prefill else None, decode=self.decode.id, ttft_s=self.ttft_s,
            tpot_s=self.tpot_s, cached_tokens=self.cached_tokens, queue_s=self.queue_s, prefill_s=self.prefill_s,
            transfer_s=self.transfer_s, kv_source=self.pool.id if self.pool else None, chosen=chosen, reason=reason,
            kv_way=self.way, fetched_blocks=self.fetch.new_blocks if self.fetch else 0,
            fetch_s=self.fetch.fetch_s if self.fetch else 0.0,
        )  # fmt: skip


Policy = Callable[[Candidate, Wanted], tuple[int, float]]
"""(misses, cost) of a candidate: fewer misses win, then the lower cost."""


def by_objectives(one: Candidate, wanted: Wanted) -> tuple[int, float]:
    """Predicted attainment first, then the least slack used up. DistServe's goodput (OSDI'24, section 2) read as a
    placement rule: a decode counts as missed when adding this request slows its whole batch past the objective."""
    misses = one.faults + (one.short_blocks > 0)
    slo = wanted.slo
    if slo is None:
        return misses, one.ttft_s + one.tpot_s * wanted.usual_output
    ttft_s = wanted.waited_s + one.ttft_s
    misses += (ttft_s > slo.ttft_s) + (one.tpot_s > slo.tpot_s)
    if slo.e2e_s is not None:
        misses += ttft_s + one.tpot_s * wanted.usual_output > slo.e2e_s
    return misses, one.ttft_s / slo.ttft_s + one.tpot_s / slo.tpot_s


def by_first_token(one: Candidate, wanted: Wanted) -> tuple[int, float]:
    """The earliest first token, whatever it does to others."""
    return one.faults + (one.short_blocks > 0), one.ttft_s


def in_turn(one: Candidate, wanted: Wanted) -> tuple[int, float]:
    """Everybody in turn, blind to load: the baseline that others are compared with."""
    return one.faults + (one.short_blocks > 0), 0.0


POLICIES: dict[str, Policy] = {"slo": by_objectives, "fastest": by_first_token, "round_robin": in_turn}


def choose(candidates: Sequence[Candidate], wanted: Wanted, config: CoreConfig) -> list[Candidate]:
    """Best first. Which candidates compete at all is decide.py's; the policy does the rest."""
    policy = POLICIES[config.policy]
    for one in candidates:
        one.misses, one.cost = policy(one, wanted)
        one.cost = round(one.cost, 9)
    return sorted(candidates, key=lambda one: (one.misses, one.cost, one.order))


def explain(ranked: Sequence[Candidate], wanted: Wanted) -> tuple[CandidateView, ...]:
    """The winner and up to seven others, each with the reason it won or lost."""
    best = ranked[0]
    views = [best.view(True, "best predicted attainment" if not best.misses else f"least bad: {_faults(best, wanted)}")]
    for one in ranked[1:MAX_VIEWS]:
        views.append(one.view(False, _faults(one, wanted) or _slower(one, best)))
    return tuple(views)


def _faults(one: Candidate, wanted: Wanted) -> str:
    """What a candidate is predicted to miss; empty when nothing."""
    found = []
    slo, ttft_s = wanted.slo, wanted.waited_s + one.ttft_s
    if slo is not None and ttft_s > slo.ttft_s:
        found.append(f"TTFT {ttft_s:.3g} s over {slo.ttft_s:g} s")
    if slo is not None and one.tpot_s > slo.tpot_s:
        found.append(f"TPOT {one.tpot_s:.3g} s over {slo.tpot_s:g} s")
    if one.short_blocks > 0:
        found.append(f"{one.short_blocks} KV blocks short of its usual length")
    if one.faults:
        found.append("failed this request before")
    return ", ".join(found)


def _slower(one: Candidate, best: Candidate) -> str:
    if one.ttft_s > best.ttft_s:
        return f"first token {one.ttft_s - best.ttft_s:.3g} s later"
    if one.tpot_s > best.tpot_s:
        return f"TPOT {one.tpot_s - best.tpot_s:.3g} s longer"
    return "equal; the other's turn" if one.cost == best.cost else "uses up more of the objectives"
