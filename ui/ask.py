"""One question to the fleet, and its answer drawn or as JSON: what most commands do."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from rich.console import Console

from ui.client import FleetClient
from ui.render import make_console, print_json

T = TypeVar("T")


def show(
    ask: Callable[[FleetClient], Awaitable[T]], draw: Callable[[Console, T], None], url: str, api_key: str | None,
    json: bool,
) -> None:  # fmt: skip
    """Ask the fleet at `url` one thing and print it, drawn or as JSON."""

    async def work() -> T:
        async with FleetClient(url, api_key) as client:
            return await ask(client)

    found = asyncio.run(work())
    if json:
        print_json(found)
    else:
        draw(make_console(), found)
