"""Draws the two SVGs of docs/tui.md from a running fleet: `python docs/make_tui_screens.py --url URL`."""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

from ui.client import FleetClient
from ui.tui.app import TopApp
from ui.tui.model import Picture
from ui.tui.pen import Pen
from ui.tui.session import LiveSession
from ui.words import words

SCREENS = Path(__file__).parent / "screens"
PICTURES = {"tui-overview": ((120, 40), ()), "tui-requests": ((160, 34), ("3", "s", "s", "s", "s", "s", "s", "down"))}
SETTLE_S = 4.0


async def draw(url: str) -> None:
    for name, (size, keys) in PICTURES.items():
        async with FleetClient(url) as client:
            app = TopApp(LiveSession(client), Pen(words("en", {})), Picture())
            async with app.run_test(size=size) as pilot:
                await pilot.press(*keys[:1])
                await pilot.pause(SETTLE_S)
                await pilot.press(*keys[1:])
                await pilot.pause(0.5)
                SCREENS.mkdir(exist_ok=True)
                (SCREENS / f"{name}.svg").write_text(app.export_screenshot(), encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    asyncio.run(draw(parser.parse_args().url))
