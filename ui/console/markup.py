"""HTML and SVG as nested calls, everything escaped that is not markup already. It knows no page and no fleet."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from markupsafe import Markup, escape

VOID = frozenset({"line", "rect", "path", "circle", "polyline", "br", "input", "meta"})
Child = str | None


def tag(name: str, /, *children: Child, **attributes: str | float | None) -> Markup:
    """An element. `class_` and `aria_label` stand for class and aria-label; None leaves a child or attribute out."""
    pairs = ((key.rstrip("_").replace("_", "-"), value) for key, value in attributes.items())
    shown = "".join(f' {key}="{escape(_figure(value))}"' for key, value in pairs if value is not None)
    inner = "".join(escape(child) for child in children if child is not None)
    return Markup(f"<{name}{shown}/>" if name in VOID and not inner else f"<{name}{shown}>{inner}</{name}>")


def join(children: Iterable[Child]) -> Markup:
    """One after another."""
    return Markup("".join(escape(child) for child in children if child is not None))


class Column(NamedTuple):
    """number: set to the right, in figures of equal width. wraps: sentences, which may take several lines."""

    title: str
    number: bool = False
    wraps: bool = False


def table(
    columns: Sequence[Column], rows: Iterable[Sequence[str]], caption: str | None = None, *, tall: bool = False
) -> Markup:
    """A data table that a screen reader can walk: a header cell for each column and each row. tall: it scrolls."""
    head = tag("tr", *(tag("th", one.title, scope="col", class_=_side(one)) for one in columns))
    body = [
        tag("tr", *(
            tag("th" if index == 0 else "td", cell, scope="row" if index == 0 else None, class_=_side(column))
            for index, (column, cell) in enumerate(zip(columns, row, strict=True))
        ))
        for row in rows
    ]  # fmt: skip
    label = None if caption is None else tag("caption", caption)
    inner = tag("table", label, tag("thead", head), tag("tbody", *body), class_="pp-table")
    return tag(
        "div",
        inner,
        class_="pp-scroll pp-tall" if tall else "pp-scroll",
        tabindex="0",
        role="region",
        aria_label=caption,
    )


def folded(title: str, content: str) -> Markup:
    """Content behind a line to open."""
    return tag("details", tag("summary", title), content, class_="pp-folded")


def _side(column: Column) -> str | None:
    return "n" if column.number else "w" if column.wraps else None


def _figure(value: str | float | None) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
