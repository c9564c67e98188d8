"""The four folders keep their direction at run time too, and cores stay pure (import-linter checks it statically)."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CORES = sorted([*ROOT.glob("nodes/core/*.py"), *ROOT.glob("controlplane/core/**/*.py")])
IMPURE = {"asyncio", "time", "threading", "socket", "zmq", "aiohttp", "torch", "random", "os", "selectors"}


def _imported(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module.split(".")[0])
    return names


@pytest.mark.parametrize("path", CORES, ids=lambda p: str(p.relative_to(ROOT)))
def test_a_core_imports_no_clock_socket_or_engine(path: Path) -> None:
    impure = _imported(path) & (IMPURE - {"random"})
    assert not impure, f"{path} decides, so it must not import {sorted(impure)}; pass what it needs as an argument"


@pytest.mark.parametrize(
    ("module", "unwanted"),
    [
        ("nodes.engines.emulated", {"torch", "transformers", "controlplane", "ui"}),
        ("nodes.agent", {"torch", "transformers", "controlplane", "ui", "aiohttp"}),
        ("nodes.kvpool", {"torch", "transformers", "controlplane", "ui", "aiohttp"}),
        ("transfer.kv.client", {"nodes", "controlplane", "ui", "torch", "aiohttp"}),
        ("controlplane.main", {"torch", "nodes", "ui", "transformers"}),
        ("controlplane.core.scheduler", {"asyncio", "zmq", "aiohttp", "torch", "nodes"}),
        ("nodes.core.batching", {"asyncio", "zmq", "aiohttp", "torch", "controlplane"}),
        ("ui.cli", {"torch", "nodes", "controlplane", "zmq"}),
        ("transfer.wire.messages", {"nodes", "controlplane", "ui", "zmq", "asyncio"}),
    ],
)
def test_importing_a_part_loads_no_other_layer(module: str, unwanted: set[str]) -> None:
    code = f"import sys, {module}; print('\\n'.join(sys.modules))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60, check=True)
    loaded = {name.split(".")[0] for name in run.stdout.split()}
    assert not loaded & unwanted
