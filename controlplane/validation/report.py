"""Runs the parts of the validation and writes them as one document, equal for equal data and code."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from controlplane.validation.section import Section
from controlplane.validation.sources import SOURCES, Source
from transfer.errors import InvalidValue

Run = Callable[[Path], Section]
"""Of the data directory."""

INTRODUCTION = """\
# Validation

How far off the latency model and the simulator are, against what others measured and published. `phaseplane validate`
wrote this file from the data below, which is not part of the product: put it into a directory and name that with
`--data`. Errors are relative; a median error of 3 % means that half of the predictions are off by no more than that.
"""


@dataclass(frozen=True, slots=True)
class Part:
    """One section by name, and what it reads."""

    name: str
    title: str
    sources: tuple[Source, ...]
    run: Run

    def section(self, data: Path) -> Section:
        """The section, or one that says which file is not there and where to get it."""
        missing = [f"{file}, from {source.origin}" for source in self.sources for file in source.missing(data)]
        if missing:
            return Section(self.title, f"Skipped: there is no {'; no '.join(missing)}.")
        return self.run(data)


def chosen(parts: Sequence[Part], names: Sequence[str]) -> list[Part]:
    """The parts of these names, in the report's order; all for none. Raises InvalidValue for a name that is none."""
    known = [part.name for part in parts]
    for name in names:
        if name not in known:
            raise InvalidValue(f"there is no part {name!r} of the validation; it has {', '.join(known)}")
    return [part for part in parts if not names or part.name in names]


def document(sections: Sequence[Section]) -> str:
    """The whole report in Markdown."""
    rows = "\n".join(f"| {section.title} | {_WORDS[section.passed]} | {section.verdict} |" for section in sections)
    summary = f"| section | bar | verdict |\n|---|---|---|\n{rows}"
    table = "\n".join(
        f"| {source.name} | {source.files[0]} | {source.what} | {source.origin} | {source.licence} |"
        for source in SOURCES
    )
    sources = f"## Data\n\n| of | file | what | from | licence |\n|---|---|---|---|---|\n{table}"
    return "\n\n".join([INTRODUCTION.rstrip(), summary, *(one.markdown() for one in sections), sources]) + "\n"


_WORDS = {True: "met", False: "missed", None: "none"}
