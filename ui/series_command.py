"""The command series: the past of goodput, attainment, latencies and so on, read in a terminal."""

from __future__ import annotations

import asyncio
from datetime import datetime
from typing import Annotated, NamedTuple

import msgspec
import typer

from transfer.screens import SeriesView
from ui.ask import show
from ui.client import DEFAULT_URL, FleetClient
from ui.errors import UsageFault
from ui.options import ApiKey, Command, Config, Json, Url, span_s
from ui.render import make_console, print_json
from ui.series import Report, Step, nice_every, recorded, report, step_for
from ui.series_names import PULSE, chosen, listed
from ui.series_view import show_names, show_report

DAY_S = 86400.0
"""What the control plane keeps."""
PULSE_S = 60.0
"""How exactly the beginning of the record is looked for."""


class Asked(NamedTuple):
    """since_s and until_s: seconds before now."""

    since_s: float
    until_s: float
    every_s: float | None


def register(app: typer.Typer) -> None:
    """Add the command to the program."""
    app.command(cls=Command)(series)


def series(
    names: Annotated[list[str] | None, typer.Argument(metavar="[NAME]...", help="Nothing: list them.")] = None,
    since: Annotated[str, typer.Option("--since", metavar="TIME", help="How far back: 90s, 30m, 24h.")] = "24h",
    until: Annotated[str, typer.Option("--until", metavar="TIME", help="How long ago it ends.")] = "0s",
    every: Annotated[
        str | None, typer.Option("--every", metavar="TIME", help="A row for each so long: 10s, 10m, 1h.")
    ] = None,
    traffic_class: Annotated[str | None, typer.Option("--class", metavar="CLASS", help="Of this class.")] = None,
    model: Annotated[str | None, typer.Option("--model", metavar="NAME", help="Of this model, of several.")] = None,
    instance: Annotated[str | None, typer.Option("--instance", metavar="ID", help="Of this instance.")] = None,
    ascii: Annotated[bool, typer.Option("--ascii", help="No braille, no box drawing: ASCII signs alone.")] = False,
    json: Json = False, url: Url = DEFAULT_URL, api_key: ApiKey = None, config: Config = None,
) -> None:  # fmt: skip
    """Read the last day: goodput, latencies, queues.

    A name is one of those that the command lists without any; its unit may be left out (goodput), and a star stands for
    any end ('stage.*'). A terminal is drawn a chart; --every adds rows, and without a terminal there are always rows.
    Times at which the control plane did not run are gaps, not zeros.
    """
    owners = [f"{kind}.{name}." for kind, name in (("class", traffic_class), ("model", model), ("instance", instance))
              if name is not None]  # fmt: skip
    if len(owners) > 1:
        raise UsageFault("--class, --model and --instance exclude each other; give one of them")
    since_s, until_s = span_s(since), span_s(until)
    if since_s <= until_s:
        raise UsageFault(f"--since {since} is not before --until {until}; both count back from now")
    if until_s >= DAY_S:
        raise UsageFault(f"--until {until} is before what the control plane keeps, the last 24 hours")
    every_s = None if every is None else span_s(every)
    if every_s == 0:
        raise UsageFault("--every must be above 0")
    owner = owners[0] if owners else ""
    if not names:
        show(lambda client: _list(client, owner), lambda console, view: show_names(console, view.names), url, api_key,
             json)  # fmt: skip
        return
    found, charted = asyncio.run(_ask(url, api_key, names, owner, Asked(min(since_s, DAY_S), until_s, every_s)))
    if json:
        print_json(found)
        return
    console = make_console()
    if since_s > DAY_S:
        console.print("the control plane keeps the last 24 hours")
    rows = every is not None or not console.is_terminal
    show_report(console, found, charted if console.is_terminal else {}, rows, ascii)


async def _list(client: FleetClient, owner: str) -> SeriesView:
    view = await client.series()
    return msgspec.structs.replace(view, names=tuple(listed(owner, view.names)))


async def _ask(url: str, api_key: str | None, names: list[str], owner: str, asked: Asked
               ) -> tuple[Report, dict[str, list[Step]]]:  # fmt: skip
    """The past of the series that are meant, as fine as it can be from where the record begins."""
    async with FleetClient(url, api_key) as client:
        wanted = chosen(names, owner, (await client.series()).names)
        until_s = -asked.until_s if asked.until_s else None
        pulse = recorded(await client.series([PULSE], -asked.since_s, PULSE_S, until_s), PULSE)
        asked_s = asked.since_s - asked.until_s
        lasting_s = min(asked_s, pulse[-1].at_s - pulse[0].at_s + PULSE_S) if pulse else asked_s
        every_s = asked.every_s or nice_every(lasting_s)
        step_s = step_for(lasting_s, every_s)
        view = await client.series(
            [*_patterns(wanted, names, owner), PULSE], -lasting_s - asked.until_s, step_s, until_s
        )
    return report(view, wanted, asked_s, every_s, zone_s), {name: recorded(view, name) for name in wanted}


def _patterns(wanted: list[str], names: list[str], owner: str) -> list[str]:
    """What stands for all that is wanted. Stars stay stars: hundreds of names are too long for an address."""
    stars = [owner + text for text in names if text.endswith("*")]
    return stars + [name for name in wanted if not any(name.startswith(star[:-1]) for star in stars)]


def zone_s(at_s: float) -> float:
    """How far the local time is ahead of UTC at this Unix time."""
    offset = datetime.fromtimestamp(at_s).astimezone().utcoffset()
    return 0.0 if offset is None else offset.total_seconds()
