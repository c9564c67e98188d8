"""Synthetic traffic by name: `generated:NAME?key=value&...` as requests. Equal texts and seeds give equal requests."""

from __future__ import annotations

import difflib
import itertools
import math
import random
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple
from urllib.parse import parse_qsl

from transfer.errors import InvalidValue
from transfer.terms import Struct
from transfer.traces.arrivals import bursty_times, diurnal_times, renewal_times
from transfer.traces.mixes import MIXES
from transfer.traces.request import TraceRequest
from transfer.traces.sessions import SessionShape, session_requests

PREFIX = "generated:"
DAY_S = 86_400.0
DEFAULT_NUM = 1000
MAX_NUM = 20_000_000

Numbers = Mapping[str, float]


class Kind(NamedTuple):
    """summary: in --help and docs. numbers: its settings beside rate and num, with their defaults. mixes: the mix of
    lengths and, for a kind that changes from one to another, the second. span_s: of a trace when neither num nor a
    duration is given; None: DEFAULT_NUM requests."""

    summary: str
    numbers: Numbers = {}
    mixes: tuple[str, ...] = ("conversation",)
    span_s: Callable[[Numbers], float] | None = None


KINDS: dict[str, Kind] = {
    "poisson": Kind("arrivals independent of each other"),
    "gamma": Kind("gaps whose standard deviation is cv times their mean", {"cv": 2.0}),
    "diurnal": Kind(
        "a day's sine, its rate between 1 - depth and 1 + depth of the mean, each minute off by noise",
        {"depth": 0.6, "noise": 0.1, "period": DAY_S},
        span_s=lambda numbers: numbers["period"],
    ),
    "bursty": Kind(
        "bursts, for a share of the time, at burst times the rate between them; one every period seconds",
        {"burst": 10.0, "share": 0.2, "period": 60.0},
    ),
    "agentic": Kind(
        "agents' sessions: shared system prompts, growing histories, pauses of gap seconds for tools",
        {"turns": 2.0, "apps": 12.0, "system": 2500.0, "gap": 8.0},
        ("agent",),
    ),
    "multiturn": Kind(
        "people's chats of several turns, with long documents now and then",
        {"turns": 1.6, "apps": 1.0, "system": 880.0, "gap": 60.0},
        ("turns",),
    ),
    "step": Kind(
        "lengths change once, from mix to then, at a time",
        {"at": 300.0},
        ("summarise", "reasoning"),
        lambda numbers: 2 * numbers["at"],
    ),
    "swing": Kind(
        "lengths change to and fro between mix and then, every period seconds",
        {"period": 65.0},
        ("summarise", "reasoning"),
        lambda numbers: 10 * numbers["period"],
    ),
}


class Traffic(Struct, frozen=True):
    """What `generated:NAME?...` says. num None: as many as the duration or the kind makes."""

    kind: str
    rate: float = 1.0
    num: int | None = None
    numbers: dict[str, float] = {}
    mixes: tuple[str, ...] = ("conversation",)


def is_generated(source: str) -> bool:
    return source.startswith(PREFIX)


def parse_traffic(source: str) -> Traffic:
    """`generated:NAME?rate=4&num=2000&cv=2&mix=code`; a mix alone as NAME is Poisson. Raises InvalidValue."""
    name, _, query = source.removeprefix(PREFIX).partition("?")
    if name in MIXES and name not in KINDS:
        name, query = "poisson", "&".join(filter(None, (f"mix={name}", query)))
    if name not in KINDS:
        raise InvalidValue(
            f"there is no generated traffic {name!r}; use --trace {PREFIX}{_nearest(name, [*KINDS, *MIXES])}; known: "
            f"{', '.join([*KINDS, *MIXES])}"
        )
    kind = KINDS[name]
    numbers, mixes = dict(kind.numbers), list(kind.mixes)
    rate, num = 1.0, None
    try:
        pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=True) if query else []
    except ValueError:
        raise InvalidValue(f"{source!r} is not traffic; write it like {PREFIX}{name}?rate=4&num=2000") from None
    for key, value in pairs:
        if key in ("mix", "then")[: len(mixes)]:
            mixes[key == "then"] = _mix(value)
        elif key == "rate":
            rate = _number(source, key, value)
        elif key == "num":
            num = _count(source, _number(source, key, value))
        elif key in numbers:
            numbers[key] = _number(source, key, value)
        else:
            known = ["rate", "num", *numbers, *("mix", "then")[: len(mixes)]]
            raise InvalidValue(f"{name} traffic has no {key}; it has {', '.join(known)}")
    _check(source, name, numbers)
    return Traffic(kind=name, rate=rate, num=num, numbers=numbers, mixes=tuple(mixes))


def generate(traffic: Traffic, seed: int = 0, duration_s: float | None = None) -> list[TraceRequest]:
    """As many as traffic.num says, those before duration_s, or both; with neither, as many as the kind has itself."""
    num = traffic.num
    if num is None and duration_s is None:
        span_s = KINDS[traffic.kind].span_s
        num, duration_s = (DEFAULT_NUM, None) if span_s is None else (None, span_s(traffic.numbers))
    if num is None and duration_s is not None and duration_s * traffic.rate > MAX_NUM:
        raise InvalidValue(f"{duration_s:g} s at {traffic.rate:g} a second are over {MAX_NUM} requests; give a num")
    requests = itertools.islice(_endless(traffic, seed), num)
    if duration_s is None:
        return list(requests)
    return list(itertools.takewhile(lambda request: request.at_s < duration_s, requests))


def _endless(traffic: Traffic, seed: int) -> Iterator[TraceRequest]:
    mixes = [MIXES[name] for name in traffic.mixes]
    when, sizes = random.Random(f"phaseplane-times-{seed}"), random.Random(f"phaseplane-lengths-{seed}")
    numbers, rate = traffic.numbers, traffic.rate
    if traffic.kind in ("agentic", "multiturn"):
        shape = SessionShape(rate, numbers["turns"], round(numbers["apps"]), numbers["system"], numbers["gap"])
        yield from session_requests(shape, mixes[0], sizes)
    for at_s in _times(traffic, when):
        side = 0
        if traffic.kind == "step":
            side = at_s >= numbers["at"]
        elif traffic.kind == "swing":
            side = math.floor(at_s / numbers["period"]) % 2
        prompt, output = mixes[side].draw(sizes)
        yield TraceRequest(at_s=at_s, prompt_tokens=prompt, output_tokens=output)


def _times(traffic: Traffic, draw: random.Random) -> Iterator[float]:
    numbers = traffic.numbers
    if traffic.kind == "diurnal":
        return diurnal_times(traffic.rate, numbers["depth"], numbers["noise"], numbers["period"], draw)
    if traffic.kind == "bursty":
        return bursty_times(traffic.rate, numbers["burst"], numbers["share"], numbers["period"], draw)
    return renewal_times(traffic.rate, numbers.get("cv", 1.0), draw)


def _check(source: str, name: str, numbers: Numbers) -> None:
    """Ranges beyond "above 0"."""
    for key, most in (("depth", 1.0), ("share", 1.0), ("noise", 3.0)):
        if numbers.get(key, 0.0) > most:
            raise InvalidValue(f"{source!r}: {key} is at most {most:g}, got {numbers[key]:g}")
    if numbers.get("share") == 1 or numbers.get("burst", 1.0) < 1 or numbers.get("turns", 1.0) < 1:
        raise InvalidValue(f"{source!r}: share must be below 1, burst and turns at least 1")
    if not numbers.get("apps", 1.0) >= 1:
        raise InvalidValue(f"{source!r}: {name} needs at least one app, got {numbers['apps']:g}")


def _mix(name: str) -> str:
    if name not in MIXES:
        raise InvalidValue(f"there is no mix of lengths {name!r}; use one of {', '.join(MIXES)}")
    return name


def _number(source: str, key: str, text: str) -> float:
    """Above 0, or at least 0 where nothing of it makes sense; only a rate or a burst may be infinite."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    least_ok = number >= 0 if key in ("cv", "depth", "noise") else number > 0
    if not least_ok or (math.isinf(number) and key != "burst"):
        raise InvalidValue(f"{source!r}: {key} must be a number above 0, got {text!r}")
    return number


def _count(source: str, number: float) -> int:
    if number != int(number) or not 1 <= number <= MAX_NUM:
        raise InvalidValue(f"{source!r}: num must be a whole number from 1 to {MAX_NUM}, got {number:g}")
    return int(number)


def _nearest(name: str, known: list[str]) -> str:
    return difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]
