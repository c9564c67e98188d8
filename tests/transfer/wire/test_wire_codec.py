"""Every message survives the wire; nothing but ProtocolError leaves decode, whatever the bytes."""

from __future__ import annotations

import enum
import types
import typing
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from transfer.errors import ProtocolError
from transfer.terms import Struct
from transfer.wire.codec import MAX_MESSAGE_BYTES, WIRE, Codec, decode, encode
from transfer.wire.messages import MESSAGES, PROTOCOL_VERSION, Abort, Message, Reserved, StepOutput

ABORT = Abort(request_id="r1", generation=3, reason="client left")


class Unlisted(Message, frozen=True):
    value: int


def values(kind: Any) -> st.SearchStrategy[Any]:
    """Values of a field's declared type."""
    simple = {
        int: st.integers(-(2**63), 2**63 - 1),
        float: st.floats(allow_nan=False),
        str: st.text(max_size=20),
        bytes: st.binary(max_size=40),
        bool: st.booleans(),
        type(None): st.none(),
    }
    if kind in simple:
        return simple[kind]
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return st.one_of([values(arg) for arg in args])
    if origin is tuple and args[-1] is ...:
        return st.lists(values(args[0]), max_size=3).map(tuple)
    if origin is dict:
        return st.dictionaries(values(args[0]), values(args[1]), max_size=3)
    if issubclass(kind, enum.Enum):
        return st.sampled_from(kind)
    return structs(kind)


def structs(kind: type[msgspec.Struct]) -> st.SearchStrategy[Any]:
    fields = {field.name: values(field.type) for field in msgspec.structs.fields(kind)}
    return st.fixed_dictionaries(fields).map(lambda given_fields: kind(**given_fields))


any_message = st.one_of([structs(kind) for kind in MESSAGES])


def raw(fields: dict[str, Any], version: int = PROTOCOL_VERSION) -> bytes:
    return b"PP" + bytes([version]) + msgspec.msgpack.encode(fields)


@given(any_message)
def test_every_message_survives(message: Message) -> None:
    assert decode(encode(message)) == message
    assert decode(memoryview(encode(message))) == message


@pytest.mark.parametrize("kind", MESSAGES)
def test_every_message_refuses_unknown_fields_down_to_its_leaves(kind: type[Message]) -> None:
    todo, seen = [kind], set()
    while todo:
        struct = todo.pop()
        seen.add(struct)
        assert struct.__struct_config__.forbid_unknown_fields, struct
        assert struct.__struct_config__.frozen, struct
        for field in msgspec.structs.fields(struct):
            parts = [field.type, *typing.get_args(field.type)]
            todo += [part for part in parts if isinstance(part, type) and issubclass(part, Struct) and part not in seen]


@given(st.binary(max_size=200))
def test_random_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode(data)


@given(st.binary(max_size=200))
def test_random_bytes_behind_a_good_header_are_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode(b"PP" + bytes([PROTOCOL_VERSION]) + data)


@given(any_message, st.data())
def test_a_damaged_message_is_decoded_or_refused(message: Message, data: st.DataObject) -> None:
    damaged = bytearray(encode(message))
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    del damaged[data.draw(st.integers(0, len(damaged))) :]
    complaint = ""
    try:
        assert isinstance(decode(bytes(damaged)), Message)
    except ProtocolError as error:
        complaint = str(error)
    assert complaint.isprintable()
    assert len(complaint) < 1000


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"type": "Nonsense"}, "Nonsense"),
        ({"request_id": "r", "generation": 1, "reason": ""}, "type"),
        ({"type": "Abort", "request_id": "r", "generation": 1, "reason": "", "extra": 1}, "extra"),
        ({"type": "Abort", "request_id": "r", "generation": "1", "reason": ""}, "generation"),
        ({"type": "Abort", "request_id": "r", "generation": 1}, "reason"),
        ({"type": "Unlisted", "value": 1}, "Unlisted"),
    ],
)
def test_what_is_not_exactly_a_message_is_refused_by_name(fields: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ProtocolError, match=complaint):
        decode(raw(fields))


def test_hostile_lengths_and_depths_are_refused_at_once() -> None:
    head = b"PP" + bytes([PROTOCOL_VERSION])
    for body in (b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff", b"\x91" * 100_000):
        with pytest.raises(ProtocolError):
            decode(head + body)
    field_then_depth = b"\x82\xa4type\xa5Abort\xa1" + b"z" + b"\x91" * 100_000
    with pytest.raises(ProtocolError):
        decode(head + field_then_depth)
    with pytest.raises(ProtocolError, match="Phaseplane message"):
        decode(b"GET / HTTP/1.1\r\n")
    with pytest.raises(ProtocolError):
        decode(encode(ABORT) + b"\x00")


def test_another_version_is_told_both_versions_and_what_to_do() -> None:
    newer = Codec(MESSAGES, PROTOCOL_VERSION + 1)
    with pytest.raises(ProtocolError, match=r"version 2 .* version\s+1; run the same Phaseplane release"):
        decode(newer.encode(ABORT))


def test_sizes_are_bounded_both_ways() -> None:
    too_much = Abort(request_id="r", generation=1, reason="x" * MAX_MESSAGE_BYTES)
    with pytest.raises(ProtocolError, match=r"Abort of 8388\d\d\d bytes is over the limit of 8388608"):
        encode(too_much)
    with pytest.raises(ProtocolError, match="over the limit"):
        decode(b"PP" + bytes([PROTOCOL_VERSION]) + msgspec.msgpack.encode(too_much))
    largest = Abort(request_id="r", generation=1, reason="x" * (MAX_MESSAGE_BYTES - 1000))
    assert decode(encode(largest)) == largest


def test_an_unregistered_class_is_not_sent() -> None:
    with pytest.raises(ProtocolError, match="Unlisted is not a message"):
        encode(Unlisted(value=1))


def test_the_version_is_on_the_wire_where_every_release_looks_for_it() -> None:
    assert encode(ABORT)[:3] == b"PP" + bytes([WIRE.version])
    assert WIRE.version == PROTOCOL_VERSION


def test_a_message_of_the_wrong_types_is_caught_on_arrival() -> None:
    wrong = Reserved(request_id="r", generation="one", have_tokens=0, free_blocks=0)
    with pytest.raises(ProtocolError, match="generation"):
        decode(encode(wrong))
    assert decode(encode(StepOutput(epoch=1, items=()))) == StepOutput(epoch=1, items=())
