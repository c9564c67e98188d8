"""The command `phaseplane bench kv`: KV transfer, pool and SSD beside sockets, memcpy, files and other projects'."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ui.options import Command, Config
from ui.programs import arguments, become


def register(group: typer.Typer) -> None:
    """Add the command below `bench`."""
    group.command(cls=Command)(kv)


def kv(
    context: typer.Context,
    only: Annotated[
        str | None, typer.Option("--only", metavar="NAME,...", help="Of tcp, shm, ssd, pool; by default all.")
    ] = None,
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="Each measured so often, in turn; medians count.")] = 7,
    peers_python: Annotated[
        Path | None, typer.Option("--peers-python", help="A Python that has Mooncake and NIXL, to measure them too.")
    ] = None,
    directory: Annotated[Path | None, typer.Option("--directory", help="Where SSD and files are measured.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON line for each.")] = False,
    config: Config = None,
) -> None:
    """Measure KV transfer, SSD tier and pool on this machine, each beside a peer in the same run."""
    become("nodes.benches.kv", arguments(context))
