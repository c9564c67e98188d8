"""Placement: which instance prefills, where its KV comes from and which one decodes. Values only; policies choose."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from controlplane.core.fetching import Fetch
from controlplane.core.instance import Charge, Instance
from transfer.api import CandidateView, KvWay
from transfer.said import Said
from transfer.terms import InstanceId, Slo

CERTAINTY = {"extrapolated": 0, "preset": 1, "measured": 2, "fitted": 3}
"""How much a predicted step time is worth by where it comes from."""


class Block(StrEnum):
    """Why a request has no place now."""

    NO_DECODE = "no_decode"
    NO_PREFILL = "no_prefill"
    ROOM = "room"
    BACKLOG = "backlog"
    BETTER_LATER = "better_later"
    """It has a place, but a policy predicts that waiting for another is better; others may go ahead of it."""
    NEVER_FITS = "never_fits"


class Blocked(NamedTuple):
    """again_s: before then it need not be asked again, unless the instance that it awaits takes work."""

    block: Block
    said: Said
    again_s: float = 0.0
    awaits: Instance | None = None


@dataclass(slots=True)
class Wanted:
    """What is to be placed. num_tokens: prompt + output so far; keep_blocks: to run it until its usual end.

    resumed: it was placed before, so that turning it away is out of the question.
    """

    num_tokens: int
    need_blocks: int
    keep_blocks: int
    usual_output: float
    slo: Slo | None
    waited_s: float
    avoid: dict[InstanceId, int]
    unfit: dict[InstanceId, str]
    max_output: int = 1
    """Output tokens it may still have."""
    tenant: str = ""
    resumed: bool = False

    @property
    def tpot_us(self) -> int:
        """Its pace objective as charged; 0 without one."""
        return round(self.slo.tpot_s * 1e6) if self.slo is not None else 0


@dataclass(slots=True, eq=False)
class Candidate:
    """One way to serve a request. remote False: decode (or mixed) computes the prompt itself.

    cached_tokens: found there or fetched; compute_tokens: the others, the last token left out where remote.
    short_blocks: KV blocks it lacks to keep the request until its usual end without preempting another.
    reason: why it won or lost, in its policy's terms.
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
    error_s: float = 0.0
    """Of ttft_s: its error bar, where the policy has one."""
    reason: tuple[Said, ...] = ()

    @property
    def remote(self) -> bool:
        return self.prefill is not None

    @property
    def pool(self) -> Instance | None:
        """Where KV is fetched from."""
        return self.fetch.pool if self.fetch is not None else None

    @property
    def way(self) -> KvWay:
        """A fetch is "both" where at least a block is left to compute."""
        if self.fetch is None:
            return "compute"
        left = self.compute_tokens - (not self.remote)  # the last token is always computed
        return "both" if left * self.fetch.blocks >= self.cached_tokens else "fetch"

    @property
    def order(self) -> tuple[int, str, int, str]:
        """Breaks ties: whoever was picked longest ago, then by id."""
        first = self.prefill or self.decode
        return (first.picked, first.id, self.decode.picked, self.decode.id)

    def view(self, chosen: bool) -> CandidateView:
        return CandidateView(
            prefill=self.prefill.id if self.prefill else None, decode=self.decode.id, ttft_s=self.ttft_s,
            tpot_s=self.tpot_s, cached_tokens=self.cached_tokens, queue_s=self.queue_s, prefill_s=self.prefill_s,
            transfer_s=self.transfer_s, kv_source=self.pool.id if self.pool else None, chosen=chosen,
            reason=", ".join(str(one) for one in self.reason), said=self.reason, kv_way=self.way,
            fetched_blocks=self.fetch.new_blocks if self.fetch else 0,
            fetch_s=self.fetch.fetch_s if self.fetch else 0.0, provenance=self._provenance(), error=self._error(),
        )  # fmt: skip

    def _provenance(self) -> str:
        decode, first = self.decode, self.prefill or self.decode
        total = self.compute_tokens + self.cached_tokens
        step = decode.profile.provenance_at(decode.rows + 1, decode.context_tokens + total, decode.rows + 1)
        prompt = first.profile.prefill_provenance(self.compute_tokens, self.cached_tokens, first.hello.token_budget)
        return min(step, prompt, key=_certainty)

    def _error(self) -> float | None:
        errors = (self.decode.profile.error, (self.prefill or self.decode).profile.error)
        known = [error for error in errors if error is not None]
        return max(known) if len(known) == len(errors) else None


def _certainty(provenance: str) -> int:
    return CERTAINTY.get(provenance, 0)


def explain(ranked: Sequence[Candidate]) -> tuple[CandidateView, ...]:
    """The winner and a few others, each with the reason it won or lost."""
    return tuple(one.view(index == 0) for index, one in enumerate(ranked))
