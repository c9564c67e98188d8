"""What travels between two KV ports, and how it is cut out of a byte stream. Sans-IO: bytes in, frames out.

Frame: prefix | header | payload. The prefix is fixed (magic, header length, payload length, checksum of these, checksum
of the header); the header is one array-like MessagePack struct below; only Slab has a payload, which is received
straight into the memory it is meant for. Lengths are checked before anything is allocated; the unknown is refused.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Sequence
from typing import Annotated, Protocol

import msgspec
import xxhash

from transfer.errors import KvCorrupt, ProtocolError
from transfer.kv.arena import ArenaHandle
from transfer.kv.port import KvAnswer, KvAsk, KvFetch, KvOffer, KvTrailer
from transfer.terms import KvLayout, Struct

MAX_HEADER_BYTES = 4 << 20
MAX_PAYLOAD_BYTES = 64 << 20
MAX_DESCRIPTOR_BYTES = 64 << 10
STAGING_BYTES = 64 << 10
READAHEAD_BYTES = 4 << 10
MAX_BUFFERS = 512
FRAMES_PER_TURN = 8

_PREFIX = struct.Struct("<4sII")
_SUMS = struct.Struct("<IQ")
PREFIX_BYTES = _PREFIX.size + _SUMS.size
MAGIC = b"PKV1"


class RemoteHandle(Struct, frozen=True):
    """What a peer that has the same backend needs to read an arena by it. descriptor: bytes that only it understands.

    layout, num_blocks: where in the arena, from its first byte, the blocks are (see HostArena).
    """

    backend: Annotated[str, msgspec.Meta(max_length=32)]
    descriptor: Annotated[bytes, msgspec.Meta(max_length=MAX_DESCRIPTOR_BYTES)]
    layout: KvLayout
    num_blocks: Annotated[int, msgspec.Meta(ge=1, le=1 << 32)]


class FrameBase(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """`stream` is chosen by the side that opened the connection and never reused on it."""

    stream: int


class Offer(FrameBase, frozen=True, tag=1):
    """Opens a push. arena: how to map the sender's memory, when both may be on one host. remote: how to read it."""

    offer: KvOffer
    layout: KvLayout
    host_id: str
    arena: ArenaHandle | None
    remote: RemoteHandle | None = None


class Grant(FrameBase, frozen=True, tag=2):
    """Receiver: go ahead. window: bytes in flight at most; skip: offered indices not wanted.

    mapped: send no payload, name blocks of your arena; checksums: send one with each slab. direct: as mapped, they are
    read by the backend of your remote handle, so many bytes of a slab at most; 0: they are not.
    """

    window: int
    skip: tuple[int, ...]
    mapped: bool
    checksums: bool
    direct: int = 0


class Refuse(FrameBase, frozen=True, tag=3):
    """Receiver or server: no, in a sentence; the stream is over."""

    reason: str


class Slab(FrameBase, frozen=True, tag=4):
    """`count` blocks of one layer from offered index `first`. Payload: K of all of them, then V (none when the
    receiver maps or reads the sender's memory).

    checksum: XXH3-64 of these bytes in this order; None when not asked for. Without a payload: runs are (first block
    id, number of blocks) in the sender's arena, `count` in all, and generations are theirs, count x uint64.
    """

    layer: int
    first: int
    count: int
    checksum: int | None
    runs: tuple[tuple[int, int], ...] = ()
    generations: bytes = b""
    number: int = 0
    """Where several connections carry a session: its place on this one, for Taken."""


class Credit(FrameBase, frozen=True, tag=5):
    """Receiver: `allowed` KV bytes may be sent, counted from the stream's start; a repeat is harmless."""

    allowed: int


class Commit(FrameBase, frozen=True, tag=6):
    """Sender: that was all. trailer: of a push; None ends a fetch."""

    trailer: KvTrailer | None


class Ack(FrameBase, frozen=True, tag=7):
    """Receiver: all of it is here and verified; the stream is over."""


class Nack(FrameBase, frozen=True, tag=8):
    """Receiver: given up, in a sentence; the stream is over. corrupt: a checksum or generation did not match."""

    reason: str
    corrupt: bool


class Abort(FrameBase, frozen=True, tag=9):
    """Sender: given up, in a sentence; the stream is over."""

    reason: str


class Alive(FrameBase, frozen=True, tag=10):
    """Sender: still computing, nothing to send just now. So a long queue or chunk is not taken for a death."""


class Fetch(FrameBase, frozen=True, tag=11):
    """Opens a fetch from a pool; answered by Fetched or Refuse."""

    fetch: KvFetch
    layout: KvLayout
    host_id: str


class Fetched(FrameBase, frozen=True, tag=12):
    """Server: the leading `count` blocks are here, pinned; answer with Grant. 0: none, the stream is over."""

    count: int
    arena: ArenaHandle | None
    remote: RemoteHandle | None = None


class Bye(FrameBase, frozen=True, tag=13):
    """Either side, stream 0: the connection ends for this reason. corrupt: what you sent did not match its checksum.

    session: so do the other connections that carry the same session.
    """

    reason: str
    corrupt: bool
    session: bool = False


class Ask(FrameBase, frozen=True, tag=14):
    """A question that moves no KV; answered by Answer or Refuse."""

    ask: KvAsk


class Answer(FrameBase, frozen=True, tag=15):
    """Ends an Ask."""

    answer: KvAnswer


class Numbered(FrameBase, frozen=True, tag=16):
    """A frame without payload where several connections carry a session. number: as Slab's. sequence: its place in the
    order of all such frames of this side; a repeat is harmless."""

    number: int
    sequence: int
    frame: bytes


class Taken(FrameBase, frozen=True, tag=17):
    """Stream 0: everything up to this number was read from this connection."""

    number: int


class Probe(FrameBase, frozen=True, tag=18):
    """Stream 0: answer with Taken at once."""

    number: int


Frame = (
    Offer | Grant | Refuse | Slab | Credit | Commit | Ack | Nack | Abort | Alive | Fetch | Fetched | Bye | Ask | Answer
    | Numbered | Taken | Probe
)  # fmt: skip

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Frame)


def encode_frame(frame: Frame, payload_bytes: int = 0) -> bytes:
    """Prefix and header of a frame; `payload_bytes` of payload must follow. Raises ProtocolError when too large."""
    header = _encoder.encode(frame)
    if len(header) > MAX_HEADER_BYTES or payload_bytes > MAX_PAYLOAD_BYTES:
        raise ProtocolError(
            f"a {type(frame).__name__} of {len(header)} + {payload_bytes} bytes exceeds the largest frame "
            f"({MAX_HEADER_BYTES} + {MAX_PAYLOAD_BYTES}); send fewer blocks at a time"
        )
    prefix = _PREFIX.pack(MAGIC, len(header), payload_bytes)
    sums = _SUMS.pack(xxhash.xxh32_intdigest(prefix), xxhash.xxh3_64_intdigest(header))
    return b"".join((prefix, sums, header))


def pack_frame(frame: Frame) -> bytes:
    """A frame's header alone, to travel within a Numbered."""
    return _encoder.encode(frame)


def unpack_frame(data: bytes | memoryview) -> Frame:
    """Inverse of pack_frame. Raises ProtocolError."""
    try:
        return _decoder.decode(data)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise ProtocolError(f"the peer sent a KV frame we do not know: {error}") from None


_scratch = memoryview(bytearray(STAGING_BYTES))


def scratch(num_bytes: int) -> list[memoryview]:
    """Views that swallow `num_bytes` bytes nobody wants; never read."""
    full, rest = divmod(num_bytes, STAGING_BYTES)
    views = [_scratch] * full
    return [*views, _scratch[:rest]] if rest else views


class FrameSink(Protocol):
    """Who takes the frames a FrameReader cuts. When one of these raises, the connection cannot go on."""

    def frame_received(self, frame: Frame) -> None:
        """A frame without payload."""

    def slab_opened(self, slab: Slab, payload_bytes: int) -> Sequence[memoryview]:
        """Where the payload goes: writable views, payload_bytes long in all, filled in order."""

    def slab_closed(self, slab: Slab) -> None:
        """The payload of the slab opened last is in place."""


class FrameReader:
    """Cuts frames out of bytes that arrive in any portions. The caller receives into `buffers` and calls `advance`."""

    def __init__(self, sink: FrameSink) -> None:
        self._sink = sink
        self._staging = memoryview(bytearray(STAGING_BYTES))
        self._start = self._end = 0
        self._pieces: deque[memoryview] = deque()
        self._slab: Slab | None = None

    def buffers(self) -> list[memoryview]:
        """Where the next bytes must be received, in order; never empty. Destination memory first, if in a payload."""
        if self._pieces:
            if len(self._pieces) > MAX_BUFFERS:
                return [self._pieces[i] for i in range(MAX_BUFFERS)]
            return [*self._pieces, self._staging[:READAHEAD_BYTES]]
        return [self._staging[self._end :]]

    def advance(self, num_bytes: int) -> bool:
        """`num_bytes` were received into `buffers`; takes up to 8 frames. True: maybe more, advance(0) takes them.

        Raises KvCorrupt or ProtocolError: the connection cannot go on.
        """
        self._end += self._fill(num_bytes)
        for _ in range(FRAMES_PER_TURN):
            if not self._step():
                break
        else:
            return True
        if self._start == self._end:
            self._start = self._end = 0
        elif self._start and len(self._staging) - self._end < READAHEAD_BYTES:
            self._compact(len(self._staging))
        return False

    def feed(self, data: bytes) -> None:
        """Take bytes that lie elsewhere (one copy): for links without a socket."""
        view = memoryview(data)
        while view.nbytes:
            taken = 0
            for buffer in self.buffers():
                part = view[taken : taken + buffer.nbytes]
                buffer[: part.nbytes] = part
                taken += part.nbytes
            view = view[taken:]
            while self.advance(taken):
                taken = 0

    def divert(self, stream: int) -> None:
        """Write no further byte of `stream` where it was meant to go: the rest of its payload is thrown away."""
        if self._slab is not None and self._slab.stream == stream:
            self._pieces = deque(scratch(sum(piece.nbytes for piece in self._pieces)))

    def _fill(self, num_bytes: int) -> int:
        """Account bytes received into the payload's pieces; returns how many went on into staging."""
        pieces = self._pieces
        while pieces and num_bytes >= pieces[0].nbytes:
            num_bytes -= pieces.popleft().nbytes
        if pieces and num_bytes:
            pieces[0] = pieces[0][num_bytes:]
            return 0
        return num_bytes

    def _step(self) -> bool:
        """Take one payload or frame out of staging; False when more bytes are needed."""
        if self._slab is not None:
            return self._finish_payload(self._slab)
        if self._end - self._start < PREFIX_BYTES:
            return False
        header_bytes, payload_bytes, wanted = self._prefix()
        begin = self._start + PREFIX_BYTES
        if self._end - begin < header_bytes:
            if PREFIX_BYTES + header_bytes > len(self._staging) - self._start:
                self._compact(max(len(self._staging), PREFIX_BYTES + header_bytes))
            return False
        header = self._staging[begin : begin + header_bytes]
        if xxhash.xxh3_64_intdigest(header) != wanted:
            raise KvCorrupt("the header of a KV frame does not match its checksum; it was changed on the way")
        frame = unpack_frame(header)
        self._start = begin + header_bytes
        self._dispatch(frame, payload_bytes)
        return True

    def _dispatch(self, frame: Frame, payload_bytes: int) -> None:
        if payload_bytes == 0:
            self._sink.frame_received(frame)
            return
        if not isinstance(frame, Slab):
            raise ProtocolError(f"the peer sent a {type(frame).__name__} with a payload of {payload_bytes} bytes")
        self._pieces = deque(self._sink.slab_opened(frame, payload_bytes))
        self._slab = frame

    def _finish_payload(self, slab: Slab) -> bool:
        pieces = self._pieces
        while pieces and self._start < self._end:
            size = min(pieces[0].nbytes, self._end - self._start)
            pieces[0][:size] = self._staging[self._start : self._start + size]
            self._start += size
            if size == pieces[0].nbytes:
                pieces.popleft()
            else:
                pieces[0] = pieces[0][size:]
        if pieces:
            return False
        self._slab = None
        self._sink.slab_closed(slab)
        return True

    def _prefix(self) -> tuple[int, int, int]:
        prefix = self._staging[self._start : self._start + _PREFIX.size]
        magic, header_bytes, payload_bytes = _PREFIX.unpack(prefix)
        prefix_sum, header_sum = _SUMS.unpack_from(self._staging, self._start + _PREFIX.size)
        if prefix_sum != xxhash.xxh32_intdigest(prefix):
            raise KvCorrupt("the prefix of a KV frame does not match its checksum; it was changed on the way")
        if magic != MAGIC:
            raise ProtocolError(f"the peer speaks another version of the KV protocol: {magic!r}, ours is {MAGIC!r}")
        if header_bytes > MAX_HEADER_BYTES or payload_bytes > MAX_PAYLOAD_BYTES:
            raise ProtocolError(
                f"the peer announced a KV frame of {header_bytes} + {payload_bytes} bytes; the largest allowed is "
                f"{MAX_HEADER_BYTES} + {MAX_PAYLOAD_BYTES}"
            )
        return header_bytes, payload_bytes, header_sum

    def _compact(self, size: int) -> None:
        """Move what is unread to the front, of a larger staging if need be."""
        unread = bytes(self._staging[self._start : self._end])
        if size > len(self._staging):
            self._staging = memoryview(bytearray(size))
        self._staging[: len(unread)] = unread
        self._start, self._end = 0, len(unread)
