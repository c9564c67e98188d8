"""The first words on a KV connection: protocol version and, with a key, an HMAC-SHA256 challenge both ways. Sans-IO.

It proves that both ends hold the key; it does not encrypt or sign what follows, so the network must be trusted not
to change bytes in flight on purpose (checksums catch accidents).
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Generator

import msgspec

from transfer.errors import ProtocolError

KV_PROTOCOL = 1
NONCE_BYTES = 32
LENGTH_BYTES = 2
MAX_WORD_BYTES = 1024


class Word(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One handshake message. error: why the other side is turned away, in a sentence."""

    protocol: int
    nonce: bytes = b""
    proof: bytes = b""
    keyed: bool = False
    error: str = ""


Handshake = Generator[bytes, Word, tuple[bytes, str | None]]
"""Yields what to send before the next word is read (maybe nothing), is sent that word, returns (last bytes to send,
why the other side is turned away or None)."""


def opener_handshake(key: bytes | None) -> Handshake:
    """The side that connected. Raises ProtocolError when the peer turns us away or does not prove the key."""
    nonce = secrets.token_bytes(NONCE_BYTES)
    answer = yield encode_word(Word(protocol=KV_PROTOCOL, nonce=nonce, keyed=key is not None))
    _check(answer)
    if key is None:
        return b"", None
    if not hmac.compare_digest(answer.proof, _proof(key, b"acceptor", nonce, answer.nonce)):
        raise ProtocolError("the peer does not hold our auth key; give both sides the same key")
    _check((yield encode_word(Word(protocol=KV_PROTOCOL, proof=_proof(key, b"opener", nonce, answer.nonce)))))
    return b"", None


def acceptor_handshake(key: bytes | None) -> Handshake:
    """The side that listens; it says why before it turns anybody away."""
    hello = yield b""
    problem = _problem(hello, key)
    if problem is None and key is not None:
        nonce = secrets.token_bytes(NONCE_BYTES)
        proof = _proof(key, b"acceptor", hello.nonce, nonce)
        answer = yield encode_word(Word(protocol=KV_PROTOCOL, nonce=nonce, proof=proof, keyed=True))
        if not hmac.compare_digest(answer.proof, _proof(key, b"opener", hello.nonce, nonce)):
            problem = "its auth key is not ours; give both sides the same key"
    return encode_word(Word(protocol=KV_PROTOCOL, error=problem or "")), problem


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
    return None


def _check(answer: Word) -> None:
    if answer.error:
        raise ProtocolError(f"the peer turned us away: {answer.error}")
    if answer.protocol != KV_PROTOCOL:
        raise ProtocolError(
            f"KV protocol version {answer.protocol} meets version {KV_PROTOCOL}; upgrade the older side"
        )


def _proof(key: bytes, side: bytes, opener_nonce: bytes, acceptor_nonce: bytes) -> bytes:
    text = b"phaseplane-kv\0" + side + b"\0" + bytes([KV_PROTOCOL]) + opener_nonce + acceptor_nonce
    return hmac.new(key, text, hashlib.sha256).digest()
