"""Our own flight recordings (controlplane/history/recorder.py) as a trace: sizes, times and shared blocks, no text."""

from __future__ import annotations

import hashlib
import statistics
from collections.abc import Iterable, Iterator
from pathlib import Path

from controlplane.core.events import Arrived, Ended, RequestSpec
from controlplane.core.recorder import read
from controlplane.history.recorder import chunks
from transfer.errors import InvalidValue
from transfer.said import say
from transfer.traces.reading import Trace
from transfer.traces.request import TraceRequest

FORMAT = "recording"
BLOCK_TOKENS = 512
TOKEN_BYTES = 4
"""Of a packed token (transfer/terms.py, pack_tokens)."""


def is_recording(path: Path) -> bool:
    """Whether it is a directory of recordings or a file that begins like one; False when it cannot be read."""
    if path.is_dir():
        return True
    try:
        read(chunks(path))
    except (OSError, InvalidValue):
        return False
    return True


def read_recording(path: Path, block_tokens: int = BLOCK_TOKENS) -> Trace:
    """A file, or every file of a directory, as one trace; times are those of arrival at the gateway.

    Prompts share spans of block_tokens. What a client cancelled keeps what it had produced. What was refused, failed or
    still ran counts as wanting the median answer of its class, at most its max_tokens; the trace's notes say how many.
    Raises InvalidValue with a sentence.
    """
    arrived: list[RequestSpec] = []
    ended: dict[str, Ended] = {}
    try:
        for file in _files(path):
            for entry in read(chunks(file))[1]:
                if isinstance(entry.event, Arrived):
                    arrived.append(entry.event.request)
                elif isinstance(entry.event, Ended):
                    ended[entry.event.request_id] = entry.event
    except OSError as error:
        raise InvalidValue(
            f"cannot read the recording {path} ({error.strerror}); give a file or directory with --trace"
        ) from None
    if not arrived:
        raise InvalidValue(f"the recording {path} holds no request; give another with --trace")
    arrived.sort(key=lambda request: request.arrived_at)
    wanted = _medians(arrived, ended)
    first, blocks, num_guessed = arrived[0].arrived_at, Blocks(block_tokens), 0
    requests: list[TraceRequest] = []
    for request in arrived:
        end = ended.get(request.request_id)
        output = end.output_tokens if end is not None and end.outcome in ("ok", "cancelled") else None
        if output is None:
            num_guessed += 1
            most = request.sampling.max_tokens
            output = min(most, wanted.get(request.traffic_class, most))
        requests.append(
            TraceRequest(
                at_s=request.arrived_at - first,
                prompt_tokens=max(1, len(request.tokens) // TOKEN_BYTES),
                output_tokens=max(1, output),
                blocks=blocks.ids(request.tokens, request.salt),
                block_tokens=block_tokens,
                traffic_class=request.traffic_class,
                tenant=request.tenant,
                priority=request.priority,
            )
        )
    guess = say("trace.guessed", num=num_guessed, total=len(requests))
    return Trace(requests, FORMAT, (guess,) if num_guessed else ())


class Blocks:
    """Numbers leading spans of prompts: equal text after equal text, under one salt, has one number."""

    def __init__(self, block_tokens: int = BLOCK_TOKENS) -> None:
        self._span_bytes = block_tokens * TOKEN_BYTES
        self._ids: dict[bytes, int] = {}

    def ids(self, tokens: bytes, salt: str) -> tuple[int, ...]:
        """Of packed tokens; the last span may be partial."""
        chain, ids = hashlib.sha256(salt.encode()), list[int]()
        for start in range(0, len(tokens), self._span_bytes):
            chain.update(tokens[start : start + self._span_bytes])
            ids.append(self._ids.setdefault(chain.digest(), len(self._ids)))
        return tuple(ids)


def _files(path: Path) -> Iterator[Path]:
    if not path.is_dir():
        yield path
        return
    files = sorted(path.glob("flight-*.msgpack"))
    if not files:
        raise InvalidValue(f"there is no flight recording in {path}; give its file, or history.directory, with --trace")
    yield from files


def _medians(arrived: Iterable[RequestSpec], ended: dict[str, Ended]) -> dict[str, int]:
    """Output tokens of what was completed, by class."""
    found: dict[str, list[int]] = {}
    for request in arrived:
        end = ended.get(request.request_id)
        if end is not None and end.outcome == "ok":
            found.setdefault(request.traffic_class, []).append(end.output_tokens)
    return {name: round(statistics.median(counts)) for name, counts in found.items()}
