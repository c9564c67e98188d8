"""Host memory between a caller's buffers and KV blocks: which blocks of an arena are free, and the copies in and out.

A value is `block_bytes` long: layer by layer its K half, then its V half. Larger copies run in threads.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from transfer.errors import InvalidValue, KvTransferFailed
from transfer.kv.arena import HostArena
from transfer.terms import OPAQUE, KvLayout

OPAQUE_SLAB_BYTES = 512 << 10
INLINE_BYTES = 256 << 10
"""Copies up to this size are made where they are asked for: a thread would cost more."""

CLOSED = "the KV pool client was closed meanwhile"

Array = np.ndarray[Any, np.dtype[Any]]
Memory = bytes | bytearray | memoryview | Array
"""Anything contiguous."""
Values = Memory | Sequence[Memory]
"""All values one after the other in one piece of memory, or one piece for each."""


def opaque_layout(block_bytes: int) -> KvLayout:
    """The layout of blocks that are nothing but bytes. Raises InvalidValue for a size that has none: it must be even,
    and above 512 KiB a multiple of that."""
    num_layers = max(1, -(-block_bytes // OPAQUE_SLAB_BYTES))
    if block_bytes < 2 or block_bytes % (2 if num_layers == 1 else OPAQUE_SLAB_BYTES):
        raise InvalidValue(
            f"a block cannot have {block_bytes} bytes; give an even number up to {OPAQUE_SLAB_BYTES}, or a multiple "
            f"of {OPAQUE_SLAB_BYTES}"
        )
    half = block_bytes // (2 * num_layers)
    return KvLayout(num_layers=num_layers, num_kv_heads=1, head_dim=half, block_size=1, dtype="uint8", rope=OPAQUE)


def rows(values: Values, count: int, block_bytes: int, *, writable: bool = False) -> list[Array]:
    """The memory of `count` values, `block_bytes` each, as bytes. Raises InvalidValue when it is not that long,
    cannot be seen as bytes, or cannot be written though it must."""
    pieces: list[Any] = list(values) if isinstance(values, list | tuple) else [values]
    try:
        flat: list[Array] = [np.frombuffer(piece, np.uint8) for piece in pieces]
    except (ValueError, TypeError, BufferError) as error:
        raise InvalidValue(f"this memory cannot be used as bytes ({error}); give contiguous buffers") from None
    if len(flat) == 1 and count != 1:
        if flat[0].nbytes != count * block_bytes:
            raise InvalidValue(f"{count} values of {block_bytes} bytes are wanted, the memory has {flat[0].nbytes}")
        flat = list(flat[0].reshape(count, block_bytes)) if count else []
    if len(flat) != count or any(row.nbytes != block_bytes for row in flat):
        sizes = sorted({row.nbytes for row in flat})
        raise InvalidValue(f"{count} values of {block_bytes} bytes are wanted, got {len(flat)} of {sizes} bytes")
    if writable and not all(row.flags.writeable for row in flat):
        raise InvalidValue("the memory to read into is read-only; give a bytearray or an array that may be written")
    return flat


class Staging:
    """The blocks of one arena, lent out for a while each, first come first served."""

    def __init__(self, arena: HostArena) -> None:
        layout = arena.layout
        self.arena, self.num_blocks, self.block_bytes = arena, arena.num_blocks, layout.block_bytes
        self._slabs: Array = np.frombuffer(arena.buffer, np.uint8).reshape(
            2 * layout.num_layers, arena.num_blocks, layout.slab_bytes
        )
        self._free = list(range(arena.num_blocks))
        self._closed = False
        self._waiting: deque[tuple[int, asyncio.Future[list[int]]]] = deque()

    @property
    def free_blocks(self) -> int:
        return len(self._free)

    async def take(self, count: int, timeout_s: float) -> list[int]:
        """`count` block ids, neighbours where possible. Raises InvalidValue when there never are so many, and
        KvTransferFailed when they are not free in time, or `close` was called."""
        if count > self.num_blocks:
            raise InvalidValue(f"{count} blocks are more than the {self.num_blocks} of staging memory; make it larger")
        self._check_open()
        granted: asyncio.Future[list[int]] = asyncio.get_running_loop().create_future()
        self._waiting.append((count, granted))
        self._grant()
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.shield(granted)
        except BaseException as error:
            if not granted.done():
                self._waiting.remove((count, granted))
                self._grant()
            elif granted.exception() is None:
                self.give(granted.result())
            if isinstance(error, TimeoutError):
                raise KvTransferFailed(
                    f"{count} blocks of staging memory were not free within {timeout_s:g} s; use fewer at once"
                ) from None
            raise

    def give(self, blocks: Sequence[int]) -> None:
        """Blocks come back; whoever may still read their old bytes in shared memory will notice that they changed.
        Nothing after `close`."""
        if self._closed:
            return
        for block in blocks:
            self.arena.bump(block)
        self._free = sorted([*self._free, *blocks])
        self._grant()

    async def load(self, blocks: Sequence[int], values: Sequence[Array]) -> None:
        """Copy values into blocks. Raises KvTransferFailed after `close`."""
        slabs = self._slabs

        def copy() -> None:
            for block, value in zip(blocks, values, strict=True):
                slabs[:, block] = value.reshape(slabs.shape[0], -1)

        await self._run(copy, len(blocks))

    async def store(self, blocks: Sequence[int], values: Sequence[Array]) -> None:
        """Copy blocks out to values. Raises KvTransferFailed after `close`."""
        slabs = self._slabs

        def copy() -> None:
            for block, value in zip(blocks, values, strict=True):
                value.reshape(slabs.shape[0], -1)[:] = slabs[:, block]

        await self._run(copy, len(blocks))

    def close(self) -> None:
        """Let go of the arena's memory, once copies under way have ended. Whoever waits for blocks fails."""
        self._closed = True
        self._slabs = np.empty((0, 0, 0), np.uint8)
        while self._waiting:
            self._waiting.popleft()[1].set_exception(KvTransferFailed(CLOSED))

    def _check_open(self) -> None:
        if self._closed:
            raise KvTransferFailed(CLOSED)

    async def _run(self, copy: Callable[[], None], count: int) -> None:
        self._check_open()
        if count * self.block_bytes <= INLINE_BYTES:
            copy()
        else:
            await finish(asyncio.ensure_future(asyncio.to_thread(copy)))

    def _grant(self) -> None:
        while self._waiting and len(self._free) >= self._waiting[0][0]:
            count, granted = self._waiting.popleft()
            granted.set_result(self._free[:count])
            self._free = self._free[count:]


async def finish(task: asyncio.Future[None]) -> None:
    """Wait for the end of what cannot be stopped half way, a cancellation notwithstanding; then honour that."""
    cancelled = False
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            cancelled = True
    if cancelled:
        raise asyncio.CancelledError
    task.result()
