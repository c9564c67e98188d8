"""What `vllm bench serve --save-result --save-detailed` saves, read as a trace: a JSON document, or one a line.

Only lengths and times are read; generated texts in it are never kept.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import msgspec

from transfer.errors import InvalidValue
from transfer.traces.arrivals import renewal_times
from transfer.traces.request import TraceRequest


class _Result(msgspec.Struct, frozen=True):
    """start_times: of a monotonic clock, seconds, in newer results. request_rate: a number or "inf".

    burstiness: the shape of gamma distributed gaps, 1 for Poisson arrivals.
    """

    input_lens: list[int] | None = None
    output_lens: list[int] | None = None
    start_times: list[float] | None = None
    request_rate: float | str | None = None
    burstiness: float = 1.0


def read_vllm(text: str, path: Path) -> Iterator[TraceRequest | None]:
    """Requests of each result in turn, the next one beginning where the last one's arrivals ended.

    Without start times, arrivals are drawn again at the run's request rate and burstiness. None for a request that
    failed (no output). Raises InvalidValue.
    """
    begin_s = 0.0
    for number, result in _results(text, path):
        prompts, outputs = result.input_lens, result.output_lens
        if prompts is None or outputs is None:
            raise InvalidValue(
                f"{_place(number, path)} has no input_lens and output_lens; save it with --save-result --save-detailed"
            )
        if len(prompts) != len(outputs):
            raise InvalidValue(f"{_place(number, path)} has {len(prompts)} input_lens and {len(outputs)} output_lens")
        times = _times(result, len(prompts), number, path)
        for at_s, prompt, output in zip(times, prompts, outputs, strict=True):
            done = output > 0
            yield (
                TraceRequest(at_s=begin_s + at_s, prompt_tokens=max(1, prompt), output_tokens=output) if done else None
            )
        begin_s += max(times, default=0.0)


def _results(text: str, path: Path) -> Iterator[tuple[int, _Result]]:
    """A whole document, or, as --append-result makes them, one a line."""
    try:
        yield 1, msgspec.json.decode(text, type=_Result)
        return
    except msgspec.DecodeError as error:
        lines = [(number, line) for number, line in enumerate(text.splitlines(), start=1) if line.strip()]
        if len(lines) < 2:
            raise InvalidValue(f"{path} is not a result of vllm bench serve ({error})") from None
    for number, line in lines:
        try:
            yield number, msgspec.json.decode(line, type=_Result)
        except msgspec.DecodeError as error:
            raise InvalidValue(f"{_place(number, path)} is not a result of vllm bench serve ({error})") from None


def _times(result: _Result, num: int, number: int, path: Path) -> list[float]:
    if result.start_times:
        if len(result.start_times) != num:
            raise InvalidValue(f"{_place(number, path)} has {num} input_lens and {len(result.start_times)} start_times")
        first = min(result.start_times)
        return [at_s - first for at_s in result.start_times]
    try:
        rate = float(result.request_rate if result.request_rate is not None else "inf")
    except ValueError:
        rate = 0.0
    if not rate > 0 or not result.burstiness > 0:
        raise InvalidValue(f"{_place(number, path)} has request_rate {result.request_rate!r}, which is no rate")
    draw = random.Random(f"vllm-{number}")
    gaps = renewal_times(rate, result.burstiness**-0.5, draw)
    return [next(gaps) for _ in range(num)]


def _place(number: int, path: Path) -> str:
    return f"{path}" if number == 1 else f"line {number} of {path}"
