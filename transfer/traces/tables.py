"""Traces that are CSV tables: Azure's (AzurePublicDataset, CC-BY-4.0) and BurstGPT's (HPMLL/BurstGPT, CC-BY-4.0)."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path

from transfer.errors import InvalidValue
from transfer.traces.request import TraceRequest

AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
BURSTGPT_COLUMNS = ("Timestamp", "Request tokens", "Response tokens")


def read_azure(texts: Iterable[str], path: Path) -> Iterator[TraceRequest]:
    """Rows of a table with TIMESTAMP (a date and time), ContextTokens, GeneratedTokens. Raises InvalidValue."""
    for number, (when, prompt, output) in _rows(texts, path, AZURE_COLUMNS, "an Azure"):
        try:
            at_s = _seconds(when)
            yield TraceRequest(at_s=at_s, prompt_tokens=max(1, _count(prompt)), output_tokens=max(1, _count(output)))
        except ValueError as error:
            raise _bad_row(number, path, "an Azure", error) from None


def read_burstgpt(texts: Iterable[str], path: Path) -> Iterator[TraceRequest | None]:
    """Rows of a table with Timestamp (seconds), Request tokens, Response tokens; other columns are not needed.

    None for a row without response tokens: that request failed, and what it asked for is not known.
    Raises InvalidValue.
    """
    for number, (when, prompt, output) in _rows(texts, path, BURSTGPT_COLUMNS, "a BurstGPT"):
        try:
            at_s, num_prompt, num_output = float(when), _count(prompt), _count(output)
        except ValueError as error:
            raise _bad_row(number, path, "a BurstGPT", error) from None
        if num_output == 0:
            yield None
        else:
            yield TraceRequest(at_s=at_s, prompt_tokens=max(1, num_prompt), output_tokens=num_output)


def _rows(
    texts: Iterable[str], path: Path, wanted: tuple[str, str, str], whose: str
) -> Iterator[tuple[int, tuple[str, str, str]]]:
    """The three wanted fields of every row, with its line number."""
    reader = csv.reader(texts)
    try:
        header = [name.strip() for name in next(reader, [])]
        missing = [name for name in wanted if name not in header]
        if missing:
            raise InvalidValue(f"{path} has no column {', '.join(missing)}; it is not {whose} trace")
        first, second, third = (header.index(name) for name in wanted)
        last = max(first, second, third)
        for row in reader:
            if not row:
                continue
            if len(row) <= last:
                raise _bad_row(reader.line_num, path, whose, f"it has {len(row)} of {len(header)} fields")
            yield reader.line_num, (row[first], row[second], row[third])
    except csv.Error as error:
        raise _bad_row(reader.line_num, path, whose, error) from None


def _seconds(text: str) -> float:
    """Unix time; without a zone the clock is taken as UTC, so that no hour is lost or doubled."""
    when = datetime.fromisoformat(text.strip())
    return (when if when.tzinfo is not None else when.replace(tzinfo=UTC)).timestamp()


def _count(text: str) -> int:
    """Some writers put whole numbers as 12.0."""
    number = float(text)
    if number != int(number) or number < 0:
        raise ValueError(f"{text!r} is no number of tokens")
    return int(number)


def _bad_row(number: int, path: Path, whose: str, reason: object) -> InvalidValue:
    return InvalidValue(f"line {number} of {path} is not a row of {whose} trace ({reason}); mend or drop it")
