"""Recorded traffic as a list of calls: readers of public trace formats, and a generator with like statistics.

Azure: CSV with TIMESTAMP, ContextTokens, GeneratedTokens (AzurePublicDataset, CC-BY-4.0). Mooncake: JSON lines
with timestamp (ms), input_length, output_length, hash_ids of 512-token blocks (kvcache-ai/Mooncake, Apache-2.0).
Ours: JSON lines with at_s, prompt_tokens, output_tokens and, if wanted, traffic_class and blocks. It sends nothing.
"""

from __future__ import annotations

import bisect
import csv
import math
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import TypeVar

import msgspec

from ui.errors import CliError

T = TypeVar("T")

MOONCAKE_BLOCK_TOKENS = 512
GENERATED_PREFIX = "generated:"


@dataclass(frozen=True, slots=True)
class Call:
    """One request to make. at_s counts from the start of the run.

    blocks: ids of leading spans of `block_tokens` prompt tokens; equal ids stand for equal text.
    """

    at_s: float
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()
    block_tokens: int = MOONCAKE_BLOCK_TOKENS
    traffic_class: str = ""


SHARES = (0.0, 0.01, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 1.0)


@dataclass(frozen=True, slots=True)
class Mix:
    """A kind of traffic to generate: for each of SHARES, the most prompt and output tokens of that share of calls."""

    prompt: tuple[int, ...]
    output: tuple[int, ...]


MIXES = {
    "conversation": Mix(
        prompt=(2, 29, 181, 207, 387, 403, 703, 1020, 1071, 1130, 1315, 2735, 4083, 4142, 14050),
        output=(7, 16, 41, 54, 77, 91, 103, 129, 177, 384, 400, 424, 451, 601, 1000),
    )
}
"""conversation: the quantiles of the Azure LLM inference trace of 2023 (conversations)."""


class _Line(msgspec.Struct, frozen=True):
    """A line of either JSON lines format; readers check which fields are there."""

    timestamp: float | None = None
    input_length: int | None = None
    output_length: int | None = None
    hash_ids: list[int] = []
    at_s: float | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    traffic_class: str = ""
    blocks: list[int] = []


def load_trace(source: str, rate: float | None, num: int | None, seed: int) -> list[Call]:
    """Calls in order of time from a file, or from `generated:NAME`. Raises CliError with a sentence.

    A generated trace arrives at `rate` (1.0 by default) and has `num` calls (1,000 by default).
    """
    if source.startswith(GENERATED_PREFIX):
        name = source.removeprefix(GENERATED_PREFIX)
        if name not in MIXES:
            raise CliError(f"there is no generated traffic {name!r}; use --trace {GENERATED_PREFIX}{next(iter(MIXES))}")
        return generate(MIXES[name], rate or 1.0, num or 1000, seed)
    path = Path(source)
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            calls = list(_read_csv(file, path)) if path.suffix == ".csv" else list(_read_lines(file, path))
    except (OSError, UnicodeDecodeError) as error:
        raise CliError(f"cannot read the trace {path} ({_reason(error)}); give a file with --trace FILE") from None
    if not calls:
        raise CliError(f"the trace {path} holds no request; give another file with --trace FILE")
    calls.sort(key=lambda call: call.at_s)
    first = calls[0].at_s
    return [replace(call, at_s=call.at_s - first) for call in calls]


def cut_trace(
    calls: list[Call], rate: float | None, num: int | None, duration_s: float | None, start_s: float
) -> list[Call]:
    """The part of a trace to offer. With `rate`, times are scaled so that exactly this rate is offered.

    Without `rate` the recorded times stand. Raises CliError when the part is empty.
    """
    part = [call for call in calls if call.at_s >= start_s]
    if rate is not None and duration_s is not None:
        wanted = max(1, round(rate * duration_s))
        num = wanted if num is None else min(num, wanted)
    elif duration_s is not None:
        part = [call for call in part if call.at_s < start_s + duration_s]
    part = part[:num]
    if not part:
        raise CliError(f"the trace has no request after {start_s:g} s; give a smaller --trace-start")
    first = part[0].at_s
    scale = 1.0
    if rate is not None:
        span = part[-1].at_s - first
        scale = (len(part) - 1) / rate / span if span > 0 else 0.0
    return [replace(call, at_s=(call.at_s - first) * scale) for call in part]


def generate(mix: Mix, rate: float, num: int, seed: int) -> list[Call]:
    """`num` calls of a mix with Poisson arrivals; equal arguments give equal calls."""
    draw = random.Random(f"phaseplane-{seed}")
    calls: list[Call] = []
    at_s = 0.0
    for _ in range(num):
        at_s += draw.expovariate(rate)
        calls.append(Call(at_s, _at_share(mix.prompt, draw.random()), _at_share(mix.output, draw.random())))
    return calls


def poisson_times(rate: float, num: int, seed: int) -> list[float]:
    """`num` arrival times in seconds of a Poisson process; an infinite rate gives all at once."""
    if math.isinf(rate):
        return [0.0] * num
    draw = random.Random(seed)
    times: list[float] = []
    at_s = 0.0
    for _ in range(num):
        at_s += draw.expovariate(rate)
        times.append(at_s)
    return times


def _read_csv(file: Iterable[str], path: Path) -> Iterator[Call]:
    rows = csv.DictReader(file)
    wanted = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
    if any(column not in (rows.fieldnames or ()) for column in wanted):
        raise CliError(f"{path} has no columns {', '.join(wanted)}; it is not an Azure LLM inference trace")
    for number, row in enumerate(rows, start=2):
        try:
            at_s = datetime.fromisoformat(row["TIMESTAMP"]).timestamp()
            prompt, output = int(row["ContextTokens"]), int(row["GeneratedTokens"])
        except (ValueError, TypeError) as error:
            raise CliError(f"line {number} of {path} is not a row of an Azure trace ({error}); drop it") from None
        yield Call(at_s, max(1, prompt), max(1, output))


def decode_lines(texts: Iterable[str], path: Path, kind: type[T], what: str) -> Iterator[tuple[int, T]]:
    """The lines of a JSONL file that are not blank, numbered. Raises CliError for one that is no `what`."""
    decoder = msgspec.json.Decoder(kind)
    for number, text in enumerate(texts, start=1):
        if not text.strip():
            continue
        try:
            line = decoder.decode(text)
        except msgspec.DecodeError as error:
            raise CliError(f"line {number} of {path} is not {what} ({error}); mend or drop it") from None
        yield number, line


def _read_lines(file: Iterable[str], path: Path) -> Iterator[Call]:
    for number, line in decode_lines(file, path, _Line, "a request of a trace"):
        if line.at_s is not None and line.prompt_tokens is not None and line.output_tokens is not None:
            yield Call(
                line.at_s, max(1, line.prompt_tokens), max(1, line.output_tokens),
                tuple(line.blocks), MOONCAKE_BLOCK_TOKENS, line.traffic_class,
            )  # fmt: skip
        elif line.timestamp is not None and line.input_length is not None and line.output_length is not None:
            yield Call(
                line.timestamp / 1000, max(1, line.input_length), max(1, line.output_length), tuple(line.hash_ids)
            )
        else:
            raise CliError(
                f"line {number} of {path} has neither at_s, prompt_tokens, output_tokens nor timestamp, input_length, "
                "output_length; drop it"
            )


def _at_share(quantiles: tuple[int, ...], share: float) -> int:
    """Tokens at a share, linear between the known quantiles."""
    high = max(1, bisect.bisect_left(SHARES, share))
    low = high - 1
    within = (share - SHARES[low]) / (SHARES[high] - SHARES[low])
    return round(quantiles[low] + (quantiles[high] - quantiles[low]) * within)


def _reason(error: OSError | UnicodeDecodeError) -> str:
    if isinstance(error, OSError):
        return error.strerror or str(error)
    return "it is not UTF-8 text"
