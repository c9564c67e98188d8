"""What an agent and the connector inside its vLLM say to each other over a unix socket, and how it is framed.

Plain data, imported on both sides. KV itself never travels here: it is in the arena that both have mapped.
"""

from __future__ import annotations

import struct

import msgspec

from transfer.errors import ProtocolError
from transfer.kv.arena import ArenaHandle
from transfer.terms import Struct

PROTOCOL = 2
MAX_FRAME_BYTES = 4 << 20
_HEADER = struct.Struct("<I")


class Hello(Struct, frozen=True, tag="hello"):
    """First frame of a connector: what its vLLM is. num_blocks: of vLLM's own KV cache, block_size tokens each.

    rank: this worker's among the world_size that split the model's num_kv_heads. engine: the same for all of them,
    and for those of no other vLLM.
    revision, tokenizer: as transfer.models reads them from the model directory; empty where vLLM has none.
    obstacle: why this vLLM's KV cannot be moved block by block; empty where it can. missing: settings that our
    connector rests on and that this vLLM runs without, as it is told of them.
    """

    protocol: int
    version: str
    pid: int
    model: str
    revision: str
    tokenizer: str
    dtype: str
    cache_dtype: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    num_blocks: int
    world_size: int
    max_model_len: int
    device: str
    obstacle: str = ""
    missing: tuple[str, ...] = ()
    rank: int = 0
    engine: str = ""


class Began(Struct, frozen=True, tag="began"):
    """The job is in its first step, with KV of `num_cached` leading tokens that vLLM need not compute. The first
    worker says so, when all have loaded it."""

    job: int
    num_cached: int


class Saved(Struct, frozen=True, tag="saved"):
    """The worker's heads of `layer` of the job's arena blocks [first, first + count) are in the arena; `first` is where
    its last frame of that layer ended, or save_from."""

    job: int
    layer: int
    first: int
    count: int


class LoadFailed(Struct, frozen=True, tag="load_failed"):
    """KV could not be taken from the arena by one worker or more; vLLM computes it. Said by the first worker."""

    job: int
    reason: str


class Revoked(Struct, frozen=True, tag="revoked"):
    """The job's blocks are neither read nor written by this worker any more, nor will be."""

    job: int


class Welcome(Struct, frozen=True, tag="welcome"):
    """block_size: of the arena; divides vLLM's."""

    arena: ArenaHandle


class Refused(Struct, frozen=True, tag="refused"):
    reason: str


class Grant(Struct, frozen=True, tag="grant"):
    """The job may use these arena blocks: read KV of the first num_loaded tokens, write from block save_from on up to
    num_tokens. generations: of the blocks read, as they were when granted."""

    job: int
    blocks: list[int]
    num_loaded: int
    save_from: int
    num_tokens: int
    generations: list[int]


class Revoke(Struct, frozen=True, tag="revoke"):
    job: int


FromConnector = Hello | Began | Saved | LoadFailed | Revoked
FromAgent = Welcome | Refused | Grant | Revoke

_encoder = msgspec.msgpack.Encoder()
_from_connector = msgspec.msgpack.Decoder(FromConnector)
_from_agent = msgspec.msgpack.Decoder(FromAgent)


def pack(frame: FromConnector | FromAgent) -> bytes:
    """The frame with its length before it. Raises ProtocolError for one that is too long to be taken."""
    body = _encoder.encode(frame)
    if len(body) > MAX_FRAME_BYTES:
        raise ProtocolError(f"a frame of {len(body)} bytes is over the {MAX_FRAME_BYTES} that a link carries")
    return _HEADER.pack(len(body)) + body


class Unpacker:
    """Bytes as they arrive, whole frames out."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Bodies of the frames that are complete now. Raises ProtocolError for a length over MAX_FRAME_BYTES."""
        self._buffer += data
        bodies: list[bytes] = []
        while len(self._buffer) >= _HEADER.size:
            (size,) = _HEADER.unpack_from(self._buffer)
            if size > MAX_FRAME_BYTES:
                raise ProtocolError(f"a frame of {size} bytes is over the {MAX_FRAME_BYTES} that a link carries")
            end = _HEADER.size + size
            if len(self._buffer) < end:
                break
            bodies.append(bytes(self._buffer[_HEADER.size : end]))
            del self._buffer[:end]
        return bodies


def from_connector(body: bytes) -> FromConnector:
    """Raises ProtocolError for anything else."""
    try:
        return _from_connector.decode(body)
    except msgspec.DecodeError as error:
        raise ProtocolError(f"a connector sent what is not a frame: {error}") from None


def from_agent(body: bytes) -> FromAgent:
    """Raises ProtocolError for anything else."""
    try:
        return _from_agent.decode(body)
    except msgspec.DecodeError as error:
        raise ProtocolError(f"an agent sent what is not a frame: {error}") from None
