"""One KV block at rest: a self-describing, versioned, checksummed record. No pickle, no copies of the payload.

Record: magic (8) | version u16 | reserved u16 | header length u32 | checksum u64 over the 16 bytes before and the
header | header (MessagePack) | payload. The header carries the payload's own XXH3-64. Little-endian.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import xxhash

from transfer.errors import InvalidValue, KvCorrupt
from transfer.kv.arena import KvArena
from transfer.kv.block import HASH_BYTES
from transfer.terms import DTYPE_BYTES, KvLayout, ModelIdentity, Struct

MAGIC = b"PPKVBLOB"
VERSION = 1
MAX_HEADER_BYTES = 64 << 10
RAW = "raw"

_FIXED = struct.Struct("<8sHHI")
_SUM = struct.Struct("<Q")
PREFIX_BYTES = _FIXED.size + _SUM.size


class BlobHeader(Struct, frozen=True):
    """What the payload is: whoever reads it must hold the same model, tokenizer, layout and block hash.

    payload: for each layer K then V, each [block_size, num_kv_heads, head_dim] of layout.dtype.
    """

    model_revision: str
    tokenizer: str
    layout: KvLayout
    block_hash: bytes
    payload_bytes: int
    payload_xxh3: int
    codec: str = RAW


@dataclass(frozen=True, slots=True)
class KvBlob:
    """A parsed record. `payload` looks into the buffer that was parsed."""

    header: BlobHeader
    payload: memoryview

    def require(self, model: ModelIdentity, layout: KvLayout, block_hash: bytes) -> None:
        """Raises KvCorrupt, naming the field, when the record is of another model, layout or block."""
        expected = {
            "model revision": (self.header.model_revision, model.revision),
            "tokenizer": (self.header.tokenizer, model.tokenizer),
            "layout": (self.header.layout, layout),
            "block hash": (self.header.block_hash.hex(), block_hash.hex()),
        }
        for name, (found, wanted) in expected.items():
            if found != wanted:
                raise KvCorrupt(f"KV blob has {name} {found}, wanted {wanted}; it will not be served")

    def restore(self, arena: KvArena, block: int) -> None:
        """Write the payload into `block` of an arena of the same layout. Raises KvCorrupt for another layout."""
        layout = arena.layout
        if layout != self.header.layout:
            raise KvCorrupt(f"KV blob has layout {self.header.layout}, this arena {layout}; it will not be served")
        size = layout.slab_bytes
        for layer in range(layout.num_layers):
            k, v = arena.views(layer, block, 1)
            start = 2 * layer * size
            k[:] = self.payload[start : start + size]
            v[:] = self.payload[start + size : start + 2 * size]
            arena.commit_write(layer, [block])


def encode_block(arena: KvArena, block: int, model: ModelIdentity, block_hash: bytes) -> list[memoryview]:
    """The record of one block of an arena as buffers: the header bytes, then views of the block (no copy)."""
    pieces: list[memoryview] = []
    for layer in range(arena.layout.num_layers):
        arena.prepare_read(layer, [block])
        pieces.extend(arena.views(layer, block, 1))
    return encode_blob(model, arena.layout, block_hash, pieces)


def encode_blob(
    model: ModelIdentity, layout: KvLayout, block_hash: bytes, payload: Sequence[memoryview]
) -> list[memoryview]:
    """The record as buffers to write one after another: [header, *payload]; the payload is not copied.

    payload: for each layer K then V, layout.block_bytes in all. Raises InvalidValue when it is not.
    """
    num_bytes = sum(piece.nbytes for piece in payload)
    if num_bytes != layout.block_bytes:
        raise InvalidValue(f"the payload of a KV blob must be {layout.block_bytes} bytes, got {num_bytes}")
    if len(block_hash) != HASH_BYTES:
        raise InvalidValue(f"a block hash is {HASH_BYTES} bytes, got {len(block_hash)}")
    digest = xxhash.xxh3_64()
    for piece in payload:
        digest.update(piece)
    header = msgspec.msgpack.encode(
        BlobHeader(
            model_revision=model.revision, tokenizer=model.tokenizer, layout=layout, block_hash=block_hash,
            payload_bytes=num_bytes, payload_xxh3=digest.intdigest(),
        )
    )  # fmt: skip
    if len(header) > MAX_HEADER_BYTES:
        raise InvalidValue(f"a KV blob's header may be {MAX_HEADER_BYTES} bytes, this one is {len(header)}")
    fixed = _FIXED.pack(MAGIC, VERSION, 0, len(header))
    head = fixed + _SUM.pack(xxhash.xxh3_64_intdigest(fixed + header)) + header
    return [memoryview(head), *payload]


def parse_blob(data: bytes | bytearray | memoryview) -> KvBlob:
    """Parse and verify a whole record. Raises KvCorrupt naming what is wrong; nothing is returned unverified."""
    view = memoryview(data).cast("B")
    header = _parse_header(view)
    payload = view[_payload_start(view) :]
    if payload.nbytes != header.payload_bytes:
        raise KvCorrupt(f"KV blob's payload is {payload.nbytes} bytes, its header says {header.payload_bytes}")
    if payload.nbytes != header.layout.block_bytes:
        raise KvCorrupt(f"KV blob's payload is {payload.nbytes} bytes, its layout needs {header.layout.block_bytes}")
    found = xxhash.xxh3_64_intdigest(payload)
    if found != header.payload_xxh3:
        raise KvCorrupt(f"KV blob's payload checksum is {found:016x}, its header says {header.payload_xxh3:016x}")
    return KvBlob(header, payload)


def _payload_start(view: memoryview) -> int:
    return PREFIX_BYTES + int.from_bytes(view[12:16], "little")


def _parse_header(view: memoryview) -> BlobHeader:
    if view.nbytes < PREFIX_BYTES:
        raise KvCorrupt(f"KV blob is {view.nbytes} bytes, shorter than its {PREFIX_BYTES}-byte prefix")
    magic, version, reserved, header_len = _FIXED.unpack_from(view)
    if magic != MAGIC:
        raise KvCorrupt(f"KV blob starts with {magic!r}, not with {MAGIC!r}")
    if version != VERSION:
        raise KvCorrupt(f"KV blob has version {version}; this build reads version {VERSION}")
    if reserved:
        raise KvCorrupt(f"KV blob's reserved field is {reserved}, it must be 0")
    if header_len > MAX_HEADER_BYTES or PREFIX_BYTES + header_len > view.nbytes:
        raise KvCorrupt(f"KV blob's header of {header_len} bytes does not fit in a record of {view.nbytes} bytes")
    header = view[PREFIX_BYTES : PREFIX_BYTES + header_len]
    (wanted,) = _SUM.unpack_from(view, _FIXED.size)
    found = xxhash.xxh3_64_intdigest(bytes(view[: _FIXED.size]) + bytes(header))
    if found != wanted:
        raise KvCorrupt(f"KV blob's header checksum is {found:016x}, its prefix says {wanted:016x}")
    try:
        parsed = msgspec.msgpack.decode(header, type=BlobHeader)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise KvCorrupt(f"KV blob's header is not one we know: {error}") from None
    if parsed.codec != RAW:
        raise KvCorrupt(f"KV blob is encoded with {parsed.codec!r}; this build reads {RAW!r}")
    if parsed.layout.dtype not in DTYPE_BYTES:
        raise KvCorrupt(f"KV blob holds dtype {parsed.layout.dtype!r}; this build knows {', '.join(DTYPE_BYTES)}")
    return parsed
