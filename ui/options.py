"""Options that several commands share, and how --config and the environment feed any option."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from ui.client import DEFAULT_URL
from ui.settings import check_environment, defaults_for


def _feed(context: typer.Context, path: Path | None) -> Path | None:
    """Runs before the other options are read: gives them defaults from the file."""
    command = context.info_name or ""
    known = [name for param in context.command.params if (name := param.name) not in (None, "help", "config")]
    check_environment(os.environ, command, [*known, "config"])
    if path is not None:
        repeatable = [
            param.name for param in context.command.params if param.name and getattr(param, "multiple", False)
        ]
        context.default_map = defaults_for(path, command, known, repeatable)
    return path


Config = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="FILE",
        envvar="PHASEPLANE_CONFIG",
        is_eager=True,
        callback=_feed,
        help="TOML file; flags and variables win over it.",
    ),
]
Url = Annotated[str, typer.Option("--url", envvar="PHASEPLANE_URL", help=f"The fleet, by default {DEFAULT_URL}.")]
ApiKey = Annotated[
    str | None,
    typer.Option(
        "--api-key", envvar="PHASEPLANE_API_KEY", help="Only for fleets that ask for one.", show_default=False
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on standard output.")]
