"""The drawn state machines are those of the code, and the documents name files and settings that exist."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from transfer.wire.messages import MESSAGES

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", ROOT / "ARCHITECTURE.md", *sorted((ROOT / "docs").glob("*.md"))]


def generator():
    spec = importlib.util.spec_from_file_location("make_state_diagrams", ROOT / "docs" / "make_state_diagrams.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_diagrams_are_drawn_from_the_tables_as_they_are():
    text = (ROOT / "docs" / "states.md").read_text()
    assert text == generator().render(), "run python docs/make_state_diagrams.py"


def test_a_flat_table_shows_moves_and_ends():
    drawn = generator().draw({("a", "go"): "b", ("b", "stop"): "c"}, "a")
    assert drawn.splitlines() == [
        "stateDiagram-v2", "    [*] --> a", "    a --> b: go", "    b --> c: stop", "    c --> [*]",
    ]  # fmt: skip


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_documents_name_files_that_exist(document: Path):
    named = re.findall(r"`((?:transfer|nodes|controlplane|ui|docs|benchmarks|tests)/[\w./-]+)`", document.read_text())
    missing = sorted({name for name in named if not (ROOT / name).exists() and name != "benchmarks/results/"})
    assert not missing, f"{document.name} names what is not there"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_between_documents_lead_somewhere(document: Path):
    links = re.findall(r"\]\((?!https?:)([^)#]+)", document.read_text())
    assert not [link for link in links if not (document.parent / link).exists()]


def test_the_protocol_document_names_every_message():
    text = (ROOT / "docs" / "protocol.md").read_text()
    assert [message.__name__ for message in MESSAGES if f"`{message.__name__}`" not in text] == []
