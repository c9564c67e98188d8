"""`python -m controlplane.sim`, which `phaseplane simulate` starts: with the compiled copy where there is one."""

from __future__ import annotations

import os
import sys

from controlplane.sim.compiled import NO_COMPILE, use_copy


def main() -> int:
    """Choose between the copy and the sources before either is imported."""
    compiled = use_copy()
    from controlplane.sim.program import main

    return main(before_many=None if compiled or NO_COMPILE in sys.argv else _compile_first)


def _compile_first() -> None:
    """Start again with a compiled copy; come back where there can be none."""
    from controlplane.sim.compiling import compile_aloud
    from controlplane.sim.view import make_console

    if compile_aloud(make_console(sys.stderr)):
        os.execv(sys.executable, [sys.executable, "-m", "controlplane.sim", *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main())
