"""The command `phaseplane validate`: starts the program that compares predictions with public measurements."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ui.options import Command, Config, Json
from ui.programs import arguments, become

PROGRAM = "controlplane.validation"


def register(app: typer.Typer) -> None:
    """Add the command to the program."""
    app.command(cls=Command)(validate)


def validate(
    context: typer.Context,
    data: Annotated[
        Path | None, typer.Option("--data", metavar="DIR", help="With the public measurements; by default data.")
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option("--only", metavar="NAME", help="A part of the report; may repeat.")
    ] = None,
    recording: Annotated[
        Path | None, typer.Option("--recording", metavar="FILE", help="Flight recording of a fleet that was measured.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="Write the report; by default to docs/validation.md.")
    ] = None,
    json: Json = False,
    config: Config = None,
) -> None:
    """Compare predicted step times, latencies and goodput with what others measured and published."""
    become(PROGRAM, arguments(context))
