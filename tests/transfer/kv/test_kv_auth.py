"""The handshake: both sides prove the key or nobody talks; beyond loopback there is no port without one."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kv_helpers import TIMEOUT_S, Pair, make_arena, make_offer, push_all

from transfer.errors import ConfigError, KvTransferFailed, ProtocolError
from transfer.kv.links.auth import (
    KV_PROTOCOL,
    LENGTH_BYTES,
    Word,
    acceptor_handshake,
    decode_word,
    encode_word,
    opener_handshake,
    word_length,
)
from transfer.kv.links.tcp import TcpKvPort
from transfer.kv.port import KvTrailer

KEY = b"a long enough secret of 32 bytes"


def word(data: bytes) -> Word:
    assert word_length(data[:LENGTH_BYTES]) == len(data) - LENGTH_BYTES
    return decode_word(data[LENGTH_BYTES:])


def converse(opener_key: bytes | None, acceptor_key: bytes | None) -> tuple[str, str | None]:
    """Run both sides against each other: ("ok" or the opener's error, the acceptor's)."""
    opener, acceptor = opener_handshake(opener_key), acceptor_handshake(acceptor_key)
    next(acceptor)
    said = next(opener)
    last, problem = b"", None
    while True:
        try:
            answer = acceptor.send(word(said))
        except StopIteration as stop:
            last, problem = stop.value
            answer = last
        try:
            said = opener.send(word(answer))
        except StopIteration:
            return "ok", problem
        except ProtocolError as error:
            return str(error), problem


@pytest.mark.parametrize("key", [None, KEY])
def test_equal_sides_agree(key: bytes | None):
    assert converse(key, key) == ("ok", None)


@pytest.mark.parametrize(
    ("opener_key", "acceptor_key", "words"),
    [(KEY, None, "has none"), (None, KEY, "has none"), (KEY, b"other", "does not hold our auth key")],
)
def test_other_sides_do_not(opener_key: bytes | None, acceptor_key: bytes | None, words: str):
    error, problem = converse(opener_key, acceptor_key)
    assert words in error
    assert problem is None or words in problem


def test_an_opener_that_only_claims_the_key_is_turned_away():
    acceptor = acceptor_handshake(KEY)
    next(acceptor)
    challenge = word(acceptor.send(Word(protocol=KV_PROTOCOL, nonce=bytes(32), keyed=True)))
    with pytest.raises(StopIteration) as stop:  # it echoes what it was shown
        acceptor.send(Word(protocol=KV_PROTOCOL, proof=challenge.proof))
    last, problem = stop.value.value
    assert "auth key is not ours" in problem
    assert "auth key is not ours" in word(last).error


@pytest.mark.parametrize("changes", [{"token": b"another"}, {"striped": False, "token": b""}])
def test_the_session_to_join_cannot_be_changed_on_the_way(changes: dict[str, object]):
    opener = opener_handshake(KEY, striped=True, token=b"ours")
    acceptor = acceptor_handshake(KEY)
    next(acceptor)
    hello = msgspec.structs.replace(word(next(opener)), **changes)
    with pytest.raises(ProtocolError, match="does not hold our auth key"):
        opener.send(word(acceptor.send(hello)))


def test_an_acceptor_cannot_replay_an_earlier_proof():
    first, acceptor = opener_handshake(KEY), acceptor_handshake(KEY)
    next(acceptor)
    recorded = word(acceptor.send(word(next(first))))
    second = opener_handshake(KEY)
    next(second)
    with pytest.raises(ProtocolError, match="does not hold our auth key"):
        second.send(recorded)


def test_another_protocol_version_is_turned_away_with_a_sentence():
    acceptor = acceptor_handshake(None)
    next(acceptor)
    with pytest.raises(StopIteration) as stop:
        acceptor.send(Word(protocol=KV_PROTOCOL + 1, nonce=bytes(32)))
    last, problem = stop.value.value
    assert "upgrade the older side" in problem
    opener = opener_handshake(None)
    next(opener)
    with pytest.raises(ProtocolError, match="upgrade the older side"):
        opener.send(word(last))


@given(st.binary(max_size=100))
def test_no_random_bytes_are_a_word(data: bytes):
    try:
        decoded = decode_word(data)
    except ProtocolError:
        return
    assert encode_word(decoded)


def test_a_word_too_long_is_not_read():
    with pytest.raises(ProtocolError, match="does not speak"):
        word_length(b"GE")


@pytest.mark.parametrize("host", ["0.0.0.0", "10.1.2.3", "::", "node-7.cluster"])
def test_beyond_loopback_a_key_is_needed(host: str):
    arena = make_arena(1)
    for key in (None, b""):
        with pytest.raises(ConfigError, match="needs an auth key"):
            TcpKvPort(instance_id="x", epoch=1, arena=arena, host=host, auth_key=key)
    TcpKvPort(instance_id="x", epoch=1, arena=arena, host=host, auth_key=KEY)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost"])
def test_on_loopback_none_is_needed(host: str):
    TcpKvPort(instance_id="x", epoch=1, arena=make_arena(1), host=host)


async def test_kv_flows_between_ports_with_one_key():
    async with Pair(4, auth_key=KEY) as pair:
        sender = await pair.prefill.open(pair.peer, make_offer(2), [0, 1], TIMEOUT_S)
        push_all(sender, 0, 2)
        await sender.commit(KvTrailer(num_tokens=1), TIMEOUT_S)
        assert pair.same([0, 1], [0, 1])


@pytest.mark.parametrize("key", [None, b"another"])
async def test_no_kv_flows_without_the_key(key: bytes | None):
    async with Pair(4, auth_key=KEY) as pair:
        pair.prefill._key = key
        with pytest.raises(KvTransferFailed, match="auth key"):
            await pair.prefill.open(pair.peer, make_offer(2), [0, 1], TIMEOUT_S)
        assert pair.role.offered == []
        assert pair.decode._sessions == {}


async def test_the_advertised_host_is_what_peers_are_told():
    arena = make_arena(1)
    port = TcpKvPort(instance_id="x", epoch=1, arena=arena, host="127.0.0.1", advertise="node-7", auth_key=KEY)
    await port.start()
    assert port.endpoint.startswith("tcp://node-7:")
    await port.close()
