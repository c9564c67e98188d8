"""The prefill role: make a prompt's KV, stream it to decode while it is made, free it on the acknowledgement."""

from __future__ import annotations

import asyncio

from nodes.core.events import Admitted, Computed, Gone, Handed, NotAdmitted, SequenceSpec, Work
from nodes.roles.base import BatchRole
from nodes.roles.context import sleep_until
from nodes.roles.leg import Leg
from nodes.roles.refusals import refusal
from nodes.roles.shell import BatchShell
from nodes.roles.stream import PushStream
from transfer.errors import InvalidValue, KvError
from transfer.kv.port import KvKind, KvOffer, KvSender, KvTrailer
from transfer.terms import Role, TokenIds, unpack_tokens
from transfer.wire.messages import Prefill, PrefillDone


class PrefillRole(BatchRole):
    role = Role.PREFILL

    def prefill(self, message: Prefill) -> None:
        begin_prefill(self.shell, message)


def begin_prefill(shell: BatchShell, message: Prefill) -> None:
    """Take a Prefill message. Idempotent by (request_id, generation)."""
    try:
        tokens = unpack_tokens(message.tokens)
    except InvalidValue as error:
        shell.context.send(refusal(message, str(error)))
        return
    shell.admit(PrefillLeg(shell, message, tokens))


class PrefillLeg(Leg):
    """One prefill. Its task walks through admission, grant, fetch, compute and commit, and is the one place that
    gives the blocks back; only the core's own decision (`gone` with a reason) can come before."""

    def __init__(self, shell: BatchShell, message: Prefill, tokens: TokenIds) -> None:
        super().__init__(
            shell,
            SequenceSpec(
                request_id=message.request_id, generation=message.generation, work=Work.PREFILL, tokens=tokens,
                num_output=0, sampling=None, root=shell.context.root(message.salt), lease_s=message.lease_s,
                priority=message.priority, salt=message.salt,
                fetch_blocks=message.source.num_blocks if message.source else 0,
            ),
            message.source,
        )  # fmt: skip
        self._message = message
        loop = asyncio.get_running_loop()
        self._admitted: asyncio.Future[None] = loop.create_future()
        self._computed: asyncio.Future[Computed] = loop.create_future()
        self._stream: PushStream | None = None
        self._sender: KvSender | None = None
        self._done: PrefillDone | None = None
        self._failure: str | None = None
        self._task: asyncio.Task[None] | None = None
        self._over = False
        self._computed_s = 0.0

    # --- what the shell tells -------------------------------------------------------------------------------

    def begin(self) -> None:
        self._task = self.shell.spawn(self._run(), f"prefill {self.request_id}", self._let_go)
        super().begin()

    def stream(self) -> PushStream | None:
        return self._stream

    def admitted(self, effect: Admitted) -> None:
        super().admitted(effect)
        context, now = self.shell.context, asyncio.get_running_loop().time()
        self._stream = PushStream(
            min(self._message.have_tokens // context.block_size, len(self.blocks)), len(self.blocks),
            context.engine.layout.num_layers, context.block_size, self.shell.link,
        )  # fmt: skip
        self._stream.finalise(self.have_blocks, now, now)
        if not self._admitted.done():
            self._admitted.set_result(None)

    def computed(self, effect: Computed) -> None:
        self._computed_s = asyncio.get_running_loop().time()
        self.started()  # also when everything was cached and no step was needed
        if not self._computed.done():
            self._computed.set_result(effect)
        self.shell.writer.offer(self.request_id, self.spec.tokens[:-1], self.spec.root)

    def refused(self, effect: NotAdmitted) -> None:
        self._failure = effect.reason
        self._end(effect.reason)

    def abort(self, reason: str) -> None:
        self.aborted = self.aborted or reason
        if self._task is not None:
            self._task.cancel()  # _let_go follows

    def gone(self, effect: Gone) -> None:
        self._failure = effect.lost or self._failure
        self._end(effect.lost or "the prefill has ended")

    def _end(self, reason: str) -> None:
        """No block is ours from here on."""
        self._over = True
        if self._task is not None:
            self._task.cancel()
        if self._sender is not None and self._done is None:
            self._sender.abort(reason)
        if self.aborted is not None:
            return
        if self._done is not None:
            self.shell.context.send(self._done)
        elif self._failure is not None:
            self.shell.context.send(refusal(self._message, self._failure))

    # --- the task -------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        try:
            self._done = await self._hand_off()
        except KvError as error:
            self._failure = str(error)

    def _let_go(self) -> None:
        """The task has ended, in whatever way, so nothing of ours writes into the blocks any more."""
        if self._over:
            return
        if self._done is not None:
            self.shell.handle(Handed(request_id=self.request_id, generation=self.generation))
            return
        reason = self.aborted or self._failure or "the instance stops"
        if self._sender is not None:
            self._sender.abort(reason)  # first, so that nobody reads the blocks when they return
        self.let_go(reason)

    async def _hand_off(self) -> PrefillDone:
        # No deadline on the queue and on compute: the core serves in order, every step has a deadline
        # (Bounds.step_s), and the control plane aborts what its client no longer waits for.
        await self._admitted
        self._sender = await self._open()
        if self._stream is not None:
            self._stream.attach(self._sender, asyncio.get_running_loop().time())
        await self.fetch_leading()
        computed = await self._computed
        if self._stream is not None:
            self._stream.finalise(len(self.blocks), self._computed_s, self._computed_s)
            await sleep_until(self._stream.sent_at)
        stats = await self._sender.commit(KvTrailer(num_tokens=len(self.spec.tokens) - 1), self._message.lease_s)
        return self.prefill_done(computed, self._computed_s, stats)

    async def _open(self) -> KvSender:
        message, context = self._message, self.shell.context
        first = min(message.have_tokens // context.block_size, len(self.blocks))
        offer = KvOffer(
            kind=KvKind.HANDOFF, request_id=self.request_id, generation=self.generation, source=context.instance_id,
            source_epoch=context.epoch, target_epoch=message.target.epoch, fingerprint=self.spec.root,
            first_block=first, num_blocks=len(self.blocks) - first,
        )  # fmt: skip
        timeout_s = min(context.bounds.open_s, message.lease_s)
        return await context.port.open(message.target, offer, self.blocks[first:], timeout_s)
