"""How others reach an actor: tell (no answer) and ask (an answer within a deadline). Remote peers can be told."""

from __future__ import annotations

import asyncio

from transfer.actors.actor import Actor, Envelope, Mailbox
from transfer.errors import DeadlinePassed
from transfer.wire.endpoint import Endpoint
from transfer.wire.messages import Message


class ActorRef:
    """An actor in this process; stays valid across restarts. Use it from the actor's event loop.

    tell: received at most once, in order. ask: as tell; DeadlinePassed means it may have been handled
    (indefinite), MailboxFull that it was not (definite).
    """

    def __init__(self, name: str, mailbox: Mailbox) -> None:
        self.name = name
        self._mailbox = mailbox

    @classmethod
    def of(cls, actor: Actor) -> ActorRef:
        return cls(actor.name, actor.mailbox)

    def __repr__(self) -> str:
        return f"ActorRef({self.name})"

    def tell(self, message: object) -> None:
        """Never blocks. Raises MailboxFull at once when there is no room, PeerLost when the actor has ended."""
        self._mailbox.put(Envelope(message), self.name)

    async def ask(self, message: object, timeout_s: float) -> object:
        """The answer, or the exception that `receive` raised. Raises as tell does, and DeadlinePassed."""
        reply: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        self._mailbox.put(Envelope(message, reply), self.name)
        try:
            await asyncio.wait((reply,), timeout=timeout_s)
            if not reply.done():
                raise DeadlinePassed(
                    f"actor {self.name} did not answer a {type(message).__name__} within {timeout_s:g} s; "
                    "it may still have handled it"
                )
            return reply.result()
        finally:
            if not reply.cancel() and not reply.cancelled():
                reply.exception()  # marks it as seen, in case the asker was cancelled meanwhile


class RemoteRef:
    """A peer of an endpoint. Only tell: wire messages pair up by (request_id, generation), not by a correlation id.

    Delivery and order are the endpoint's: at most once, in order, within one session.
    """

    def __init__(self, endpoint: Endpoint, peer: str) -> None:
        self.name = peer
        self._endpoint = endpoint

    def __repr__(self) -> str:
        return f"RemoteRef({self.name})"

    def tell(self, message: Message) -> None:
        """Never blocks. Raises PeerLost, MailboxFull and ProtocolError as Endpoint.send does."""
        self._endpoint.send(self.name, message)
