"""A table as data: sorted, filtered, and drawn into a width and height, with a cursor. Pure."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from rich.cells import cell_len

from ui.tui.lines import Line, Span, Tone, cut, fit, pad

Key = float | str
GAP = 2


class Head(NamedTuple):
    """rank: where the width does not do, columns of the highest rank go first. most: its largest width."""

    title: str
    right: bool = False
    rank: int = 0
    most: int = 40


class Cell(NamedTuple):
    """key sorts it."""

    text: str
    key: Key
    tone: Tone = ""


class Row(NamedTuple):
    id: str
    cells: tuple[Cell, ...]


@dataclass(frozen=True, slots=True)
class Grid:
    heads: tuple[Head, ...]
    rows: tuple[Row, ...]


@dataclass(frozen=True, slots=True)
class Order:
    """column: which one sorts, None as they came; needle: rows without this text are left out."""

    column: int | None = None
    reverse: bool = False
    needle: str = ""

    def next(self, columns: Sequence[int]) -> Order:
        """Column after column of those shown, each up and then down, and at last as they came."""
        if self.column in columns and not self.reverse:
            return replace(self, reverse=True)
        place = columns.index(self.column) + 1 if self.column in columns else 0
        return replace(self, column=columns[place] if place < len(columns) else None, reverse=False)


def text(value: str, tone: Tone = "") -> Cell:
    return Cell(value, value, tone)


def figure(value: str, key: float | None, tone: Tone = "") -> Cell:
    """What is not known sorts below every number."""
    return Cell(value, float("-inf") if key is None else key, tone)


def arranged(grid: Grid, order: Order) -> Grid:
    """Filtered and sorted; equal rows keep their order."""
    wanted = order.needle.casefold()
    rows = [row for row in grid.rows if not wanted or any(wanted in cell.text.casefold() for cell in row.cells)]
    column = order.column
    if column is not None and column < len(grid.heads):
        rows.sort(key=lambda row: _comparable(row.cells[column].key), reverse=order.reverse)
    return replace(grid, rows=tuple(rows))


def drawn(
    grid: Grid, width: int, height: int, *, order: Order = Order(), cursor: int | None = None, top: int = 0,
    widest: MutableMapping[int, int] | None = None, ascii: bool = False,
) -> list[Line]:  # fmt: skip
    """The head and the rows from `top` on, at most `height` lines. widest: keeps columns from shrinking again between
    two drawings."""
    if height < 1:
        return []
    gutter = 0 if cursor is None else GAP
    sizes = _sizes(grid, widest)
    shown = _that_fit(grid, sizes, width - gutter)
    up, down, here = ("^", "v", ">") if ascii else ("▲", "▼", "▸")

    def laid(values: Mapping[int, tuple[str, Tone]]) -> list[Span]:
        spans: list[Span] = []
        for index, (value, tone) in values.items():
            head = grid.heads[index]
            text = value if index == shown[-1] and not head.right else pad(value, sizes[index], head.right)
            spans += [Span(" " * GAP), Span(text, tone)] if spans else [Span(text, tone)]
        return spans

    signs = {order.column: down if order.reverse else up}
    titles: dict[int, tuple[str, Tone]] = {
        index: (grid.heads[index].title + signs.get(index, ""), "title") for index in shown
    }
    found = [fit((Span(" " * gutter), *laid(titles)), width)]
    for number, row in enumerate(grid.rows[top : top + height - 1], top):
        spans = laid({index: (row.cells[index].text, row.cells[index].tone) for index in shown})
        if number == cursor:
            whole = fit((Span(pad(here, gutter)), *spans), width)
            found.append(tuple(Span(span.text, "cursor") for span in whole))
        else:
            found.append(fit((Span(" " * gutter), *spans), width))
    return found


def shown_columns(grid: Grid, width: int, widest: MutableMapping[int, int]) -> list[int]:
    """Those that `drawn` with a cursor shows in this width."""
    return _that_fit(grid, _sizes(grid, widest), width - GAP)


def _sizes(grid: Grid, widest: MutableMapping[int, int] | None) -> dict[int, int]:
    sizes = {}
    for index, head in enumerate(grid.heads):
        size = max((cell_len(row.cells[index].text) for row in grid.rows), default=0)
        size = min(head.most, max(size, cell_len(head.title) + 1))
        if widest is not None:
            size = widest[index] = max(size, widest.get(index, 0))
        sizes[index] = size
    return sizes


def _that_fit(grid: Grid, sizes: Mapping[int, int], width: int) -> list[int]:
    """Columns, without those of the highest ranks when there is no room; the last one may be cut."""
    shown = [*range(len(grid.heads))]
    while len(shown) > 1 and sum(sizes[index] + GAP for index in shown) - GAP > width:
        worst = max(shown, key=lambda index: (grid.heads[index].rank, index))
        if grid.heads[worst].rank == 0:
            break
        shown.remove(worst)
    return shown


def _comparable(key: Key) -> tuple[int, float, str]:
    return (1, 0.0, key) if isinstance(key, str) else (0, key, "")


def stacked_rows(pairs: Mapping[str, str], width: int) -> list[Line]:
    """Names and values below one another."""
    size = max((cell_len(name) for name in pairs), default=0)
    return [
        (Span(pad(name, size), "dim"), Span(" " * GAP), Span(cut(value, max(0, width - size - GAP)).rstrip()))
        for name, value in pairs.items()
    ]
