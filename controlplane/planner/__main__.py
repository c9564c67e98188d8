"""`python -m controlplane.planner`, which `phaseplane plan` starts: with the simulator's compiled copy, if any."""

from __future__ import annotations

import sys

from controlplane.sim.compiled import use_copy

if __name__ == "__main__":
    use_copy()
    from controlplane.planner.cli import main

    sys.exit(main())
