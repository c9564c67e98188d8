"""Log probabilities in the two forms of the OpenAI API. Tokens that are not whole characters are escaped bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from controlplane.gateway.assembler import Piece
from controlplane.gateway.tokenizer import TextTokenizer
from transfer.terms import TokenLogprob

_FLOOR = -9999.0
"""What the OpenAI API shows for a probability of zero: JSON has no infinity."""


def chat_logprobs(tokenizer: TextTokenizer, pieces: Sequence[Piece]) -> dict[str, Any] | None:
    """{"content": [{token, logprob, bytes, top_logprobs}]}, one entry for each output token."""
    content = [
        _entry(tokenizer, token_id, logprob.logprob)
        | {
            "top_logprobs": [
                _entry(tokenizer, top_id, top)
                for top_id, top in zip(logprob.top_ids, logprob.top_logprobs, strict=True)
            ]
        }
        for token_id, logprob in _paired(pieces)
    ]
    return {"content": content, "refusal": None} if content else None


def completion_logprobs(tokenizer: TextTokenizer, pieces: Sequence[Piece], offset: int) -> dict[str, Any] | None:
    """{tokens, token_logprobs, top_logprobs, text_offset}. offset: characters of the answer before these pieces."""
    tokens, values, tops, offsets = list[str](), list[float](), list[dict[str, float]](), list[int]()
    for token_id, logprob in _paired(pieces):
        text = _text(tokenizer.token_bytes(token_id), "bytes:")
        tokens.append(text)
        values.append(max(logprob.logprob, _FLOOR))
        top = {text: max(logprob.logprob, _FLOOR)} if not logprob.top_ids else {}
        for top_id, value in zip(logprob.top_ids, logprob.top_logprobs, strict=True):
            top[_text(tokenizer.token_bytes(top_id), "bytes:")] = max(value, _FLOOR)
        tops.append(top)
        offsets.append(offset)
        offset += len(text)
    if not tokens:
        return None
    return {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}


def _paired(pieces: Sequence[Piece]) -> list[tuple[int, TokenLogprob]]:
    # A node that sends no logprobs for a token leaves the piece's list empty: then there is nothing to show.
    return [pair for piece in pieces for pair in zip(piece.token_ids, piece.logprobs, strict=False)]


def _entry(tokenizer: TextTokenizer, token_id: int, logprob: float) -> dict[str, Any]:
    raw = tokenizer.token_bytes(token_id)
    return {"token": _text(raw, ""), "logprob": max(logprob, _FLOOR), "bytes": list(raw)}


def _text(raw: bytes, prefix: str) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return prefix + "".join(f"\\x{byte:02x}" for byte in raw)
