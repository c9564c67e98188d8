"""What every KvPort does whatever its link: offers, fetches, revokes, deadlines. Subclasses connect and listen."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Sequence

from transfer.errors import InvalidValue, KvError, KvTransferFailed
from transfer.kv.links.context import PortContext
from transfer.kv.links.sending import Push
from transfer.kv.links.session import Session
from transfer.kv.port import KvAnswer, KvAsk, KvDelegate, KvFetch, KvOffer, OnFetched
from transfer.terms import RequestId
from transfer.wire.messages import KvPeer

TICKS_PER_STALL = 8
IDLE_S = 60.0
CLOSE_S = 5.0


class SessionPort(ABC):
    """KvPort over Sessions. Idempotent: revoke and close. Nothing is retried here: a lost stream is reported once.

    Live sessions are ticked stall_s / 8 apart; with none there is no timer.
    """

    def __init__(self, context: PortContext) -> None:
        self._context = context
        self._sessions: dict[Session, bool] = {}  # -> whether this side opened it
        self._timer: asyncio.TimerHandle | None = None
        self._ticked_s = 0.0
        self._closed = False

    @property
    def delegate(self) -> KvDelegate | None:
        """The role behind this port. Streams already granted stay with the role that granted them."""
        return self._context.delegate

    @delegate.setter
    def delegate(self, role: KvDelegate | None) -> None:
        self._context.delegate = role

    @property
    def num_streams(self) -> int:
        """Pushes and fetches in progress, both ways; 0 at rest."""
        return sum(session.num_streams for session in self._sessions)

    async def open(self, peer: KvPeer, offer: KvOffer, blocks: Sequence[int], timeout_s: float) -> Push:
        """Connect if needed, offer, wait for the grant. Raises KvTransferFailed with the receiver's sentence."""
        if len(blocks) != offer.num_blocks:
            raise InvalidValue(f"the offer has {offer.num_blocks} blocks, {len(blocks)} block ids were given")
        self._check_blocks(blocks)
        try:
            async with asyncio.timeout(timeout_s):
                session = await self._connected(peer)
                push = session.open_push(peer, offer, blocks)
                try:
                    await push.wait_granted()
                except asyncio.CancelledError:
                    push.abort("the sender stopped waiting for the grant")
                    raise
        except TimeoutError:
            raise KvTransferFailed(f"{peer.instance_id} did not answer the offer within {timeout_s:g} s") from None
        return push

    async def fetch(
        self, peer: KvPeer, fetch: KvFetch, blocks: Sequence[int], timeout_s: float, on_layer: OnFetched | None = None
    ) -> int:
        """Fetch leading blocks into `blocks`; how many came and were verified. Raises KvTransferFailed or KvCorrupt."""
        if len(blocks) != len(fetch.hashes):
            raise InvalidValue(f"the fetch has {len(fetch.hashes)} hashes, {len(blocks)} block ids were given")
        self._check_blocks(blocks)
        try:
            async with asyncio.timeout(timeout_s):
                session = await self._connected(peer)
                call = session.open_fetch(fetch, blocks, on_layer)
                try:
                    result = await asyncio.shield(call.result)
                finally:
                    session.end_fetch(call, "the fetch was given up")
        except TimeoutError:
            raise KvTransferFailed(f"{peer.instance_id} did not finish the fetch within {timeout_s:g} s") from None
        if isinstance(result, KvError):
            raise result
        return result

    async def ask(self, peer: KvPeer, ask: KvAsk, timeout_s: float) -> KvAnswer:
        """Put a question to a pool. Raises KvTransferFailed with its sentence when it refuses, is lost or late."""
        try:
            async with asyncio.timeout(timeout_s):
                session = await self._connected(peer)
                call = session.open_ask(ask)
                try:
                    result = await asyncio.shield(call.result)
                finally:
                    session.end_ask(call)
        except TimeoutError:
            raise KvTransferFailed(f"{peer.instance_id} did not answer within {timeout_s:g} s") from None
        if isinstance(result, KvError):
            raise result if isinstance(result, KvTransferFailed) else KvTransferFailed(str(result))
        return result

    def revoke(self, request_id: RequestId, generation: int) -> None:
        for session in list(self._sessions):
            session.revoke(request_id, generation)

    @abstractmethod
    async def _connected(self, peer: KvPeer) -> Session:
        """A live session to the peer. Raises KvTransferFailed."""

    def _add_session(self, session: Session, *, opened: bool) -> None:
        self._sessions[session] = opened
        if self._timer is None:
            self._ticked_s = asyncio.get_running_loop().time()
            self._schedule()

    def _remove_session(self, session: Session) -> None:
        self._sessions.pop(session, None)
        if not self._sessions and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _lose_all(self, error: KvError) -> None:
        for session in list(self._sessions):
            session.close(error)

    async def _roles_done(self) -> None:
        """Wait for what roles were reading; it was cancelled when its connection was lost."""
        if self._context.tasks:
            await asyncio.wait([*self._context.tasks], timeout=CLOSE_S)

    def _schedule(self) -> None:
        tick_s = self._context.limits.stall_s / TICKS_PER_STALL
        self._timer = asyncio.get_running_loop().call_later(tick_s, self._tick)

    def _tick(self) -> None:
        now = asyncio.get_running_loop().time()
        late = now - self._ticked_s > self._context.limits.stall_s / 2
        self._ticked_s = now
        self._schedule()
        if late:  # our own loop was busy: what peers sent meanwhile is still unread, so nobody can be called silent
            return
        for session, opened in list(self._sessions.items()):
            idle_s = session.tick(now)
            if idle_s > (
                IDLE_S if opened else 2 * IDLE_S
            ):  # the opener goes first, so that no new stream meets a close
                session.close(KvTransferFailed("the connection was idle"))

    def _check_blocks(self, blocks: Sequence[int]) -> None:
        most = self._context.arena.num_blocks
        if any(not 0 <= block < most for block in blocks):
            raise InvalidValue(f"block ids must be 0..{most - 1}, the arena's; got {min(blocks)}..{max(blocks)}")
