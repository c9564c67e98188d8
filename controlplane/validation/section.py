"""One part of the validation report: a verdict against a bar, the figures, and what was assumed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Cell = str | float | int | None


@dataclass(frozen=True, slots=True)
class Section:
    """`passed` is None for a section that was skipped or holds no bar. `table` is its header row, then rows of text.

    `figures` are the same numbers for machines, by name.
    """

    title: str
    verdict: str
    table: Sequence[Sequence[str]] = ()
    notes: Sequence[str] = ()
    passed: bool | None = None
    figures: tuple[tuple[str, Cell], ...] = ()

    def markdown(self) -> str:
        """The section as Markdown, without a trailing blank line."""
        mark = {True: "Meets its bar", False: "Misses its bar", None: "No bar"}[self.passed]
        lines = [f"## {self.title}", "", f"**{mark}.** {self.verdict}"]
        if self.table:
            header, *rows = self.table
            lines += ["", _row(header), _row(["---"] * len(header)), *(_row(row) for row in rows)]
        if self.notes:
            lines += ["", *(f"- {note}" for note in self.notes)]
        return "\n".join(lines)


def percent(value: float, digits: int = 1) -> str:
    """0.031 -> "3.1 %"."""
    return f"{100 * value:.{digits}f} %"


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"
