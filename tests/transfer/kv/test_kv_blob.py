"""KV blobs: what is written is read back, and no changed, cut or foreign record is ever taken for a good one."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_helpers import LAYOUT, TINY, block_bytes, make_arena

from transfer.errors import InvalidValue, KvCorrupt
from transfer.kv.blob import MAGIC, PREFIX_BYTES, encode_blob, encode_block, parse_blob
from transfer.terms import ModelIdentity

MODEL = ModelIdentity(name="m", revision="a" * 64, tokenizer="b" * 64, vocab_size=10, max_context=10)
NAME = bytes(range(32))


def record(layout=TINY) -> bytes:
    arena = make_arena(3, layout=layout, seed=5)
    return b"".join(encode_block(arena, 1, MODEL, NAME))


RECORD = record()


def test_a_block_comes_back_as_it_was():
    source, target = make_arena(4, seed=2), make_arena(4)
    buffers = encode_block(source, 3, MODEL, NAME)
    blob = parse_blob(b"".join(buffers))
    blob.require(MODEL, LAYOUT, NAME)
    blob.restore(target, 1)
    assert block_bytes(target, 1) == block_bytes(source, 3) == bytes(blob.payload)
    assert block_bytes(target, 0) == bytes(LAYOUT.block_bytes)
    assert (blob.header.model_revision, blob.header.block_hash) == (MODEL.revision, NAME)


def test_encoding_copies_no_payload():
    source = make_arena(2, layout=TINY, seed=2)
    buffers = encode_block(source, 0, MODEL, NAME)
    assert [buffer.nbytes for buffer in buffers[1:]] == [TINY.slab_bytes] * 2 * TINY.num_layers
    k, _ = source.views(0, 0, 1)
    k[0] ^= 0xFF
    assert buffers[1][0] == k[0]


@settings(max_examples=400)
@given(st.integers(0, len(RECORD) - 1), st.integers(1, 255))
def test_any_changed_byte_is_found(at: int, change: int):
    harmed = bytearray(RECORD)
    harmed[at] ^= change
    with pytest.raises(KvCorrupt):
        parse_blob(harmed)


@given(st.integers(0, len(RECORD) - 1))
def test_any_torn_write_is_found(length: int):
    with pytest.raises(KvCorrupt):
        parse_blob(RECORD[:length])


@given(st.binary(min_size=1, max_size=40))
def test_anything_behind_is_found(tail: bytes):
    with pytest.raises(KvCorrupt):
        parse_blob(RECORD + tail)


@given(st.binary(max_size=200))
def test_no_random_bytes_are_a_blob(data: bytes):
    for candidate in (data, MAGIC + data):
        with pytest.raises(KvCorrupt):
            parse_blob(candidate)


@pytest.mark.parametrize(
    ("at", "words"), [(0, "starts with"), (8, "version"), (10, "reserved"), (15, "header of"), (20, "header checksum"),
                      (PREFIX_BYTES + 3, "header checksum"), (-1, "payload checksum")],
)  # fmt: skip
def test_the_error_names_what_is_wrong(at: int, words: str):
    harmed = bytearray(RECORD)
    harmed[at] ^= 0x40
    with pytest.raises(KvCorrupt, match=words):
        parse_blob(harmed)


@pytest.mark.parametrize(
    ("model", "layout", "name", "words"),
    [
        (msgspec.structs.replace(MODEL, revision="c" * 64), TINY, NAME, "model revision"),
        (msgspec.structs.replace(MODEL, tokenizer="c" * 64), TINY, NAME, "tokenizer"),
        (MODEL, msgspec.structs.replace(TINY, rope="theta=2"), NAME, "layout"),
        (MODEL, msgspec.structs.replace(TINY, dtype="float16"), NAME, "layout"),
        (MODEL, TINY, bytes(32), "block hash"),
    ],
)  # fmt: skip
def test_a_record_of_something_else_is_not_served(model, layout, name, words):
    with pytest.raises(KvCorrupt, match=words):
        parse_blob(RECORD).require(model, layout, name)


def test_it_goes_into_no_arena_of_another_layout():
    with pytest.raises(KvCorrupt, match="layout"):
        parse_blob(RECORD).restore(make_arena(1, layout=msgspec.structs.replace(TINY, block_size=8)), 0)


def test_a_payload_of_the_wrong_size_is_refused():
    with pytest.raises(InvalidValue, match="must be"):
        encode_blob(MODEL, TINY, NAME, [memoryview(b"12345")])
    with pytest.raises(InvalidValue, match="block hash"):
        encode_blob(MODEL, TINY, b"short", [memoryview(bytes(TINY.block_bytes))])
