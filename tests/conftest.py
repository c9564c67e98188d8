"""Fixtures that every test may use."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from nodes.models.pull import pull


def pytest_configure() -> None:
    """A job in the background of a shell script inherits SIGINT ignored, and so would the programs that tests stop."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def smollm2_dir() -> Path:
    """SmolLM2-135M-Instruct in the ordinary cache, pulled when it is not there. Mark such tests `weights`."""
    return pull("smollm2-135m")
