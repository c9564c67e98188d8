"""An actor that does one thing at a fixed pace: the scheduler's ticks, the router's watchdog, the live feed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from transfer.actors.actor import Actor


class Metronome(Actor):
    """Calls `beat` every period_s until it is stopped. What `beat` raises is its supervisor's to decide on."""

    def __init__(self, beat: Callable[[], None], period_s: float) -> None:
        super().__init__(mailbox_size=1)
        self._beat, self._period_s = beat, period_s

    async def run(self) -> None:
        while True:
            try:
                async with asyncio.timeout(self._period_s):
                    if await self.mailbox.get() is None:
                        return
            except TimeoutError:
                self._beat()
