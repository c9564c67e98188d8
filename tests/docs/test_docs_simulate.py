"""docs/simulate.md names every kind of traffic with its defaults, every mix, format and policy."""

from __future__ import annotations

from pathlib import Path

from controlplane.core.policies.names import POLICY_NAMES
from controlplane.sim.report import SimReport
from transfer.traces.generating import KINDS
from transfer.traces.mixes import MIXES
from transfer.traces.reading import FORMATS

TEXT = (Path(__file__).parents[2] / "docs" / "simulate.md").read_text()


def test_names_and_defaults_are_those_of_the_code() -> None:
    for name, kind in KINDS.items():
        row = next(line for line in TEXT.splitlines() if line.startswith(f"| `{name}` |"))
        assert all(f"{key}={value:g}" in row for key, value in kind.numbers.items()), row
        assert len(kind.mixes) < 2 or f"mix={kind.mixes[0]}, then={kind.mixes[1]}" in row
    assert all(f"`{name}`" in TEXT for name in (*MIXES, *FORMATS, "recording"))
    assert all(f"| `{name}` | {what} |" in TEXT for name, what in POLICY_NAMES.items())


def test_the_keys_of_the_json_document_exist() -> None:
    table = TEXT.split("| key | meaning |")[1].split("\n\n")[0]
    named = {key.strip() for row in table.splitlines()[2:] for key in row.split("|")[1].split(",")}
    assert named <= set(SimReport.__struct_fields__)
