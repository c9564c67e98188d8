"""Token ids to text and back, by the model's tokenizer.json, for servers that take or give text only."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer

from transfer.errors import InvalidValue
from transfer.models import TOKENIZER_FILE
from transfer.terms import TokenIds

ANCHOR = "."
"""Text before a piece, so that a tokenizer which treats the beginning of a text in its own way does not here."""


class Text:
    """Raises InvalidValue when there is no tokenizer to read."""

    def __init__(self, directory: Path) -> None:
        path = directory / TOKENIZER_FILE
        try:
            self._tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # noqa: BLE001 (the library raises a bare Exception for whatever is wrong)
            raise InvalidValue(f"cannot read {path}: {error}; give the model's own directory by --model") from None
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._anchor = self._ids(ANCHOR)

    def decode(self, token_ids: TokenIds) -> str:
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=False))

    def encode(self, piece: str) -> list[int]:
        """Ids that read as `piece` within a text. Servers send about a token a piece, so that as good as always these
        are the ids that were drawn; where not, they read the same."""
        ids = self._ids(piece)
        if self.decode(self._anchor + ids) == ANCHOR + piece:
            return ids
        whole = self._ids(ANCHOR + piece)
        return whole[len(self._anchor) :] if whole[: len(self._anchor)] == self._anchor else ids

    def id_of(self, token: str) -> int | None:
        """The one token that reads so; None where it takes several."""
        ids = self.encode(token)
        return ids[0] if len(ids) == 1 else None

    def _ids(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)
