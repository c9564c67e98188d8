"""Traces that are JSON lines: Mooncake's (kvcache-ai/Mooncake, Apache-2.0) and Phaseplane's own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec

from transfer.errors import InvalidValue
from transfer.traces.request import TraceRequest

T = TypeVar("T")

MOONCAKE_BLOCK_TOKENS = 512
Tokens = Annotated[int, msgspec.Meta(ge=0)]


class _MooncakeLine(msgspec.Struct, frozen=True):
    """timestamp: milliseconds. hash_ids: of 512-token blocks, each hashed with all before it."""

    timestamp: float
    input_length: Tokens
    output_length: Tokens
    hash_ids: tuple[int, ...] = ()


class _OwnLine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The fields of TraceRequest."""

    at_s: float
    prompt_tokens: Tokens
    output_tokens: Tokens
    blocks: tuple[int, ...] = ()
    block_tokens: Annotated[int, msgspec.Meta(ge=1)] = MOONCAKE_BLOCK_TOKENS
    traffic_class: str = ""
    tenant: str = ""
    priority: int = 0


def read_mooncake(texts: Iterable[str], path: Path) -> Iterator[TraceRequest]:
    """timestamp (ms), input_length, output_length, hash_ids. Raises InvalidValue naming the line."""
    for _, line in decode_lines(texts, path, _MooncakeLine, "a request of a Mooncake trace"):
        yield TraceRequest(
            at_s=line.timestamp / 1000,
            prompt_tokens=max(1, line.input_length),
            output_tokens=max(1, line.output_length),
            blocks=line.hash_ids,
            block_tokens=MOONCAKE_BLOCK_TOKENS,
        )


def read_own(texts: Iterable[str], path: Path) -> Iterator[TraceRequest]:
    """Lines as write_trace makes them. Raises InvalidValue naming the line."""
    for _, line in decode_lines(texts, path, _OwnLine, "a request of a trace"):
        yield TraceRequest(
            at_s=line.at_s,
            prompt_tokens=max(1, line.prompt_tokens),
            output_tokens=max(1, line.output_tokens),
            blocks=line.blocks,
            block_tokens=line.block_tokens,
            traffic_class=line.traffic_class,
            tenant=line.tenant,
            priority=line.priority,
        )


def write_trace(requests: Iterable[TraceRequest], path: Path) -> None:
    """One JSON line a request, all its fields: what read_own reads. Raises InvalidValue when it cannot be written."""
    encoder = msgspec.json.Encoder()
    try:
        with path.open("wb") as file:
            for request in requests:
                file.write(encoder.encode(request) + b"\n")
    except OSError as error:
        raise InvalidValue(f"cannot write the trace {path} ({error.strerror}); give another file") from None


def decode_lines(texts: Iterable[str], path: Path, kind: type[T], what: str) -> Iterator[tuple[int, T]]:
    """The lines of a JSONL file that are not blank, numbered. Raises InvalidValue for one that is no `what`."""
    decoder = msgspec.json.Decoder(kind)
    for number, text in enumerate(texts, start=1):
        if not text.strip():
            continue
        try:
            line = decoder.decode(text)
        except msgspec.DecodeError as error:
            raise InvalidValue(f"line {number} of {path} is not {what} ({error}); mend or drop it") from None
        yield number, line
