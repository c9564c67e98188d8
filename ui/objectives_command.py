"""The command objectives: what the traffic classes are held to, shown and changed while the fleet runs."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer

from transfer.classes import ClassesRequest, ClassesView
from transfer.errors import InvalidValue
from transfer.objectives import parse_objectives
from transfer.terms import Slo
from ui.client import DEFAULT_URL, FleetClient
from ui.errors import UsageFault
from ui.options import ApiKey, Command, Config, Json, Url
from ui.render import make_console, print_json, show_classes

NONE = "none"


def register(app: typer.Typer) -> None:
    """Add the command to the program."""
    app.command(cls=Command)(objectives)


def objectives(
    name: Annotated[str | None, typer.Argument(metavar="[CLASS]", help="Nothing: only look.")] = None,
    wanted: Annotated[
        str | None, typer.Argument(metavar="[OBJECTIVES]", help="Such as ttft=2,tpot=200ms,e2e=30s, or none.")
    ] = None,
    json: Json = False, url: Url = DEFAULT_URL, api_key: ApiKey = None, config: Config = None,
) -> None:  # fmt: skip
    """Show what traffic classes are held to and what the hardware costs, or set the objectives of one class.

    Requests that have not ended are held to the new objectives too. How many were good is counted anew for that class.
    """
    change = None if name is None else {name: _read(wanted)}

    async def work() -> ClassesView:
        async with FleetClient(url, api_key) as client:
            found = await client.classes()
            if change is None:
                return found
            return await client.set_classes(ClassesRequest(base_version=found.version, classes=change))

    view = asyncio.run(work())
    if json:
        print_json(view)
    else:
        show_classes(make_console(), view)


def _read(text: str | None) -> Slo | None:
    """Raises UsageFault."""
    example = "write them like ttft=2,tpot=200ms, or none"
    if text is None:
        raise UsageFault(f"the objectives are missing; {example}")
    if text == NONE:
        return None
    try:
        return parse_objectives([text])[""]
    except (InvalidValue, KeyError):
        raise UsageFault(f"{text!r} are no objectives; {example}") from None
