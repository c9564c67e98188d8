"""Fixtures that every test may use."""

from __future__ import annotations

from pathlib import Path

import pytest

from nodes.models.pull import pull


@pytest.fixture(scope="session")
def smollm2_dir() -> Path:
    """SmolLM2-135M-Instruct in the ordinary cache, pulled when it is not there. Mark such tests `weights`."""
    return pull("smollm2-135m")
