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
    Bye,
    Commit,
    Credit,
    Fetch,
    Fetched,
    Frame,
    Grant,
    Nack,
    Offer,
    Refuse,
    Slab,
    encode_frame,
    scratch,
)
from transfer.kv.links.context import Link, PortContext, Wire
from transfer.kv.links.inbound import FetchCall, Inbound
from transfer.kv.links.outbound import Outbound
from transfer.kv.links.sending import OutFrame, Push
from transfer.kv.port import KvFetch, KvOffer
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
        self._last_stream = 0
        self._busy_s = asyncio.get_running_loop().time()

    @property
    def failure(self) -> KvError | None:
        """Why the connection was lost; None while it stands."""
        return self._wire.failure

    @property
    def num_streams(self) -> int:
        """Pushes and fetches in progress, both ways."""
        return len(self._outbound) + len(self._inbound)

    # --- what the port asks for ---------------------------------------------------------------------------------

    def open_push(self, peer: KvPeer, offer: KvOffer, blocks: Sequence[int]) -> Push:
        """Send an offer. Raises KvTransferFailed when the connection is lost or has too many streams."""
        return self._outbound.open_push(self._new_stream(), offer, blocks, peer.host_id)

    def open_fetch(self, fetch: KvFetch, blocks: Sequence[int]) -> FetchCall:
        """Ask for leading blocks. Raises KvTransferFailed when the connection is lost or has too many streams."""
        return self._inbound.fetch(self._new_stream(), fetch, blocks)

    def end_fetch(self, call: FetchCall, reason: str) -> None:
        """Stop writing into a fetch's blocks. Idempotent."""
        self._inbound.end_fetch(call, reason)

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
            frame = self._wire.control.popleft()
            return OutFrame(frame.stream, [memoryview(encode_frame(frame))])
        return self._outbound.next_frame()

    def slab_opened(self, slab: Slab, payload_bytes: int) -> Sequence[memoryview]:
        return self._inbound.slab_opened(slab, payload_bytes) if self.failure is None else scratch(payload_bytes)

    def slab_closed(self, slab: Slab) -> None:
        self._inbound.slab_closed(slab)

    def frame_received(self, frame: Frame) -> None:
        if self.failure is not None:
            return
        match frame:
            case Offer() | Fetch():
                self._stream_opened(frame)
            case Fetched():
                self._inbound.fetched(frame)
            case Slab() | Commit() | Abort() | Alive():
                self._inbound.receive(frame)
            case Grant() | Credit() | Ack() | Nack():
                self._outbound.receive(frame)
            case Refuse():
                self._inbound.refused(frame)
                self._outbound.receive(frame)
            case Bye():
                reason = f"the peer ended the connection: {frame.reason}"
                self._wire.link.close(KvCorrupt(reason) if frame.corrupt else KvTransferFailed(reason))

    def lost(self, error: KvError) -> None:
        """The connection is gone: every stream on it fails at once. Idempotent."""
        if self._wire.failure is None:
            self._wire.failure = error
            self._wire.control.clear()
            self._outbound.lost(error)
            self._inbound.lost(error)

    def _stream_opened(self, frame: Offer | Fetch) -> None:
        if self._opener:
            raise ProtocolError(f"the peer sent a {type(frame).__name__} on a connection it did not open")
        if frame.stream <= self._last_stream:
            return  # a repeat; stream ids only grow
        self._last_stream = frame.stream
        try:
            if self.num_streams >= MAX_STREAMS:
                raise Refused(f"{self._context.instance_id} has {MAX_STREAMS} streams open for this peer; try later")
            if isinstance(frame, Offer):
                self._inbound.grant(frame)
            else:
                self._outbound.serve(frame)
        except Refused as refusal:
            self._wire.send(Refuse(stream=frame.stream, reason=str(refusal)))

    def _new_stream(self) -> int:
        if self.failure is not None:
            raise KvTransferFailed(f"the connection is lost: {self.failure}")
        if self.num_streams >= MAX_STREAMS:
            raise KvTransferFailed(f"{MAX_STREAMS} KV streams are open to this peer; try again later")
        self._last_stream += 1
        return self._last_stream
