"""Fixtures of the ui's tests: a fake fleet, and the program run in this process."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
from ui_fakes import Fake, serving

from ui.cli import main


@dataclass(frozen=True)
class Ran:
    code: int
    out: str
    err: str


Run = Callable[..., Ran]


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Variables of the machine must not change what a test sees."""
    for name in list(os.environ):
        if name.startswith("PHASEPLANE_") and name != "PHASEPLANE_HOME":
            monkeypatch.delenv(name)


@pytest.fixture
def fleet() -> Iterator[Fake]:
    with serving(Fake()) as fake:
        yield fake


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Run:
    """Run `phaseplane ARGUMENTS`; returns exit status, standard output and standard error."""

    def call(*arguments: str) -> Ran:
        capfd.readouterr()
        code = main(list(arguments))
        out, err = capfd.readouterr()
        return Ran(code, out, err)

    return call
