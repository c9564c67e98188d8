"""docs/cases.md: every fault it lists names tests, and each of those tests is there."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs" / "cases.md"
ROW = re.compile(r"^\|(?P<symptom>[^|]+)\|(?P<ours>[^|]+)\|(?P<tests>[^|]+)\|(?P<reference>[^|]+)\|$")
TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")
NUM_ROWS = {"A": 9, "C": 6, "D": 4, "E": 10, "F": 6, "H": 11, "I": 9}
"""Faults of each group: a row may be added, never dropped."""


def rows() -> dict[str, list[re.Match[str]]]:
    """The rows of each group's table, by the group's letter."""
    found: dict[str, list[re.Match[str]]] = {}
    letter = ""
    for line in DOCUMENT.read_text().splitlines():
        if line.startswith("## "):
            letter = line[3]
        elif (row := ROW.match(line)) and not line.startswith(("| symptom", "|---")):
            found.setdefault(letter, []).append(row)
    return found


@cache
def functions_of(path: str) -> frozenset[str]:
    tree = ast.parse((ROOT / path).read_text())
    functions = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    return frozenset(one.name for one in functions)


def test_no_fault_is_missing():
    found = rows()
    assert {letter: len(found.get(letter, [])) >= least for letter, least in NUM_ROWS.items()} == dict.fromkeys(
        NUM_ROWS, True
    )


def test_every_fault_names_tests_that_exist():
    for row in (row for group in rows().values() for row in group):
        named = TEST.findall(row["tests"])
        assert named, f"no test is named for: {row['symptom'].strip()}"
        absent = [f"{path}::{name}" for path, name in named if name not in functions_of(path)]
        assert not absent, f"{row['symptom'].strip()}: there is no {absent}"
