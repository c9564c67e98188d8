"""Reads a trace file of any known format, recognised from what is in it, not from its name.

Formats: mooncake, azure, burstgpt, vllm (a saved result of vllm bench serve), phaseplane (our own JSON lines).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from io import StringIO
from itertools import chain
from pathlib import Path
from typing import NamedTuple, TextIO

import msgspec
from msgspec.structs import replace

from transfer.errors import InvalidValue
from transfer.said import Said, say
from transfer.traces.lines import read_mooncake, read_own
from transfer.traces.request import TraceRequest
from transfer.traces.tables import AZURE_COLUMNS, BURSTGPT_COLUMNS, read_azure, read_burstgpt
from transfer.traces.vllm import read_vllm

Rows = Callable[[Iterable[str], Path], Iterable[TraceRequest | None]]


class Trace(NamedTuple):
    """Requests in order of time, from 0 s. notes: what a reader of results must know of it, sentences."""

    requests: list[TraceRequest]
    format: str
    notes: tuple[Said, ...] = ()


def _read_vllm_lines(texts: Iterable[str], path: Path) -> Iterable[TraceRequest | None]:
    return read_vllm("".join(texts), path)


READERS: dict[str, Rows] = {
    "mooncake": read_mooncake,
    "azure": read_azure,
    "burstgpt": read_burstgpt,
    "vllm": _read_vllm_lines,
    "phaseplane": read_own,
}
FORMATS = tuple(READERS)


class _Keys(msgspec.Struct, frozen=True):
    """What tells JSON formats apart."""

    timestamp: msgspec.Raw = msgspec.Raw()
    at_s: msgspec.Raw = msgspec.Raw()
    input_lens: msgspec.Raw = msgspec.Raw()


def read_trace(path: Path, format: str | None = None) -> list[TraceRequest]:
    """Requests in order of time, the first at 0 s. See read_trace_file."""
    return read_trace_file(path, format).requests


def read_trace_file(path: Path, format: str | None = None) -> Trace:
    """The whole file. Raises InvalidValue: no such file, no known format, a line that is none of its format, empty."""
    if format is not None and format not in READERS:
        raise InvalidValue(f"there is no trace format {format!r}; use one of {', '.join(FORMATS)}")
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            name, texts = (format, file) if format is not None else _recognised(file, path)
            rows = list(READERS[name](texts, path))
    except OSError as error:
        raise InvalidValue(
            f"cannot read the trace {path} ({error.strerror or error}); give a file with --trace FILE"
        ) from None
    except UnicodeDecodeError:
        raise InvalidValue(
            f"cannot read the trace {path} (it is not UTF-8 text); give a file with --trace FILE"
        ) from None
    requests = [row for row in rows if row is not None]
    if not requests:
        raise InvalidValue(f"the trace {path} holds no request; give another file with --trace FILE")
    if not all(math.isfinite(request.at_s) for request in requests):
        raise InvalidValue(f"the trace {path} holds a time that is no number; mend or drop that request")
    requests.sort(key=lambda request: request.at_s)
    first = requests[0].at_s
    if first != 0:
        requests = [replace(request, at_s=request.at_s - first) for request in requests]
    failed = len(rows) - len(requests)
    notes = (say("trace.failed", num=failed, total=len(rows)),) if failed else ()
    return Trace(requests, name, notes)


def _recognised(file: TextIO, path: Path) -> tuple[str, Iterable[str]]:
    """Name of the format, and the lines from the first on."""
    first, before = "", []
    for text in file:
        before.append(text)
        if text.strip():
            first = text
            break
    if not first:
        raise InvalidValue(f"the trace {path} holds no request; give another file with --trace FILE")
    if not first.lstrip().startswith(("{", "[")):
        return _table_format(first, path), chain(before, file)
    try:
        keys = msgspec.json.decode(first, type=_Keys)
    except msgspec.DecodeError as error:
        whole = "".join(chain(before, file))
        if '"input_lens"' in whole:  # one document over many lines
            return "vllm", StringIO(whole)
        raise InvalidValue(
            f"line {len(before)} of {path} is not a request of a trace ({error}); mend or drop it"
        ) from None
    if bytes(keys.input_lens):
        return "vllm", chain(before, file)
    if bytes(keys.at_s):
        return "phaseplane", chain(before, file)
    if bytes(keys.timestamp):
        return "mooncake", chain(before, file)
    raise InvalidValue(
        f"line {len(before)} of {path} has neither timestamp, input_length, output_length (Mooncake) nor at_s, "
        "prompt_tokens, output_tokens (Phaseplane) nor input_lens, output_lens (vllm bench serve, saved in detail)"
    )


def _table_format(header: str, path: Path) -> str:
    names = [name.strip() for name in header.split(",")]
    for format, columns in (("azure", AZURE_COLUMNS), ("burstgpt", BURSTGPT_COLUMNS)):
        if all(name in names for name in columns):
            return format
    raise InvalidValue(
        f"{path} has neither columns {', '.join(AZURE_COLUMNS)} (Azure) nor {', '.join(BURSTGPT_COLUMNS)} (BurstGPT); "
        "it is no trace that is known here"
    )
