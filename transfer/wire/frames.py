"""The frame around every message on a ZeroMQ connection: one kind byte, an 8-byte session, a body.

This layout never changes with the protocol version, so that any release can refuse any other in a sentence.
"""

from __future__ import annotations

OPEN = ord("O")
"""Dealer -> router, first frame of a connection: a new session under this identity."""
PING = ord("P")
"""Dealer -> router: answered by PONG."""
PONG = ord("Q")
"""Router -> dealer: the session is open and alive. The first one answers OPEN."""
MESSAGE = ord("M")
"""Both ways. Body: an encoded message."""
STALE = ord("X")
"""Router -> dealer: your session is not known here (any more); open another."""
REFUSED = ord("R")
"""Router -> dealer: your traffic is not acceptable. Body: a sentence, UTF-8."""

SESSION_BYTES = 8
PREFIX_BYTES = 1 + SESSION_BYTES
NO_SESSION = bytes(SESSION_BYTES)
MAX_SENTENCE_BYTES = 1024


def prefix(kind: int, session: bytes) -> bytes:
    """The first PREFIX_BYTES of a frame."""
    return bytes([kind]) + session


def split(frame: bytes) -> tuple[int, bytes]:
    """(kind, session). A frame that is too short has kind 0, which nothing accepts, and NO_SESSION."""
    if len(frame) < PREFIX_BYTES:
        return 0, NO_SESSION
    return frame[0], frame[1:PREFIX_BYTES]


def sentence(frame: bytes) -> str:
    """The body of REFUSED as printable text, cut to MAX_SENTENCE_BYTES."""
    text = frame[PREFIX_BYTES : PREFIX_BYTES + MAX_SENTENCE_BYTES].decode("utf-8", "replace")
    return "".join(char if char.isprintable() else " " for char in text)
