"""How a request ends: told to fail, confirmed by the gateway, recorded exactly once, both legs released."""

from __future__ import annotations

from typing import Literal

from controlplane.core import hits
from controlplane.core.desk import Desk
from controlplane.core.events import Ended, Fail, Finished
from controlplane.core.goodput import counts_for_attainment, is_good, missed_by_s
from controlplane.core.ledger import Leg, LegKind
from controlplane.core.lifecycle import Request, RequestState
from controlplane.core.placement import Candidate
from controlplane.core.policies.memory import MAX_STOLEN, Memory
from transfer.api import Outcome, RequestRecord
from transfer.said import Said
from transfer.terms import RequestId

FailKind = Literal["overloaded", "unavailable", "invalid", "timeout", "internal"]

OUTCOMES: dict[FailKind, Outcome] = {
    "overloaded": "rejected", "unavailable": "rejected", "invalid": "rejected", "timeout": "timed_out",
    "internal": "error",
}  # fmt: skip
"""What a failure counts as when the gateway never confirms it."""


class Endings:
    """Delivery: exactly one Finished for every Arrived that was taken; repeated and late events change nothing."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk

    def fail(
        self, request: Request, status: int, kind: FailKind, why: Said, retry_after_s: float | None = None
    ) -> None:
        """End it with an error: legs are aborted now, the gateway confirms with Ended."""
        if request.state in (RequestState.FAILING, RequestState.ENDED):
            return
        desk = self._desk
        desk.line.discard(request)
        desk.order(desk.ledger.abort_request(request.request_id, str(why), desk.now))
        request.move = None
        request.fire("fail", desk.now)
        request.failing = Fail(
            request_id=request.request_id, status=status, kind=kind, said=why, retry_after_s=retry_after_s
        )
        desk.count(f"failed_{kind}")
        desk.emit(request.failing)

    def ended(self, event: Ended) -> None:
        """The gateway wrote the client's terminal event."""
        desk = self._desk
        request = desk.requests.pop(event.request_id, None)
        if request is None:
            return
        desk.line.discard(request)
        migrating = request.state is RequestState.MIGRATING
        request.fire("end", desk.now)
        self._release(request, by_node=event.by_node and event.outcome == "ok" and not migrating)
        record = self._record(request, event)
        missed_s = request.stages.so_far(desk.now)
        desk.goodput.finished(record, missed_s, desk.now, desk.now - request.placed_s)
        cached = min(record.cached_tokens, record.prompt_tokens)
        hits.local_done(desk, request, cached)
        desk.count("prompt_tokens", record.prompt_tokens)
        desk.count("cached_tokens", cached)
        desk.count("output_tokens", record.output_tokens)
        if record.outcome == "ok":
            memory = desk.memory(record.model)
            memory.finished(record.output_tokens)
            placed, slo = request.chosen, request.slo
            stayed = not request.num_migrations and not request.num_replaced
            if placed is not None and slo is not None and record.tpot_s is not None and stayed:
                memory.paced(_expected_s(placed, memory, desk), record.tpot_s, slo.tpot_s, desk.now)
        counts = request.slo is not None and counts_for_attainment(record, request.slo)
        desk.traffic.ended(
            record.request_id, record.model, ok=record.outcome == "ok", output_tokens=record.output_tokens,
            cached_tokens=cached, good=record.good is True if counts else None,
        )  # fmt: skip
        desk.emit(Finished(record=record))
        desk.stirred = True

    def unconfirmed(self, request: Request) -> None:
        """The gateway never answered a Fail: close the books all the same."""
        failing = request.failing
        if failing is None:
            return
        self._desk.note("error", f"the gateway did not confirm the end of request {request.request_id}")
        self.ended(
            Ended(
                request_id=request.request_id, outcome=OUTCOMES[failing.kind], finish_reason=None, output_tokens=0,
                ttft_s=None, tpot_s=None, e2e_s=max(0.0, self._desk.now - request.spec.arrived_s), max_itl_s=None,
                error=failing.message, error_said=failing.said, by_node=False,
            )
        )  # fmt: skip

    def _release(self, request: Request, by_node: bool) -> None:
        """Close what the node says it released itself; abort everything else, the twin included."""
        desk, reason = self._desk, "the request has ended"
        running: list[Leg] = [leg for leg in desk.ledger.legs_of(request.request_id)
                              if leg.kind is LegKind.DECODE and not leg.closing]  # fmt: skip
        if by_node and len(running) == 1:
            desk.ledger.close(running[0])
        desk.order(desk.ledger.abort_request(request.request_id, reason, desk.now))

    def _record(self, request: Request, event: Ended) -> RequestRecord:
        spec, chosen = request.spec, request.chosen
        cached = event.cached_tokens if event.cached_tokens is not None else request.cached_tokens or 0
        error, said = event.error, event.error_said
        if not error and request.failing is not None:
            error, said = request.failing.message, request.failing.said
        return RequestRecord(
            request_id=spec.request_id, model=spec.model, traffic_class=request.traffic_class,
            arrived_at=spec.arrived_at, outcome=event.outcome, finish_reason=event.finish_reason,
            prompt_tokens=request.num_prompt, output_tokens=event.output_tokens, cached_tokens=cached,
            ttft_s=event.ttft_s, tpot_s=event.tpot_s, e2e_s=event.e2e_s, max_itl_s=event.max_itl_s,
            good=is_good(event, request.slo), missed_by_s=missed_by_s(event, request.slo),
            stages_s={} if event.ttft_s is None else request.stages.summing_to(event.ttft_s, self._desk.now),
            prefill=request.prefill, decode=request.decode, num_resumes=request.num_resumes,
            kv_source=chosen.pool.id if chosen is not None and chosen.pool is not None else None,
            num_migrations=request.num_migrations, why=request.why, error=None if event.outcome == "ok" else error,
            error_said=None if event.outcome == "ok" else said,
            fetched_tokens=min(request.fetched_tokens, cached), num_replaced=request.num_replaced,
        )  # fmt: skip


def _expected_s(chosen: Candidate, memory: Memory, desk: Desk) -> float:
    """The pace predicted for it when it was placed and what is predicted there now, halved: the batch has grown or
    shrunk meanwhile, which is no error of a prediction."""
    one = chosen.decode
    if one.latency is None:
        return chosen.tpot_s
    stolen = min(MAX_STOLEN, memory.stolen_share(one.id, desk.now))
    return 0.5 * (chosen.tpot_s + one.step_hint_s() / (1.0 - stolen))


def is_active(request: Request) -> bool:
    """Whether some instance works for it."""
    return request.state in (
        RequestState.RESERVING,
        RequestState.PREFILLING,
        RequestState.DECODING,
        RequestState.MIGRATING,
    )


def find(desk: Desk, request_id: RequestId, generation: int) -> Request | None:
    """The request, if `generation` is the one that runs it now."""
    request = desk.requests.get(request_id)
    return request if request is not None and request.generation == generation else None
