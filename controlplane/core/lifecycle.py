"""One request: its states as a table, and everything the scheduler remembers of it. Decides nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from controlplane.core.events import Fail, RequestSpec
from controlplane.core.instance import Instance
from controlplane.core.machine import Machine, mermaid
from controlplane.core.placement import Candidate
from controlplane.core.stages import StageClock
from transfer.api import CandidateView
from transfer.said import Said
from transfer.terms import InstanceId, RequestId, Slo

TOKEN_BYTES = 4
UNHURRIED_S = 30.0
"""First token of a request without objectives: what it is scheduled for, not what it is judged by."""


class RequestState(StrEnum):
    QUEUED = "queued"
    """No instance holds anything for it; waits for a place."""
    RESERVING = "reserving"
    """Decode was asked to hold blocks."""
    PREFILLING = "prefilling"
    """Blocks are held; the prompt is computed or its KV is on its way."""
    DECODING = "decoding"
    MIGRATING = "migrating"
    """Runs, and another instance prepares to take over."""
    RESUMING = "resuming"
    """Its instance is lost; the gateway is asked what was delivered."""
    FAILING = "failing"
    """The gateway was told to end it and has not confirmed yet."""
    ENDED = "ended"


_ANYWHERE = {"fail": RequestState.FAILING, "end": RequestState.ENDED}

REQUEST_MOVES: dict[RequestState, dict[str, RequestState]] = {
    RequestState.QUEUED: {"place": RequestState.RESERVING, **_ANYWHERE},
    RequestState.RESERVING: {
        "reserved": RequestState.PREFILLING,
        "refused": RequestState.QUEUED,
        "lost": RequestState.QUEUED,
        "lost_work": RequestState.RESUMING,
        "first_token": RequestState.DECODING,
        **_ANYWHERE,
    },
    RequestState.PREFILLING: {
        "kv_received": RequestState.DECODING,
        "first_token": RequestState.DECODING,
        "lost_work": RequestState.RESUMING,
        **_ANYWHERE,
    },
    RequestState.DECODING: {
        "migrate": RequestState.MIGRATING,
        "lost_work": RequestState.RESUMING,
        **_ANYWHERE,
    },
    RequestState.MIGRATING: {
        "moved": RequestState.DECODING,
        "stayed": RequestState.DECODING,
        "lost_work": RequestState.RESUMING,
        **_ANYWHERE,
    },
    RequestState.RESUMING: {"resume": RequestState.QUEUED, **_ANYWHERE},
    RequestState.FAILING: {"end": RequestState.ENDED},
    RequestState.ENDED: {},
}


@dataclass(slots=True)
class Move:
    """A migration in progress. ordered_s: when Migrate was sent; None while the target prepares."""

    generation: int
    target: InstanceId
    since_s: float
    deadline_s: float
    ordered_s: float | None = None
    target_lost: bool = False


@dataclass(slots=True, eq=False)
class Request:
    """tokens: pack_tokens(prompt + delivered output), the last num_output are output, as known at the last placement.

    generation: the one whose decode leg runs it now; minted: the highest ever used. avoid: instances that failed
    it, by how often; placement prefers others. why: the candidates of its first placement.
    """

    spec: RequestSpec
    number: int
    traffic_class: str
    slo: Slo | None
    stages: StageClock
    machine: Machine[RequestState]
    tokens: bytes
    num_output: int = 0
    generation: int = 0
    minted: int = 0
    chosen: Candidate | None = None
    prefill: InstanceId | None = None
    decode: InstanceId | None = None
    why: tuple[CandidateView, ...] = ()
    hashes: Sequence[bytes] | None = None
    root: bytes = b""
    """What `hashes` were chained from."""
    cached_tokens: int | None = None
    """Of its first placement, as its prefill instance told; None before, and where decode computes the prompt."""
    fetched_tokens: int = 0
    avoid: dict[InstanceId, int] = field(default_factory=dict)
    unfit: dict[InstanceId, str] = field(default_factory=dict)
    """Instances that said it never fits there, and their sentence."""
    blame: list[int] = field(default_factory=list)
    """Engine failures, by their number, that it may have been the cause of (suspects.py)."""
    num_resumes: int = 0
    num_migrations: int = 0
    num_replaced: int = 0
    """Times it was placed anew because its instance was emptied and cannot move what runs."""
    num_failed_moves: int = 0
    move: Move | None = None
    first_token_s: float | None = None
    since_s: float = 0.0
    """When it came into its present state."""
    placed_s: float = 0.0
    """When it was last given a place."""
    sent_s: float = 0.0
    """When its unanswered message was last sent."""
    unheld_s: float | None = None
    """Since when no instance has held it though it should run."""
    yields: bool = False
    """It waits for something that others do not want, and is no obstacle to them."""
    again_s: float = 0.0
    awaits: Instance | None = None
    """While it yields, it is not tried again before then, unless the instance that it awaits takes work."""
    waits_for: Said | None = None
    """What kept it from a place at the last try, for the verdict and the 503."""
    failing: Fail | None = None

    @property
    def request_id(self) -> RequestId:
        return self.spec.request_id

    @property
    def state(self) -> RequestState:
        return self.machine.state

    @property
    def num_tokens(self) -> int:
        return len(self.tokens) // TOKEN_BYTES

    @property
    def num_prompt(self) -> int:
        return len(self.spec.tokens) // TOKEN_BYTES

    @property
    def deadline_s(self) -> float:
        return self.spec.arrived_s + self.spec.timeout_s

    @property
    def rank(self) -> tuple[int, float, int]:
        """Order in the waiting line: lower priority value first, then arrival, so that a resumed one goes ahead."""
        return (self.spec.priority, self.spec.arrived_s, self.number)

    @property
    def due_s(self) -> float:
        """When its first token is due by its class; without objectives, when it has waited unusually long."""
        return self.spec.arrived_s + (self.slo.ttft_s if self.slo is not None else UNHURRIED_S)

    def fire(self, event: str, now: float) -> None:
        """Take a move of REQUEST_MOVES. Raises IllegalTransition."""
        self.machine.fire(event)
        self.since_s = now

    def doomed(self, now: float) -> bool:
        """Whether it is past an objective of its class already."""
        if self.slo is None:
            return False
        first = now if self.first_token_s is None else self.first_token_s
        late = first - self.spec.arrived_s > self.slo.ttft_s
        return late or (self.slo.e2e_s is not None and now - self.spec.arrived_s > self.slo.e2e_s)


def new_request(spec: RequestSpec, number: int, traffic_class: str, slo: Slo | None, minted: int) -> Request:
    """A request that has just arrived. minted: the highest generation of this id that may still be held anywhere."""
    return Request(
        spec=spec, number=number, traffic_class=traffic_class, slo=slo, stages=StageClock(spec.arrived_s),
        machine=Machine(f"request {spec.request_id}", REQUEST_MOVES, RequestState.QUEUED), tokens=spec.tokens,
        generation=minted, minted=minted, since_s=spec.arrived_s,
    )  # fmt: skip


def request_diagram() -> str:
    """The request's states as a Mermaid diagram."""
    return mermaid(REQUEST_MOVES, RequestState.QUEUED)
