"""What the tests of direct transfers begin with."""

from __future__ import annotations

import asyncio
from typing import Any

from kv_direct_helpers import DirectPair
from kv_helpers import (
    TIMEOUT_S,
    TRAILER,
    make_offer,
    push,
    push_all,
    until,
)

from transfer.kv.frames import Slab

SOURCE, TARGET = [3, 1, 2, 9, 10, 11], [15, 14, 13, 4, 5, 6]


async def begun(pair: DirectPair, source: list[int] = SOURCE, target: list[int] = TARGET) -> Any:
    """A push whose reads are held in flight; its sender and the task of its commit."""
    pair.reader.open.clear()
    pair.role.granted = list(target)
    sender = await pair.prefill.open(pair.peer, make_offer(len(source)), source, TIMEOUT_S)
    push_all(sender, 0, len(source))
    commit = asyncio.create_task(sender.commit(TRAILER, TIMEOUT_S))
    await until(lambda: pair.reader.running == 2)
    return sender, commit


async def push_other(pair: DirectPair) -> bool:
    """A whole push of another request: everything before it has been dealt with."""
    await push(pair, [0, 1], [0, 1], request_id="r2")
    return pair.same([0, 1], [0, 1])


async def one_slab(pair: DirectPair, request_id: str, *, push: bool = True) -> Any:
    pair.role.granted = [0]
    sender = await pair.prefill.open(pair.peer, make_offer(1, request_id=request_id), [0], TIMEOUT_S)
    if push:
        sender.push(0, 0, 1)
    return sender


def bad_slab(**changes: Any) -> Slab:
    values = {
        "stream": 1,
        "layer": 0,
        "first": 0,
        "count": 2,
        "checksum": 1,
        "runs": ((0, 2),),
        "generations": bytes(16),
    }
    return Slab(**(values | changes))
