"""The first words on a KV connection: protocol version and, with a key, an HMAC-SHA256 challenge both ways. Sans-IO.

It proves that both ends hold the key; it does not encrypt or sign what follows, so the network must be trusted not
to change bytes in flight on purpose (checksums catch accidents).
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Callable, Generator

import msgspec

from transfer.errors import ProtocolError

KV_PROTOCOL = 2
NONCE_BYTES = 32
LENGTH_BYTES = 2
MAX_WORD_BYTES = 1024


class Word(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One handshake message. error: why the other side is turned away, in a sentence.

    striped: several connections shall carry the session. token: of the session this connection joins (opener), of the
    session it has begun (acceptor): nobody else can guess it.
    """

    protocol: int
    nonce: bytes = b""
    proof: bytes = b""
    keyed: bool = False
    error: str = ""
    striped: bool = False
    token: bytes = b""


Admit = Callable[[Word], tuple[str | None, bytes]]
"""What the acceptor makes of an opener that has proved the key: why it is turned away, or None; its session's token."""


Handshake = Generator[bytes, Word, tuple[bytes, str | None]]
"""Yields what to send before the next word is read (maybe nothing), is sent that word, returns (last bytes to send,
why the other side is turned away or None)."""


def opener_handshake(
    key: bytes | None, *, striped: bool = False, token: bytes = b"", learn: Callable[[bytes], None] | None = None
) -> Handshake:
    """The side that connected. token: of the session to join; learn: is told the token of a new striped one.

    Raises ProtocolError when the peer turns us away or does not prove the key.
    """
    nonce = secrets.token_bytes(NONCE_BYTES)
    hello = Word(protocol=KV_PROTOCOL, nonce=nonce, keyed=key is not None, striped=striped, token=token)
    answer = yield encode_word(hello)
    _check(answer)
    if key is not None:
        if not hmac.compare_digest(answer.proof, _proof(key, b"acceptor", hello, answer.nonce)):
            raise ProtocolError("the peer does not hold our auth key; give both sides the same key")
        proof = _proof(key, b"opener", hello, answer.nonce)
        answer = yield encode_word(Word(protocol=KV_PROTOCOL, proof=proof))
        _check(answer)
    if learn is not None:
        learn(answer.token)
    return b"", None


def acceptor_handshake(key: bytes | None, admit: Admit | None = None, refuse: str = "") -> Handshake:
    """The side that listens; it says why before it turns anybody away. refuse: turn away whoever it is, for this."""
    hello = yield b""
    problem, token = refuse or _problem(hello, key), b""
    if problem is None and key is not None:
        nonce = secrets.token_bytes(NONCE_BYTES)
        proof = _proof(key, b"acceptor", hello, nonce)
        answer = yield encode_word(Word(protocol=KV_PROTOCOL, nonce=nonce, proof=proof, keyed=True))
        if not hmac.compare_digest(answer.proof, _proof(key, b"opener", hello, nonce)):
            problem = "its auth key is not ours; give both sides the same key"
    if problem is None and admit is not None:
        problem, token = admit(hello)
    return encode_word(Word(protocol=KV_PROTOCOL, error=problem or "", token=token)), problem


def encode_word(word: Word) -> bytes:
    data = msgspec.msgpack.encode(word)
    return len(data).to_bytes(LENGTH_BYTES, "little") + data


def word_length(prefix: bytes) -> int:
    """Bytes that follow a length prefix. Raises ProtocolError when they are too many."""
    length = int.from_bytes(prefix, "little")
    if length > MAX_WORD_BYTES:
        raise ProtocolError(f"the peer does not speak our KV protocol: its first word would be {length} bytes long")
    return length


def decode_word(data: bytes) -> Word:
    try:
        return msgspec.msgpack.decode(data, type=Word)
    except (msgspec.DecodeError, msgspec.ValidationError):
        raise ProtocolError("the peer does not speak our KV protocol: its first word cannot be read") from None


def _problem(hello: Word, key: bytes | None) -> str | None:
    if hello.protocol != KV_PROTOCOL:
        return f"KV protocol version {hello.protocol} meets version {KV_PROTOCOL}; upgrade the older side"
    if hello.keyed != (key is not None):
        return "one side has an auth key and the other has none; give both sides the same key"
    if len(hello.nonce) != NONCE_BYTES:
        return f"a nonce is {NONCE_BYTES} bytes, got {len(hello.nonce)}"
    if hello.token and not hello.striped:
        return "only a striped session can be joined"
    return None


def _check(answer: Word) -> None:
    if answer.error:
        raise ProtocolError(f"the peer turned us away: {answer.error}")
    if answer.protocol != KV_PROTOCOL:
        raise ProtocolError(
            f"KV protocol version {answer.protocol} meets version {KV_PROTOCOL}; upgrade the older side"
        )


def _proof(key: bytes, side: bytes, hello: Word, acceptor_nonce: bytes) -> bytes:
    said = hello.nonce + bytes([hello.striped]) + hello.token
    text = b"phaseplane-kv\0" + side + b"\0" + bytes([KV_PROTOCOL]) + acceptor_nonce + said
    return hmac.new(key, text, hashlib.sha256).digest()
