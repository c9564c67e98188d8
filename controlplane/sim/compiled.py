"""A compiled copy of what simulating spends its time in: which modules, whether it is of this very code, and its use.

mypyc compiles them from their own sources, so that they decide the same, twice as fast. The copy lies beside pulled
models, by a hash of the sources, never beside these; what serves requests never uses it. compiling.py makes it.
"""

from __future__ import annotations

import hashlib
import sys
import sysconfig
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType

from transfer.models import home_dir

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = (
    "transfer", "nodes/core", "nodes/engines/engine.py", "nodes/pool", "controlplane/core", "controlplane/sim",
    "controlplane/text.py",
)  # fmt: skip
"""Of the compiled modules and of all that they import from."""
MODULES = {
    "controlplane.core": (
        "admission", "buckets", "decide", "desk", "directory", "dispatch", "endings", "estimate", "fetching", "fleet",
        "goodput", "handoff", "hits", "instance", "kvwatch", "ledger", "lifecycle", "machine", "membership", "paces",
        "placement", "recovery", "scheduler", "stages", "vetting",
    ),
    "controlplane.core.policies": (
        "attainment", "goodput", "line", "memory", "odds", "phases", "protocol",
    ),
    "controlplane.sim": (
        "chain", "decode", "driver", "feed", "fetch", "heap", "links", "node", "pool", "prefill", "router",
        "runs", "shell", "stepper", "world", "writer",
    ),
    "nodes.core": (
        "admission", "batching", "blocks", "counted", "endings", "fetching", "legs", "pins", "planning", "questions",
        "report", "residency", "runs", "sequence", "speed", "takeover",
    ),
    "nodes.pool": (
        "holds", "index", "policy", "policy_reuse", "reuse", "store",
    ),
}  # fmt: skip
"""Where requests spend their time; what only sets things up gains nothing, and message types stay as they are."""
NO_COMPILE = "--no-compile"
SUFFIX: str = sysconfig.get_config_var("EXT_SUFFIX")


def sources() -> list[Path]:
    """Of the modules that are compiled."""
    return [ROOT.joinpath(*package.split("."), f"{name}.py") for package, names in MODULES.items() for name in names]


def copies_dir() -> Path:
    """Where all copies are."""
    return home_dir().absolute() / "compiled"


def copy_dir(root: Path = ROOT) -> Path:
    """Where the copy of the sources in FOLDERS below `root` is or would be: any change of any names another one."""
    digest = hashlib.sha256(SUFFIX.encode())
    for folder in FOLDERS:
        for path in sorted((root / folder).rglob("*.py")) or [root / folder]:
            content = path.read_bytes() if path.is_file() else b""
            digest.update(f"\0{path.relative_to(root)}\0{len(content)}\0".encode() + content)
    return copies_dir() / digest.hexdigest()[:24]


def use_compiled(directory: Path) -> bool:
    """Import from this copy from now on, if it is there. To be asked before anything that it holds is imported."""
    files = {
        ".".join(path.relative_to(directory).parts).removesuffix(SUFFIX): path
        for path in directory.rglob(f"*{SUFFIX}")
    }  # fmt: skip
    if files and not any(name in sys.modules for name in files):
        sys.meta_path.insert(0, _Finder(files))
        return True
    return False


def use_copy() -> bool:
    """As use_compiled with the copy of the present sources, unless this program was told NO_COMPILE."""
    return NO_COMPILE not in sys.argv and use_compiled(copy_dir())


def is_compiled() -> bool:
    """Whether this process simulates with a compiled copy."""
    return any(isinstance(one, _Finder) for one in sys.meta_path)


class _Finder(MetaPathFinder):
    """Ahead of the sources, for the modules of the copy alone."""

    def __init__(self, files: dict[str, Path]) -> None:
        self._files = files

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        file = self._files.get(fullname)
        return None if file is None else spec_from_file_location(fullname, file)
