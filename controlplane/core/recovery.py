"""What happens when something is lost: the request is fenced, the gateway asked what was delivered, and placed again.

Also the watchdogs: no request stands without an owner and a deadline. Liveness is judged by the owner's heartbeat,
not by age: while a prefill instance lives, the decode reservation of its queued work is renewed.
"""

from __future__ import annotations

import heapq

from controlplane.core.admission import retry_after_s
from controlplane.core.config import CoreConfig
from controlplane.core.decide import unserved
from controlplane.core.desk import Desk
from controlplane.core.dispatch import Dispatch
from controlplane.core.endings import Endings, is_active
from controlplane.core.events import NeedTokens, Resume
from controlplane.core.ledger import Leg, LegKind
from controlplane.core.lifecycle import Request, RequestState
from controlplane.core.stages import QUEUE
from controlplane.core.suspects import convict, is_convicted
from transfer.said import Said, say
from transfer.terms import RequestId
from transfer.wire.messages import Prefill

SWEEP_S = 1.0
MISSING_LEASES = 3
"""Heartbeats that do not list a request for this many leases, though it should run there: it is lost."""


class Recovery:
    def __init__(self, desk: Desk, dispatch: Dispatch, endings: Endings) -> None:
        self._desk, self._dispatch, self._endings = desk, dispatch, endings
        self._prefills: dict[tuple[RequestId, int], tuple[Prefill, float]] = {}
        self._deadlines: list[tuple[float, int, RequestId]] = []
        self._swept_s = 0.0
        self._unserved_s: dict[str, float] = {}

    @property
    def _config(self) -> CoreConfig:
        return self._desk.config

    def replace(self, request: Request, reason: Said) -> None:
        """Fence every leg of it and place it again. Bounded: after max_resumes it fails, and earlier when it is itself
        what makes engines fail."""
        if is_active(request):
            self._replace(request, reason)

    def move_on(self, request: Request, reason: str) -> None:
        """Place one that decodes anew, as `replace` does, though nothing was lost: its instance is to be emptied and
        cannot move it. It is no failure of anybody's, and does not bring the request nearer to max_resumes."""
        request.num_replaced += 1
        self._desk.count("replaced")
        self._desk.order(self._desk.ledger.abort_request(request.request_id, reason, self._desk.now))
        self._ask_delivered(request)

    def _replace(self, request: Request, reason: Said) -> None:
        desk = self._desk
        desk.order(desk.ledger.abort_request(request.request_id, str(reason), desk.now))
        request.move = None
        if is_convicted(desk, request):
            self._endings.fail(request, 500, "internal", convict(desk, request, reason))
            return
        chosen = request.chosen
        if request.state is RequestState.RESERVING and chosen is not None and chosen.remote:
            request.fire("lost", desk.now)  # no token can have been drawn: nothing to ask
            self._requeue(request)
            return
        request.num_resumes += 1
        desk.count("resumes")
        if request.num_resumes > self._config.max_resumes:
            why = say("ended.lost", num=request.num_resumes, why=reason)
            self._endings.fail(request, 500, "internal", why)
            return
        self._ask_delivered(request)

    def _ask_delivered(self, request: Request) -> None:
        """The gateway says what its client has; from there it is placed again."""
        desk = self._desk
        request.fire("lost_work", desk.now)
        request.stages.enter(QUEUE, desk.now)
        request.sent_s = desk.now
        desk.emit(NeedTokens(request_id=request.request_id))

    def resume(self, event: Resume) -> None:
        """What was delivered. Ignored unless it was asked for."""
        request = self._desk.requests.get(event.request_id)
        if request is None or request.state is not RequestState.RESUMING:
            return
        request.tokens, request.num_output, request.hashes = event.tokens, event.num_output, None
        request.fire("resume", self._desk.now)
        self._requeue(request)

    def lost_legs(self, legs: list[Leg], reason: Said) -> None:
        """Their instance is gone: place anew whoever ran or was being computed there."""
        for leg in legs:
            request = self._desk.requests.get(leg.request_id)
            if request is None or leg.closing:
                continue
            if request.move is not None and request.move.generation == leg.generation:
                request.move.target_lost = True
            elif request.generation == leg.generation and (
                leg.kind is LegKind.DECODE or request.state in (RequestState.RESERVING, RequestState.PREFILLING)
            ):
                self.replace(request, reason)

    def remember_prefill(self, leg: Leg, message: Prefill) -> None:
        """Send the prefill order, and keep it until its leg closes in case it must be repeated."""
        self._prefills[leg.request_id, leg.generation] = (message, self._desk.now)
        self._desk.ledger.sent(leg)
        self._desk.send(leg.instance.id, message)

    def watch(self, request: Request) -> None:
        """Its timeout holds from arrival on."""
        if len(self._deadlines) > 2 * len(self._desk.requests) + 1024:
            live = [one for one in self._deadlines if one[2] in self._desk.requests]
            heapq.heapify(live)
            self._deadlines = live
        heapq.heappush(self._deadlines, (request.deadline_s, request.number, request.request_id))

    def tick(self) -> None:
        desk = self._desk
        while self._deadlines and self._deadlines[0][0] <= desk.now:
            _, number, request_id = heapq.heappop(self._deadlines)
            request = desk.requests.get(request_id)
            if request is not None and request.number == number:
                self._timed_out(request)
        desk.order(desk.ledger.retry(desk.now))
        if desk.now - self._swept_s >= SWEEP_S:
            self._swept_s = desk.now
            self._sweep()

    def _timed_out(self, request: Request) -> None:
        timeout = f"{request.spec.timeout_s:g}"
        if request.state is RequestState.QUEUED and request.first_token_s is None:
            why = say("ended.not_taken", seconds=timeout, why=request.waits_for or say("wait.no_place"))
            self._endings.fail(request, 503, "unavailable", why, self._config.rejoin_grace_s)
        else:
            self._endings.fail(request, 504, "timeout", say("ended.timeout", seconds=timeout))

    def _requeue(self, request: Request) -> None:
        request.stages.enter(QUEUE, self._desk.now)
        self._desk.line.add(request)
        self._desk.stirred = True

    # --- watchdogs ------------------------------------------------------------------------------------------

    def _sweep(self) -> None:
        desk = self._desk
        self._sweep_unserved()
        open_prefills = {}
        for request in list(desk.requests.values()):
            age_s, state = desk.now - request.since_s, request.state
            if state is RequestState.DECODING or state is RequestState.PREFILLING:
                self._check_running(request, age_s)
            elif state is RequestState.RESERVING:
                self._check_reserving(request, age_s)
            elif state is RequestState.RESUMING and age_s > self._config.lease_s:
                desk.emit(NeedTokens(request_id=request.request_id))
                request.since_s = desk.now
            elif state is RequestState.FAILING and age_s > self._config.lease_s:
                self._endings.unconfirmed(request)
            if request.state is RequestState.PREFILLING:
                name = (request.request_id, request.generation)
                if name in self._prefills:
                    open_prefills[name] = self._prefills[name]
        self._prefills = open_prefills
        self._sweep_stale_legs()

    def _sweep_unserved(self) -> None:
        """Requests of a model without a ready instance wait a grace for nodes to rejoin, then 503."""
        desk, config = self._desk, self._config
        before, self._unserved_s = self._unserved_s, {}
        for model in desk.line.models():
            blocked = unserved(config, model, desk.fleet.groups.get(model))
            if blocked is not None:
                self._unserved_s[model] = before.get(model, desk.now)
            for request in desk.line.of(model):
                waited_s = desk.now - request.since_s
                if blocked is not None and min(waited_s, desk.now - self._unserved_s[model]) > config.rejoin_grace_s:
                    self._endings.fail(request, 503, "unavailable", blocked.said, config.rejoin_grace_s)
                elif config.max_queue_s is not None and waited_s > config.max_queue_s:
                    why = say("ended.no_place", seconds=f"{config.max_queue_s:g}",
                              why=request.waits_for or say("wait.long_line"))  # fmt: skip
                    again_s = retry_after_s(config, waited_s, desk.random)
                    self._endings.fail(request, 503, "unavailable", why, again_s)

    def _check_reserving(self, request: Request, age_s: float) -> None:
        leg = self._desk.ledger.find(request.request_id, request.generation, LegKind.DECODE)
        if leg is None or age_s > self._config.lease_s:
            if leg is not None:
                request.avoid[leg.instance.id] = request.avoid.get(leg.instance.id, 0) + 1
            self.replace(request, say("lost.no_answer"))
        elif self._desk.now - request.sent_s >= self._config.reserve_retry_s:
            self._repeat_reserve(request, leg)

    def _check_running(self, request: Request, age_s: float) -> None:
        desk, lease_s = self._desk, self._config.lease_s
        decode = desk.ledger.find(request.request_id, request.generation, LegKind.DECODE)
        if decode is None:
            request.unheld_s = desk.now if request.unheld_s is None else request.unheld_s
            if desk.now - request.unheld_s > lease_s:
                self.replace(request, say("lost.not_run"))
            return
        request.unheld_s = None
        if decode.missing_s is not None and desk.now - decode.missing_s > MISSING_LEASES * lease_s:
            self.replace(request, say("lost.not_held", id=decode.instance.id))
            return
        if request.state is RequestState.PREFILLING:
            self._check_prefilling(request, decode, age_s)

    def _check_prefilling(self, request: Request, decode: Leg, age_s: float) -> None:
        desk, lease_s, chosen = self._desk, self._config.lease_s, request.chosen
        if chosen is None:
            return
        if not chosen.remote:
            predicted_s = chosen.queue_s + chosen.prefill_s + lease_s
            if request.first_token_s is not None and age_s > predicted_s:
                request.fire("first_token", desk.now)  # a resumed request has no first token to tell of
                desk.ledger.computed(decode)
            return
        prefill = desk.ledger.find(request.request_id, request.generation, LegKind.PREFILL)
        if prefill is None:
            if age_s > lease_s and desk.now - request.sent_s > lease_s:
                self.replace(request, say("lost.no_kv"))
            return
        if prefill.missing_s is not None and desk.now - prefill.missing_s > MISSING_LEASES * lease_s:
            request.avoid[prefill.instance.id] = request.avoid.get(prefill.instance.id, 0) + 1
            self.replace(request, say("lost.unknown", id=prefill.instance.id))
            return
        if desk.now - request.sent_s >= lease_s / 3:
            self._repeat_reserve(request, decode)
        kept = self._prefills.get((request.request_id, request.generation))
        if kept is not None and not prefill.started and desk.now - kept[1] > lease_s:
            self.remember_prefill_again(prefill, kept[0])

    def remember_prefill_again(self, leg: Leg, message: Prefill) -> None:
        """Repeat an order that has not started: harmless where it waits, needed where it was lost."""
        self._prefills[leg.request_id, leg.generation] = (message, self._desk.now)
        self._desk.send(leg.instance.id, message)

    def _repeat_reserve(self, request: Request, leg: Leg) -> None:
        """Idempotent on the node: answers again, and renews the lease."""
        remote = request.chosen is not None and request.chosen.remote
        self._dispatch.reserve(request, leg, remote, 0)

    def _sweep_stale_legs(self) -> None:
        """Legs that their request has left behind: a prefill whose KV has long arrived, a source after its move."""
        desk = self._desk
        old_s = desk.now - self._config.lease_s
        for leg in [one for one in desk.ledger.everything() if one.opened_s < old_s and not one.closing]:
            request = desk.requests.get(leg.request_id)
            if request is None:
                desk.order(desk.ledger.abort(leg, "the request has ended", desk.now))
                continue
            settled = request.state in (RequestState.DECODING, RequestState.RESUMING, RequestState.QUEUED)
            left = leg.kind is LegKind.PREFILL or leg.generation != request.generation
            if settled and left and desk.now - request.since_s > self._config.lease_s:
                desk.order(desk.ledger.abort(leg, "the request has moved on", desk.now))
