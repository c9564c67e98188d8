"""One prefill on a simulated instance: its KV leaves while it is made, and is let go of when decode has it.

nodes/roles/prefill.py and stream.py in simulated time: the same order of events towards core and control plane.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from controlplane.sim.shell import SimLeg
from nodes.core.counted import CountedTokens
from nodes.core.events import Admitted, Computed, Gone, Handed, NotAdmitted, SequenceSpec, Work
from transfer.errors import Refused
from transfer.terms import InstanceId
from transfer.wire.messages import Prefill, PrefillDone, PrefillFailed

if TYPE_CHECKING:
    from controlplane.sim.decode import DecodeLeg
    from controlplane.sim.shell import SimShell

TOKEN_BYTES = 4


class PrefillLeg(SimLeg):
    __slots__ = (
        "_computed", "_computed_s", "_done", "_end", "_failure", "_final", "_first", "_message", "_opened_s", "_over",
        "_sent_s", "_target",
    )  # fmt: skip

    def __init__(self, shell: SimShell, message: Prefill) -> None:
        num_tokens = len(message.tokens) // TOKEN_BYTES
        super().__init__(
            shell,
            SequenceSpec(
                request_id=message.request_id, generation=message.generation, work=Work.PREFILL,
                tokens=CountedTokens(num_tokens), num_output=0, sampling=None, root=b"", lease_s=message.lease_s,
                priority=message.priority, fetch_blocks=message.source.num_blocks if message.source else 0,
                keys=shell.world.keys.get(message.request_id, ()),
            ),
        )  # fmt: skip
        self._message = message
        self._target: DecodeLeg | None = None
        self._first = self._final = self._end = 0
        self._opened_s = self._sent_s = self._computed_s = 0.0
        self._computed: Computed | None = None
        self._done: PrefillDone | None = None
        self._failure: str | None = None
        self._over = False

    @property
    def first_block(self) -> int:
        """Decode has those before it."""
        return self._first

    def admitted(self, effect: Admitted) -> None:
        super().admitted(effect)
        world, message, now = self.shell.world, self._message, self.shell.world.now
        self._end = self.blocks
        self._first = self._final = min(message.have_tokens // world.config.block_size, self._end)
        self._opened_s = self._sent_s = now
        try:
            self._target = self.shell.node.open(message.target, self)
        except Refused as error:
            self._fail(str(error))
            return
        self.finalise(self.have_blocks, now, now)
        self.fetch_leading(message.source)

    def finalise(self, upto: int, since: float, now: float) -> None:
        """Blocks below `upto` are final, made between `since` and `now`: send what decode lacks of them."""
        upto = min(upto, self._end)
        if self._target is None or upto <= self._final:
            return
        world, count, self._final = self.shell.world, upto - self._final, upto
        target = self._target.shell.node
        self._sent_s = world.links.book(
            self.shell.node.nic, target.nic, world.num_bytes(count), since, now, world.layout.num_layers
        )

    def unclaim(self) -> None:
        """The step was abandoned; a booking is made only when one has ended well."""

    def computed(self, effect: Computed) -> None:
        world = self.shell.world
        self._computed, self._computed_s = effect, world.now
        self.started()  # also when everything was cached and no step was needed
        self.shell.writer.offer(self.request_id, len(self.spec.tokens) - 1)
        self.finalise(self._end, world.now, world.now)
        world.heap.at(max(self._sent_s, world.now), self._arrived)

    def _arrived(self) -> None:
        """The last of it is there."""
        world, effect, target, shell = self.shell.world, self._computed, self._target, self.shell
        if self._over or effect is None or target is None or not shell.node.alive or self.aborted is not None:
            return
        try:
            target.arrived(self)
        except Refused as error:
            self._fail(str(error))
            return
        num_bytes = world.num_bytes(self._end - self._first)
        transfer_s = world.links.seconds(shell.node.nic, target.shell.node.nic, num_bytes)
        self._done = self.prefill_done(effect, self._computed_s, transfer_s, num_bytes)
        shell.handle(Handed(request_id=self.request_id, generation=self.generation))

    # --- it ends ----------------------------------------------------------------------------------------------

    def refused(self, effect: NotAdmitted) -> None:
        self._over = True
        if self.aborted is None:
            self._say_failed(effect.reason)

    def abort(self, reason: str) -> None:
        self.aborted = self.aborted or reason
        self._let_go(reason)

    def orphaned(self) -> None:
        self._over = True
        self._stop()

    def peer_lost(self, instance_id: InstanceId) -> None:
        if self._target is not None and self._target.shell.node.id == instance_id:
            self._fail(f"{instance_id} is gone")
        elif self._fetch is not None:
            self._fetch.peer_lost(instance_id)

    def gone(self, effect: Gone) -> None:
        if effect.lost is not None:
            self._failure = effect.lost
            self._stop()
        self._over = True
        if self.aborted is not None:
            return
        if self._done is not None:
            self.shell.node.send(self._done)
        elif self._failure is not None:
            self._say_failed(self._failure)

    def _fail(self, reason: str) -> None:
        if not self._over and self._done is None:
            self._failure = self._failure or reason
            self._let_go(reason)

    def _let_go(self, reason: str) -> None:
        if not self._over:
            self._stop()
            self.shell.drop(self, reason)

    def _stop(self) -> None:
        """Nothing more is sent or fetched."""
        if self._target is not None and self._done is None:
            self._target.failed(self)
        self.stop_fetch()

    def _say_failed(self, reason: str) -> None:
        self.shell.node.send(PrefillFailed(request_id=self.request_id, generation=self.generation, reason=reason))
