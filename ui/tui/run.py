"""Starts and ends the screen: opens the client, the recording, and closes both."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from ui.client import FleetClient
from ui.tui.app import TopApp
from ui.tui.model import Picture
from ui.tui.pen import Pen
from ui.tui.recording import Recorder, load
from ui.tui.session import LiveSession, ReplaySession


class Shown(TopApp):
    """A screen whose bugs end it and are raised where it was started, instead of being printed."""

    bug: Exception | None = None

    def _handle_exception(self, error: Exception) -> None:
        self.bug = self.bug or error
        self.exit(return_code=1)


def show(
    pen: Pen, basis: Picture, every_s: float, record: Path | None, replay: Path | None, api_key: str | None
) -> None:
    """Until the operator leaves. Raises CliError for a file that cannot be used."""
    if replay is not None:
        session = ReplaySession(load(replay, pen.words), str(replay))
        asyncio.run(_run(Shown(session, pen, basis, every_s=every_s)))
        return
    recorder = Recorder(record, time.time(), pen.words) if record is not None else None

    async def work() -> None:
        async with FleetClient(basis.url, api_key) as client:
            await _run(Shown(LiveSession(client, recorder), pen, basis, every_s=every_s))

    try:
        asyncio.run(work())
    finally:
        if recorder is not None:
            recorder.close()


async def _run(app: Shown) -> None:
    await app.run_async()
    if app.bug is not None:
        raise app.bug
