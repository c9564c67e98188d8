"""The sending side of a stream: slabs named by SendStream become frames over an arena's memory, without a copy.

A Push is what a role holds (KvSender); a Serving answers a fetch. Which bytes leave when is the link's business.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import msgspec

from transfer.errors import KvCorrupt, KvError, KvTransferFailed, ProtocolError
from transfer.kv.arena import KvArena
from transfer.kv.frames import Frame, Slab, encode_frame
from transfer.kv.links.memory import checksum, halves, pieces
from transfer.kv.port import KvTrailer, SendStats
from transfer.kv.stream import SendStream


@dataclass(slots=True)
class OutFrame:
    """One frame to write: header bytes, then views of arena memory. kv_bytes: what it moves, here or when mapped.

    control, slab: what it is, one of them. number: its place on its connection, where several carry the session.
    """

    stream: int
    parts: list[memoryview]
    kv_bytes: int = 0
    control: Frame | None = None
    slab: Slab | None = None
    number: int = 0

    def numbered(self, number: int) -> OutFrame:
        """The same slab with its number."""
        assert self.slab is not None
        slab = msgspec.structs.replace(self.slab, number=number)
        payload = self.parts[1:]
        head = memoryview(encode_frame(slab, self.kv_bytes if payload else 0))
        return OutFrame(self.stream, [head, *payload], self.kv_bytes, slab=slab, number=number)


class SlabName(NamedTuple):
    """Which blocks a slab holds: of one layer, by offered index."""

    layer: int
    first: int
    num_blocks: int


def control_frame(frame: Frame) -> OutFrame:
    return OutFrame(frame.stream, [memoryview(encode_frame(frame))], control=frame)


class SendingHost(Protocol):
    """What a Sending needs of its session."""

    def make_ready(self, sending: Sending) -> None:
        """It may have a frame to send."""

    def give_up(self, sending: Sending, error: KvError) -> None:
        """Fail it here, tell the peer, and read its memory no more once this returns."""

    def push_soon(self, push: Push, layer: int, first_block: int, count: int) -> None:
        """Thread-safe: queue on the event loop."""

    def take_pushes(self) -> None:
        """Queue what `push_soon` was told so far, now."""


class Sending:
    """A SendStream and the arena it reads. Subclasses say what its grant and its end mean."""

    def __init__(self, machine: SendStream, arena: KvArena) -> None:
        self.machine, self.arena = machine, arena
        self.ready = False
        """Whether the session has it in its round-robin."""

    def next_frame(self, now: float) -> OutFrame | None:
        """The next slab or the commit; None when there is nothing, or no credit."""
        machine = self.machine
        slab = machine.next_slab(now)
        if slab is not None:
            return self.slab_frame(*slab)
        commit = machine.next_commit(now)
        return None if commit is None else control_frame(commit)

    def granted(self) -> None:
        """The receiver said yes."""

    def ended(self) -> None:
        """Acknowledged or failed; called once."""

    def slab_frame(self, layer: int, first: int, count: int) -> OutFrame:
        """The frame of `count` offered blocks from `first`: made anew when it was lost on the way."""
        machine, arena = self.machine, self.arena
        runs = machine.table.runs(first, count)
        blocks = machine.table.blocks[first : first + count]
        arena.prepare_read(layer, blocks)
        generations = b""
        if machine.named:  # read before the bytes: whoever changes them later bumps it, and the reader notices
            if machine.mapped and arena.handle is None:
                raise ProtocolError("the receiver wants to map an arena that is private")
            generations = struct.pack(f"={count}Q", *map(arena.generation, blocks))  # one host: its byte order
        parts = pieces(halves(arena, layer), runs, machine.layout.slab_bytes)
        slab = Slab(
            stream=machine.stream, layer=layer, first=first, count=count,
            checksum=checksum(parts) if machine.checksums else None,
            runs=tuple(runs) if machine.named else (), generations=generations,
        )  # fmt: skip
        num_bytes = 2 * count * machine.layout.slab_bytes
        if machine.named:
            return OutFrame(machine.stream, [memoryview(encode_frame(slab))], num_bytes, slab=slab)
        return OutFrame(machine.stream, [memoryview(encode_frame(slab, num_bytes)), *parts], num_bytes, slab=slab)


class Push(Sending):
    """KvSender over a session: `push` from any thread, the rest on the event loop."""

    def __init__(self, machine: SendStream, arena: KvArena, host: SendingHost) -> None:
        super().__init__(machine, arena)
        self._host = host
        self._loop = asyncio.get_running_loop()
        self._opened_s = self._loop.time()
        self._granted: asyncio.Future[None] = self._loop.create_future()
        self._ended: asyncio.Future[None] = self._loop.create_future()

    def push(self, layer: int, first_block: int, count: int) -> None:
        self.machine.check_range(layer, first_block, count)
        self._host.push_soon(self, layer, first_block, count)

    async def wait_granted(self) -> None:
        """Raises the KvError the offer ended with."""
        await self._granted
        self._raise_failure()

    async def commit(self, trailer: KvTrailer, timeout_s: float) -> SendStats:
        self._host.take_pushes()
        self._raise_failure()
        started_s = self._loop.time()
        why = "the commit was cancelled"
        try:
            self.machine.commit(trailer)
            self._host.make_ready(self)
            async with asyncio.timeout(timeout_s):
                await self._ended
        except TimeoutError:
            why = f"the receiver did not acknowledge within {timeout_s:g} s"
            raise KvTransferFailed(why) from None
        except KvTransferFailed as error:
            why = str(error)
            raise
        finally:
            self.abort(why)
        self._raise_failure()
        now = self._loop.time()
        return SendStats(
            num_bytes=self.machine.sent_bytes, transfer_s=now - self._opened_s, exposed_s=now - started_s
        )  # fmt: skip

    def abort(self, reason: str) -> None:
        self._host.give_up(self, KvTransferFailed(reason))

    def granted(self) -> None:
        if not self._granted.done():
            self._granted.set_result(None)

    def ended(self) -> None:
        for future in (self._granted, self._ended):
            if not future.done():
                future.set_result(None)

    def _raise_failure(self) -> None:
        if self.machine.failure is not None:
            raise self.machine.failure


class Serving(Sending):
    """Answers a fetch: everything is pushed at once, `on_end` is told when the blocks may be unpinned.

    A lease may end before a slow reader has everything: a block that changed hands since is not named any more.
    """

    def __init__(self, machine: SendStream, arena: KvArena, on_end: Callable[[], None]) -> None:
        super().__init__(machine, arena)
        self._on_end = on_end
        self._generations = [arena.generation(block) for block in machine.table.blocks]
        for layer in range(machine.layout.num_layers):
            machine.push(layer, 0, len(machine.table))
        machine.commit(None)

    def slab_frame(self, layer: int, first: int, count: int) -> OutFrame:
        """Raises KvCorrupt when the blocks are somebody else's by now."""
        blocks, stop = self.machine.table.blocks, first + count
        if [self.arena.generation(block) for block in blocks[first:stop]] != self._generations[first:stop]:
            raise KvCorrupt("the lease of a fetch ended before all of it was read, and its blocks have changed hands")
        return super().slab_frame(layer, first, count)

    def ended(self) -> None:
        self._on_end()
