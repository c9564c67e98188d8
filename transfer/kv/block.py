"""Names of KV blocks: a chained SHA-256 over whole blocks of tokens, equal in every process and on every machine.

The root is terms.kv_fingerprint, so model, tokenizer, dtype, layout, RoPE and tenant are part of every name.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from transfer.errors import InvalidValue
from transfer.terms import TokenIds, pack_tokens

HASH_BYTES = 32
TOKEN_BYTES = 4


class HashChain:
    """Hashes of a growing token sequence; costs one SHA-256 for each block filled, whatever came before."""

    def __init__(self, block_size: int, root: bytes, known: Sequence[bytes] = ()) -> None:
        """`known`: hashes of leading whole blocks already named; `extend` then continues after them."""
        _check(block_size, root)
        self.block_size, self.root = block_size, root
        self.hashes: list[bytes] = list(known)
        self._tail = b""

    @property
    def num_tokens(self) -> int:
        """Tokens taken in so far, the unfinished block included."""
        return len(self.hashes) * self.block_size + len(self._tail) // TOKEN_BYTES

    def extend(self, tokens: TokenIds) -> list[bytes]:
        """Take the next tokens; returns the hashes of the blocks they filled. Raises InvalidValue on a bad id."""
        data = self._tail + pack_tokens(tokens)
        step = self.block_size * TOKEN_BYTES
        whole = len(data) - len(data) % step
        parent = self.hashes[-1] if self.hashes else self.root
        filled = []
        for start in range(0, whole, step):
            parent = hashlib.sha256(parent + data[start : start + step]).digest()
            filled.append(parent)
        self._tail = data[whole:]
        self.hashes += filled
        return filled


def block_hashes(tokens: TokenIds, block_size: int, root: bytes, known: Sequence[bytes] = ()) -> list[bytes]:
    """Hashes h_i = SHA-256(h_{i-1} + pack_tokens(block i)) of all whole blocks of `tokens`; h_{-1} is `root`.

    known: leading hashes computed before; they are kept (as many as there are whole blocks) and not recomputed.
    Raises InvalidValue for a block size below 1, a root that is not 32 bytes, or a bad token id.
    """
    _check(block_size, root)
    num_blocks = len(tokens) // block_size
    kept = list(known[:num_blocks])
    chain = HashChain(block_size, root, kept)
    chain.extend(tokens[len(kept) * block_size : num_blocks * block_size])
    return chain.hashes


def _check(block_size: int, root: bytes) -> None:
    if block_size < 1:
        raise InvalidValue(f"a KV block holds at least one token, got block_size {block_size}")
    if len(root) != HASH_BYTES:
        raise InvalidValue(f"the root of a hash chain is {HASH_BYTES} bytes (kv_fingerprint), got {len(root)}")
