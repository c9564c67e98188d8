"""An actor: private state, a bounded mailbox, one message at a time. Supervision restarts it, refs reach it."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass

from transfer.errors import MailboxFull, PeerLost, PhaseplaneError

MAILBOX_SIZE = 1024
_YIELD_EVERY = 64
"""Messages an actor may take in one go before the loop's other work has its turn."""


@dataclass(slots=True)
class Envelope:
    """A message on its way; `reply` is set for an ask."""

    message: object
    reply: asyncio.Future[object] | None = None


class Mailbox:
    """A bounded queue with one reader. It outlives a restart of its actor, not the actor's end."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._queue: deque[Envelope] = deque()
        self._changed = asyncio.Event()
        self.closed = False

    def __len__(self) -> int:
        return len(self._queue)

    def put(self, envelope: Envelope, owner: str) -> None:
        """Raises MailboxFull when full and PeerLost when closed; nothing was queued then."""
        if self.closed:
            raise PeerLost(f"actor {owner} has ended, so a {type(envelope.message).__name__} was not delivered")
        if len(self._queue) >= self._size:
            raise MailboxFull(
                f"the mailbox of actor {owner} is full with {self._size} messages; send later or slow down"
            )
        self._queue.append(envelope)
        self._changed.set()

    async def get(self) -> Envelope | None:
        """The oldest envelope; None when the mailbox is closed and empty."""
        while not self._queue:
            if self.closed:
                return None
            self._changed.clear()
            await self._changed.wait()
        return self._queue.popleft()

    def close(self) -> None:
        """Take nothing more; what is queued can still be read."""
        self.closed = True
        self._changed.set()

    def abandon(self, error: PeerLost) -> int:
        """Close, fail every queued ask with `error`, drop every queued tell. Returns how many tells were dropped."""
        self.close()
        num_dropped = 0
        while self._queue:
            reply = self._queue.popleft().reply
            if reply is None:
                num_dropped += 1
            elif not reply.done():
                reply.set_exception(error)
        return num_dropped


class Actor:
    """Subclass it and write `receive`; keep state in attributes that nobody else touches.

    Delivery: a message in the mailbox is received at most once, in the order it was put, one at a time;
    an ask whose asker gave up before its turn is not received at all. A message that made the actor fail
    is not received again after the restart.
    Errors: a PhaseplaneError raised while answering an ask is the answer and the actor lives on. Anything
    else, and any error on a tell, makes the actor fail; its supervisor decides what then.
    An actor that asks itself waits until the deadline of its own ask.
    """

    def __init__(self, *, mailbox_size: int = MAILBOX_SIZE) -> None:
        self.name = type(self).__name__
        self.mailbox = Mailbox(mailbox_size)

    async def started(self) -> None:
        """Before the first message, also after a restart."""

    async def receive(self, message: object) -> object | None:
        """Handle one message; what it returns answers an ask."""
        raise TypeError(f"actor {self.name} does not handle {type(message).__name__}")

    async def stopped(self) -> None:
        """After the last message, whatever ended the actor, also when `started` failed. Release resources here."""

    async def run(self) -> None:
        """Until the mailbox is closed and empty, the task is cancelled, or the actor fails (raises)."""
        try:
            await self.started()
            num_taken = 0
            while (envelope := await self.mailbox.get()) is not None:
                await self._handle(envelope)
                num_taken += 1
                if num_taken % _YIELD_EVERY == 0:
                    await asyncio.sleep(0)
        finally:
            await self.stopped()

    async def _handle(self, envelope: Envelope) -> None:
        reply = envelope.reply
        if reply is None:
            await self.receive(envelope.message)
            return
        if reply.done():
            return
        try:
            result = await self.receive(envelope.message)
        except asyncio.CancelledError:
            if not reply.done():
                name = type(envelope.message).__name__
                reply.set_exception(PeerLost(f"actor {self.name} was stopped while it handled a {name}"))
            raise
        except Exception as error:  # the asker gets it; what is no answer is raised to the supervisor too
            if not reply.done():
                reply.set_exception(error)
            if not isinstance(error, PhaseplaneError):
                raise
            return
        if not reply.done():
            reply.set_result(result)
