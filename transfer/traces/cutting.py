"""The part of a trace to offer: where it starts, how long, how many, and at which rate. Used by every command."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from transfer.errors import InvalidValue
from transfer.traces.request import TraceRequest


def cut(
    requests: Sequence[TraceRequest],
    *,
    start_s: float = 0.0,
    duration_s: float | None = None,
    num: int | None = None,
    rate: float | None = None,
) -> list[TraceRequest]:
    """Requests from start_s on, times from 0. With `rate`, times are scaled so that exactly this rate is offered.

    Without it the recorded times stand. With rate and duration_s: as many requests as that makes. An infinite rate
    offers all at once. Raises InvalidValue when no request is left.
    """
    part = [request for request in requests if request.at_s >= start_s]
    if rate is not None and duration_s is not None:
        wanted = max(1, round(rate * duration_s))
        num = wanted if num is None else min(num, wanted)
    elif duration_s is not None:
        part = [request for request in part if request.at_s < start_s + duration_s]
    part = part[:num]
    if not part:
        until = "" if duration_s is None or rate is not None else f" and before {start_s + duration_s:g} s"
        raise InvalidValue(f"the trace has no request after {start_s:g} s{until}; give a smaller --trace-start")
    first = part[0].at_s
    scale = 1.0
    if rate is not None:
        span = part[-1].at_s - first
        scale = (len(part) - 1) / rate / span if span > 0 else 0.0
    if first == 0 and scale == 1:
        return part
    return [replace(request, at_s=(request.at_s - first) * scale) for request in part]
