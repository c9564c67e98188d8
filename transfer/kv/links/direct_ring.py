"""Staging memory in a ring of slots, and the threads that read into it: a backend never writes into a KV block.

A slab is read into a slot, summed there, and handed out on the event loop, where whoever asked may have gone meanwhile.
So a read that is in flight at a revoke can do no harm, and blocks that the sender reused are found by their checksum.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import mmap
import queue
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from transfer.errors import KvCorrupt, KvError, KvTransferFailed, ProtocolError
from transfer.kv.arena import KvArena
from transfer.kv.frames import MAX_DESCRIPTOR_BYTES, RemoteHandle, Slab
from transfer.kv.links.direct import DirectReader, Span, whole_arena
from transfer.kv.links.memory import checksum
from transfer.kv.links.shm import runs_inside
from transfer.terms import KvLayout

log = logging.getLogger("transfer.kv")

MAX_FAILURES = 3
"""In a row; then this peer's KV comes over TCP."""
MAX_PEERS = 1024
"""Remembered for their failures."""
STOP_S = 3.0

Ended = Callable[["DirectRead", memoryview | KvError], None]


@dataclass(frozen=True, slots=True)
class RingLimits:
    """num_slots: reads at once, each in a thread. slot_bytes: of a slab at most (one block always fits).
    read_s: from the moment a read is asked for to its end."""

    num_slots: int = 2
    slot_bytes: int = 4 << 20
    read_s: float = 5.0


@dataclass(slots=True)
class _Peer:
    """failures: in a row. overdue: reads that were given up and have not ended."""

    failures: int = 0
    overdue: int = 0


@dataclass(slots=True, eq=False)
class DirectRead:
    """One slab on its way into staging memory."""

    remote: RemoteHandle
    slab: Slab
    peer: _Peer
    timer: asyncio.TimerHandle | None
    ended: Ended | None
    running: bool = False
    overdue: bool = False

    def cancel(self) -> None:
        """Nobody waits for it any more: `ended` is not called. Idempotent."""
        self.ended = None
        if not self.running and self.timer is not None:
            self.timer.cancel()

    def end(self, result: memoryview | KvError) -> None:
        ended, self.ended = self.ended, None
        if ended is not None:
            ended(self, result)


class DirectRing:
    """Reads for one port. `start` before anything else; all on the event loop but the reader's calls."""

    def __init__(self, reader: DirectReader, arena: KvArena, limits: RingLimits) -> None:
        self._reader, self._arena, self._limits = reader, arena, limits
        self.slab_bytes = max(limits.slot_bytes, 2 * arena.layout.slab_bytes)
        self.handle: RemoteHandle | None = None
        """How peers read this port's arena; None before the start, and for an arena that cannot be read so."""
        self._staging = memoryview(mmap.mmap(-1, limits.num_slots * self.slab_bytes))
        self._slots: list[_Slot] = []
        self._idle: deque[_Slot] = deque()
        self._queue: deque[DirectRead] = deque()
        self._running: dict[DirectRead, None] = {}
        self._peers: OrderedDict[bytes, _Peer] = OrderedDict()
        self._started = self._closed = False

    async def start(self, instance_id: str) -> None:
        """Start the backend and register both memories. Raises ConfigError with what is missing."""
        self._loop = asyncio.get_running_loop()
        whole = whole_arena(self._arena)
        descriptor = await asyncio.to_thread(self._reader.start, instance_id, whole, self._staging)
        self._started = True
        if whole is None or len(descriptor) > MAX_DESCRIPTOR_BYTES:
            log.warning("peers cannot read this arena by %s, they get its KV over TCP", self._reader.name)
        else:
            layout, count = self._arena.layout, self._arena.num_blocks
            self.handle = RemoteHandle(
                backend=self._reader.name, descriptor=descriptor, layout=layout, num_blocks=count
            )  # fmt: skip
        self._slots = [
            _Slot(number * self.slab_bytes, self._staging[number * self.slab_bytes :][: self.slab_bytes], self)
            for number in range(self._limits.num_slots)
        ]
        self._idle.extend(self._slots)

    def usable(self, remote: RemoteHandle) -> bool:
        """Whether a new stream may read this peer's memory: same backend and layout, and it did well so far."""
        if self._closed or not self._started or remote.backend != self._reader.name:
            return False
        peer = self._peers.get(remote.descriptor)
        well = peer is None or (peer.failures < MAX_FAILURES and not peer.overdue)
        stuck = sum(read.overdue for read in self._running)
        return well and stuck < len(self._slots) and remote.layout == self._arena.layout

    def read(self, remote: RemoteHandle, slab: Slab, ended: Ended) -> DirectRead:
        """Read the runs a slab names. ended(read, result): soon, unless cancelled: its bytes in staging, verified, for
        as long as the call lasts; or why not. Raises ProtocolError for runs outside the sender's arena."""
        if not runs_inside(slab, remote.num_blocks):
            raise ProtocolError(f"the sender named blocks {slab.runs} for {slab.count}; they are not in its arena")
        read = DirectRead(remote, slab, self._peer(remote), None, ended)
        read.timer = self._loop.call_later(self._limits.read_s, self._late, read)
        self._queue.append(read)
        self._loop.call_soon(self._start_reads)
        return read

    async def close(self) -> None:
        """Wait for what is being read, then stop the backend. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._queue.clear()
        if not self._started:
            return
        end = self._loop.time() + STOP_S
        while self._running and self._loop.time() < end:  # noqa: ASYNC110  (threads tell, one by one)
            await asyncio.sleep(0.01)
        for slot in self._slots:
            slot.stop()
        if self._running:
            log.warning("%d reads by %s hang; its memory is kept until this process ends", len(self._running),
                        self._reader.name)  # fmt: skip
            _kept.append(self)
            return
        await asyncio.to_thread(self._reader.stop)

    def _start_reads(self) -> None:
        while self._idle and self._queue:
            read = self._queue.popleft()
            if read.ended is None:
                continue
            if read.peer.overdue:  # it must not take one slot after the other
                self._over(read, KvTransferFailed(f"the peer's memory cannot be read by {self._reader.name} just now"))
                continue
            read.running = True
            self._running[read] = None
            self._idle.popleft().run(read)

    def _late(self, read: DirectRead) -> None:
        """Its deadline has passed. A slot stays taken until the backend is done with it."""
        if read.running:
            read.overdue = True
            read.peer.overdue += 1
            self._failed(read)
        self._over(
            read, KvTransferFailed(f"{self._reader.name} did not read the KV within {self._limits.read_s:g} s")
        )  # fmt: skip

    def read_by(self, slot: _Slot) -> Callable[[DirectRead], None]:
        """In the slot's thread: read, sum, and tell the loop."""

        def work(read: DirectRead) -> None:
            result: int | KvError
            try:
                spans = slab_spans(read.slab, read.remote.layout, read.remote.num_blocks, slot.offset)
                self._reader.read(read.remote.descriptor, spans)
                result = checksum([slot.view[: sum(span.num_bytes for span in spans)]])
            except KvError as error:
                result = error
            except Exception as error:  # supervision boundary: a foreign library's call in a thread
                log.exception("a read by %s failed", self._reader.name)
                result = KvTransferFailed(f"the KV backend {self._reader.name} failed: {type(error).__name__}")
            with contextlib.suppress(RuntimeError):  # the loop was closed: nobody is left to be told
                self._loop.call_soon_threadsafe(self._finished, slot, read, result)

        return work

    def _finished(self, slot: _Slot, read: DirectRead, result: int | KvError) -> None:
        del self._running[read]
        read.peer.overdue -= read.overdue
        if read.timer is not None:
            read.timer.cancel()
        slab = read.slab
        if isinstance(result, int) and result != slab.checksum:
            result = KvCorrupt(
                f"layer {slab.layer} of blocks {slab.first}..{slab.first + slab.count} does not match its checksum, "
                f"read by {self._reader.name}; the sender's blocks may have changed hands"
            )
        if isinstance(result, int):
            read.peer.failures = 0 if not read.overdue else read.peer.failures
            read.end(slot.view[: slab.count * 2 * read.remote.layout.slab_bytes])
        else:
            if read.ended is not None:  # a stream that is over proves nothing
                self._failed(read)
            read.end(result)
        self._idle.append(slot)
        self._start_reads()

    def _over(self, read: DirectRead, error: KvError) -> None:
        if read.timer is not None:
            read.timer.cancel()
        read.end(error)

    def _failed(self, read: DirectRead) -> None:
        read.peer.failures += 1
        if read.peer.failures == MAX_FAILURES:
            log.warning("%d reads by %s failed in a row; KV of this peer comes over TCP from now on", MAX_FAILURES,
                        self._reader.name)  # fmt: skip

    def _peer(self, remote: RemoteHandle) -> _Peer:
        peer = self._peers.setdefault(remote.descriptor, _Peer())
        self._peers.move_to_end(remote.descriptor)
        if len(self._peers) > MAX_PEERS:
            self._peers.popitem(last=False)
        return peer


class _Slot:
    """A piece of staging memory and its thread: a daemon, as a read that hangs must not keep the process alive."""

    def __init__(self, offset: int, view: memoryview, ring: DirectRing) -> None:
        self.offset, self.view = offset, view
        self._work = ring.read_by(self)
        self._jobs: queue.SimpleQueue[DirectRead | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def run(self, read: DirectRead) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="kv-read", daemon=True)
            self._thread.start()
        self._jobs.put(read)

    def stop(self) -> None:
        self._jobs.put(None)

    def _serve(self) -> None:
        while (read := self._jobs.get()) is not None:
            self._work(read)


_kept: list[DirectRing] = []
"""Closed while a backend still wrote into their memory."""


def slab_spans(slab: Slab, layout: KvLayout, num_blocks: int, local: int) -> Sequence[Span]:
    """Where a slab's runs are in the sender's arena, K of all and then V of all, to be put one after another."""
    spans, size = [], layout.slab_bytes
    for half in (2 * slab.layer, 2 * slab.layer + 1):
        for first, count in slab.runs:
            spans.append(Span((half * num_blocks + first) * size, local, count * size))
            local += count * size
    return spans
