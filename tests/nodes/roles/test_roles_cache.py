"""The feed of cache changes leaves nothing behind in the process that tells them for days."""

from __future__ import annotations

import asyncio
import sys

from nodes.roles.cache import CacheFeed

NUM_FLUSHES = 400


async def test_telling_changes_takes_no_memory_that_stays() -> None:
    """A tuple made of a generator adds to CPython's free list of its size, up to 2000 for each of 20 sizes."""
    told = asyncio.Event()
    feed = CacheFeed(1, lambda message: told.set(), every_s=0.0)
    names = [bytes([index]) for index in range(60)]

    async def tell(count: int) -> None:
        for turn in range(count):
            size = 1 + turn % 9
            told.clear()
            feed.change(names[:size], names[20 : 20 + size], names[40 : 40 + size])
            await told.wait()

    await tell(50)
    before = sys.getallocatedblocks()
    await tell(NUM_FLUSHES)
    grown = sys.getallocatedblocks() - before
    feed.close()
    assert grown < NUM_FLUSHES // 4, f"{grown} more blocks of memory after {NUM_FLUSHES} flushes"
