"""Frames: cut out of a byte stream whatever its portions, payload straight to its place, nonsense refused unread."""

from __future__ import annotations

import contextlib
import struct

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_helpers import TINY, make_offer

from transfer.errors import KvCorrupt, KvError, ProtocolError
from transfer.kv import frames
from transfer.kv.frames import Alive, Credit, Frame, FrameReader, Nack, Offer, Slab, encode_frame, scratch
from transfer.kv.port import KvAnswer, KvAsk, KvAskKind, KvTrailer

PAYLOAD = bytes(range(256)) * 40


def slab(stream: int = 1) -> Slab:
    return Slab(stream=stream, layer=2, first=3, count=4, checksum=9)


class Sink:
    """Takes frames; puts payload into `memory`, in pieces of the sizes given."""

    def __init__(self, pieces: tuple[int, ...] = ()) -> None:
        self.frames: list[Frame] = []
        self.memory = bytearray(len(PAYLOAD))
        self.pieces = pieces

    def frame_received(self, frame: Frame) -> None:
        self.frames.append(frame)

    def slab_opened(self, slab: Slab, payload_bytes: int) -> list[memoryview]:
        view, views = memoryview(self.memory), []
        for size in (*self.pieces, payload_bytes):
            part = view[: min(size, payload_bytes)]
            payload_bytes -= part.nbytes
            view = view[part.nbytes :]
            views += [part] if part.nbytes else []
        return views

    def slab_closed(self, slab: Slab) -> None:
        self.frames.append(slab)


ALL = [
    Offer(stream=1, offer=make_offer(2), layout=TINY, host_id="h", arena=None),
    frames.Grant(stream=1, window=100, skip=(1, 2), mapped=False, checksums=True),
    frames.Refuse(stream=1, reason="no room"),
    Credit(stream=1, allowed=77),
    frames.Commit(stream=1, trailer=KvTrailer(num_tokens=3, tokens=b"abcd", num_output=1)),
    frames.Commit(stream=2, trailer=None),
    frames.Ack(stream=1),
    Nack(stream=1, reason="why", corrupt=True),
    frames.Abort(stream=1, reason="why"),
    Alive(stream=1),
    frames.Fetched(stream=4, count=2, arena=None),
    frames.Bye(stream=0, reason="why", corrupt=False),
    frames.Bye(stream=0, reason="why", corrupt=True, session=True),
    frames.Ask(stream=5, ask=KvAsk(kind=KvAskKind.PIN, source="c", target_epoch=0, hashes=(b"h" * 32,), name="c/1")),
    frames.Answer(stream=5, answer=KvAnswer(epoch=3, num_blocks=1, stats={"hits": 1.5})),
    frames.Numbered(stream=0, number=7, sequence=4, frame=frames.pack_frame(Alive(stream=1))),
    frames.Taken(stream=0, number=7),
    frames.Probe(stream=0, number=8),
    Slab(stream=1, layer=0, first=0, count=2, checksum=None, runs=((4, 2),), generations=bytes(16)),
]


@settings(max_examples=100)
@given(st.lists(st.integers(1, 700), max_size=60), st.lists(st.integers(1, 5000), max_size=8))
def test_any_portions_give_the_same_frames(portions: list[int], pieces: list[int]):
    sink = Sink(tuple(pieces))
    reader = FrameReader(sink)
    data = b"".join(map(encode_frame, ALL)) + encode_frame(slab(), len(PAYLOAD)) + PAYLOAD + encode_frame(ALL[3])
    for portion in portions:
        reader.feed(data[:portion])
        data = data[portion:]
    reader.feed(data)
    assert sink.frames == [*ALL, slab(), ALL[3]]
    assert bytes(sink.memory) == PAYLOAD


def test_payload_is_received_where_it_belongs():
    sink = Sink((1000, 2000))
    reader = FrameReader(sink)
    reader.feed(encode_frame(slab(), len(PAYLOAD)))
    buffers = reader.buffers()
    assert [buffer.nbytes for buffer in buffers[:3]] == [1000, 2000, len(PAYLOAD) - 3000]
    buffers[1][0] = 0xAB
    assert sink.memory[1000] == 0xAB


def test_a_diverted_payload_leaves_memory_alone():
    sink = Sink((100,))
    reader = FrameReader(sink)
    reader.feed(encode_frame(slab(), len(PAYLOAD)) + b"\1" * 5000)
    reader.divert(2)
    reader.feed(b"\2" * 10)
    reader.divert(1)
    reader.feed(b"\3" * (len(PAYLOAD) - 5010) + encode_frame(Alive(stream=1)))
    assert bytes(sink.memory) == b"\1" * 5000 + b"\2" * 10 + bytes(len(PAYLOAD) - 5010)
    assert sink.frames == [slab(), Alive(stream=1)]


def test_a_reader_takes_turns_but_loses_nothing():
    sink = Sink()
    reader = FrameReader(sink)
    data = encode_frame(Alive(stream=1)) * 20
    reader.buffers()[0][: len(data)] = data
    assert reader.advance(len(data))
    assert len(sink.frames) == 8
    assert reader.advance(0)
    assert not reader.advance(0)
    assert len(sink.frames) == 20


@settings(max_examples=300)
@given(st.data())
def test_any_changed_byte_of_a_header_is_found(data: st.DataObject):
    frame = data.draw(st.sampled_from(ALL))
    encoded = bytearray(encode_frame(frame))
    encoded[data.draw(st.integers(0, len(encoded) - 1))] ^= data.draw(st.integers(1, 255))
    sink = Sink()
    with pytest.raises(KvCorrupt):
        FrameReader(sink).feed(bytes(encoded) + bytes(100))
    assert sink.frames == []


def prefix(magic: bytes, header: int, payload: int, header_sum: int = 0) -> bytes:
    fixed = struct.pack("<4sII", magic, header, payload)
    return fixed + struct.pack("<IQ", xxhash.xxh32_intdigest(fixed), header_sum)


def framed(header: bytes, payload: int = 0) -> bytes:
    return prefix(b"PKV1", len(header), payload, xxhash.xxh3_64_intdigest(header)) + header


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (prefix(b"PKV9", 5, 0), "version"),
        (prefix(b"PKV1", frames.MAX_HEADER_BYTES + 1, 0), "largest allowed"),
        (prefix(b"PKV1", 5, frames.MAX_PAYLOAD_BYTES + 1), "largest allowed"),
        (framed(b"\x92\x63\x01"), "do not know"),  # an array with tag 99
        (framed(b"\x93\x0a\x01\x01"), "do not know"),  # an Alive with a field too many
        (framed(b"\x92\x0a\xa1x"), "do not know"),  # a stream that is not a number
        (framed(b"\xc1"), "do not know"),
        (encode_frame(Alive(stream=1), 10), "Alive with a payload"),
    ],
)
def test_nonsense_is_refused(data: bytes, words: str):
    with pytest.raises(ProtocolError, match=words):
        FrameReader(Sink()).feed(data)


def test_nothing_is_allocated_for_what_is_too_large():
    reader = FrameReader(Sink())
    with pytest.raises(ProtocolError):
        reader.feed(prefix(b"PKV1", 0xFFFFFFFF, 0))
    assert reader.buffers()[0].nbytes <= frames.STAGING_BYTES


def test_a_frame_too_large_is_not_sent():
    with pytest.raises(ProtocolError, match="exceeds the largest frame"):
        encode_frame(frames.Abort(stream=1, reason="x" * (frames.MAX_HEADER_BYTES + 1)))


def test_a_header_larger_than_the_staging_arrives():
    sink = Sink()
    large = frames.Commit(stream=1, trailer=KvTrailer(num_tokens=1, tokens=bytes(3 * frames.STAGING_BYTES)))
    FrameReader(sink).feed(encode_frame(Alive(stream=1)) + encode_frame(large) + encode_frame(ALL[0]))
    assert sink.frames == [Alive(stream=1), large, ALL[0]]


@given(st.binary(min_size=1, max_size=300))
def test_random_bytes_never_become_a_frame(data: bytes):
    sink = Sink()
    with contextlib.suppress(KvError, ProtocolError):
        FrameReader(sink).feed(data)
    assert sink.frames == []


@given(st.integers(1, 300_000))
def test_scratch_swallows_exactly_that(num_bytes: int):
    assert sum(view.nbytes for view in scratch(num_bytes)) == num_bytes
