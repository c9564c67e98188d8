"""What screens draw: GET /v1/series, the past by name, and GET /v1/kv. JSON as in transfer/screens.py."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Mapping

from aiohttp import web

from controlplane.core.series import SeriesBook, SeriesRow
from controlplane.gateway.errors import invalid
from controlplane.gateway.generate import json_response
from controlplane.gateway.service import GATEWAY
from controlplane.text import shown
from transfer.screens import SeriesView

PERIOD_S = 1.0
DEFAULT_SINCE_S = -600.0
MAX_NAMES = 512
"""Series in one answer."""


def sampling(
    book: SeriesBook, readings: Callable[[], Mapping[str, float]], keep: Callable[[SeriesRow], None]
) -> Callable[[], None]:
    """What is to be called every PERIOD_S: it writes this second down, and has every ten seconds kept."""

    def sample() -> None:
        row = book.put(time.time(), readings())
        if row is not None:
            keep(row)

    return sample


async def get_series(request: web.Request) -> web.StreamResponse:
    """?names=a,b (a trailing * stands for any end; without names: which there are), ?since_s=, ?until_s= (Unix time, or
    seconds before now when negative; the last 600 s), ?step_s= (1)."""
    book = request.app[GATEWAY].series
    patterns = [name for text in request.query.getall("names", []) for name in text.split(",") if name]
    now = time.time()
    since_s, until_s = (
        value + now if value < 0 else value
        for value in (_number(request, "since_s", DEFAULT_SINCE_S), _number(request, "until_s", now))
    )
    step_s = _number(request, "step_s", 1.0)
    if step_s <= 0:
        raise invalid(f"step_s must be above 0, got {step_s:g}", "step_s")
    window = book.window(since_s, until_s, step_s)
    if not patterns:
        return json_response(SeriesView(step_s=window.step_s, names=tuple(book.names())))
    names = book.names(patterns)
    if len(names) > MAX_NAMES:
        raise invalid(f"names stands for {len(names)} series; ask for at most {MAX_NAMES} at a time", "names")
    found = {}
    for name in names:
        column = book.column(name, window)
        if column is not None:
            found[name] = column
        await asyncio.sleep(0)  # a day of many series takes a while: requests go on in between
    return json_response(SeriesView(step_s=window.step_s, times=tuple(window.times), series=found))


async def get_kv(request: web.Request) -> web.StreamResponse:
    return json_response(request.app[GATEWAY].control.kv())


def _number(request: web.Request, name: str, default: float) -> float:
    text = request.query.get(name)
    if text is None:
        return default
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise invalid(f"{name} must be a number of seconds, got {shown(text)}", name)
    return value
