"""The conversation on one connection between two KV ports: many streams, multiplexed by stream id, over any link.

The side that opened the connection opens the streams on it (pushes and fetches); the other side answers. A link
moves the frames: links/tcp.py over sockets, links/inproc.py in virtual time. It all runs on the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from transfer.errors import KvCorrupt, KvError, KvTransferFailed, ProtocolError, Refused
from transfer.kv.frames import (
    Abort,
    Ack,
    Alive,
    Answer,
    Ask,
    Bye,
    Commit,
    Credit,
    Fetch,
    Fetched,
    Frame,
    Grant,
    Nack,
    Numbered,
    Offer,
    Probe,
    Refuse,
    Slab,
    Taken,
    scratch,
)
from transfer.kv.links.asking import AskCall, Asking
from transfer.kv.links.context import Link, PortContext, Wire
from transfer.kv.links.inbound import FetchCall, Inbound
from transfer.kv.links.outbound import Outbound
from transfer.kv.links.sending import OutFrame, Push, SlabName, control_frame
from transfer.kv.port import KvAsk, KvFetch, KvOffer, OnFetched
from transfer.terms import RequestId
from transfer.wire.messages import KvPeer

MAX_STREAMS = 1024


class Session:
    """Every stream of one connection (frames.FrameSink). opener: this side connected, so it opens the streams."""

    def __init__(self, context: PortContext, link: Link, *, opener: bool) -> None:
        self._context, self._opener = context, opener
        self._wire = Wire(link)
        self._outbound = Outbound(context, self._wire)
        self._inbound = Inbound(context, self._wire)
        self._asking = Asking(context, self._wire)
        self._last_stream = 0
        self._busy_s = asyncio.get_running_loop().time()

    @property
    def failure(self) -> KvError | None:
        """Why the connection was lost; None while it stands."""
        return self._wire.failure

    @property
    def num_streams(self) -> int:
        """Pushes, fetches and questions in progress, both ways."""
        return len(self._outbound) + len(self._inbound) + len(self._asking)

    # --- what the port asks for ---------------------------------------------------------------------------------

    def open_push(self, peer: KvPeer, offer: KvOffer, blocks: Sequence[int]) -> Push:
        """Send an offer. Raises KvTransferFailed when the connection is lost or has too many streams."""
        return self._outbound.open_push(self._new_stream(), offer, blocks, peer.host_id)

    def open_fetch(self, fetch: KvFetch, blocks: Sequence[int], on_layer: OnFetched | None) -> FetchCall:
        """Ask for leading blocks. Raises KvTransferFailed when the connection is lost or has too many streams."""
        return self._inbound.fetch(self._new_stream(), fetch, blocks, on_layer)

    def end_fetch(self, call: FetchCall, reason: str) -> None:
        """Stop writing into a fetch's blocks. Idempotent."""
        self._inbound.end_fetch(call, reason)

    def open_ask(self, ask: KvAsk) -> AskCall:
        """Put a question. Raises KvTransferFailed when the connection is lost or has too many streams."""
        return self._asking.ask(self._new_stream(), ask)

    def end_ask(self, call: AskCall) -> None:
        """Nobody waits for the answer any more. Idempotent."""
        self._asking.end(call)

    def revoke(self, request_id: RequestId, generation: int) -> None:
        """Stop writing into blocks granted to this request up to this generation."""
        self._inbound.revoke(request_id, generation)

    def close(self, error: KvError) -> None:
        """End the connection. Idempotent."""
        self._wire.link.close(error)

    def tick(self, now: float) -> float:
        """Fail what is stalled, keep quiet senders alive. Returns for how long no stream was open, seconds."""
        self._outbound.tick(now)
        self._inbound.tick(now)
        if self.num_streams:
            self._busy_s = now
        return now - self._busy_s

    # --- what the link asks for ---------------------------------------------------------------------------------

    def next_frame(self) -> OutFrame | None:
        """The next frame to write: control frames first, then a slab of each sending stream in turn."""
        if self._wire.control:
            return control_frame(self._wire.control.popleft())
        return self._outbound.next_frame()

    def slab_opened(self, slab: Slab, payload_bytes: int, link: int = 0) -> Sequence[memoryview]:
        """frames.FrameSink; link: on which of several connections, where there are."""
        return self._inbound.slab_opened(slab, payload_bytes, link) if self.failure is None else scratch(payload_bytes)

    def slab_closed(self, slab: Slab, link: int = 0) -> None:
        self._inbound.slab_closed(slab, link)

    def frame_received(self, frame: Frame) -> None:
        if self.failure is not None:
            return
        match frame:
            case Offer() | Fetch() | Ask():
                self._stream_opened(frame)
            case Fetched():
                self._inbound.fetched(frame)
            case Slab() | Commit() | Abort() | Alive():
                self._inbound.receive(frame)
            case Grant() | Credit() | Ack() | Nack():
                self._outbound.receive(frame)
            case Answer():
                self._asking.receive(frame)
            case Refuse():
                self._asking.receive(frame)
                self._inbound.refused(frame)
                self._outbound.receive(frame)
            case Numbered() | Taken() | Probe():
                raise ProtocolError(f"the peer sent a {type(frame).__name__} where one connection carries the session")
            case Bye():
                reason = f"the peer ended the connection: {frame.reason}"
                self._wire.link.close(KvCorrupt(reason) if frame.corrupt else KvTransferFailed(reason))

    def goodbye(self, error: KvError) -> Bye:
        """What the peer is told when the connection ends."""
        return Bye(stream=0, reason=str(error), corrupt=isinstance(error, KvCorrupt))

    def broken(self, error: Exception) -> None:
        """What was received cannot be; the connection will be lost in a moment, and with it the session."""

    # --- where several connections carry it ---------------------------------------------------------------------

    @property
    def has_control(self) -> bool:
        """There is a frame that needs no room."""
        return bool(self._wire.control)

    def slab_again(self, stream: int, name: SlabName) -> OutFrame | None:
        """A slab that was lost with its connection; None when its stream is over."""
        return self._outbound.slab_again(stream, name)

    def give_up(self, stream: int, error: KvError) -> None:
        """Fail one sending stream."""
        self._outbound.give_up_stream(stream, error)

    def link_lost(self, link: int) -> None:
        """What it had begun to receive on this connection will come again on another."""
        self._inbound.link_lost(link)

    def lost(self, error: KvError) -> None:
        """The connection is gone: every stream on it fails at once. Idempotent."""
        if self._wire.failure is None:
            self._wire.failure = error
            self._wire.control.clear()
            self._outbound.lost(error)
            self._inbound.lost(error)
            self._asking.lost(error)

    def _stream_opened(self, frame: Offer | Fetch | Ask) -> None:
        if self._opener:
            raise ProtocolError(f"the peer sent a {type(frame).__name__} on a connection it did not open")
        if frame.stream <= self._last_stream:
            return  # a repeat; stream ids only grow
        self._last_stream = frame.stream
        try:
            if self.num_streams >= MAX_STREAMS:
                raise Refused(f"{self._context.instance_id} has {MAX_STREAMS} streams open for this peer; try later")
            match frame:
                case Offer():
                    self._inbound.grant(frame)
                case Fetch():
                    self._outbound.serve(frame)
                case Ask():
                    self._asking.serve(frame)
        except Refused as refusal:
            self._wire.send(Refuse(stream=frame.stream, reason=str(refusal)))

    def _new_stream(self) -> int:
        if self.failure is not None:
            raise KvTransferFailed(f"the connection is lost: {self.failure}")
        if self.num_streams >= MAX_STREAMS:
            raise KvTransferFailed(f"{MAX_STREAMS} KV streams are open to this peer; try again later")
        self._last_stream += 1
        return self._last_stream
