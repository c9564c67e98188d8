"""One connection of a Bundle: its queue, what it has read and confirms, what it hands on."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from transfer.errors import KvCorrupt, KvError, KvTransferFailed, PhaseplaneError
from transfer.kv.frames import Bye, Frame, Numbered, Probe, Slab, Taken, encode_frame, unpack_frame
from transfer.kv.links.connection import TcpConnection
from transfer.kv.links.sending import OutFrame

if TYPE_CHECKING:
    from transfer.kv.links.bundle import Bundle

CONFIRM_S = 0.01
"""A slab is confirmed at once, as it measures the link; control frames together, this much later at most."""


class Lane:
    """FrameHost of one connection (connection.FrameHost)."""

    def __init__(self, bundle: Bundle, number: int, connection: TcpConnection) -> None:
        self.number, self.connection = number, connection
        self._bundle = bundle
        self._loop = asyncio.get_running_loop()
        self._queue: deque[OutFrame] = deque()
        self._read = self._confirmed = 0
        self._timer: asyncio.TimerHandle | None = None

    def send(self, out: OutFrame) -> None:
        self._queue.append(out)
        self.connection.wake()

    def send_control(self, frame: Numbered | Probe) -> None:
        self.send(OutFrame(0, [memoryview(encode_frame(frame))], number=frame.number))  # of stream 0: never dropped

    def drop(self, stream: int) -> dict[int, None]:
        """As Link.drop. Returns the numbers of slabs that will not be sent."""
        dropped = {out.number: None for out in self._queue if out.slab is not None and out.stream == stream}
        self._queue = deque(out for out in self._queue if out.number not in dropped)
        return dropped | self.connection.drop_numbers(stream)

    # --- FrameHost --------------------------------------------------------------------------------------------------

    def next_frame(self) -> OutFrame | None:
        if not self._queue:
            self._bundle.dispatch()
        return self._queue.popleft() if self._queue else None

    def frame_received(self, frame: Frame) -> None:
        match frame:
            case Taken():
                self._bundle.choice.confirmed(self.number, frame.number, self._loop.time())
                self._bundle.wake()
            case Numbered():
                self._bundle.received(frame, unpack_frame(frame.frame))
                self._took(frame.number, at_once=False)
            case Probe():
                self._took(frame.number, at_once=True)
            case Slab():
                self._bundle.session.frame_received(frame)
                self._took(frame.number, at_once=True)
            case Bye():
                error = (KvCorrupt if frame.corrupt else KvTransferFailed)(f"the peer ended it: {frame.reason}")
                if frame.session:
                    self._bundle.close(error)
                else:
                    self.connection.close(error)

    def slab_opened(self, slab: Slab, payload_bytes: int) -> Sequence[memoryview]:
        return self._bundle.session.slab_opened(slab, payload_bytes, self.number)

    def slab_closed(self, slab: Slab) -> None:
        self._bundle.session.slab_closed(slab, self.number)
        self._took(slab.number, at_once=True)

    def goodbye(self, error: KvError) -> Bye:
        corrupt = isinstance(error, KvCorrupt)
        return Bye(stream=0, reason=str(error), corrupt=corrupt, session=self._bundle.closing)

    def broken(self, error: Exception) -> None:
        """A wrong checksum is this link's fault and harms nobody else; any other nonsense ends the session."""
        if not isinstance(error, KvCorrupt):
            reason = str(error) if isinstance(error, PhaseplaneError) else "the role behind the KV port failed"
            self._bundle.break_off(KvTransferFailed(reason), self)

    def lost(self, error: KvError) -> None:
        self._queue.clear()
        if self._timer is not None:
            self._timer.cancel()
        self._bundle.lane_lost(self, error)

    # --- confirming -------------------------------------------------------------------------------------------------

    def _took(self, number: int, *, at_once: bool) -> None:
        self._read = number
        if at_once:
            self._confirm()
        elif self._timer is None:
            self._timer = self._loop.call_later(CONFIRM_S, self._confirm)

    def _confirm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._read > self._confirmed:
            self._confirmed = self._read
            taken = Taken(stream=0, number=self._read)
            self._queue.appendleft(OutFrame(0, [memoryview(encode_frame(taken))]))
            self.connection.wake()
