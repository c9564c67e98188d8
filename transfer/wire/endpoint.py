"""What both transports obey: named peers, messages that arrive in order or not at all, and peers that come and go."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from transfer.errors import ConfigError, ProtocolError
from transfer.wire.messages import Message

QUEUE_SIZE = 10_000
"""Messages an endpoint holds for each peer before MailboxFull."""


class PeerEvent(StrEnum):
    CONNECTED = "connected"
    LOST = "lost"


OnMessage = Callable[[str, Message], None]
OnPeer = Callable[[str, PeerEvent], None]
OnBad = Callable[[str, ProtocolError], None]


@dataclass(frozen=True)
class Timing:
    """A peer is pinged every heartbeat_s and LOST after liveness_s without anything from it. Seconds."""

    heartbeat_s: float = 1.0
    liveness_s: float = 3.0

    def __post_init__(self) -> None:
        if not 0 < 2 * self.heartbeat_s <= self.liveness_s:
            raise ConfigError(
                f"liveness_s must be at least twice heartbeat_s, got {self.liveness_s} and {self.heartbeat_s}"
            )


class Endpoint(Protocol):
    """One end of the control traffic. All of it runs on one event loop; callbacks must not block.

    Delivery: at most once. Order: per peer and session, a message arrives only if all earlier ones did.
    A session lies between CONNECTED and LOST of a peer: on_message is never called outside of it, and
    nothing sent in one session arrives in another. What was sent shortly before LOST may or may not have
    arrived (indefinite), so receivers must be idempotent by (request_id, generation).

    on_bad(peer, error) tells of traffic that is not a message. On a router the peer is then answered with
    the error's sentence (in a form every protocol version reads) and dropped; on a dealer the error carries
    the sentence that the router answered, and the endpoint goes on trying: close it to give up.
    An exception out of a callback is reported to the loop's exception handler; the endpoint lives on.
    """

    @property
    def identity(self) -> str:
        """The name peers know this end by."""
        ...

    @property
    def address(self) -> str:
        """Where it is bound, or connects to. After start() with the port in place of 0."""
        ...

    async def start(self) -> None:
        """Begins; a dealer does not wait for its router. Raises ConfigError when the address cannot be used."""
        ...

    async def close(self) -> None:
        """Ends; idempotent. Undelivered messages are dropped, no callback follows."""
        ...

    def send(self, peer: str, message: Message) -> None:
        """Hands over one message; never blocks. Whatever it raises, this message was not handed over.

        Raises PeerLost for a peer that is unknown or gone, MailboxFull when its bounded queue is full,
        ProtocolError for a message that cannot be encoded.
        """
        ...
