"""The planner as a program, for tests: what it prints when asked for JSON."""

from __future__ import annotations

import io
import json
from typing import TypeVar

import msgspec
import pytest

from controlplane.planner import cli as program

T = TypeVar("T", bound=msgspec.Struct)


def printed(arguments: list[str], kind: type[T]) -> T:
    out = io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.stdout", out)
        assert program.main([*arguments, "--json"]) == 0
    return msgspec.convert(json.loads(out.getvalue()), kind)
