"""Token ids to text as they come, at constant cost a token, holding back what is not a whole character yet.

Knows nothing of stop strings (assembler.py) or of special tokens beyond the table it is given.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from typing import Protocol

REPLACEMENT = "\ufffd"

_MAX_HELD_TOKENS = 8
"""A character spans at most 4 byte tokens; a tail that stays broken for longer is broken text."""


class Detokenizer(Protocol):
    """One output's text. The concatenation of all `add` and one `flush` is the decoding of all ids at once."""

    def add(self, token_id: int) -> str:
        """Text that became final with this token; "" while a character is incomplete."""

    def flush(self) -> str:
        """What was held back, broken bytes as U+FFFD."""


class ByteDetokenizer:
    """For byte-level vocabularies, where every token is a run of bytes: exact by construction."""

    __slots__ = ("_decode", "_table")

    def __init__(self, table: Sequence[bytes]) -> None:
        """table[id]: the token's bytes; b"" for tokens that are not shown. Shared, not copied."""
        self._table = table
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def add(self, token_id: int) -> str:
        return self._decode(self._table[token_id]) if token_id < len(self._table) else ""

    def flush(self) -> str:
        return self._decode(b"", True)


class WindowDetokenizer:
    """For any other tokenizer: decodes a short window of recent ids twice and takes the difference.

    The window starts one settled span early, since what a token looks like depends on the one before
    (SentencePiece strips the first space). Broken byte runs may differ from decoding all at once.
    """

    __slots__ = ("_decode", "_ids", "_read")

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._ids: list[int] = []
        self._read = 0

    def add(self, token_id: int) -> str:
        self._ids.append(token_id)
        before, after = self._decode(self._ids[: self._read]), self._decode(self._ids)
        held = len(self._ids) - self._read
        if len(after) <= len(before) or (after.endswith(REPLACEMENT) and held < _MAX_HELD_TOKENS):
            return ""
        self._ids = self._ids[self._read :]
        self._read = len(self._ids)
        return after[len(before) :]

    def flush(self) -> str:
        text = self._decode(self._ids)[len(self._decode(self._ids[: self._read])) :]
        self._read = len(self._ids)
        return text
