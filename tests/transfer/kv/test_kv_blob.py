"""KV blobs: what is written is read back, and no changed, cut or foreign record is ever taken for a good one."""

from __future__ import annotations

import struct

import msgspec
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_helpers import TINY

from transfer.errors import InvalidValue, KvCorrupt
from transfer.kv.blob import HEADER_BYTES, MAGIC, VERSION, encode_header, layout_digest, parse_header
from transfer.terms import KvLayout

NAME = bytes(range(32))
LAYOUT = layout_digest(TINY)
PAYLOAD = bytes(range(256)) * (TINY.block_bytes // 256) + bytes(TINY.block_bytes % 256)


def record() -> bytes:
    return encode_header(NAME, LAYOUT, memoryview(PAYLOAD)) + PAYLOAD


def read(data: bytes) -> memoryview:
    """As a reader of slots does: header, whose it is, then the payload."""
    header = parse_header(bytes(data[:HEADER_BYTES]))
    header.require(NAME, LAYOUT, TINY.block_bytes)
    payload = memoryview(data)[HEADER_BYTES:]
    header.check(payload)
    return payload


def test_a_block_comes_back_as_it_was():
    assert bytes(read(record())) == PAYLOAD
    assert len(record()) == HEADER_BYTES + TINY.block_bytes


def test_the_header_is_as_documented():
    fields = struct.pack(
        "<8sI4x32s32sQ16s", b"PPKVBLOB", 2, NAME, LAYOUT, len(PAYLOAD), xxhash.xxh3_128_digest(PAYLOAD)
    )
    assert record()[:HEADER_BYTES] == fields + struct.pack("<Q", xxhash.xxh3_64_intdigest(fields))


@settings(max_examples=400)
@given(st.integers(0, HEADER_BYTES + TINY.block_bytes - 1), st.integers(1, 255))
def test_any_changed_byte_is_found(at: int, change: int):
    harmed = bytearray(record())
    harmed[at] ^= change
    with pytest.raises(KvCorrupt):
        read(harmed)


@given(st.integers(0, HEADER_BYTES + TINY.block_bytes - 1))
def test_any_torn_write_is_found(length: int):
    with pytest.raises(KvCorrupt):
        read(record()[:length])


@given(st.binary(max_size=200))
def test_no_random_bytes_are_a_header(data: bytes):
    for candidate in (data, MAGIC + data, (MAGIC + data).ljust(HEADER_BYTES, b"\0")[:HEADER_BYTES]):
        with pytest.raises(KvCorrupt):
            parse_header(candidate)


def test_another_version_is_told():
    fields = struct.pack("<8sI4x32s32sQ16s", MAGIC, VERSION + 1, NAME, LAYOUT, 0, bytes(16))
    with pytest.raises(KvCorrupt, match="reads version"):
        parse_header(fields + struct.pack("<Q", xxhash.xxh3_64_intdigest(fields)))


@pytest.mark.parametrize(
    ("name", "layout", "num_bytes", "words"),
    [
        (bytes(32), LAYOUT, TINY.block_bytes, "holds the KV of"),
        (NAME, layout_digest(msgspec.structs.replace(TINY, rope="theta=2")), TINY.block_bytes, "another layout"),
        (NAME, layout_digest(msgspec.structs.replace(TINY, dtype="float16")), TINY.block_bytes, "another layout"),
        (NAME, LAYOUT, TINY.block_bytes + 1, "another layout"),
    ],
)
def test_a_record_of_something_else_is_not_served(name: bytes, layout: bytes, num_bytes: int, words: str):
    with pytest.raises(KvCorrupt, match=words):
        parse_header(record()[:HEADER_BYTES]).require(name, layout, num_bytes)


@pytest.mark.parametrize("field", KvLayout.__struct_fields__)
def test_every_part_of_a_layout_is_in_its_digest(field: str):
    value = getattr(TINY, field)
    other = "float64" if field == "dtype" else value + ("x" if isinstance(value, str) else 1)
    assert layout_digest(msgspec.structs.replace(TINY, **{field: other})) != LAYOUT


def test_names_of_the_wrong_size_are_refused():
    with pytest.raises(InvalidValue, match="block hash"):
        encode_header(b"short", LAYOUT, memoryview(PAYLOAD))
    with pytest.raises(InvalidValue, match="layout digest"):
        encode_header(NAME, b"short", memoryview(PAYLOAD))
