"""One running request leaves for another instance: pause, push all of its KV and tokens, release or resume."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from nodes.core.events import Gone, Handed, Pause, Paused, Resume
from nodes.roles.context import sleep_until
from nodes.roles.refusals import refusal
from nodes.roles.shell import BatchShell
from transfer.errors import KvError, KvTransferFailed
from transfer.kv.port import KvKind, KvOffer, KvSender, KvTrailer
from transfer.terms import pack_tokens
from transfer.wire.messages import Migrate, Released

if TYPE_CHECKING:
    from nodes.roles.decode import DecodeLeg


class Migration:
    """The source's side. While it lasts it owns the leg's blocks: an abort waits until nobody reads them.

    Released on success; on any failure the request runs on here and MigrateFailed says so.
    """

    def __init__(self, shell: BatchShell, leg: DecodeLeg, message: Migrate) -> None:
        self._shell, self._leg, self._message = shell, leg, message
        self._paused: asyncio.Future[Paused] = asyncio.get_running_loop().create_future()
        self._sender: KvSender | None = None
        self._task: asyncio.Task[None] | None = None
        self._moved = self._over = self._pausing = False
        self._reason = "the instance stops"

    def begin(self) -> None:
        message = self._message
        self._task = self._shell.spawn(self._run(), f"migrate {message.request_id}", self._let_go)
        self._pausing = True
        self._shell.handle(Pause(request_id=message.request_id, generation=message.generation))

    def paused(self, effect: Paused) -> None:
        if not self._paused.done():
            self._paused.set_result(effect)

    def cannot_pause(self, reason: str) -> None:
        self._pausing = False
        if not self._paused.done():
            self._paused.set_exception(KvTransferFailed(reason))

    def abort(self) -> None:
        if self._task is not None:
            self._task.cancel()  # _let_go follows

    def gone(self, effect: Gone) -> None:
        """The leg holds no block any more: handed over, or it finished or was lost before it could be paused."""
        message, context = self._message, self._shell.context
        self._over = True
        self.abort()
        if self._sender is not None and not self._moved:
            self._sender.abort("the request has ended")
        if self._leg.aborted is not None:
            return
        if self._moved:
            context.send(
                Released(request_id=message.request_id, generation=message.generation, num_blocks=effect.num_blocks)
            )
        else:
            self._say_failed("the request ended before it could move")

    async def _run(self) -> None:
        try:
            await self._move()
            self._moved = True
        except KvError as error:
            self._reason = str(error)

    async def _move(self) -> None:
        message, context, loop = self._message, self._shell.context, asyncio.get_running_loop()
        try:
            async with asyncio.timeout(context.bounds.step_s):
                paused = await self._paused
        except TimeoutError:
            raise KvTransferFailed("the running step did not end in time to pause the request") from None
        first = min(message.have_tokens // context.block_size, len(paused.blocks))
        blocks = paused.blocks[first:]
        offer = KvOffer(
            kind=KvKind.MIGRATION, request_id=message.request_id, generation=message.target_generation,
            source=context.instance_id, source_epoch=context.epoch, target_epoch=message.target.epoch,
            fingerprint=self._leg.spec.root, first_block=first, num_blocks=len(blocks),
        )  # fmt: skip
        timeout_s = min(context.bounds.open_s, message.lease_s)
        self._sender = await context.port.open(message.target, offer, blocks, timeout_s)
        for layer in range(context.engine.layout.num_layers):
            self._sender.push(layer, first, len(blocks))
        now = loop.time()
        await sleep_until(self._shell.link.send(len(blocks) * context.block_size, now, now))
        trailer = KvTrailer(
            num_tokens=len(paused.tokens) - 1, tokens=pack_tokens(paused.tokens), num_output=paused.num_output
        )
        await self._sender.commit(trailer, message.lease_s)

    def _let_go(self) -> None:
        """The task has ended, in whatever way: hand over, run on, or drop."""
        if self._over:
            return
        message, leg = self._message, self._leg
        if self._moved:
            self._shell.handle(Handed(request_id=message.request_id, generation=message.generation))
            return
        if self._sender is not None:
            self._sender.abort(leg.aborted or self._reason)
        self._over = True
        leg.migration_over()
        if leg.aborted is not None or self._task is None or self._task.cancelled():
            self._shell.drop(leg, leg.aborted or self._reason)
            return
        if self._pausing:
            self._shell.handle(Resume(request_id=message.request_id, generation=message.generation))
        self._say_failed(self._reason)

    def _say_failed(self, reason: str) -> None:
        self._shell.context.send(refusal(self._message, reason))
