"""One request on its nodes: reservation answered, prompt computed, KV received, first token delivered.

Every message is judged by (request, generation, sender); what belongs to an older placement closes its leg at most.
"""

from __future__ import annotations

from controlplane.core import hits
from controlplane.core.desk import Desk
from controlplane.core.dispatch import Dispatch
from controlplane.core.endings import find
from controlplane.core.ledger import KINDS, Leg, LegKind
from controlplane.core.lifecycle import Request, RequestState
from controlplane.core.migration import Migrations
from controlplane.core.recovery import Recovery
from controlplane.core.stages import ADMISSION, DECODE, PREFILL, QUEUE, TRANSFER
from controlplane.core.suspects import blame, is_engine_failure
from transfer.said import say
from transfer.terms import InstanceId
from transfer.wire.messages import (
    Abort,
    KvReceived,
    Prefill,
    PrefillDone,
    PrefillFailed,
    PrefillStarted,
    Released,
    RequestLost,
    Reserved,
    ReserveRefused,
)


class Handoff:
    def __init__(self, desk: Desk, dispatch: Dispatch, recovery: Recovery, migrations: Migrations) -> None:
        self._desk, self._dispatch, self._recovery, self._migrations = desk, dispatch, recovery, migrations

    # --- decode answers -------------------------------------------------------------------------------------

    def reserved(self, sender: InstanceId, message: Reserved) -> None:
        leg = self._leg(sender, message.request_id, message.generation, LegKind.DECODE)
        if leg is None:
            self._fence(sender, message.request_id, message.generation)
            return
        self._desk.ledger.answered(leg)
        leg.instance.told_free(message.free_blocks)
        request = self._desk.requests.get(message.request_id)
        if request is None or leg.closing:
            return
        if request.move is not None and request.move.generation == message.generation:
            self._migrations.reserved(request, message.have_tokens)
        elif request.generation == message.generation and request.state is RequestState.RESERVING:
            self._start(request, leg, message.have_tokens)

    def refused(self, sender: InstanceId, message: ReserveRefused) -> None:
        """Try others at once; where there are none the request waits for freed room."""
        leg = self._leg(sender, message.request_id, message.generation, LegKind.DECODE)
        if leg is None:
            return
        desk, instance, aborted = self._desk, leg.instance, leg.closing
        desk.ledger.close(leg)
        instance.told_free(message.free_blocks, full=message.retry)
        desk.count("reserve_refused")
        request = desk.requests.get(message.request_id)
        if request is None or aborted:
            return
        if not message.retry:
            request.unfit[sender] = message.reason
        if request.move is not None and request.move.generation == message.generation:
            self._migrations.refused(request)
        elif request.generation == message.generation and request.state is RequestState.RESERVING:
            desk.order(desk.ledger.abort_request(request.request_id, message.reason, desk.now))
            request.fire("refused", desk.now)
            request.waits_for = say("text", text=message.reason)
            request.stages.enter(ADMISSION, desk.now)
            desk.line.add(request)
            desk.stirred = True

    def kv_received(self, sender: InstanceId, message: KvReceived) -> None:
        leg = self._leg(sender, message.request_id, message.generation, LegKind.DECODE)
        if leg is None:
            self._fence(sender, message.request_id, message.generation)
            return
        desk = self._desk
        request = desk.requests.get(message.request_id)
        if request is None or leg.closing:
            return
        desk.ledger.answered(leg)
        if request.move is not None and request.move.generation == message.generation:
            self._migrations.moved(request)
        elif request.generation == message.generation and request.state is RequestState.PREFILLING:
            request.fire("kv_received", desk.now)
            request.stages.enter(DECODE, desk.now)
            self._computed(request)

    # --- prefill answers ------------------------------------------------------------------------------------

    def prefill_started(self, sender: InstanceId, message: PrefillStarted) -> None:
        leg = self._leg(sender, message.request_id, message.generation, LegKind.PREFILL)
        leg = leg or self._leg(sender, message.request_id, message.generation, LegKind.DECODE)
        request = find(self._desk, message.request_id, message.generation)
        if leg is None or request is None or leg.closing:
            return
        leg.started = True
        if request.state is RequestState.PREFILLING:
            request.stages.enter(PREFILL, self._desk.now)

    def prefill_done(self, sender: InstanceId, message: PrefillDone) -> None:
        desk = self._desk
        leg = self._leg(sender, message.request_id, message.generation, LegKind.PREFILL)
        leg = leg or self._leg(sender, message.request_id, message.generation, LegKind.DECODE)
        if leg is None:
            return
        aborted, started = leg.closing, leg.started
        if leg.kind is LegKind.PREFILL:
            self._handed_off(leg, message)
        desk.count("fetched_tokens", max(0, message.fetched_tokens))
        request = find(desk, message.request_id, message.generation)
        if request is None or aborted or request.state not in (RequestState.PREFILLING, RequestState.DECODING):
            return
        hits.prefill_done(desk, request, leg.instance, message)
        if request.cached_tokens is None:
            found = message.cached_tokens + message.fetched_tokens
            request.cached_tokens = min(found, request.num_prompt - 1)  # of a resumed one it may be output, too
        if leg.kind is LegKind.PREFILL and (
            request.first_token_s is None or request.num_resumes + request.num_replaced == 0
        ):
            self._clock_prefill(request, message, started)

    def prefill_failed(self, sender: InstanceId, message: PrefillFailed) -> None:
        self._failed(sender, message.request_id, message.generation, LegKind.PREFILL, message.reason)

    # --- either ---------------------------------------------------------------------------------------------

    def request_lost(self, sender: InstanceId, message: RequestLost) -> None:
        for kind in KINDS:
            self._failed(sender, message.request_id, message.generation, kind, message.reason)

    def released(self, sender: InstanceId, message: Released) -> None:
        closed = self._desk.ledger.released(sender, message.request_id, message.generation)
        if not closed:
            return
        self._desk.stirred = True
        request = self._desk.requests.get(message.request_id)
        move = request.move if request is not None else None
        if request is None or move is None or not move.target_lost or move.ordered_s is None:
            return
        if any(leg.generation == request.generation for leg in closed):
            self._recovery.replace(request, say("lost.taking_over", id=move.target))

    def first_token(self, request: Request) -> None:
        """Delivered to the client: the clock of the stages stops."""
        desk = self._desk
        if request.first_token_s is None:
            request.first_token_s = desk.now
            if request.chosen is not None and not request.chosen.remote:
                request.stages.enter(DECODE, desk.now)
            request.stages.enter(None, desk.now)
        if request.machine.can("first_token"):
            request.fire("first_token", desk.now)
        self._computed(request)

    # --- helpers --------------------------------------------------------------------------------------------

    def _start(self, request: Request, leg: Leg, have_tokens: int) -> None:
        """Decode holds the blocks: let the prompt be computed, there or by the prefill instance chosen with it."""
        desk, chosen = self._desk, request.chosen
        request.fire("reserved", desk.now)
        if chosen is None or chosen.prefill is None:
            request.stages.enter(PREFILL, desk.now)
            return
        prefill = desk.ledger.find(request.request_id, request.generation, LegKind.PREFILL)
        if prefill is None:
            self._recovery.replace(request, say("lost.prefill_gone"))
            return
        request.stages.enter(QUEUE, desk.now)
        self._recovery.remember_prefill(
            prefill,
            Prefill(
                request_id=request.request_id, generation=request.generation, tokens=request.tokens,
                target=leg.instance.peer(), have_tokens=have_tokens, lease_s=self._dispatch.lease_s(request),
                source=self._dispatch.source(chosen.fetch), salt=request.spec.salt, priority=request.spec.priority,
            ),
        )  # fmt: skip

    def _failed(self, sender: InstanceId, request_id: str, generation: int, kind: LegKind, reason: str) -> None:
        """A leg ended without a result; its blocks are free."""
        desk = self._desk
        leg = self._leg(sender, request_id, generation, kind)
        if leg is None:
            return
        aborted = leg.closing
        desk.count("prefills_failed" if kind is LegKind.PREFILL else "decodes_failed")
        if is_engine_failure(reason):
            blame(desk, sender, [leg])
        desk.ledger.close(leg)
        desk.stirred = True
        request = desk.requests.get(request_id)
        if request is None or aborted:
            return
        if request.move is not None and request.move.generation == generation:
            self._migrations.target_failed(request)
        elif request.generation == generation and (
            kind is LegKind.DECODE or request.state in (RequestState.RESERVING, RequestState.PREFILLING)
        ):
            for name in (request.prefill, request.decode) if kind is LegKind.PREFILL else (sender,):
                if name is not None:
                    request.avoid[name] = request.avoid.get(name, 0) + 1
            self._recovery.replace(request, say("text", text=reason))

    def _handed_off(self, leg: Leg, message: PrefillDone) -> None:
        """A prefill instance is rid of it."""
        desk = self._desk
        desk.ledger.close(leg)
        desk.stirred = True
        target = desk.ledger.find(message.request_id, message.generation, LegKind.DECODE)
        if target is not None and message.transfer_bytes > 0:
            desk.watch.handed_off(leg.instance, target.instance, message, desk.now)
        desk.count("transfer_bytes", max(0, message.transfer_bytes))
        desk.count("computed_tokens", max(0, message.computed_tokens))

    def _computed(self, request: Request) -> None:
        """The prompt needs no more compute: its prefill charge ends here, not with the request."""
        for kind in KINDS:
            leg = self._desk.ledger.find(request.request_id, request.generation, kind)
            if leg is not None and leg.charge.prefill_tokens:
                self._desk.ledger.computed(leg)
                self._desk.stirred = True

    def _clock_prefill(self, request: Request, message: PrefillDone, started: bool) -> None:
        """Share the time since Reserved between queue, prefill and transfer as the node measured it."""
        now, stages = self._desk.now, request.stages
        if not started:
            stages.move(QUEUE, PREFILL, message.prefill_s, now)
        if request.state is RequestState.PREFILLING:
            stages.enter(TRANSFER, now)
        stages.move(PREFILL, TRANSFER, message.exposed_s, now)

    def _leg(self, sender: InstanceId, request_id: str, generation: int, kind: LegKind) -> Leg | None:
        leg = self._desk.ledger.find(request_id, generation, kind)
        return leg if leg is not None and leg.instance.id == sender else None

    def _fence(self, sender: InstanceId, request_id: str, generation: int) -> None:
        """Something is held for a placement that is over: have it dropped."""
        if self._desk.fleet.live(sender) is not None:
            reason = "this placement is over"
            self._desk.send(sender, Abort(request_id=request_id, generation=generation, reason=reason))
