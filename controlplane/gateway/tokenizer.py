"""Text to token ids and back for one model: a Hugging Face-format directory, or bytes for emulated models.

Loads no weights. Incremental decoding is detokenizer.py, chat templates are chat_template.py.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from tokenizers import Tokenizer

from controlplane.gateway.chat_template import ChatTemplate
from controlplane.gateway.detokenizer import ByteDetokenizer, Detokenizer, WindowDetokenizer
from transfer.errors import InvalidValue
from transfer.models import TOKENIZER_FILE, read_identity, read_json
from transfer.terms import TokenIds

BYTE_VOCABULARY = 257
BYTE_EOS = 256
THREAD_CHARS = 4096
"""Longer texts are tokenised in a thread: they would hold up every stream for more than about a millisecond."""

_EMULATED_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


class TextTokenizer(Protocol):
    """What the gateway asks of a tokenizer; one object serves all requests. max_context counts prompt and output."""

    max_context: int
    vocab_size: int
    template: ChatTemplate | None

    def encode(self, text: str, add_special_tokens: bool) -> TokenIds: ...

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Broken UTF-8 becomes U+FFFD; ids beyond the vocabulary are left out."""

    def token_bytes(self, token_id: int) -> bytes:
        """The token as it stands in text, special ones by name."""

    def detokenizer(self) -> Detokenizer: ...


class ByteTokenizer:
    """Emulated models: ids 0..255 are the bytes of UTF-8, 256 ends the text."""

    vocab_size = BYTE_VOCABULARY

    def __init__(self, max_context: int) -> None:
        self.max_context = max_context
        self.template: ChatTemplate | None = ChatTemplate(_EMULATED_TEMPLATE, {})
        self._table = [bytes([value]) for value in range(256)]

    def encode(self, text: str, add_special_tokens: bool) -> TokenIds:
        return list(text.encode("utf-8", "replace"))

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return bytes(token for token in token_ids if token < BYTE_EOS).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        return self._table[token_id] if token_id < BYTE_EOS else b"<|end|>" if token_id == BYTE_EOS else b""

    def detokenizer(self) -> Detokenizer:
        return ByteDetokenizer(self._table)


class HfTokenizer:
    """tokenizer.json by the `tokenizers` library. Raises InvalidValue when a file is missing or wrong."""

    def __init__(self, directory: Path) -> None:
        identity = read_identity(directory)
        self.max_context = identity.max_context
        path = directory / TOKENIZER_FILE
        try:
            self._tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # noqa: BLE001 (the library raises a bare Exception for whatever is wrong)
            raise InvalidValue(f"cannot read {path}: {error}; pull the model again or restore the file") from None
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.vocab_size = max(identity.vocab_size, self._tokenizer.get_vocab_size(with_added_tokens=True))
        self._added = self._tokenizer.get_added_tokens_decoder()
        self._table = self._byte_table()
        self.template = _read_template(directory)

    def encode(self, text: str, add_special_tokens: bool) -> TokenIds:
        # A batch of one, because only encode_batch lets other threads run meanwhile.
        return self._tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)[0].ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        if token_id in self._added:
            return self._added[token_id].content.encode()
        if self._table is not None:
            return self._table[token_id] if token_id < len(self._table) else b""
        return self.decode([token_id]).encode()

    def detokenizer(self) -> Detokenizer:
        return WindowDetokenizer(self.decode) if self._table is None else ByteDetokenizer(self._table)

    def _byte_table(self) -> list[bytes] | None:
        """Each id's bytes when the decoder is byte-level, else None. Special tokens have none."""
        decoder = json.loads(self._tokenizer.to_str()).get("decoder") or {}
        parts = decoder.get("decoders", [decoder])
        if [part.get("type") for part in parts] != ["ByteLevel"]:
            return None
        by_char = _byte_level_alphabet()
        table = [b""] * self.vocab_size
        for token, token_id in self._tokenizer.get_vocab(with_added_tokens=True).items():
            added = self._added.get(token_id)
            if added is not None and added.special:
                continue
            try:
                table[token_id] = bytes([by_char[char] for char in token])
            except KeyError:  # as the library does: a token outside the alphabet stands for itself
                table[token_id] = token.encode()
        return table


async def encode(tokenizer: TextTokenizer, text: str, add_special_tokens: bool) -> TokenIds:
    """Token ids of `text` without holding up the event loop for long ones."""
    if len(text) <= THREAD_CHARS:
        return tokenizer.encode(text, add_special_tokens)
    return await asyncio.to_thread(tokenizer.encode, text, add_special_tokens)


def _byte_level_alphabet() -> dict[str, int]:
    """The printable character that GPT-2's byte-level BPE writes for each byte, inverted."""
    shown = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {chr(256 + place): byte for place, byte in enumerate(hidden)}


def _read_template(directory: Path) -> ChatTemplate | None:
    """From chat_template.jinja or tokenizer_config.json; None when the model has none (a base model)."""
    path = directory / "tokenizer_config.json"
    config = read_json(path) if path.is_file() else {}
    source = config.get("chat_template")
    if isinstance(source, list):
        named = {entry["name"]: entry["template"] for entry in source if isinstance(entry, dict) and "name" in entry}
        source = named.get("default")
    file = directory / "chat_template.jinja"
    if file.is_file():
        source = file.read_text(encoding="utf-8")
    if not isinstance(source, str):
        return None
    return ChatTemplate(source, {key: text for key in config if (text := _special_token(key, config[key])) is not None})


def _special_token(key: str, value: Any) -> str | None:
    if not key.endswith("_token"):
        return None
    content = value.get("content") if isinstance(value, dict) else value
    return content if isinstance(content, str) else None
