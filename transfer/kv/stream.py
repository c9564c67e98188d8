"""One push or fetch of KV as two state machines, sender's and receiver's. Sans-IO: no sockets, no memory, no clock.

Credit counts KV bytes: a sender never has more than the granted window between itself and what the receiver has
consumed. Every (layer, block) offered travels once; a repeat is harmless, a gap at the commit is refused.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from transfer.errors import IllegalTransition, InvalidValue, KvCorrupt, KvError, KvTransferFailed, ProtocolError
from transfer.kv.frames import MAX_PAYLOAD_BYTES, Ack, Commit, Credit, Frame, Grant, Nack, Refuse, Slab
from transfer.kv.port import KvTrailer
from transfer.kv.table import BlockTable, SlabPlace
from transfer.terms import KvLayout

GENERATION_BYTES = 8
CREDIT_SHARE = 4
"""The receiver returns credit whenever a window's 1/4 was consumed, and a window holds at least 4 blocks."""
CREDITS_PER_STALL = 8
"""On a slow link it returns what was consumed every stall_s / 8, so that slow is not taken for dead."""

SEND_TABLE = {
    ("offered", "grant"): "granted",
    ("offered", "fail"): "failed",
    ("granted", "commit"): "committed",
    ("granted", "fail"): "failed",
    ("committed", "ack"): "done",
    ("committed", "fail"): "failed",
}
RECEIVE_TABLE = {
    ("granted", "commit"): "done",
    ("granted", "fail"): "failed",
    ("granted", "revoke"): "failed",
}


@dataclass(frozen=True, slots=True)
class SendLimits:
    """slab_bytes, mapped_slab_bytes: KV of one slab at most, over the wire and in shared memory (one block always may).

    Over the wire a slab should fit in a core's cache; a mapped one only costs its receiver's loop the copy (half a
    millisecond), and few large ones are a fifth faster than many small ones.
    stall_s: see SendStream.stalled.
    """

    slab_bytes: int = 512 << 10
    mapped_slab_bytes: int = 8 << 20
    stall_s: float = 10.0


class SendStream:
    """The sending half. The driver asks `next_slab` and `next_commit` whenever it can write and reports what it hears.

    blocks: the sender's block ids, one for each offered block. now: seconds on any monotonic clock.
    """

    def __init__(
        self, stream: int, layout: KvLayout, first_block: int, blocks: Sequence[int], limits: SendLimits, now: float
    ) -> None:
        self.stream, self.layout, self.first_block = stream, layout, first_block
        self.table = BlockTable(blocks)
        self.state = "offered"
        self.history: tuple[str, ...] = ()
        self.failure: KvError | None = None
        self.sent_bytes = self.allowed_bytes = self.window = 0
        self.checksums = True
        self.mapped = False
        self.direct = 0
        """Bytes of a slab that the receiver reads by itself at most; 0: it does not."""
        self._limits = limits
        self._block_bytes = 2 * layout.slab_bytes
        self._skip = bytearray(len(self.table))  # 1: the receiver does not want it
        self._queue: deque[tuple[int, int, int]] = deque()  # layer, first index, count
        self._pushed = bytearray(layout.num_layers * len(self.table))
        self._trailer: KvTrailer | None = None
        self._commit_wanted = False
        self._waiting_s = self._spoke_s = now

    @property
    def over(self) -> bool:
        return self.state in ("done", "failed")

    @property
    def named(self) -> bool:
        """Slabs have no payload: the receiver takes their bytes out of the sender's memory."""
        return self.mapped or self.direct > 0

    def push(self, layer: int, first_block: int, count: int) -> None:
        """Queue blocks from request block index `first_block`; what was queued before is left out."""
        self.check_range(layer, first_block, count)
        if self.over:
            return
        if self._commit_wanted:
            raise IllegalTransition(f"KV stream {self.stream}", "committing", "push", self.history)
        base = layer * len(self.table)
        index = first_block - self.first_block
        end = index + count
        while index < end:
            if self._pushed[base + index]:
                index += 1
                continue
            pushed = self._pushed.find(1, base + index, base + end)
            stop = end if pushed < 0 else pushed - base
            self._enqueue(layer, index, stop - index)
            self._pushed[base + index : base + stop] = b"\1" * (stop - index)
            index = stop

    def check_range(self, layer: int, first_block: int, count: int) -> None:
        """Raises InvalidValue when `count` blocks from `first_block` of `layer` were not offered."""
        first = first_block - self.first_block
        if not (0 <= layer < self.layout.num_layers and first >= 0 and count >= 0 and first + count <= len(self.table)):
            raise InvalidValue(
                f"blocks {first_block}..{first_block + count} of layer {layer} were not offered; the offer has blocks "
                f"{self.first_block}..{self.first_block + len(self.table)} of {self.layout.num_layers} layers"
            )

    def commit(self, trailer: KvTrailer | None) -> None:
        """Send the trailer once all is sent. Raises KvTransferFailed when a block offered was never pushed."""
        missing = self._pushed.find(0)
        if missing >= 0:
            layer, index = divmod(missing, len(self.table))
            raise KvTransferFailed(
                f"block {self.first_block + index} of layer {layer} was offered but never pushed; the push is given up"
            )
        self._trailer, self._commit_wanted = trailer, True

    def next_slab(self, now: float) -> tuple[int, int, int] | None:
        """(layer, first offered index, count) to send now, or None: nothing queued, or no credit for it.

        The credit counts as spent; `table.runs` says where the blocks are.
        """
        if self.state != "granted":
            return None
        slab_bytes = self.direct or (self._limits.mapped_slab_bytes if self.mapped else self._limits.slab_bytes)
        most = min(slab_bytes, MAX_PAYLOAD_BYTES) // self._block_bytes or 1
        most = min(most, (self.allowed_bytes - self.sent_bytes) // self._block_bytes)
        while self._queue and most > 0:
            layer, first, count = self._queue.popleft()
            skipped = bool(self._skip[first])
            change = self._skip.find(not skipped, first, first + count)
            taken = (change if change >= 0 else first + count) - first
            if not skipped:
                taken = min(taken, most)
            if count > taken:
                self._queue.appendleft((layer, first + taken, count - taken))
            if not skipped:
                self.sent_bytes += taken * self._block_bytes
                self._waiting_s = self._spoke_s = now
                return layer, first, taken
        return None

    def next_commit(self, now: float) -> Commit | None:
        """The commit frame, once, when everything before it was sent."""
        if self.state != "granted" or not self._commit_wanted or self._queue:
            return None
        self._move("commit")
        self._waiting_s = now
        return Commit(stream=self.stream, trailer=self._trailer)

    def receive(self, frame: Frame, now: float) -> None:
        """A frame from the receiver. A repeated or late one changes nothing. Raises ProtocolError on nonsense."""
        self._waiting_s = now
        match frame:
            case Grant() if self.state == "offered":
                self._granted(frame)
            case Credit() if self.state == "granted":
                if frame.allowed > self.sent_bytes + self.window:
                    raise ProtocolError(f"credit up to {frame.allowed} bytes exceeds the window of {self.window}")
                self.allowed_bytes = max(self.allowed_bytes, frame.allowed)
            case Ack() if self.state == "committed":
                self._move("ack")
            case Ack() if self.state != "done":
                raise ProtocolError("the receiver acknowledged KV before its commit was sent")
            case Refuse():
                self.fail(KvTransferFailed(frame.reason))
            case Nack():
                self.fail((KvCorrupt if frame.corrupt else KvTransferFailed)(frame.reason))

    def fail(self, error: KvError) -> None:
        """End the stream, unless it is over; the source blocks are not named again."""
        if self.over:
            return
        self._move("fail")
        self.failure = error
        self._queue.clear()

    def stalled(self, now: float) -> str | None:
        """A sentence when the receiver owes an answer or credit and was silent for stall_s."""
        waiting = self.state in ("offered", "committed") or (self.state == "granted" and self._starved())
        if not waiting:
            self._waiting_s = now
        if now - self._waiting_s < self._limits.stall_s:
            return None
        return f"the receiver was silent for {self._limits.stall_s:g} s while {self.state}; its instance may be stuck"

    def alive_due(self, now: float) -> bool:
        """True when the receiver should be told that we live: granted, nothing said for stall_s / 4."""
        if self.state != "granted" or now - self._spoke_s < self._limits.stall_s / 4:
            return False
        self._spoke_s = now
        return True

    def _granted(self, grant: Grant) -> None:
        if grant.window < self._block_bytes and len(self.table):
            raise ProtocolError(f"a window of {grant.window} bytes cannot hold one block of {self._block_bytes}")
        if grant.direct and (grant.mapped or not grant.checksums or grant.direct < self._block_bytes):
            raise ProtocolError(
                f"the receiver wants to read slabs of {grant.direct} bytes, mapped or without checksums"
            )
        self._move("grant")
        for index in grant.skip:
            if not 0 <= index < len(self.table):
                raise ProtocolError(f"the receiver does not want block {index} of {len(self.table)} offered")
            self._skip[index] = 1
        self.window = self.allowed_bytes = grant.window
        self.checksums, self.mapped, self.direct = grant.checksums, grant.mapped, grant.direct

    def _starved(self) -> bool:
        return bool(self._queue) and self.allowed_bytes - self.sent_bytes < self._block_bytes

    def _enqueue(self, layer: int, first: int, count: int) -> None:
        if self._queue:
            last_layer, last_first, last_count = self._queue[-1]
            if last_layer == layer and last_first + last_count == first:
                self._queue[-1] = (layer, last_first, last_count + count)
                return
        self._queue.append((layer, first, count))

    def _move(self, event: str) -> None:
        self.state, self.history = _move(SEND_TABLE, f"KV stream {self.stream}", self.state, event, self.history)


class RecvStream:
    """The receiving half: which (layer, block) is here, where the next slab goes, what to answer.

    blocks: own block ids, one for each offered block; -1 is not wanted. window: bytes granted, raised to 4 blocks.
    mapped, direct: as in Grant.
    """

    def __init__(
        self, stream: int, layout: KvLayout, blocks: Sequence[int], *,
        window: int, stall_s: float, now: float, checksums: bool = True, mapped: bool = False, direct: int = 0,
    ) -> None:  # fmt: skip
        self.stream, self.layout = stream, layout
        self.table = BlockTable(blocks)
        self.checksums, self.mapped, self.direct = checksums, mapped, direct
        self.state = "granted"
        self.history: tuple[str, ...] = ()
        self._block_bytes = 2 * layout.slab_bytes
        self.window = max(window, CREDIT_SHARE * self._block_bytes)
        self.received_bytes = 0
        self._returned_bytes = 0
        self._stall_s, self._heard_s, self._credited_s = stall_s, now, now
        self._reading: dict[SlabPlace, int] = {}  # -> bytes
        here = bytes(block < 0 for block in blocks)
        self._here = bytearray(here * layout.num_layers)
        self._missing = [here.count(0)] * layout.num_layers

    @property
    def over(self) -> bool:
        return self.state != "granted"

    @property
    def complete(self) -> bool:
        """Everything offered and wanted is here."""
        return not any(self._missing)

    @property
    def reading(self) -> bool:
        """Some slab was named and its bytes are still being read."""
        return bool(self._reading)

    @property
    def wanted(self) -> list[int]:
        """Own block ids that are written, in offered order: what one layer's commit_write takes."""
        return [block for block in self.table.blocks if block >= 0]

    def grant(self) -> Grant:
        """The answer that lets the sender start."""
        skip = tuple(index for index, block in enumerate(self.table.blocks) if block < 0)
        return Grant(
            stream=self.stream, window=self.window, skip=skip, mapped=self.mapped, checksums=self.checksums,
            direct=self.direct,
        )  # fmt: skip

    def expect(self, slab: Slab, payload_bytes: int, now: float) -> bool:
        """Whether a slab is new: then it goes to `table.runs(slab.first, slab.count)`; a repeat goes nowhere.

        Raises ProtocolError when it cannot be of this stream, or is beyond the credit.
        """
        self._heard_s = now
        self._check(slab, payload_bytes)
        start = slab.layer * len(self.table) + slab.first
        num_here = self._here.count(1, start, start + slab.count)
        if self.over or num_here == slab.count or _place(slab) in self._reading:
            return False
        if num_here:
            raise ProtocolError(
                f"the sender sent {num_here} of {slab.count} blocks of layer {slab.layer} unasked or twice"
            )
        owned_bytes = self.received_bytes + sum(self._reading.values())
        if owned_bytes + slab.count * self._block_bytes > self._returned_bytes + self.window:
            raise ProtocolError(f"the sender sent more than its window of {self.window} bytes allows")
        return True

    def read_begun(self, slab: Slab) -> None:
        """A new slab's bytes are being read: until `landed`, it is not asked for again."""
        stop = slab.first + slab.count
        if any(at.layer == slab.layer and at.first < stop and slab.first < at.stop for at in self._reading):
            raise ProtocolError(f"the sender named blocks {slab.first}..{stop} of layer {slab.layer} twice")
        self._reading[_place(slab)] = slab.count * self._block_bytes

    def landed(self, slab: Slab) -> bool:
        """A new slab is in place and verified. True when it was the last of its layer."""
        self._reading.pop(_place(slab), None)
        start = slab.layer * len(self.table) + slab.first
        self._here[start : start + slab.count] = b"\1" * slab.count
        self.received_bytes += slab.count * self._block_bytes
        self._missing[slab.layer] -= slab.count
        return self._missing[slab.layer] == 0

    def credit(self, now: float) -> Credit | None:
        """The credit to return after a slab, when enough was consumed, or long enough ago, to be worth a frame."""
        consumed = self.received_bytes - self._returned_bytes
        long_ago = now - self._credited_s >= self._stall_s / CREDITS_PER_STALL
        if self.over or not consumed or not (consumed >= self.window // CREDIT_SHARE or long_ago):
            return None
        self._returned_bytes, self._credited_s = self.received_bytes, now
        return Credit(stream=self.stream, allowed=self.received_bytes + self.window)

    def commit(self) -> str | None:
        """The sender says that was all. None: it is, acknowledge it. Else a sentence, and the stream has failed."""
        num_missing = self._here.count(0)
        if not num_missing:
            self._move("commit")
            return None
        layer, index = divmod(self._here.find(0), len(self.table))
        self._move("fail")
        return f"{num_missing} slabs are missing at the commit, the first is offered block {index} of layer {layer}"

    def end(self, event: str) -> None:
        """`fail` or `revoke`: nothing is written from now on. Idempotent."""
        if not self.over:
            self._move(event)

    def heard(self, now: float) -> None:
        """The sender said something else about this stream: it lives."""
        self._heard_s = now

    def stalled(self, now: float) -> str | None:
        """A sentence when the sender was silent for stall_s; reads have deadlines of their own."""
        if self._reading:
            self._heard_s = now
        if self.over or now - self._heard_s < self._stall_s:
            return None
        return f"the sender was silent for {self._stall_s:g} s with {self._here.count(0)} slabs missing"

    def _check(self, slab: Slab, payload_bytes: int) -> None:
        in_range = 0 <= slab.layer < self.layout.num_layers and slab.first >= 0 and slab.count > 0
        if not in_range or slab.first + slab.count > len(self.table):
            raise ProtocolError(
                f"the sender sent blocks {slab.first}..{slab.first + slab.count} of layer {slab.layer}; granted were "
                f"{len(self.table)} blocks of {self.layout.num_layers} layers"
            )
        named = self.mapped or self.direct > 0
        expected = 0 if named else slab.count * self._block_bytes
        if payload_bytes != expected:
            raise ProtocolError(
                f"{slab.count} blocks need a payload of {expected} bytes, the sender sent {payload_bytes}"
            )
        if named and len(slab.generations) != slab.count * GENERATION_BYTES:
            raise ProtocolError(f"a named slab of {slab.count} blocks has {len(slab.generations)} generation bytes")
        if self.direct and slab.count * self._block_bytes > self.direct:
            raise ProtocolError(
                f"the sender named {slab.count} blocks at once; {self.direct} bytes may be read at once"
            )
        if (slab.checksum is None) == self.checksums:
            raise ProtocolError(f"checksums are {'on' if self.checksums else 'off'}, the sender's slab says otherwise")

    def _move(self, event: str) -> None:
        self.state, self.history = _move(RECEIVE_TABLE, f"KV stream {self.stream}", self.state, event, self.history)


def _place(slab: Slab) -> SlabPlace:
    return SlabPlace(slab.layer, slab.first, slab.first + slab.count)


def _move(
    table: dict[tuple[str, str], str], subject: str, state: str, event: str, history: tuple[str, ...]
) -> tuple[str, tuple[str, ...]]:
    try:
        return table[state, event], (*history, f"{state} {event}")
    except KeyError:
        raise IllegalTransition(subject, state, event, history) from None
