"""Messages to bytes and back: MessagePack behind two magic bytes and a protocol version. Fails closed.

Whatever the bytes, `decode` returns a registered message or raises ProtocolError; it never guesses.
"""

from __future__ import annotations

from typing import Union, cast

import msgspec

from transfer.errors import ProtocolError
from transfer.wire.messages import MESSAGES, PROTOCOL_VERSION, Message

MAGIC = b"PP"
MAX_MESSAGE_BYTES = 8 * 1024 * 1024
"""Of one encoded message, header included."""

_HEADER_BYTES = len(MAGIC) + 1
_MAX_DETAIL_CHARS = 200


class Codec:
    """One protocol version: its messages and their encoder and decoder, which are reused.

    Not safe for threads; every endpoint calls it from its event loop.
    """

    def __init__(self, messages: tuple[type[Message], ...], version: int) -> None:
        self.version = version
        self._known = frozenset(messages)
        self._header = MAGIC + bytes([version])
        self._encoder = msgspec.msgpack.Encoder()
        union = Union[messages]  # type: ignore[valid-type]  # noqa: UP007 (built from a tuple at run time)
        self._decoder = cast("msgspec.msgpack.Decoder[Message]", msgspec.msgpack.Decoder(union))

    def encode(self, message: Message) -> bytes:
        """Raises ProtocolError for a class that is not registered and above MAX_MESSAGE_BYTES."""
        if type(message) not in self._known:
            raise ProtocolError(
                f"{type(message).__name__} is not a message of protocol version {self.version}; add it to MESSAGES"
            )
        data = self._header + self._encoder.encode(message)
        if len(data) > MAX_MESSAGE_BYTES:
            raise ProtocolError(
                f"a {type(message).__name__} of {len(data)} bytes is over the limit of {MAX_MESSAGE_BYTES}; split it"
            )
        return data

    def decode(self, data: bytes | memoryview) -> Message:
        """Raises ProtocolError, and nothing else, for bytes that are not one whole message of this version."""
        if len(data) > MAX_MESSAGE_BYTES:
            raise ProtocolError(f"a message of {len(data)} bytes is over the limit of {MAX_MESSAGE_BYTES}")
        if len(data) < _HEADER_BYTES or data[: len(MAGIC)] != MAGIC:
            raise ProtocolError("the bytes are not a Phaseplane message; check what is connected to this port")
        if data[len(MAGIC)] != self.version:
            raise ProtocolError(
                f"the peer speaks protocol version {data[len(MAGIC)]} and this process speaks version "
                f"{self.version}; run the same Phaseplane release on both"
            )
        try:
            return self._decoder.decode(memoryview(data)[_HEADER_BYTES:])
        except msgspec.MsgspecError as error:
            detail = str(error)[:_MAX_DETAIL_CHARS].encode("unicode_escape").decode()
            raise ProtocolError(f"a message was refused: {detail}") from None
        except RecursionError:
            raise ProtocolError("a message was refused: it is nested too deeply") from None


WIRE = Codec(MESSAGES, PROTOCOL_VERSION)
"""The codec of this release; endpoints use it unless a test says otherwise."""

encode = WIRE.encode
decode = WIRE.decode
