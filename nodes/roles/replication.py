"""Copies of hot prefixes to other pools: a pool pushes its own blocks as STORE, in the background, best effort."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from nodes.pool.keeper import Keeper
from transfer.errors import KvError, PhaseplaneError
from transfer.kv.port import KvKind, KvOffer, KvPort, KvTrailer
from transfer.terms import InstanceId, KvLayout
from transfer.wire.messages import Message, Replicate, Replicated

REPLICATE_S, OPEN_S = 30.0, 5.0
MAX_AT_ONCE = 2
MAX_WAITING = 32

_log = logging.getLogger(__name__)


class Replicator:
    """Every order is answered once by Replicated, with a sentence when nothing was copied. A repeated name that is
    under way is not done twice."""

    def __init__(
        self, instance_id: InstanceId, epoch: int, layout: KvLayout, keeper: Keeper, port: KvPort,
        send: Callable[[Message], None],
    ) -> None:  # fmt: skip
        self._instance_id, self._epoch, self._layout = instance_id, epoch, layout
        self._keeper, self._port, self._send = keeper, port, send
        self._turn = asyncio.Semaphore(MAX_AT_ONCE)
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self.num_blocks = self.num_failed = 0

    def begin(self, order: Replicate) -> None:
        if order.name in self._tasks:
            return
        if order.epoch != self._epoch:
            self._answer(order, 0, f"{self._instance_id} was restarted since the order was given")
        elif len(self._tasks) >= MAX_WAITING:
            self._answer(order, 0, f"{self._instance_id} has {MAX_WAITING} copies to make already; ask again later")
        else:
            task = asyncio.create_task(self._run(order), name=f"replicate {order.name}")
            self._tasks[order.name] = task
            task.add_done_callback(lambda _: self._tasks.pop(order.name, None))

    async def close(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def _run(self, order: Replicate) -> None:
        count, reason = 0, "the pool stops"
        try:
            async with asyncio.timeout(REPLICATE_S), self._turn:
                count = await self._copy(order)
            reason = "" if count else "none of the blocks is here any more"
        except KvError as error:
            reason = str(error)
        except TimeoutError:
            reason = f"the copy was not done within {REPLICATE_S:g} s"
        except PhaseplaneError as error:
            reason = str(error)
        finally:
            self.num_blocks += count
            self.num_failed += not count
            self._answer(order, count, reason)

    async def _copy(self, order: Replicate) -> int:
        key = ("replicate", order.name)
        blocks = await self._blocks(key, order.hashes)
        try:
            return await self._push(order, blocks) if blocks else 0
        finally:
            self._keeper.done(key)

    async def _blocks(self, key: tuple[str, str], hashes: tuple[bytes, ...]) -> list[int]:
        try:
            return list(await self._keeper.read_now(key, hashes))
        except asyncio.CancelledError:
            self._keeper.done(key)
            raise

    async def _push(self, order: Replicate, blocks: list[int]) -> int:
        count = len(blocks)
        offer = KvOffer(
            kind=KvKind.STORE, request_id=f"{self._instance_id}/{order.name}", generation=0, source=self._instance_id,
            source_epoch=self._epoch, target_epoch=order.target.epoch, fingerprint=order.fingerprint, first_block=0,
            num_blocks=count, hashes=order.hashes[:count],
        )  # fmt: skip
        sender = await self._port.open(order.target, offer, blocks, OPEN_S)
        try:
            for layer in range(self._layout.num_layers):
                sender.push(layer, 0, count)
            trailer = KvTrailer(num_tokens=count * self._layout.block_size)
            await sender.commit(trailer, REPLICATE_S)
        finally:
            sender.abort("the copy was given up")  # nothing after a commit
        return count

    def _answer(self, order: Replicate, count: int, reason: str) -> None:
        self._send(Replicated(name=order.name, epoch=self._epoch, num_blocks=count, reason=reason))
