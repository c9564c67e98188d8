"""What a command was given as --trace, as requests: a file of any format, or generated traffic; cut and scaled."""

from __future__ import annotations

import math
from pathlib import Path

from msgspec.structs import replace

from transfer.errors import InvalidValue
from transfer.terms import Struct
from transfer.traces.cutting import cut
from transfer.traces.generating import generate, is_generated, parse_traffic
from transfer.traces.reading import Trace, read_trace_file


class Wanted(Struct, frozen=True):
    """Which part of a trace, and how fast. rate None: as recorded, or as the generated traffic's name says."""

    rate: float | None = None
    num: int | None = None
    duration_s: float | None = None
    start_s: float = 0.0
    seed: int = 0


def load_trace(source: str, wanted: Wanted, format: str | None = None) -> Trace:
    """Requests in order of time, from 0 s, at least one. Raises InvalidValue with a sentence."""
    if not is_generated(source):
        return offered(read_trace_file(Path(source), format), wanted)
    if format is not None:
        raise InvalidValue(f"{source!r} is generated and has no --format; drop that")
    traffic = parse_traffic(source)
    at_once = wanted.rate is not None and math.isinf(wanted.rate)
    rate = traffic.rate if wanted.rate is None or at_once else wanted.rate
    traffic = replace(traffic, rate=rate, num=traffic.num if wanted.num is None else wanted.num)
    if wanted.duration_s is None:
        requests = generate(traffic, wanted.seed)
    else:
        requests = generate(traffic, wanted.seed, wanted.start_s + wanted.duration_s)
    return Trace(cut(requests, start_s=wanted.start_s, rate=math.inf if at_once else None), "generated")


def offered(trace: Trace, wanted: Wanted) -> Trace:
    """The part of a recorded trace that is wanted. Raises InvalidValue when it is empty."""
    part = cut(trace.requests, start_s=wanted.start_s, duration_s=wanted.duration_s, num=wanted.num, rate=wanted.rate)
    return trace._replace(requests=part)
