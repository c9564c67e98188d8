"""Objectives as people write them: `ttft:2,tpot:0.2`, also `ttft=2,tpot=200ms`, for all classes or for one."""

from __future__ import annotations

import re
from collections.abc import Sequence

from transfer.errors import InvalidValue
from transfer.said import say
from transfer.terms import Slo

_PART = re.compile(r"(?:(?P<name>.+?)[=:])?(?P<key>ttft|tpot|e2e)[=:](?P<number>.+?)(?P<unit>ms|s)?")
_UNITS = {None: 1.0, "s": 1.0, "ms": 1e-3}


def parse_objectives(texts: Sequence[str]) -> dict[str, Slo]:
    """`ttft:2,tpot:0.2` (of all classes, key "") and `NAME=ttft:2,tpot:0.2`; seconds. Raises InvalidValue."""
    slos: dict[str, Slo] = {}
    for text in texts:
        name, values = "", dict[str, float]()
        for place, part in enumerate(text.split(",")):
            found = _PART.fullmatch(part.strip())
            value = _positive(found["number"]) if found is not None else None
            if found is None or value is None or (place > 0 and found["name"]):
                raise InvalidValue(say("objective.unreadable", text=repr(text)))
            name = (found["name"] or "").strip() if place == 0 else name
            values[found["key"]] = value * _UNITS[found["unit"]]
        if "ttft" not in values or "tpot" not in values:
            raise InvalidValue(say("objective.both", text=repr(text)))
        slos[name] = Slo(ttft_s=values["ttft"], tpot_s=values["tpot"], e2e_s=values.get("e2e"))
    return slos


def describe(slo: Slo | None) -> str:
    """In a few words, for people."""
    if slo is None:
        return "none"
    e2e = "" if slo.e2e_s is None else f", E2E {slo.e2e_s:g} s"
    return f"TTFT {slo.ttft_s:g} s, TPOT {slo.tpot_s:g} s{e2e}"


def _positive(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if value > 0 else None
