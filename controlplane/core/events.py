"""What enters and leaves the scheduler core. Every event is journalled by the flight recorder and replays.

Wire messages enter wrapped in FromNode and leave wrapped in Send. Tokens do not pass here: decode sends them to
the gateway's TokenRouter, which reports FirstToken and Ended.
"""

from __future__ import annotations

from typing import Literal

from transfer.api import (
    ActionView,
    ApplyRequest,
    AuditRow,
    CandidateView,
    HoldAction,
    Outcome,
    Plan,
    PlanRequest,
    RequestRecord,
)
from transfer.autopilot import AutopilotMode, AutopilotRequest, AutopilotView, LookRow, PinRequest, PinView
from transfer.classes import ClassesRequest, ClassesView
from transfer.said import Said
from transfer.terms import InstanceId, RequestId, SamplingParams, Slo, Struct
from transfer.wire.messages import (
    CacheEvents,
    Goodbye,
    Heartbeat,
    Hello,
    KvReceived,
    Message,
    MigrateFailed,
    PrefillDone,
    PrefillFailed,
    PrefillStarted,
    Released,
    Replicated,
    RequestLost,
    Reserved,
    ReserveRefused,
    RoleReport,
)  # fmt: skip

NodeMessage = (
    Hello | Heartbeat | Goodbye | RoleReport | Reserved | ReserveRefused | PrefillStarted | PrefillDone
    | PrefillFailed | KvReceived | RequestLost | Released | MigrateFailed | CacheEvents | Replicated
)  # fmt: skip


class RequestSpec(Struct, frozen=True):
    """A validated request. tokens: pack_tokens(prompt). arrived_s: loop time at the gateway; arrived_at: Unix time.

    hashes: of the whole blocks of tokens[:-1], from a simulator, whose tokens say only how many they are; never a
    client's. Empty: they are made from the tokens.
    """

    request_id: RequestId
    model: str
    tokens: bytes
    sampling: SamplingParams
    traffic_class: str
    arrived_s: float
    arrived_at: float
    timeout_s: float
    salt: str = ""
    tenant: str = ""
    priority: int = 0
    hashes: tuple[bytes, ...] = ()


# --- events -------------------------------------------------------------------------------------------------


class Event(Struct, frozen=True, tag=True):
    pass


class FromNode(Event, frozen=True):
    instance_id: InstanceId
    message: NodeMessage


class NodeLost(Event, frozen=True):
    """The wire has heard nothing from the instance for its liveness time."""

    instance_id: InstanceId


class Arrived(Event, frozen=True):
    request: RequestSpec


class Resume(Event, frozen=True):
    """Answer to NeedTokens: pack_tokens(prompt + delivered output), of which num_output are output."""

    request_id: RequestId
    tokens: bytes
    num_output: int


class FirstToken(Event, frozen=True):
    """The first output token was delivered to the client's socket (or, unstreamed, became available)."""

    request_id: RequestId


class Ended(Event, frozen=True):
    """The gateway wrote the client's one terminal event. cached_tokens: as a local decode told, else None."""

    request_id: RequestId
    outcome: Outcome
    finish_reason: str | None
    output_tokens: int
    ttft_s: float | None
    tpot_s: float | None
    e2e_s: float
    max_itl_s: float | None
    cached_tokens: int | None = None
    error: str | None = None
    error_said: Said | None = None
    by_node: bool = True
    """True: the decode node ended it itself (stop token, length) and holds nothing; False: it must be aborted."""


class PlanWanted(Event, frozen=True):
    """Plan only; answered by the effect PlanReady or PlanRefused with the same ask_id."""

    ask_id: str
    request: PlanRequest


class ApplyWanted(Event, frozen=True):
    """undo: apply the inverse of plan_id."""

    ask_id: str
    plan_id: str
    apply: ApplyRequest
    undo: bool = False
    at_s: float = 0.0
    """Unix time, for the audit."""


class AutopilotWanted(Event, frozen=True):
    """Change the autopilot, pin or release something; answered by AutopilotReady or PlanRefused. actor: who releases;
    the other two name their own."""

    ask_id: str
    change: AutopilotRequest | None = None
    pin: PinRequest | None = None
    unpin: str | None = None
    actor: str = "operator"


class HoldWanted(Event, frozen=True):
    """Set an instance aside or take it back; answered by HoldReady or PlanRefused. at_s: Unix time, for the audit."""

    ask_id: str
    instance_id: InstanceId
    action: HoldAction
    apply: ApplyRequest
    at_s: float = 0.0


class AutopilotState(Struct, frozen=True):
    """What was set of the autopilot. configured: mode, floor and max_moves of the settings that it was set under. at_s:
    Unix time, from the shell; left_s of the pins counts from then."""

    mode: AutopilotMode
    floor: int
    max_moves: int | None
    configured: tuple[AutopilotMode, int, int | None]
    pins: tuple[PinView, ...] = ()
    at_s: float = 0.0


class AutopilotRestored(Event, frozen=True):
    """What an earlier life of this control plane kept, age_s ago; before anything else is asked of it."""

    state: AutopilotState
    age_s: float


class ClassesWanted(Event, frozen=True):
    """Change objectives; answered by ClassesReady or PlanRefused. at_s: Unix time, for the audit."""

    ask_id: str
    change: ClassesRequest
    at_s: float = 0.0


class ClassesState(Struct, frozen=True):
    """Objectives by traffic class. configured: those of the settings that they were set under."""

    classes: dict[str, Slo | None]
    configured: dict[str, Slo | None]


class ClassesRestored(Event, frozen=True):
    """What an earlier life of this control plane kept; before anything else is asked of it."""

    state: ClassesState


class PlansState(Struct, frozen=True):
    """Plans that have ended, the oldest first."""

    plans: tuple[Plan, ...]


class PlansRestored(Event, frozen=True):
    """As ClassesRestored."""

    state: PlansState


class Tick(Event, frozen=True):
    """Every 0.1 s: deadlines, retries of waiting requests, plan progress."""


# --- effects ------------------------------------------------------------------------------------------------


class Effect(Struct, frozen=True, tag=True):
    pass


class Send(Effect, frozen=True):
    instance_id: InstanceId
    message: Message


class Expect(Effect, frozen=True):
    """Tell the TokenRouter that tokens of this generation of the request are good from now on (too)."""

    request_id: RequestId
    generation: int


class NeedTokens(Effect, frozen=True):
    """Its decode is lost: the shell answers at once with Resume. The router accepts no token until the next Expect."""

    request_id: RequestId


class Fail(Effect, frozen=True):
    """End the client's request with an error. The gateway answers with Ended. retry_after_s: for 429 and 503."""

    request_id: RequestId
    status: int
    kind: Literal["overloaded", "unavailable", "invalid", "timeout", "internal"]
    said: Said
    retry_after_s: float | None = None

    @property
    def message(self) -> str:
        return str(self.said)


class Finished(Effect, frozen=True):
    """The request's record, exactly once, for history and the live feed."""

    record: RequestRecord


class Audit(Effect, frozen=True):
    """A row whose at_s is 0 gets the present time from the shell."""

    row: AuditRow


class AutopilotKept(Effect, frozen=True):
    """To be kept for the next life, in place of what was kept before."""

    state: AutopilotState


class ClassesKept(Effect, frozen=True):
    """As AutopilotKept."""

    state: ClassesState


class PlansKept(Effect, frozen=True):
    """As AutopilotKept."""

    state: PlansState


class Looked(Effect, frozen=True):
    """To be kept, in place of an earlier row of this look_id. Its times count from now."""

    row: LookRow


class PlanReady(Effect, frozen=True):
    ask_id: str
    plan: Plan


class AutopilotReady(Effect, frozen=True):
    ask_id: str
    view: AutopilotView


class ClassesReady(Effect, frozen=True):
    ask_id: str
    view: ClassesView


class HoldReady(Effect, frozen=True):
    ask_id: str
    view: ActionView


class PlanRefused(Effect, frozen=True):
    """status: 400 nonsense, 404 unknown plan, 409 the fleet changed or another plan runs."""

    ask_id: str
    status: int
    said: Said

    @property
    def message(self) -> str:
        return str(self.said)


class Note(Effect, frozen=True):
    """A sentence for the log."""

    level: Literal["info", "warning", "error"]
    text: str


__all__ = [
    "ApplyWanted", "Arrived", "Audit", "AutopilotKept", "AutopilotReady", "AutopilotRestored", "AutopilotState",
    "AutopilotWanted", "CandidateView", "ClassesKept", "ClassesReady", "ClassesRestored", "ClassesState",
    "ClassesWanted", "Effect", "Ended", "Event", "Expect", "Fail", "Finished", "FirstToken", "FromNode",
    "HoldReady", "HoldWanted", "Looked", "NeedTokens", "NodeLost", "NodeMessage", "Note", "PlanReady",
    "PlanRefused", "PlanWanted", "PlansKept", "PlansRestored", "PlansState", "RequestSpec", "Resume", "Send", "Tick",
]  # fmt: skip
