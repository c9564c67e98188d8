"""One request that generates on a simulated instance, and its migration to another: nodes/roles/decode.py and
migration.py in simulated time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from controlplane.sim.shell import SimLeg
from nodes.core.counted import CountedTokens
from nodes.core.events import (
    Admitted,
    CannotPause,
    Computed,
    Emit,
    Gone,
    Grow,
    Handed,
    KvReady,
    NotAdmitted,
    Pause,
    Paused,
    Resume,
    SequenceSpec,
    Work,
)
from transfer.errors import Refused
from transfer.terms import InstanceId, RequestId
from transfer.wire.messages import (
    KvReceived,
    Migrate,
    MigrateFailed,
    Released,
    RequestLost,
    Reserve,
    Reserved,
    ReserveRefused,
)

if TYPE_CHECKING:
    from controlplane.sim.shell import SimShell

TOKEN_BYTES = 4


class Sender(Protocol):
    """Who pushes KV into a reservation."""

    request_id: RequestId


class DecodeLeg(SimLeg):
    __slots__ = ("_finished", "_message", "_migration", "_receiving", "_reserved", "_sender", "num_tokens")

    def __init__(self, shell: SimShell, message: Reserve) -> None:
        self.num_tokens = len(message.tokens) // TOKEN_BYTES
        super().__init__(
            shell,
            SequenceSpec(
                request_id=message.request_id, generation=message.generation,
                work=Work.RECEIVE if message.remote else Work.LOCAL, tokens=CountedTokens(self.num_tokens),
                num_output=message.num_output, sampling=message.sampling, root=b"", lease_s=message.lease_s,
                priority=message.priority, keys=shell.world.keys.get(message.request_id, ()),
                fetch_blocks=message.source.num_blocks if message.source else 0,
            ),
        )  # fmt: skip
        self._message = message
        self._reserved: Reserved | None = None
        self._receiving = message.remote
        self._sender: Sender | None = None
        self._migration: Migration | None = None
        self._finished = False

    def admitted(self, effect: Admitted) -> None:
        super().admitted(effect)
        self._reserved = Reserved(
            request_id=self.request_id, generation=self.generation,
            have_tokens=effect.have_blocks * self.shell.world.config.block_size, free_blocks=effect.free_blocks,
        )  # fmt: skip
        self.shell.node.send(self._reserved)
        self.fetch_leading(self._message.source)

    def repeated(self) -> None:
        if self._reserved is not None and self.aborted is None:
            self.renew()
            self.shell.node.send(self._reserved)

    def renew(self) -> None:
        self.shell.core.renew(self.request_id, self.generation, self.shell.world.now)

    def keep(self) -> None:
        if self._sender is not None:
            self.renew()

    def refused(self, effect: NotAdmitted) -> None:
        if self.aborted is None:
            self.shell.node.send(
                ReserveRefused(
                    request_id=self.request_id, generation=self.generation, reason=effect.reason, retry=effect.retry,
                    free_blocks=effect.free_blocks,
                )
            )  # fmt: skip

    def computed(self, effect: Computed) -> None:
        self.shell.writer.offer(self.request_id, self.num_tokens - 1)
        if self._message.source is not None:
            self.shell.node.send(self.prefill_done(effect, self.shell.world.now))

    # --- KV comes in ------------------------------------------------------------------------------------------

    @property
    def sender(self) -> Sender | None:
        """Whose KV is on its way."""
        return self._sender

    def offered(self, sender: Sender, first_block: int, end_block: int, *, migrates: bool) -> None:
        """Raises Refused with what does not fit."""
        if not self._receiving or self.aborted is not None:
            raise Refused(f"request {self.request_id} does not wait for KV here")
        if self._sender is not None:
            raise Refused(f"KV of request {self.request_id} is arriving already")
        if first_block != self.have_blocks:
            raise Refused(f"KV is needed from block {self.have_blocks}, offered from {first_block}")
        if end_block > self.blocks and migrates:
            self.shell.handle(Grow(request_id=self.request_id, generation=self.generation, num_blocks=end_block))
        if end_block > self.blocks or not self._receiving:
            raise Refused(f"request {self.request_id} has {self.blocks} blocks here, the offer needs {end_block}")
        self.renew()
        self._sender = sender

    def arrived(self, sender: Sender, tokens: CountedTokens | None = None, num_output: int = 0) -> None:
        """The KV is all here: generate. Raises Refused when nobody waits for it any more."""
        if not self._receiving or self._sender is not sender:
            raise Refused(f"the reservation of request {self.request_id} has ended meanwhile")
        self._receiving, self._sender = False, None
        self.shell.handle(
            KvReady(request_id=self.request_id, generation=self.generation, tokens=tokens, num_output=num_output)
        )
        if self.shell.leg(self.request_id, self.generation) is not self:
            raise Refused(f"request {self.request_id} could not go on here with the KV that arrived")
        self.shell.node.send(KvReceived(request_id=self.request_id, generation=self.generation))

    def failed(self, sender: Sender) -> None:
        """The push ended early. The reservation stays for another try until its lease is over."""
        if self._sender is sender:
            self._sender = None

    # --- it generates, moves, ends ----------------------------------------------------------------------------

    def emitted(self, effect: Emit) -> None:
        if effect.finish is not None:
            self._finished = True
            self.num_tokens += effect.index + 1 - self.spec.num_output

    def migrate(self, message: Migrate) -> None:
        if self._migration is None and self.aborted is None:
            self._migration = Migration(self, message)
            self._migration.begin()

    def migration_over(self) -> None:
        self._migration = None

    def paused(self, effect: Paused) -> None:
        if self._migration is not None:
            self._migration.paused(effect)

    def cannot_pause(self, effect: CannotPause) -> None:
        if self._migration is not None:
            self._migration.failed(effect.reason, resume=False)

    def abort(self, reason: str) -> None:
        self.aborted = self.aborted or reason
        if self._migration is not None:
            self._migration.stop()
        self.stop_fetch()
        self.shell.drop(self, reason)

    def orphaned(self) -> None:
        if self._migration is not None:
            self._migration.stop()
        self.stop_fetch()

    def peer_lost(self, instance_id: InstanceId) -> None:
        if self._migration is not None:
            self._migration.peer_lost(instance_id)
        elif self._fetch is not None:
            self._fetch.peer_lost(instance_id)

    def gone(self, effect: Gone) -> None:
        self.stop_fetch()
        self._receiving, self._sender = False, None
        if self._migration is not None:
            self._migration.gone(effect)
        if self._finished:
            self.shell.writer.offer(self.request_id, self.num_tokens - 1)
        elif effect.lost is not None and self.aborted is None:
            self.shell.node.send(
                RequestLost(request_id=self.request_id, generation=self.generation, reason=effect.lost)
            )


class Migration:
    """The source's side: pause, send all of its KV, release or resume."""

    def __init__(self, leg: DecodeLeg, message: Migrate) -> None:
        self._leg, self._message, self.request_id = leg, message, message.request_id
        self._target: DecodeLeg | None = None
        self._tokens: CountedTokens | None = None
        self._num_output = 0
        self._moved = self._over = False

    def begin(self) -> None:
        message = self._message
        self._leg.shell.handle(Pause(request_id=message.request_id, generation=message.generation))

    def paused(self, effect: Paused) -> None:
        if self._over or self._tokens is not None:
            return
        shell, message = self._leg.shell, self._message
        world = shell.world
        self._tokens, self._num_output = CountedTokens(len(effect.tokens)), effect.num_output
        num_blocks = len(effect.blocks)
        first = min(message.have_tokens // world.config.block_size, num_blocks)
        try:
            target = shell.node.peer_leg(message.target, message.request_id, message.target_generation)
            target.offered(self, first, num_blocks, migrates=True)
        except Refused as error:
            self.failed(str(error))
            return
        self._target = target
        done_s = world.links.book(
            shell.node.nic, target.shell.node.nic, world.num_bytes(num_blocks - first), world.now, world.now
        )
        world.heap.at(done_s, self._arrived)

    def _arrived(self) -> None:
        if self._over or self._target is None or not self._leg.shell.node.alive:
            return
        try:
            self._target.arrived(self, self._tokens, self._num_output)
        except Refused as error:
            self.failed(str(error))
            return
        self._moved = True
        message = self._message
        self._leg.shell.handle(Handed(request_id=message.request_id, generation=message.generation))

    def failed(self, reason: str, *, resume: bool = True) -> None:
        """It runs on here."""
        if self._over or self._moved:
            return
        self.stop()
        self._leg.migration_over()
        message, shell = self._message, self._leg.shell
        if resume:
            shell.handle(Resume(request_id=message.request_id, generation=message.generation))
        shell.node.send(MigrateFailed(request_id=message.request_id, generation=message.generation, reason=reason))

    def stop(self) -> None:
        if not self._over:
            self._over = True
            if self._target is not None and not self._moved:
                self._target.failed(self)

    def peer_lost(self, instance_id: InstanceId) -> None:
        if self._target is not None and self._target.shell.node.id == instance_id:
            self.failed(f"{instance_id} is gone")

    def gone(self, effect: Gone) -> None:
        """Handed over, or it finished or was lost before it could be paused."""
        moved, over = self._moved, self._over
        self.stop()
        message, node = self._message, self._leg.shell.node
        if self._leg.aborted is not None or over:
            return
        if moved:
            node.send(
                Released(request_id=message.request_id, generation=message.generation, num_blocks=effect.num_blocks)
            )
        else:
            node.send(MigrateFailed(
                request_id=message.request_id, generation=message.generation,
                reason="the request ended before it could move",
            ))  # fmt: skip
