"""Lines of a terminal as data: spans of text with a tone. Cuts, pads, wraps and joins them; it knows no terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple
from unicodedata import category

from rich.cells import cell_len, set_cell_size, split_graphemes

Tone = Literal[
    "", "dim", "bold", "title", "good", "bad", "warn", "goodput", "throughput", "objective",
    "prefill", "decode", "mixed", "kv_pool", "cursor",
]  # fmt: skip
ELLIPSIS = "…"


class Span(NamedTuple):
    text: str
    tone: Tone = ""


Line = tuple[Span, ...]
BLANK: Line = ()


def line(text: str, tone: Tone = "") -> Line:
    return (Span(text, tone),)


def plain(spans: Line) -> str:
    return "".join(visible(span.text) for span in spans)


def visible(text: str) -> str:
    """Without what a terminal takes for an order: ids, names and reasons are shown as others have written them."""
    return text if text.isprintable() else "".join(one for one in text if category(one)[0] != "C")


def cells(spans: Line) -> int:
    """How many columns of a terminal it takes; a Chinese character takes two."""
    return sum(cell_len(span.text) for span in spans)


def cut(text: str, width: int) -> str:
    """Exactly `width` columns: padded, or cut with an ellipsis."""
    if cell_len(text) <= width:
        return set_cell_size(text, width)
    return set_cell_size(text, width - 1) + ELLIPSIS if width > 0 else ""


def pad(text: str, width: int, right: bool = False) -> str:
    """As `cut`, at the right edge where `right`."""
    missing = width - cell_len(text)
    return " " * missing + text if right and missing > 0 else cut(text, width)


def fit(spans: Line, width: int) -> Line:
    """Exactly `width` columns of a line."""
    left = width
    kept: list[Span] = []
    for index, span in enumerate(spans):
        size = cell_len(span.text)
        if size > left or (size == left and any(later.text for later in spans[index + 1 :])):
            kept.append(Span(cut(span.text + ELLIPSIS, left), span.tone))
            return tuple(kept)
        kept.append(span)
        left -= size
    return (*kept, Span(" " * left)) if left else tuple(kept)


def wrap(text: str, width: int, most: int = 99) -> list[str]:
    """At most `most` lines of `width` columns, broken at spaces, within a word only where it is longer than a line or
    Chinese; the last one ends in an ellipsis when something is left out."""
    done: list[str] = []
    current = ""
    for part in _parts(text, width):
        if cell_len(current + part.rstrip()) > width:
            done.append(current.rstrip())
            current = part.lstrip()
        else:
            current += part
    done.append(current.rstrip())
    if len(done) > most:
        last = done[most - 1] + ELLIPSIS
        done = [*done[: most - 1], last if cell_len(last) <= width else cut(last, width)]
    return done


def beside(blocks: Sequence[Sequence[Line]], widths: Sequence[int], gap: int = 2) -> list[Line]:
    """Blocks of lines next to each other, each in its width."""
    height = max((len(block) for block in blocks), default=0)
    rows = []
    for index in range(height):
        spans: list[Span] = []
        for block, width in zip(blocks, widths, strict=True):
            spans += fit(block[index] if index < len(block) else BLANK, width)
            spans.append(Span(" " * gap))
        rows.append(tuple(spans[:-1]))
    return rows


def spaced(spans: Iterable[Line], gap: str = "  ") -> Line:
    """Lines after one another in one, with a gap between; empty ones are left out."""
    joined: list[Span] = []
    for part in spans:
        if part:
            joined += [Span(gap), *part] if joined else part
    return tuple(joined)


def ascii_only(spans: Line) -> Line:
    """The same line, sign for sign, where signs outside ASCII have one that may stand for them."""
    return tuple(Span(span.text.translate(_ASCII), span.tone) for span in spans)


_ASCII = str.maketrans({"…": "~", "→": ">", "∞": "-", "─": "-", "±": "~", "–": "-"})


def _parts(text: str, width: int) -> list[str]:
    """Where a line may break: after each space, around each wide character, and within words longer than a line."""
    parts: list[str] = []
    word = ""
    for start, end, size in split_graphemes(text)[0]:
        grapheme = text[start:end]
        word += grapheme
        if grapheme == " " or size > 1 or cell_len(word) >= width:
            parts.append(word)
            word = ""
    return [*parts, word] if word else parts
