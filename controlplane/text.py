"""Words from outside as they are shown to people: cut short, so that nobody's error answer is as long as they like."""

from __future__ import annotations

import re

MAX_SHOWN = 40

_DIGITS = re.compile(r"(\d{1,18})")


def shown(text: str, limit: int = MAX_SHOWN) -> str:
    """In quotes; beyond `limit` characters only its beginning and its length."""
    return repr(text) if len(text) <= limit else f"{text[:limit]!r}... ({len(text)} characters)"


def natural(name: str) -> tuple[tuple[int, int, str], ...]:
    """Sort key that orders numbers in names by value: h20-2 before h20-10. Distinct names have distinct keys."""
    parts = _DIGITS.split(name)
    key = tuple((1, int(part), "") if place % 2 else (0, 0, part) for place, part in enumerate(parts))
    return (*key, (2, 0, name))
