"""Moves a running request to another instance without its client noticing; on any failure it stays where it runs.

Target reserves under generation g+1, source pauses, pushes and releases, target runs on. The source keeps the request
until the target has acknowledged, so that nothing is lost in between.
"""

from __future__ import annotations

from collections.abc import Callable

from controlplane.core.decide import has_other_place, migration_target
from controlplane.core.desk import Desk
from controlplane.core.dispatch import Dispatch
from controlplane.core.endings import find
from controlplane.core.events import Expect
from controlplane.core.instance import Charge, Instance
from controlplane.core.ledger import LegKind
from controlplane.core.lifecycle import Move, Request, RequestState
from controlplane.core.recovery import Recovery
from controlplane.core.suspects import is_suspect, open_to_others
from transfer.said import say
from transfer.terms import InstanceId
from transfer.wire.messages import Migrate, MigrateFailed


class Migrations:
    def __init__(
        self, desk: Desk, dispatch: Dispatch, recovery: Recovery, on_moved: Callable[[InstanceId], None]
    ) -> None:
        """on_moved is told the instance that a request has left."""
        self._desk, self._dispatch, self._recovery, self._on_moved = desk, dispatch, recovery, on_moved

    def start(self, request: Request, source: Instance, to: Instance | None = None) -> bool:
        """Ask another instance to take over, `to` if it is given; False when none has room now. Only a DECODING request
        can move, and not one that runs alone because engines failed with it."""
        desk = self._desk
        group = desk.fleet.groups.get(request.spec.model)
        if group is None or request.state is not RequestState.DECODING or is_suspect(desk, request):
            return False
        if not source.hello.moves or (to is not None and not to.hello.shares_kv):
            return False
        wanted = self._dispatch.wanted(request, group)
        held = desk.ledger.find(request.request_id, request.generation, LegKind.DECODE)
        if held is not None:
            wanted.need_blocks = max(wanted.need_blocks, held.held_blocks)
            wanted.keep_blocks = max(wanted.keep_blocks, wanted.need_blocks)
        part = open_to_others(desk, group)
        target = migration_target(desk.config, part, wanted, source) if to is None else to
        if target is None or (to is not None and to not in (*part.decodes, *part.mixed)):
            return False
        request.minted += 1
        target.picked = desk.next_pick()
        deadline_s = desk.now + desk.config.migrate_timeout_s
        request.move = Move(request.minted, target.id, desk.now, deadline_s)
        context = wanted.num_tokens + int(wanted.usual_output) // 2
        charge = Charge(rows=1, context_tokens=context, blocks=wanted.keep_blocks, tpot_us=wanted.tpot_us)
        leg = desk.ledger.open(request.request_id, request.minted, LegKind.DECODE, target, charge, desk.now)
        request.fire("migrate", desk.now)
        self._dispatch.reserve(request, leg, remote=True, need_blocks=wanted.need_blocks)
        return True

    def empty(self, source: Instance) -> None:
        """Move its running requests elsewhere, a few at a time; call again until it is empty. What cannot move finishes
        where it is; where the engine moves nothing, they are placed anew and go on from what was delivered."""
        desk, config = self._desk, self._desk.config
        if not source.hello.moves:
            self._place_anew(source)
            return
        running = [
            request
            for leg in desk.ledger.legs_at(source.id)
            if leg.kind is LegKind.DECODE and not leg.closing
            if (request := desk.requests.get(leg.request_id)) is not None and request.generation == leg.generation
        ]
        moving = sum(request.state is RequestState.MIGRATING for request in running)
        for request in running:
            if moving >= config.max_migrations:
                return
            if request.state is not RequestState.DECODING or request.num_failed_moves >= config.max_migration_attempts:
                continue
            if not self.start(request, source):
                return
            moving += 1

    def _place_anew(self, source: Instance) -> None:
        """As `empty`; those under way are the ones that the source has been told to drop and still holds."""
        desk, group = self._desk, self._desk.fleet.groups.get(source.hello.model.name if source.hello.model else "")
        legs = [leg for leg in desk.ledger.legs_at(source.id) if leg.kind is LegKind.DECODE]
        free = desk.config.max_migrations - sum(leg.closing for leg in legs)
        for leg in legs:
            request = desk.requests.get(leg.request_id)
            if free <= 0 or group is None or request is None or leg.closing or request.generation != leg.generation:
                continue
            if request.state is not RequestState.DECODING or is_suspect(desk, request):
                continue
            wanted = self._dispatch.wanted(request, group)
            if not has_other_place(desk.config, open_to_others(desk, group), wanted, source):
                return
            self._recovery.move_on(request, f"{source.id} is being emptied and cannot move it")
            self._on_moved(source.id)
            free -= 1

    def reserved(self, request: Request, have_tokens: int) -> None:
        """The target holds blocks: tell the source to move, and the router to take the target's tokens."""
        desk, move = self._desk, request.move
        if move is None or move.ordered_s is not None:
            return
        target, source = desk.fleet.live(move.target), request.decode
        if target is None or source is None:
            self._stay(request)
            return
        move.ordered_s = desk.now
        desk.emit(Expect(request_id=request.request_id, generation=move.generation))
        desk.send(
            source,
            Migrate(
                request_id=request.request_id, generation=request.generation, target=target.peer(),
                target_generation=move.generation, have_tokens=have_tokens, lease_s=desk.config.lease_s,
            ),
        )  # fmt: skip

    def refused(self, request: Request) -> None:
        """The target has no room after all: not the request's fault, it may try again when somebody has."""
        self._stay(request)

    def target_failed(self, request: Request) -> None:
        """The target let go of its reservation. If the source was told to move, it will say that it could not."""
        if request.move is not None and request.move.ordered_s is None:
            self._failed(request)
        elif request.move is not None:
            request.move.target_lost = True

    def failed(self, sender: InstanceId, message: MigrateFailed) -> None:
        """The source goes on with it."""
        request = find(self._desk, message.request_id, message.generation)
        if request is not None and request.move is not None and request.decode == sender:
            self._failed(request)

    def moved(self, request: Request) -> None:
        """The target runs it now; the source says Released for itself."""
        desk, move = self._desk, request.move
        if move is None:
            return
        if request.decode is not None:
            self._on_moved(request.decode)
        request.generation, request.decode, request.move = move.generation, move.target, None
        request.num_migrations += 1
        desk.count("migrations")
        request.fire("moved", desk.now)
        desk.stirred = True

    def tick(self) -> None:
        """Deadlines of migrations."""
        desk = self._desk
        for request in list(desk.requests.values()):
            move = request.move
            if move is None:
                continue
            if move.ordered_s is None and (move.target_lost or desk.now > move.deadline_s):
                self._failed(request)
            elif desk.now > move.deadline_s:
                # Neither side answered, so either may run it: fence both and resume from what was delivered.
                self._recovery.replace(request, say("lost.migration", id=move.target))

    def _failed(self, request: Request) -> None:
        move = request.move
        if move is None:
            return
        request.num_failed_moves += 1
        request.avoid[move.target] = request.avoid.get(move.target, 0) + 1
        self._desk.count("migrations_failed")
        self._stay(request)

    def _stay(self, request: Request) -> None:
        desk, move = self._desk, request.move
        if move is None:
            return
        leg = desk.ledger.find(request.request_id, move.generation, LegKind.DECODE)
        if leg is not None:
            desk.order(desk.ledger.abort(leg, "the migration was given up", desk.now))
        request.move = None
        request.fire("stayed", desk.now)
