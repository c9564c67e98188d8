"""The vocabulary every process shares: ids, roles, objectives, sampling, model and KV identity.

Plain data only. Nothing here decides, sleeps or talks.
"""

from __future__ import annotations

import array
import hashlib
import sys
from collections.abc import MutableSequence
from enum import StrEnum

import msgspec

from transfer.errors import InvalidValue

InstanceId = str
RequestId = str
TokenIds = MutableSequence[int]

MAX_ID_CHARS = 128


class Role(StrEnum):
    """What an instance serves. MIXED does both phases: the colocated baseline."""

    PREFILL = "prefill"
    DECODE = "decode"
    MIXED = "mixed"
    KV_POOL = "kv_pool"


class Phase(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"


class FinishReason(StrEnum):
    """Why generation ended normally; everything else is an error, a cancel or a refusal."""

    STOP = "stop"
    LENGTH = "length"


class Struct(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of every immutable value that may cross a process boundary."""


class Slo(Struct, frozen=True):
    """Objectives of one traffic class, seconds. A class without an SLO is shown apart, never counted as good."""

    ttft_s: float
    tpot_s: float
    e2e_s: float | None = None


class SamplingParams(Struct, frozen=True):
    """How one request's tokens are drawn. Validated at the gateway; nodes trust it.

    `seed` is always set (the gateway draws one if the client did not): the random number of output
    token i depends on (seed, i) alone, so a request that resumes elsewhere continues the same text.
    Stop strings are not here: the gateway owns the text and ends the request.
    """

    max_tokens: int
    seed: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    """None: no logprobs; n >= 0: the sampled token's logprob and the n best alternatives."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0


class TokenLogprob(Struct, frozen=True, array_like=True):
    """Natural-log probability of the sampled token and of the best alternatives, before temperature."""

    logprob: float
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


class ModelIdentity(Struct, frozen=True):
    """Which weights, exactly. Two instances may exchange KV only if all of it is equal.

    `revision` is a sha256 over the weights, `tokenizer` one over the tokenizer file, both hex.
    """

    name: str
    revision: str
    tokenizer: str
    vocab_size: int
    max_context: int
    eos_token_ids: tuple[int, ...] = ()


class KvLayout(Struct, frozen=True):
    """Shape of KV in memory: [num_layers, 2 (K, V), num_blocks, block_size, num_kv_heads, head_dim].

    `dtype` is "float32", "bfloat16", "float16" or, for the emulated engine, "uint8".
    `rope` names the position encoding already applied to K, for example "theta=100000".
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: str
    rope: str

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return DTYPE_BYTES[self.dtype]

    @property
    def slab_bytes(self) -> int:
        """Bytes of the K half (equally the V half) of one block of one layer."""
        return self.block_size * self.num_kv_heads * self.head_dim * self.itemsize

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers, K and V."""
        return 2 * self.num_layers * self.slab_bytes

    @property
    def token_bytes(self) -> int:
        """Bytes of KV one token occupies over all layers."""
        return self.block_bytes // self.block_size

    def num_blocks(self, num_tokens: int) -> int:
        """Blocks needed to hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)


DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "uint8": 1}
OPAQUE = "opaque"
"""The `rope` of blocks that are bytes to us, without a layout of their own."""


RAW_CODEC = "raw"
"""KV as the engine computed it, the one codec there is so far."""


def kv_fingerprint(model: ModelIdentity, layout: KvLayout, salt: str = "", codec: str = RAW_CODEC) -> bytes:
    """32-byte root of the block hash chain: whatever changes the bytes of KV changes every key.

    Stable across processes and machines (no Python hash). `salt` separates tenants.
    """
    parts = (
        "phaseplane-kv-2", model.revision, model.tokenizer, layout.dtype, layout.rope, codec,
        f"{layout.num_layers}x{layout.num_kv_heads}x{layout.head_dim}x{layout.block_size}", salt,
    )  # fmt: skip
    return hashlib.sha256("\0".join(parts).encode()).digest()


def pack_tokens(tokens: TokenIds) -> bytes:
    """Token ids as little-endian uint32, the form they travel in. Raises InvalidValue outside 0..2**32-1."""
    try:
        packed = array.array("I", tokens)
    except (OverflowError, TypeError) as error:
        raise InvalidValue(f"token ids must be integers from 0 to 2**32-1: {error}") from None
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_tokens(data: bytes) -> TokenIds:
    """Inverse of pack_tokens. Raises InvalidValue when the length is not a multiple of 4."""
    if len(data) % 4:
        raise InvalidValue(f"packed token ids must be a multiple of 4 bytes, got {len(data)}")
    packed = array.array("I")
    packed.frombytes(data)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tolist()
