"""One KV block at rest: a versioned record whose header says whose bytes follow. No pickle, no copy of the payload.

Record: magic (8) | version u32 | pad (4) | block hash (32) | layout digest (32) | payload bytes u64 | XXH3-128 of the
payload (16) | XXH3-64 of all that | payload. Little-endian; the header has one size, so that records can lie in slots.
The block hash is chained from terms.kv_fingerprint, so it names model revision, tokenizer, dtype, RoPE and tenant too.
"""

from __future__ import annotations

import hashlib
import struct
from typing import NamedTuple

import msgspec
import xxhash

from transfer.errors import InvalidValue, KvCorrupt
from transfer.kv.block import HASH_BYTES
from transfer.terms import KvLayout

MAGIC = b"PPKVBLOB"
VERSION = 2

_FIELDS = struct.Struct("<8sI4x32s32sQ16s")
_SUM = struct.Struct("<Q")
HEADER_BYTES = _FIELDS.size + _SUM.size


class BlobHeader(NamedTuple):
    """What the payload is. payload: for each layer K then V, each [block_size, num_kv_heads, head_dim]."""

    block_hash: bytes
    layout: bytes
    """layout_digest of the arena it came from."""
    payload_bytes: int
    payload_digest: bytes

    def require(self, block_hash: bytes, layout: bytes, payload_bytes: int) -> None:
        """Raises KvCorrupt, naming what differs, when the record is of another block or layout."""
        if self.block_hash != block_hash:
            raise KvCorrupt(f"it holds the KV of {self.block_hash.hex()[:16]}, not of {block_hash.hex()[:16]}")
        if (self.layout, self.payload_bytes) != (layout, payload_bytes):
            raise KvCorrupt(f"it holds KV of another layout, {self.payload_bytes} bytes for {payload_bytes}")

    def check(self, payload: memoryview) -> None:
        """Raises KvCorrupt when these are not the bytes that were written."""
        if payload.nbytes != self.payload_bytes:
            raise KvCorrupt(f"its payload is {payload.nbytes} bytes, its header says {self.payload_bytes}")
        if xxhash.xxh3_128_digest(payload) != self.payload_digest:
            raise KvCorrupt("its payload does not match its checksum")


def layout_digest(layout: KvLayout) -> bytes:
    """32 bytes that differ when the bytes of a block would mean something else."""
    return hashlib.sha256(b"phaseplane-kv-layout-1\0" + msgspec.json.encode(layout, order="sorted")).digest()


def encode_header(block_hash: bytes, layout: bytes, payload: memoryview) -> bytes:
    """The HEADER_BYTES to write before `payload`. Raises InvalidValue for a hash or digest that is none."""
    for name, value in (("block hash", block_hash), ("layout digest", layout)):
        if len(value) != HASH_BYTES:
            raise InvalidValue(f"a {name} is {HASH_BYTES} bytes, got {len(value)}")
    fields = _FIELDS.pack(MAGIC, VERSION, block_hash, layout, payload.nbytes, xxhash.xxh3_128_digest(payload))
    return fields + _SUM.pack(xxhash.xxh3_64_intdigest(fields))


def parse_header(data: bytes) -> BlobHeader:
    """Raises KvCorrupt, naming what is wrong, unless these HEADER_BYTES are a header of this version."""
    if len(data) != HEADER_BYTES:
        raise KvCorrupt(f"a KV blob's header is {HEADER_BYTES} bytes, got {len(data)}")
    fields, (wanted,) = data[: _FIELDS.size], _SUM.unpack(data[_FIELDS.size :])
    magic, version, block_hash, layout, payload_bytes, digest = _FIELDS.unpack(fields)
    if magic != MAGIC:
        raise KvCorrupt(f"a KV blob begins with {MAGIC!r}, not with {magic!r}")
    if xxhash.xxh3_64_intdigest(fields) != wanted:
        raise KvCorrupt("a KV blob's header does not match its checksum")
    if version != VERSION:
        raise KvCorrupt(f"a KV blob has version {version}; this build reads version {VERSION}")
    return BlobHeader(block_hash, layout, payload_bytes, digest)
