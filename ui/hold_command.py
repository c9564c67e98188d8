"""The commands cordon, drain and resume: set an instance aside, empty it, take it back."""

from __future__ import annotations

import asyncio
import uuid
from typing import Annotated

import typer

from transfer.api import ActionView, ApplyRequest, HoldAction
from ui.client import DEFAULT_URL, FleetClient
from ui.options import ApiKey, Command, Config, Json, Url
from ui.render import make_console, print_json

Instance = Annotated[str, typer.Argument(metavar="INSTANCE", help="Its id, as phaseplane status shows it.")]

_SAID = {
    "cordon": "nothing new is placed on it",
    "drain": "nothing new is placed on it, and what runs there moves away",
    "resume": "it serves again",
}


def register(app: typer.Typer) -> None:
    """Add the commands to the program."""
    for command in (cordon, drain, resume):
        app.command(cls=Command)(command)


def cordon(
    instance: Instance, json: Json = False, url: Url = DEFAULT_URL, api_key: ApiKey = None, config: Config = None
) -> None:
    """Place nothing new on an instance; what it has goes on. `phaseplane resume` takes it back."""
    _hold(instance, "cordon", url, api_key, json)


def drain(
    instance: Instance, json: Json = False, url: Url = DEFAULT_URL, api_key: ApiKey = None, config: Config = None
) -> None:
    """Empty an instance: nothing new is placed on it and running requests move away. No client sees it."""
    _hold(instance, "drain", url, api_key, json)


def resume(
    instance: Instance, json: Json = False, url: Url = DEFAULT_URL, api_key: ApiKey = None, config: Config = None
) -> None:
    """Place on a cordoned or drained instance again."""
    _hold(instance, "resume", url, api_key, json)


def _hold(instance: str, action: HoldAction, url: str, api_key: str | None, json: bool) -> None:
    """Against the fleet as it is now: the control plane refuses when it changes in between."""

    async def work() -> ActionView:
        async with FleetClient(url, api_key) as client:
            version = (await client.fleet()).version
            request = ApplyRequest(base_version=version, idempotency_key=uuid.uuid4().hex)
            return await client.hold(instance, action, request)

    found = asyncio.run(work())
    if json:
        print_json(found)
        return
    view = found.instance
    left = f"; {found.num_left} requests are left on it" if found.num_left and action != "resume" else ""
    make_console().print(f"{view.role} instance {view.id} is {view.state}: {_SAID[action]}{left}")
