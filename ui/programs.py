"""Starts the programs that some commands stand for: the command's process becomes the program."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

import typer

from ui.options import NOT_IN_FILES


def arguments(context: typer.Context) -> list[str]:
    """What the command was told, from wherever, as flags of the same names."""
    flags = []
    for name, value in context.params.items():
        flag = f"--{name.replace('_', '-')}"
        if value is True:
            flags.append(flag)
        elif isinstance(value, list | tuple):
            flags += [f"{flag}={one}" for one in value]
        elif value is not None and value is not False and name not in NOT_IN_FILES:
            flags.append(f"{flag}={value}")
    return flags


def become(module: str, flags: list[str]) -> NoReturn:
    """Replace this process by `python -m module flags`: signals and exit status are then the program's own."""
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", module, *flags])
