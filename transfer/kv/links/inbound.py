"""All streams of one connection that receive: pushes granted here, fetches asked for here. It owns what they write."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from transfer.errors import KvCorrupt, KvError, KvTransferFailed, PhaseplaneError, ProtocolError, Refused
from transfer.kv.arena import ArenaHandle, KvArena, MappedArena
from transfer.kv.block import HASH_BYTES
from transfer.kv.frames import (
    Abort,
    Ack,
    Alive,
    Commit,
    Fetch,
    Fetched,
    Nack,
    Offer,
    Refuse,
    RemoteHandle,
    Slab,
    scratch,
)  # fmt: skip
from transfer.kv.links.context import PortContext, Wire, guard, log
from transfer.kv.links.direct_ring import DirectRead
from transfer.kv.links.receiving import Outcome, Receiving
from transfer.kv.links.shm import Mappings
from transfer.kv.port import KvDelegate, KvFetch, KvKind, KvOffer, KvTrailer, OnFetched
from transfer.kv.stream import RecvStream
from transfer.terms import RequestId

MAX_OFFERED_BLOCKS = 1 << 20


@dataclass(slots=True)
class FetchCall:
    """A fetch this side asked for. result: number of blocks verified, or the KvError it ended with.

    on_layer: see KvPort.fetch; told in order, though layers may be complete in another.
    """

    stream: int
    blocks: Sequence[int]
    result: asyncio.Future[int | KvError]
    heard_s: float
    on_layer: OnFetched | None = None
    num_blocks: int = 0
    _complete: dict[int, None] = field(default_factory=dict)
    _next_layer: int = -1

    def finish(self, result: int | KvError) -> None:
        if not self.result.done():
            self.result.set_result(result)

    def layer_complete(self, layer: int) -> None:
        """Tell of this layer, and of those after it that waited for it."""
        self._complete[layer] = None
        while self._next_layer in self._complete:
            del self._complete[self._next_layer]
            self._next_layer += 1
            if self.on_layer is not None:
                self.on_layer(self._next_layer - 1, self.num_blocks)


class Inbound:
    """Grants, fetches and the way from a slab to a verified block."""

    def __init__(self, context: PortContext, wire: Wire) -> None:
        self._context, self._wire = context, wire
        self._loop = asyncio.get_running_loop()
        self._streams: dict[int, Receiving] = {}
        self._fetches: dict[int, FetchCall] = {}
        self._mappings = Mappings(context)

    def __len__(self) -> int:
        return len(self._streams) + len(self._fetches)

    # --- opening and ending ---------------------------------------------------------------------------------------

    def grant(self, frame: Offer) -> None:
        """Answer a peer's offer. Raises Refused."""
        offer, role = frame.offer, self._context.role()
        self._context.check_peer(offer.target_epoch, offer.fingerprint, frame.layout)
        _check_offer(offer)
        blocks = list(role.kv_offered(offer))
        try:
            _check_blocks(blocks, offer, self._context.arena)
        except Refused as error:
            log.error("%s", error)
            role.kv_failed(offer, str(error))
            raise
        outcome = Outcome(
            commit=partial(_arrived, role, offer),
            fail=lambda error: role.kv_failed(offer, str(error)),
            progress=partial(role.kv_progress, offer),
        )
        handle = frame.arena if frame.host_id == self._context.host_id else None
        self._start(frame.stream, blocks, outcome, offer, handle, frame.remote)

    def fetch(self, stream: int, fetch: KvFetch, blocks: Sequence[int], on_layer: OnFetched | None) -> FetchCall:
        """Ask a pool; the call's future says how many blocks came."""
        context = self._context
        call = FetchCall(stream, blocks, self._loop.create_future(), self._loop.time(), on_layer)
        self._fetches[stream] = call
        self._wire.send(Fetch(stream=stream, fetch=fetch, layout=context.arena.layout, host_id=context.host_id))
        return call

    def fetched(self, frame: Fetched) -> None:
        """The pool says how many blocks it has: grant them."""
        call = self._fetches.get(frame.stream)
        if call is None or frame.stream in self._streams:
            return
        if not 0 <= frame.count <= len(call.blocks):
            raise ProtocolError(f"the pool answered with {frame.count} blocks, asked for were {len(call.blocks)}")
        if frame.count == 0:
            call.finish(0)
            return

        def done(_trailer: KvTrailer | None) -> None:
            call.finish(frame.count)

        outcome = Outcome(commit=done, fail=call.finish, progress=lambda: None, layer=call.layer_complete)
        self._start(frame.stream, call.blocks[: frame.count], outcome, None, frame.arena, frame.remote)
        call.num_blocks = frame.count
        call.layer_complete(-1)

    def refused(self, frame: Refuse) -> None:
        """The pool refused a fetch."""
        call = self._fetches.get(frame.stream)
        if call is not None:
            call.finish(KvTransferFailed(frame.reason))

    def end_fetch(self, call: FetchCall, reason: str) -> None:
        """Write into its blocks no more; tells the pool if it was still sending. Idempotent."""
        if self._fetches.pop(call.stream, None) is None:
            return
        if not call.result.done():
            self._stop(call.stream, "revoke")
            self._wire.send(Nack(stream=call.stream, reason=reason, corrupt=False))

    def revoke(self, request_id: RequestId, generation: int) -> None:
        """Write no more into what was granted to this request up to this generation."""
        for stream, receiving in list(self._streams.items()):
            offer = receiving.offer
            if offer is not None and offer.request_id == request_id and offer.generation <= generation:
                self._stop(stream, "revoke")
                reason = f"the receiver no longer wants generation {offer.generation} of request {request_id}"
                self._wire.send(Nack(stream=stream, reason=reason, corrupt=False))

    def tick(self, now: float) -> None:
        """Fail what waits in vain for its sender."""
        for stream, receiving in list(self._streams.items()):
            if reason := receiving.machine.stalled(now):
                self._fail(stream, KvTransferFailed(reason), tell=True)
        stall_s = self._context.limits.stall_s
        for call in list(self._fetches.values()):
            if call.stream not in self._streams and not call.result.done() and now - call.heard_s >= stall_s:
                self._wire.send(Nack(stream=call.stream, reason="the pool was silent", corrupt=False))
                call.finish(KvTransferFailed(f"the pool was silent for {stall_s:g} s after it was asked"))

    def lost(self, error: KvError) -> None:
        for stream in list(self._streams):
            guard(partial(self._fail, stream, error, tell=False))
        for call in list(self._fetches.values()):
            call.finish(error)
        self._mappings.close()

    # --- frames ---------------------------------------------------------------------------------------------------

    def slab_opened(self, slab: Slab, payload_bytes: int, link: int) -> list[memoryview]:
        """Where its payload goes; that of a stream which is over is thrown away."""
        receiving = self._streams.get(slab.stream)
        if receiving is None:
            return scratch(payload_bytes)
        if self._wire.link.striped:
            for other in receiving.overtaken(slab):
                self._wire.link.divert(slab.stream, other)
        return receiving.open_slab(slab, payload_bytes, self._loop.time(), link)

    def slab_closed(self, slab: Slab, link: int) -> None:
        """Raises KvCorrupt where several connections carry the session: this one is given up, the stream goes on."""
        receiving = self._streams.get(slab.stream)
        if receiving is not None:
            self._land(receiving, receiving.close_slab, slab, link)

    def link_lost(self, link: int) -> None:
        for receiving in self._streams.values():
            receiving.link_lost(link)

    def receive(self, frame: Slab | Commit | Abort | Alive) -> None:
        """The sender of a stream speaks; of a stream which is over it means nothing."""
        receiving = self._streams.get(frame.stream)
        if receiving is None:
            call = self._fetches.get(frame.stream)
            if call is not None:  # the pool still reads
                call.heard_s = self._loop.time()
            return
        match frame:
            case Slab() if receiving.remote is not None:
                self._read(receiving, receiving.remote, frame)
            case Slab():
                self._land(receiving, receiving.take_mapped, frame, 0)
            case Alive():
                receiving.machine.heard(self._loop.time())
            case Abort():
                self._fail(frame.stream, KvTransferFailed(f"the sender gave up: {frame.reason}"), tell=False)
            case Commit():
                self._commit(receiving, frame)

    def _land(self, receiving: Receiving, take: Callable[[Slab, float, int], None], slab: Slab, link: int) -> None:
        now = self._loop.time()
        receiving.machine.heard(now)
        try:
            take(slab, now, link)
        except KvCorrupt as error:
            if self._wire.link.striped and receiving.mapped is None:
                raise  # the sender will send it again, on another
            self._fail(slab.stream, error, tell=True)
            return
        if receiving.commit is not None and not self._must_wait(receiving):
            self._commit(receiving, receiving.commit)
            return
        credit = receiving.machine.credit(now)
        if credit is not None:
            self._wire.send(credit)
            self._wire.link.flush()  # the sender may be waiting for it while we take the next slab

    def _read(self, receiving: Receiving, remote: RemoteHandle, slab: Slab) -> None:
        """Have a slab read out of the sender's memory; it lands when it is here and verified."""
        assert self._context.direct is not None
        if not receiving.machine.expect(slab, 0, self._loop.time()):
            return
        receiving.machine.read_begun(slab)

        def ended(read: DirectRead, result: memoryview | KvError) -> None:
            receiving.reads.remove(read)
            if self._streams.get(slab.stream) is not receiving:  # its blocks may be somebody else's by now
                return
            if isinstance(result, KvError):
                self._fail(slab.stream, result, tell=True)
            else:
                self._land(receiving, partial(receiving.take_read, result), slab, 0)

        def guarded(read: DirectRead, result: memoryview | KvError) -> None:
            try:
                ended(read, result)
            except PhaseplaneError as error:
                log.warning("closing a KV session: %s", error)
                self._wire.link.close(error if isinstance(error, KvError) else KvTransferFailed(str(error)))
            except Exception as error:  # noqa: BLE001 - supervision boundary: as for a frame that a role fails at
                log.exception("a role failed while it was handed KV; its session is closed")
                self._wire.link.close(KvTransferFailed(f"the role behind the KV port failed: {type(error).__name__}"))

        receiving.reads.append(self._context.direct.read(remote, slab, guarded))

    def _commit(self, receiving: Receiving, frame: Commit) -> None:
        if (frame.trailer is None) != (receiving.offer is None):
            raise ProtocolError("the commit of a push has a trailer, that of a fetch has none")
        if self._must_wait(receiving):
            receiving.commit = frame
            return
        self._streams.pop(frame.stream)
        self._wire.link.divert(frame.stream)  # of a repeat that is still arriving
        missing = receiving.machine.commit()
        refusal = missing if missing is not None else receiving.outcome.commit(frame.trailer)
        if refusal is None:
            self._wire.send(Ack(stream=frame.stream))
            return
        self._wire.send(Nack(stream=frame.stream, reason=refusal, corrupt=False))
        if missing is not None:
            receiving.outcome.fail(KvTransferFailed(missing))

    def _must_wait(self, receiving: Receiving) -> bool:
        """Slabs may still be on their way: on other connections, or being read."""
        machine = receiving.machine
        return not machine.complete and (self._wire.link.striped or machine.reading)

    def _start(
        self, stream: int, blocks: Sequence[int], outcome: Outcome, offer: KvOffer | None,
        handle: ArenaHandle | None, remote: RemoteHandle | None,
    ) -> None:  # fmt: skip
        context, now = self._context, self._loop.time()
        mapped: MappedArena | None = self._mappings.get(handle)
        direct = context.direct
        if mapped is not None or remote is None or direct is None or not direct.usable(remote):
            direct = remote = None
        window = context.window_bytes if mapped is None and direct is None else context.mapped_window_bytes
        checksums = direct is not None or (context.checksum if mapped is None else context.shm_checksum)
        machine = RecvStream(
            stream, context.arena.layout, blocks, window=window, stall_s=context.limits.stall_s, now=now,
            checksums=checksums, mapped=mapped is not None, direct=0 if direct is None else direct.slab_bytes,
        )  # fmt: skip
        receiving = Receiving(machine, context.arena, outcome, now, offer=offer, mapped=mapped, remote=remote)
        self._streams[stream] = receiving
        self._wire.send(machine.grant())

    def _stop(self, stream: int, event: str) -> Receiving | None:
        receiving = self._streams.pop(stream, None)
        if receiving is not None:
            self._wire.link.divert(stream)
            receiving.machine.end(event)
            receiving.cancel_reads()
        return receiving

    def _fail(self, stream: int, error: KvError, *, tell: bool) -> None:
        receiving = self._stop(stream, "fail")
        if receiving is None:
            return
        if tell:
            self._wire.send(Nack(stream=stream, reason=str(error), corrupt=isinstance(error, KvCorrupt)))
        receiving.outcome.fail(error)


def _arrived(role: KvDelegate, offer: KvOffer, trailer: KvTrailer | None) -> str | None:
    if trailer is None:
        raise ProtocolError("a push was committed without a trailer")
    try:
        role.kv_arrived(offer, trailer)
    except Refused as refusal:
        return str(refusal)
    return None


def _check_offer(offer: KvOffer) -> None:
    if not 0 <= offer.num_blocks <= MAX_OFFERED_BLOCKS:
        raise Refused(f"an offer may have up to {MAX_OFFERED_BLOCKS} blocks, this one has {offer.num_blocks}")
    named = offer.num_blocks if offer.kind is KvKind.STORE else 0
    if len(offer.hashes) != named or any(len(name) != HASH_BYTES for name in offer.hashes):
        raise Refused(f"a {offer.kind} of {offer.num_blocks} blocks needs {named} hashes of {HASH_BYTES} bytes")


def _check_blocks(blocks: Sequence[int], offer: KvOffer, arena: KvArena) -> None:
    """What our own role granted must be blocks of the arena, each once; only a STORE may skip some."""
    lowest = -1 if offer.kind is KvKind.STORE else 0
    written = [block for block in blocks if block >= 0]
    outside = any(not lowest <= block < arena.num_blocks for block in blocks)
    if len(blocks) != offer.num_blocks or outside or len(written) > len(dict.fromkeys(written)):
        raise Refused(f"the receiver's role granted {len(blocks)} blocks for {offer.num_blocks}, or some not its own")
