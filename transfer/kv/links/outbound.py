"""All streams of one connection that send: pushes opened here, fetches served here. One slab of each in turn."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Awaitable, Sequence
from functools import partial

from transfer.errors import KvCorrupt, KvError, KvTransferFailed, ProtocolError
from transfer.kv.arena import ArenaHandle
from transfer.kv.frames import Abort, Ack, Alive, Credit, Fetch, Fetched, Grant, Nack, Offer, Refuse, RemoteHandle
from transfer.kv.links.context import PortContext, Wire, guard
from transfer.kv.links.reading import Readings
from transfer.kv.links.sending import OutFrame, Push, Sending, Serving, SlabName
from transfer.kv.port import KvDelegate, KvOffer
from transfer.kv.stream import SendStream


class Outbound:
    """The host of every Sending on one connection (sending.SendingHost)."""

    def __init__(self, context: PortContext, wire: Wire) -> None:
        self._context, self._wire = context, wire
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._streams: dict[int, Sending] = {}
        self._ready: deque[Sending] = deque()
        self._pushed: deque[tuple[Push, int, int, int]] = deque()
        self._waking = False
        self._readings = Readings(context, self._serve, self._refuse)

    def __len__(self) -> int:
        return len(self._streams) + len(self._readings)

    def open_push(self, stream: int, offer: KvOffer, blocks: Sequence[int], peer_host_id: str) -> Push:
        """Send an offer; the push's own futures say how it goes."""
        push = Push(self._machine(stream, offer.first_block, blocks), self._context.arena, self)
        self._streams[stream] = push
        context = self._context
        self._wire.send(
            Offer(
                stream=stream, offer=offer, layout=context.arena.layout, host_id=context.host_id,
                arena=self._handle(peer_host_id), remote=self._remote(),
            )
        )  # fmt: skip
        return push

    def serve(self, frame: Fetch) -> None:
        """Answer a peer's fetch with what the role has. Raises Refused."""
        fetch, role = frame.fetch, self._context.role()
        self._context.check_peer(fetch.target_epoch, fetch.fingerprint, frame.layout)
        found = role.kv_wanted(fetch)
        if isinstance(found, Awaitable):
            self._readings.start(frame, role, found)
        else:
            self._serve(frame, role, found)

    def receive(self, frame: Grant | Credit | Ack | Refuse | Nack) -> None:
        """The receiver of a stream answers. An answer to a stream given up a moment ago means nothing."""
        sending = self._streams.get(frame.stream)
        if sending is None:
            if isinstance(frame, Nack):
                self._readings.cancel(frame.stream, "the asker gave up")
            return
        if isinstance(frame, Grant) and frame.direct and self._remote() is None:
            raise ProtocolError("the receiver wants to read memory that was not offered to be read")
        sending.machine.receive(frame, self._loop.time())
        if sending.machine.over:
            self._wire.link.drop(frame.stream)
            self._settle(sending)
        elif isinstance(frame, Grant):
            sending.granted()
        self.make_ready(sending)

    def next_frame(self) -> OutFrame | None:
        """One frame of the stream whose turn it is; None when no stream has anything it may send."""
        now = self._loop.time()
        while self._ready:
            sending = self._ready.popleft()
            try:
                out = sending.next_frame(now)
            except KvCorrupt as error:
                self.give_up(sending, error)
                continue
            if out is not None:
                self._ready.append(sending)
                return out
            sending.ready = False
        return None

    def slab_again(self, stream: int, name: SlabName) -> OutFrame | None:
        """A slab that was lost with its connection; None when its stream is over: its memory is not read."""
        sending = self._streams.get(stream)
        if sending is None:
            return None
        try:
            return sending.slab_frame(*name)
        except KvCorrupt as error:
            self.give_up(sending, error)
            return None

    def give_up_stream(self, stream: int, error: KvError) -> None:
        """Fail one stream, here and at the peer."""
        sending = self._streams.get(stream)
        if sending is not None:
            self.give_up(sending, error)

    def tick(self, now: float) -> None:
        """Fail what waits in vain; tell receivers that a quiet sender lives."""
        for sending in list(self._streams.values()):
            if reason := sending.machine.stalled(now):
                self.give_up(sending, KvTransferFailed(reason))
            elif sending.machine.alive_due(now):
                self._wire.send(Alive(stream=sending.machine.stream))
        for stream in self._readings.streams:
            self._wire.send(Alive(stream=stream))

    def lost(self, error: KvError) -> None:
        self._ready.clear()
        self._readings.lost()
        for sending in list(self._streams.values()):
            sending.machine.fail(error)
            guard(partial(self._settle, sending))

    # --- what sendings ask for -----------------------------------------------------------------------------------

    def make_ready(self, sending: Sending) -> None:
        if not sending.ready and not sending.machine.over:
            sending.ready = True
            self._ready.append(sending)
            self._wire.link.wake()

    def give_up(self, sending: Sending, error: KvError) -> None:
        if sending.machine.over:
            return
        sending.machine.fail(error)
        self._wire.link.drop(sending.machine.stream)
        self._wire.send(Abort(stream=sending.machine.stream, reason=str(error)))
        self._settle(sending)

    def push_soon(self, push: Push, layer: int, first_block: int, count: int) -> None:
        self._pushed.append((push, layer, first_block, count))
        if self._waking:  # one wake-up takes all that is queued; it clears the flag before it looks
            return
        self._waking = True
        if threading.get_ident() == self._thread:
            self._loop.call_soon(self.take_pushes)
            return
        with contextlib.suppress(RuntimeError):  # the loop was closed under the engine's thread: nobody is left to send
            self._loop.call_soon_threadsafe(self.take_pushes)

    def take_pushes(self) -> None:
        self._waking = False
        while self._pushed:
            push, layer, first_block, count = self._pushed.popleft()
            push.machine.push(layer, first_block, count)
            self.make_ready(push)

    def _serve(self, frame: Fetch, role: KvDelegate, found: Sequence[int]) -> None:
        """Send what the role has found and pinned, until the fetch ends."""
        blocks, served = list(found), partial(role.kv_served, frame.fetch)
        if not blocks or self._wire.failure is not None:
            served()
        else:
            self._streams[frame.stream] = Serving(self._machine(frame.stream, 0, blocks), self._context.arena, served)
        handle = self._handle(frame.host_id)
        self._wire.send(Fetched(stream=frame.stream, count=len(blocks), arena=handle, remote=self._remote()))

    def _refuse(self, stream: int, reason: str) -> None:
        self._wire.send(Refuse(stream=stream, reason=reason))

    def _machine(self, stream: int, first_block: int, blocks: Sequence[int]) -> SendStream:
        context = self._context
        return SendStream(stream, context.arena.layout, first_block, blocks, context.limits, self._loop.time())

    def _handle(self, peer_host_id: str) -> ArenaHandle | None:
        context = self._context
        return context.arena.handle if context.shm and peer_host_id == context.host_id else None

    def _remote(self) -> RemoteHandle | None:
        direct = self._context.direct
        return None if direct is None else direct.handle

    def _settle(self, sending: Sending) -> None:
        if self._streams.pop(sending.machine.stream, None) is not None:
            sending.ended()
