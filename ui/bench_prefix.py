"""The command `phaseplane bench prefix`: replays a trace through the pool's index and prints hit rate by capacity.

It starts the program that holds the index and passes on what that says; it needs no fleet.
"""

from __future__ import annotations

import subprocess
import sys
from typing import Annotated

import typer

from ui.errors import UsageFault
from ui.options import Command, Config


def register(group: typer.Typer) -> None:
    """Add the command below `bench`."""
    group.command(cls=Command)(prefix)


def prefix(
    trace: Annotated[
        str | None, typer.Option("--trace", metavar="FILE", help="With blocks: Mooncake's, ours or generated:agentic.")
    ] = None,
    capacity: Annotated[
        str, typer.Option("--capacity", metavar="N,N,...", help="Blocks of the trace that the pool holds.")
    ] = "1000,3000,10000,30000,50000",
    policy: Annotated[str | None, typer.Option("--policy", help="reuse, the pool's own and default, or lru.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON line for each capacity.")] = False,
    config: Config = None,
) -> None:
    """Replay a trace through the pool's index: hit rate by capacity, beside LRU and the best that is possible."""
    if trace is None:
        raise UsageFault("there is no trace to replay; give one with --trace FILE")
    command = [sys.executable, "-m", "nodes.pool.replay", "--trace", trace, "--capacity", capacity]
    command += [] if policy is None else ["--policy", policy]
    command += ["--json"] if json else []
    raise typer.Exit(subprocess.run(command, check=False).returncode)
