"""Gives requests a place: arrival, the waiting line, the decision with its why, the reservation."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from controlplane.core.admission import (
    LOOK_AHEAD,
    STARVED_S,
    Rejection,
    predicted_wait_s,
    reject_full,
    reject_hopeless,
)
from controlplane.core.config import CoreConfig
from controlplane.core.decide import decide
from controlplane.core.desk import Desk
from controlplane.core.endings import Endings
from controlplane.core.estimate import Estimator
from controlplane.core.events import Arrived, Expect
from controlplane.core.fetching import Fetch
from controlplane.core.fleet import Group
from controlplane.core.ledger import Leg, LegKind
from controlplane.core.lifecycle import Request, new_request
from controlplane.core.placement import Block, Blocked, Candidate, Wanted, explain
from controlplane.core.policies.protocol import Situation
from controlplane.core.policies.registry import POLICIES
from controlplane.core.replication import Replication
from controlplane.core.residents import running_on
from controlplane.core.stages import ADMISSION, QUEUE
from controlplane.core.suspects import blocked_by_others, is_suspect, room_for
from transfer.kv.block import block_hashes
from transfer.said import say
from transfer.terms import InstanceId, unpack_tokens
from transfer.wire.messages import KvSource, Reserve

MAX_DOUBLINGS = 6
AGAIN_S = 0.02
WAIT_ERROR = 0.2
"""Relative error bar of a predicted wait in line."""
DEFAULT_OUTPUT = 128
"""Output tokens expected of a class before any of its requests has finished."""


class Dispatch:
    def __init__(self, desk: Desk, endings: Endings, replication: Replication) -> None:
        self._desk, self._endings, self._replication = desk, endings, replication
        self._num_arrived = 0
        self._stages: dict[str, str] = {}
        self._again_s: dict[str, float] = {}
        """When those who wait are tried again, where no place comes free before."""

    def arrived(self, event: Arrived) -> Request | None:
        """Take a request, or reject it before any work. A repeated id in flight is ignored: None."""
        desk, spec = self._desk, event.request
        if spec.request_id in desk.requests:
            desk.note("warning", f"request {spec.request_id} arrived twice; the second one is ignored")
            return None
        config = desk.config
        name = spec.traffic_class if spec.traffic_class in config.classes else config.default_class
        self._num_arrived += 1
        minted = desk.ledger.highest(spec.request_id)
        request = new_request(spec, self._num_arrived, name, config.classes[name], minted)
        desk.requests[spec.request_id] = request
        desk.traffic.arrived(spec.request_id, desk.now, spec.model, name, request.num_prompt, spec.sampling.max_tokens)
        desk.count("arrived")
        group = desk.fleet.groups.get(spec.model)
        line = desk.line.of(spec.model)
        share = desk.memory(spec.model).computed_share(desk.now)
        on_decode = POLICIES[config.policy].on_decode and config.colocate != "never"
        hold_s = desk.goodput.usual_hold_s
        wait_s = predicted_wait_s(group, line, hold_s, desk.now, share, on_decode) if line else 0.0
        rejection = reject_full(config, len(desk.line), wait_s, desk.random)
        if rejection is None and line:
            error_s = WAIT_ERROR * wait_s if config.early_reject == "objective" else 0.0
            rejection = reject_hopeless(config, request, wait_s, desk.random, error_s)
        if rejection is not None:
            self._endings.fail(request, 429, "overloaded", rejection.said, rejection.retry_after_s)
            return request
        request.stages.enter(self._stages.get(spec.model, QUEUE), desk.now)
        desk.line.add(request)
        desk.stirred = True
        return request

    def pump(self) -> None:
        """Place whoever can be placed now, in order; only a few may overtake one that finds no room."""
        desk = self._desk
        desk.stirred = False
        models = desk.line.models()
        if not models and not self._stages and not self._again_s:
            return
        self._stages = {model: stage for model, stage in self._stages.items() if model in models}
        self._again_s = {model: at_s for model, at_s in self._again_s.items() if model in models}
        for model in models:
            group = desk.fleet.groups.get(model)
            if group is None or not self._rests(model, group):
                self._pump_model(desk.line.of(model), group)

    def _rests(self, model: str, group: Group) -> bool:
        """Whether those who wait found no place a moment ago and none has come free."""
        free = POLICIES[self._desk.config.policy].free
        return (
            free is not None
            and self._desk.now < self._again_s.get(model, 0.0)
            and not free(group, self._desk.now, self._desk.memory(model))
        )

    def _awake(self, line: list[Request]) -> list[Request]:
        """Without those that wait for something that has not come."""
        now, takes = self._desk.now, POLICIES[self._desk.config.policy].takes
        taking: dict[InstanceId, bool] = {}
        found = []
        for request in line:
            awaited = request.awaits
            if request.yields and now < request.again_s:
                if awaited is None or takes is None:
                    continue
                if awaited.id not in taking:
                    taking[awaited.id] = takes(awaited, now) or not awaited.ready
                if not taking[awaited.id]:
                    continue
            found.append(request)
        return found

    def _pump_model(self, line: list[Request], group: Group | None) -> None:
        num_failed = 0
        order = POLICIES[self._desk.config.policy].order
        line = self._awake(line)
        if order is not None and len(line) > 1:
            line = order(line, self._desk.now, self._desk.memory(line[0].spec.model))
        for request in line:
            if not self._awake([request]):  # what it awaits was given to one before it
                continue
            block = self._try(request, group)
            if block is None or block is Block.NEVER_FITS or is_suspect(self._desk, request):
                continue  # a suspect waits for an empty instance and holds nobody up
            num_failed += 1
            self._again_s[request.spec.model] = self._desk.now + AGAIN_S
            if num_failed == 1:
                self._behind(request, block)
            starved = self._desk.now - request.since_s > STARVED_S
            if block not in (Block.ROOM, Block.BETTER_LATER) or num_failed > LOOK_AHEAD:
                return
            if starved and block is Block.ROOM:
                return

    def _behind(self, head: Request, block: Block) -> None:
        """Who waits behind a request waits for the same: count their time so, when that has changed."""
        desk, model = self._desk, head.spec.model
        stage = ADMISSION if block is Block.ROOM else QUEUE
        head.stages.enter(stage, desk.now)
        if self._stages.get(model, QUEUE) != stage:
            for request in desk.line.of(model):
                request.stages.enter(stage, desk.now)
        self._stages[model] = stage

    def _try(self, request: Request, group: Group | None) -> Block | None:
        """Place it, or say what it waits for. None: it left the line."""
        desk = self._desk
        if group is None:
            request.waits_for = say("wait.no_engine", model=request.spec.model)
            return Block.NO_DECODE
        wanted = self.wanted(request, group)
        room = room_for(desk, request, group)
        if isinstance(room, Blocked):
            request.waits_for = room.said
            return room.block
        at = self._situation(request, group, wanted, *room)
        found = decide(at)
        if isinstance(found, Blocked):
            found = blocked_by_others(group, at.group, found)
            request.waits_for, request.yields = found.said, found.block is Block.BETTER_LATER
            request.again_s, request.awaits = found.again_s, found.awaits
            if found.block is Block.NEVER_FITS:
                self._endings.fail(request, 400, "invalid", found.said)
            return found.block
        rejection = found if isinstance(found, Rejection) else self._hopeless(request, found[0], wanted)
        if rejection is not None or isinstance(found, Rejection):
            self._reject(request, rejection)
            return None
        if request.chosen is None:
            hashes = self._hashes(request, group)
            self._replication.arrived(hashes, request.root, group)
            longest = next(iter(at.matches.values()), None)  # they are in that order
            if longest is not None:
                self._desk.watch.asked(hashes, longest.blocks, group.layout.block_size, self._desk.now)
            request.why = explain(found)
        if (placed := POLICIES[at.config.policy].placed) is not None:
            placed(at, found[0])
        self._place(request, found[0], wanted)
        return None

    def _situation(self, request: Request, group: Group, wanted: Wanted, config: CoreConfig, part: Group) -> Situation:
        """What the policy is asked, about the part of the group that is open to this request."""
        desk = self._desk
        matches = desk.directory.match(self._hashes(request, group))
        return Situation(
            config, part, wanted, matches, Estimator(config, part, wanted, matches, desk.now), desk.now,
            desk.memory(request.spec.model),
            desk.random, partial(running_on, desk),
        )  # fmt: skip

    def _hopeless(self, request: Request, best: Candidate, wanted: Wanted) -> Rejection | None:
        ttft_s = wanted.waited_s + best.ttft_s
        return reject_hopeless(self._desk.config, request, ttft_s, self._desk.random, best.error_s)

    def _reject(self, request: Request, rejection: Rejection | None) -> None:
        if rejection is not None:
            self._endings.fail(request, 429, "overloaded", rejection.said, rejection.retry_after_s)

    def wanted(self, request: Request, group: Group) -> Wanted:
        """What the request needs of a place."""
        desk, spec = self._desk, request.spec
        left = max(1, spec.sampling.max_tokens - request.num_output)
        usual = desk.goodput.usual_output.get(request.traffic_class, DEFAULT_OUTPUT)
        output = min(float(left), max(1.0, usual - request.num_output))
        return Wanted(
            num_tokens=request.num_tokens, need_blocks=group.layout.num_blocks(request.num_tokens),
            keep_blocks=group.layout.num_blocks(request.num_tokens + int(output)), usual_output=output,
            slo=request.slo, waited_s=desk.now - spec.arrived_s, avoid=request.avoid, unfit=request.unfit,
            max_output=left, tenant=spec.tenant, resumed=request.num_resumes > 0 or request.chosen is not None,
        )  # fmt: skip

    def _hashes(self, request: Request, group: Group) -> Sequence[bytes]:
        """Hashes of the whole blocks of tokens[:-1], made once for each placement's tokens."""
        root = group.root(request.spec.salt)
        found = request.hashes
        if request.spec.hashes:
            found = request.spec.hashes
        elif found is None or request.root != root:
            found = block_hashes(unpack_tokens(request.tokens)[:-1], group.layout.block_size, root)
        request.hashes, request.root = found, root
        return found

    def _place(self, request: Request, best: Candidate, wanted: Wanted) -> None:
        """Open both legs at once, then ask decode to hold its blocks."""
        desk = self._desk
        desk.line.discard(request)
        request.minted += 1
        request.generation, request.placed_s = request.minted, desk.now
        request.chosen, request.decode = best, best.decode.id
        request.prefill = best.prefill.id if best.prefill is not None else None
        for one in (best.prefill, best.decode):
            if one is not None:
                one.picked = desk.next_pick()
        leg = desk.ledger.open(
            request.request_id, request.generation, LegKind.DECODE, best.decode, best.charge_decode, desk.now
        )
        if best.prefill is not None:
            desk.ledger.open(
                request.request_id, request.generation, LegKind.PREFILL, best.prefill, best.charge_prefill, desk.now
            )
        request.fire("place", desk.now)
        request.stages.enter(ADMISSION, desk.now)
        desk.count("placed_remote" if best.remote else "placed_local")
        desk.emit(Expect(request_id=request.request_id, generation=request.generation))
        self.reserve(request, leg, best.remote, wanted.need_blocks)

    def lease_s(self, request: Request) -> float:
        """How long nodes may hold blocks for it without progress: a lease beyond what was predicted, and twice that
        after each loss, since a wrong prediction must not kill the same request again and again."""
        predicted_s = request.chosen.ttft_s if request.chosen is not None else 0.0
        lease_s: float = (self._desk.config.lease_s + 4.0 * predicted_s) * 2.0 ** min(
            request.num_resumes, MAX_DOUBLINGS
        )
        left_s = request.deadline_s - self._desk.now
        return max(self._desk.config.lease_s, min(lease_s, left_s))

    def reserve(self, request: Request, leg: Leg, remote: bool, need_blocks: int) -> None:
        """Ask for the blocks of one leg. Repeated as it is when no answer comes."""
        desk, spec, chosen = self._desk, request.spec, request.chosen
        if not leg.sent:
            desk.ledger.sent(leg, need_blocks)
        request.sent_s = desk.now
        desk.send(
            leg.instance.id,
            Reserve(
                request_id=request.request_id, generation=leg.generation, tokens=request.tokens,
                num_output=request.num_output, sampling=spec.sampling, remote=remote, lease_s=self.lease_s(request),
                salt=spec.salt, priority=spec.priority,
                source=None if remote or chosen is None else self.source(chosen.fetch),
            ),
        )  # fmt: skip

    def source(self, fetch: Fetch | None) -> KvSource | None:
        """Where KV is fetched from, unless that pool has gone since it was chosen: then all is computed."""
        if fetch is None:
            return None
        pool = self._desk.fleet.live(fetch.pool.id, fetch.pool.epoch)
        return KvSource(peer=pool.peer(), num_blocks=fetch.blocks) if pool is not None and pool.ready else None
