"""Tokens of which only the number is known: what a simulated request has in place of text. No item is ever read."""

from __future__ import annotations

import hashlib
from collections.abc import MutableSequence
from typing import Any, NoReturn, SupportsIndex

from nodes.core.blocks import BlockKey
from transfer.terms import RequestId, TokenIds


class CountedTokens(MutableSequence[int]):  # noqa: PLW1641 (equality alone makes it unhashable)
    """`count` tokens, none of which is held: their number is kept, and every token reads 0.

    Equal to another one of the same length. Only what a batching core does with tokens works: len, append, slices,
    copy, comparison.
    """

    __slots__ = ("count_",)

    def __init__(self, count: int) -> None:
        self.count_ = count

    def __len__(self) -> int:
        return self.count_

    def __bool__(self) -> bool:
        return self.count_ > 0

    def append(self, token: int) -> None:
        self.count_ += 1

    def insert(self, index: int, value: int) -> NoReturn:
        raise TypeError("counted tokens are only appended to")

    def __setitem__(self, index: Any, value: Any) -> NoReturn:
        raise TypeError("counted tokens are not changed")

    def __delitem__(self, index: Any) -> NoReturn:
        raise TypeError("counted tokens are not taken away")

    def copy(self) -> CountedTokens:
        return CountedTokens(self.count_)

    def __getitem__(self, index: SupportsIndex | slice) -> Any:
        if isinstance(index, slice):
            return CountedTokens(len(range(*index.indices(self.count_))))
        if not -self.count_ <= int(index) < self.count_:
            raise IndexError(f"token {int(index)} of {self.count_}")
        return 0

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CountedTokens) and other.count_ == self.count_

    def __ne__(self, other: object) -> bool:
        return not self == other


def own_tokens(tokens: TokenIds) -> TokenIds:
    """A copy that may be appended to."""
    return tokens.copy() if type(tokens) is CountedTokens else list(tokens)


def made_up_key(before: bytes, request_id: RequestId, index: int) -> BlockKey:
    """Key of whole block `index` of counted tokens: what the request itself generated, equal to nobody else's."""
    name = b"%b\0%d" % (request_id.encode(), index)
    return BlockKey(hashlib.sha256(before + name).digest(), b"")
