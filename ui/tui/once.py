"""`--once`: one look at a fleet, or at the end of a recording, as text or JSON. Drawn as the screen is."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import sys
import time
from dataclasses import replace
from pathlib import Path

from ui.client import FleetClient
from ui.errors import CliError
from ui.render import print_json
from ui.tui.draw import advice_line, goodput_line, verdict_line
from ui.tui.draw_instances import instance_grid
from ui.tui.draw_overview import class_lines, notice_lines, role_lines, stage_lines
from ui.tui.export import document
from ui.tui.grid import drawn
from ui.tui.lines import BLANK, Line, ascii_only, plain
from ui.tui.model import Picture
from ui.tui.pen import Pen
from ui.tui.recording import load
from ui.tui.session import ReplaySession

ROWS = 50
MIN_COLUMNS, PIPED_COLUMNS = 80, 120


def print_once(pen: Pen, basis: Picture, json: bool, replay: Path | None, api_key: str | None) -> None:
    """On standard output. Raises CliError when there is nothing to look at."""

    async def ask() -> Picture:
        async with FleetClient(basis.url, api_key) as client:
            return await look(client, basis)

    if replay is None:
        picture = asyncio.run(ask())
    else:
        picture = ReplaySession(load(replay, pen.words), str(replay)).picture(basis, None)
    if json:
        print_json(document(picture, pen))
        return
    width = max(MIN_COLUMNS, shutil.get_terminal_size().columns) if sys.stdout.isatty() else PIPED_COLUMNS
    print(text(pen, picture, width))


async def look(client: FleetClient, basis: Picture) -> Picture:
    """What the fleet says now. Raises CliError when it cannot be asked; what only some fleets keep may be missing."""
    picture = replace(basis, fleet=await client.fleet(), at_s=time.time(), age_s=0.0, url=client.url)
    with contextlib.suppress(CliError):
        picture = replace(picture, autopilot=await client.autopilot())
    with contextlib.suppress(CliError):
        picture = replace(picture, kv=await client.kv())
    with contextlib.suppress(CliError):
        records, audit = await client.requests(ROWS), await client.audit(ROWS)
        picture = replace(picture, records=records, audit=audit)
    return picture


def text(pen: Pen, picture: Picture, width: int) -> str:
    """Verdict, goodput, advice, stages, roles, classes, instances: lines that make sense read one by one."""
    fleet = picture.fleet
    if fleet is None:
        raise CliError(pen.say("tui.error.nothing_heard", url=picture.url))
    lines: list[Line] = [verdict_line(pen, picture), goodput_line(pen, picture), advice_line(pen, picture)]
    lines += [*notice_lines(pen, fleet, width), BLANK, *stage_lines(pen, fleet, width), BLANK]
    lines += role_lines(pen, fleet, width)
    if fleet.classes:
        lines += [BLANK, *class_lines(pen, fleet, width)]
    lines += [BLANK, *drawn(instance_grid(pen, fleet.instances), width, len(fleet.instances) + 1, ascii=pen.ascii)]
    return "\n".join(plain(ascii_only(one) if pen.ascii else one).rstrip() for one in lines)
