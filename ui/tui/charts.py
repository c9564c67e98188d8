"""Curves and bars as characters: braille, or ASCII. Pure; labels are the caller's."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from ui.tui.lines import Line, Span, Tone

Values = Sequence[float | None]
_BRAILLE = 0x2800
_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
"""Bits of a braille cell by column and row, the top one first."""
_EIGHTHS = " ▏▎▍▌▋▊▉"


@dataclass(frozen=True, slots=True)
class Curve:
    """values: one for each column of dots (`num_columns`), None where nothing is known. A filled curve is an area, the
    other one a line, so that two of them are told apart without colour; mark is its ASCII character. floor: for each
    value the lower one that a line is drawn from."""

    values: Values
    tone: Tone
    mark: str
    filled: bool = False
    dotted: bool = False
    floor: Values | None = None


def num_columns(width: int, ascii: bool) -> int:
    """Columns of dots in `width` characters."""
    return width if ascii else width * 2


def sampled(times: Sequence[float], values: Values, start: float, end: float, num: int, hold_s: float) -> Values:
    """The last value known at the end of each of `num` equal steps from start to end; None where it is older than
    hold_s (or a step, if that is longer)."""
    step = (end - start) / num
    found: list[float | None] = []
    for index in range(num):
        until = start + (index + 1) * step
        at = bisect_right(times, until) - 1
        found.append(values[at] if at >= 0 and until - times[at] <= max(hold_s, step) else None)
    return found


def nice_top(values: Sequence[Values]) -> float:
    """A round number no smaller than every value."""
    largest = max((value for curve in values for value in curve if value is not None), default=0.0)
    if largest <= 0:
        return 1.0
    scale = 1.0
    while scale > largest:
        scale /= 10
    while scale * 10 <= largest:
        scale *= 10
    return next(scale * factor for factor in (1, 1.5, 2, 3, 4, 5, 6, 8, 10) if scale * factor >= largest * 0.999)


def chart(curves: Sequence[Curve], width: int, height: int, top: float, ascii: bool) -> list[Line]:
    """`height` lines of `width` characters; 0 at the bottom, `top` at the top. Later curves lie above earlier ones."""
    rows, columns = (1, 1) if ascii else (4, 2)
    bits = [[0] * width for _ in range(height)]
    tones: list[list[Tone]] = [[""] * width for _ in range(height)]
    marks = [[" "] * width for _ in range(height)]
    for curve in curves:
        before: int | None = None
        for column, value in enumerate(curve.values):
            if value is None or (curve.dotted and column % 4):
                before = None
                continue
            level = _level(value, top, height * rows)
            nothing = curve.filled and value <= 0
            low = 0 if curve.filled else min(level, level if before is None else before)
            if curve.floor is not None and (least := curve.floor[column]) is not None:
                low = min(low, _level(least, top, height * rows))
            for dot in range(low, max(level, low if before is None or curve.filled else before) + 1):
                y, x = height - 1 - dot // rows, column // columns
                if nothing or x >= width:
                    continue
                bits[y][x] |= _DOTS[column % columns][rows - 1 - dot % rows]
                tones[y][x], marks[y][x] = curve.tone, curve.mark
            before = level
    return [
        _spans(marks[y] if ascii else [chr(_BRAILLE + bit) if bit else " " for bit in bits[y]], tones[y])
        for y in range(height)
    ]


def bar(share: float, width: int, tone: Tone, ascii: bool, mark: str = "#") -> Line:
    """A share from 0 to 1 as a bar in `width` characters, to an eighth of one."""
    filled = min(1.0, max(0.0, share)) * width
    whole = int(filled)
    if ascii:
        whole = round(filled)
        return (Span(mark * whole, tone), Span("." * (width - whole), "dim"))
    part = _EIGHTHS[int((filled - whole) * 8)] if whole < width else ""
    return (Span("█" * whole + part.strip(), tone), Span("·" * (width - whole - len(part.strip())), "dim"))


def stacked(parts: Sequence[tuple[float, Tone, str]], width: int, ascii: bool) -> Line:
    """Shares (value, tone, sign) of their sum in one bar of `width` characters; each part carries its sign."""
    total = sum(value for value, _, _ in parts)
    if total <= 0:
        return (Span(("." if ascii else "·") * width, "dim"),)
    spans: list[Span] = []
    done = 0.0
    at = 0
    for value, tone, sign in parts:
        done += value
        until = round(done / total * width)
        if until > at:
            spans.append(Span(sign + ("-" if ascii else "━") * (until - at - 1), tone))
        at = max(at, until)
    return tuple(spans)


def _level(value: float, top: float, num: int) -> int:
    """The row of dots from 0 to num - 1."""
    return min(num - 1, max(0, round(value / top * (num - 1))))


def _spans(characters: Sequence[str], tones: Sequence[Tone]) -> Line:
    """Neighbours of one tone in one span."""
    spans: list[Span] = []
    for character, tone in zip(characters, tones, strict=True):
        if spans and spans[-1].tone == tone:
            spans[-1] = Span(spans[-1].text + character, tone)
        else:
            spans.append(Span(character, tone))
    return tuple(spans)
