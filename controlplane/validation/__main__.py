"""`python -m controlplane.validation`, which `phaseplane validate` starts: compares predictions with public figures.

Exit status: 0 when the report is made, whatever it says; 1 when it cannot be; 2 for a wrong flag.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from controlplane.validation.report import chosen, document
from controlplane.validation.section import Section
from controlplane.validation.sources import data_directory
from transfer.program import Parser, run

PROGRAM = "phaseplane validate"
REPORT = Path("docs/validation.md")
"""Written, where it is there already, by a run of all parts."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Make the report; returns the exit status. Never raises."""
    return run(PROGRAM, "plan", lambda: _run(make_parser().parse_args(arguments)))


def make_parser() -> argparse.ArgumentParser:
    from controlplane.validation.parts import NAMES  # not above: an install that only serves has no scipy

    parser = Parser(prog=PROGRAM, description="Compare what is predicted with what was measured and published.")
    flag = parser.add_argument
    flag("--data", type=Path, metavar="DIR", help="with the public measurements; by default data or ../shared/data")
    flag("--only", action="append", default=[], metavar="NAME", help=", ".join(NAMES))
    flag("--recording", type=Path, metavar="FILE", help="flight recording of a fleet under `phaseplane bench`")
    flag("--out", type=Path, metavar="FILE", help=f"write the report; by default {REPORT} where that is there")
    flag("--json", action="store_true", help="one JSON document on standard output")
    return parser


def _run(flags: argparse.Namespace) -> None:
    from controlplane.validation.parts import make_parts

    data = data_directory(flags.data)
    names = [name for told in flags.only for name in told.split(",") if name]
    sections: dict[str, Section] = {}
    for part in chosen(make_parts(flags.recording), names):
        print(f"{part.name} ...", file=sys.stderr, flush=True)
        sections[part.name] = part.section(data)
    text = document([*sections.values()])
    print(json.dumps({name: _as_json(section) for name, section in sections.items()}, indent=2) if flags.json else text)
    out = flags.out or (REPORT if not names and REPORT.is_file() else None)
    if out is not None:
        out.write_text(text, encoding="utf-8")
        print(f"wrote {out}", file=sys.stderr)


def _as_json(section: Section) -> dict[str, object]:
    return {
        "title": section.title,
        "passed": section.passed,
        "verdict": section.verdict,
        "figures": dict(section.figures),
        "table": [list(row) for row in section.table],
        "notes": list(section.notes),
    }


if __name__ == "__main__":
    sys.exit(main())
