"""Several connections that carry one session: slabs travel on any of them, control frames are put in order again.

What a lost or stuck connection has not confirmed goes over the others (a repeat is harmless: the receiver knows what
it has); the side that opened the session connects it anew after a pause. With the last one the session is lost.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

from transfer.errors import KvError, KvTransferFailed, PhaseplaneError
from transfer.kv.frames import Frame, Numbered, Probe, pack_frame
from transfer.kv.links.choice import LinkChoice
from transfer.kv.links.connection import TcpConnection
from transfer.kv.links.context import PortContext, log
from transfer.kv.links.lane import Lane
from transfer.kv.links.order import InOrder
from transfer.kv.links.sending import OutFrame, SlabName
from transfer.kv.links.session import Session

MAX_LINKS = 16
MAX_SENDS = 4
"""A slab or frame that has been lost with this many links is not the links' fault."""
TOKEN_BYTES = 32


@dataclass(frozen=True, slots=True)
class Item:
    """What a link owes: a control frame with its place in the order, or a slab that can be made again."""

    stream: int
    sequence: int = 0
    frame: Frame | None = None
    slab: SlabName | None = None
    sends: int = 1


class Bundle:
    """Link over several TcpConnections. on_closed: nothing is left of it. connect(bundle, link): join one more, at the
    side that opened the session; it answers with `attach` or `not_attached`. num_links: that it is to have."""

    striped = True

    def __init__(
        self, context: PortContext, on_closed: Callable[[Session], None],
        *, token: bytes = b"", connect: Callable[[Bundle, int], None] | None = None, num_links: int = 0,
    ) -> None:  # fmt: skip
        self._context, self._on_closed, self._connect = context, on_closed, connect
        self._loop = asyncio.get_running_loop()
        self.token = token or secrets.token_bytes(TOKEN_BYTES)
        self.choice: LinkChoice[Item] = LinkChoice(context.link_limits)
        self.closing = False
        self.lanes: dict[int, Lane] = {}  # those that are up
        self._alive: dict[TcpConnection, None] = {}  # those that have not hung up
        self._control_again: deque[Item] = deque()
        self._slabs_again: deque[Item] = deque()
        self._sequence = 0
        self._order = InOrder()
        self._waking = self._dispatching = False
        self._timer: asyncio.TimerHandle | None = None
        self._ticked_s = 0.0
        self._over = False
        self.session = Session(context, self, opener=connect is not None)
        for number in range(num_links):
            self.choice.add(number, self._loop.time())

    # --- Link -------------------------------------------------------------------------------------------------------

    def wake(self) -> None:
        if not (self._waking or self.closing):
            self._waking = True
            self._loop.call_soon(self._dispatch_woken)

    def flush(self) -> None:
        self.dispatch()
        for lane in list(self.lanes.values()):
            lane.connection.flush()

    def divert(self, stream: int, link: int | None = None) -> None:
        for number, lane in self.lanes.items():
            if link is None or link == number:
                lane.connection.divert(stream)

    def drop(self, stream: int) -> None:
        self._slabs_again = deque(item for item in self._slabs_again if item.stream != stream)
        for number, lane in self.lanes.items():
            self.choice.forget(number, lane.drop(stream))

    def close(self, error: KvError) -> None:
        self.break_off(error)
        for connection in list(self._alive):  # also those that only wait for the peer to hang up
            connection.close(error)

    def break_off(self, error: KvError, lane: Lane | None = None) -> None:
        """End the session; `lane` ends itself in a moment, so that the peer hears why."""
        if self.closing:
            return
        self.closing = True
        for other in list(self.lanes.values()):
            if other is not lane:
                other.connection.close(error)
        self._lost(error)

    # --- links come and go ------------------------------------------------------------------------------------------

    def attach(self, connection: TcpConnection, link: int | None = None) -> None:
        """A connection joins, handshake done. link: the one it is, at the opener; the acceptor counts them."""
        now = self._loop.time()
        if self.closing or len(self.lanes) >= MAX_LINKS:
            connection.hang_up()
            return
        if link is None:
            link = max(self.lanes, default=-1) + 1
            self.choice.add(link, now)
        if self.choice.state(link) == "paused":
            self.choice.probe(link)
        self.choice.join(link, now)
        self.lanes[link] = Lane(self, link, connection)
        self._alive[connection] = None
        connection.serve(self.lanes[link])
        self.wake()
        self._tick_soon()

    def not_attached(self, link: int, reason: str) -> None:
        """It could not be connected; it will be tried again."""
        if not self.closing:
            log.info("a KV link could not be joined: %s", reason)
            self.choice.fail(link, self._loop.time())
            self._tick_soon()

    def lane_lost(self, lane: Lane, error: KvError) -> None:
        """A connection ended: what it owes goes over the others."""
        if self.closing:
            return
        del self.lanes[lane.number]
        self.session.link_lost(lane.number)
        items = [owed.item for owed in self.choice.fail(lane.number, self._loop.time())]
        if self._connect is None:
            self.choice.remove(lane.number)
        if not self.lanes:
            self.closing = True
            self._lost(error)
            return
        log.warning("a KV link was lost, %d are left: %s", len(self.lanes), error)
        for item in items:
            self._send_again(item, error)
        self.wake()
        self._tick_soon()

    def hung_up(self, connection: TcpConnection) -> None:
        """A connection's socket is closed."""
        if connection in self._alive:
            del self._alive[connection]
            if self._over and not self._alive:
                self._on_closed(self.session)

    # --- frames in --------------------------------------------------------------------------------------------------

    def received(self, numbered: Numbered, frame: Frame) -> None:
        """A control frame from any link: handed on when its turn comes."""
        for one in self._order.take(numbered.sequence, frame, len(numbered.frame)):
            if self.closing:
                return
            self.session.frame_received(one)

    # --- frames out -------------------------------------------------------------------------------------------------

    def dispatch(self) -> None:
        """Give frames to links until there are none, or the best link has enough to do."""
        self._waking = False
        if self._dispatching:
            return
        self._dispatching = True
        try:
            while not self.closing and self._dispatch_one():
                pass
        finally:
            self._dispatching = False

    def _dispatch_woken(self) -> None:
        try:
            self.dispatch()
        except PhaseplaneError as error:
            log.warning("closing a KV session: %s", error)
            self.close(error if isinstance(error, KvError) else KvTransferFailed(str(error)))

    def _dispatch_one(self) -> bool:
        safest = self.choice.safest()
        if safest is None:
            return False
        if self._control_again:
            self._send_control(safest, self._control_again.popleft())
            return True
        if self.session.has_control:
            return self._send_next(safest)
        size = self._context.limits.slab_bytes
        best = self.choice.best(size)
        if best is None or not self.choice.has_room(best, size):
            return False
        if self._slabs_again:
            item = self._slabs_again.popleft()
            out = self.session.slab_again(item.stream, item.slab) if item.slab is not None else None
            if out is not None:
                self._send_slab(best, out, item.sends)
            return True
        return self._send_next(best)

    def _send_next(self, link: int) -> bool:
        out = self.session.next_frame()
        if out is None:
            return False
        if out.control is not None:
            self._send_control(link, Item(out.stream, self._sequence, out.control))
            self._sequence += 1
        else:
            self._send_slab(link, out, 1)
        return True

    def _send_control(self, link: int, item: Item) -> None:
        assert item.frame is not None
        number = self.choice.next_number(link)
        data = pack_frame(item.frame)
        self.choice.sent(link, number, 0, item, self._loop.time())
        self.lanes[link].send_control(Numbered(stream=0, number=number, sequence=item.sequence, frame=data))
        self._tick_soon()

    def _send_slab(self, link: int, out: OutFrame, sends: int) -> None:
        assert out.slab is not None
        number = self.choice.next_number(link)
        named = out.numbered(number)
        item = Item(out.stream, slab=SlabName(out.slab.layer, out.slab.first, out.slab.count), sends=sends)
        self.choice.sent(link, number, out.kv_bytes, item, self._loop.time())
        self.lanes[link].send(named)
        self._tick_soon()

    def _send_again(self, item: Item, error: KvError) -> None:
        again = replace(item, sends=item.sends + 1)
        if item.slab is not None:
            if item.sends < MAX_SENDS:
                self._slabs_again.append(again)
            else:
                self.session.give_up(item.stream, _after(error))
        elif item.frame is not None:
            if item.sends < MAX_SENDS:
                self._control_again.append(again)
            else:
                self.close(_after(error))

    # --- time -------------------------------------------------------------------------------------------------------

    def _tick_soon(self) -> None:
        if self._timer is None and not self.closing:
            self._ticked_s = self._loop.time()
            self._timer = self._loop.call_later(self._context.link_limits.stuck_s / 8, self._tick)

    def _tick(self) -> None:
        self._timer = None
        now, limits = self._loop.time(), self._context.link_limits
        late = now - self._ticked_s > limits.stuck_s / 2  # our own loop was busy: what came meanwhile is unread
        stuck = [] if late else self.choice.stuck(now)
        for number in stuck:
            self.lanes[number].connection.close(KvTransferFailed(f"a link was silent for {limits.stuck_s:g} s"))
        if self.closing:
            return
        for number in self.choice.to_ask(now):
            probe = self.choice.next_number(number)
            self.choice.sent(number, probe, 0, Item(0), now)
            self.lanes[number].send_control(Probe(stream=0, number=probe))
        if self._connect is not None:
            for number in self.choice.due(now):
                self.choice.probe(number)
                self._connect(self, number)
        if self.choice.any_owed or self.choice.next_due_s() is not None:
            self._tick_soon()

    def _lost(self, error: KvError) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._control_again.clear()
        self._slabs_again.clear()
        self._order.clear()
        self.session.lost(error)
        self._over = True
        if not self._alive:
            self._on_closed(self.session)


def _after(error: KvError) -> KvError:
    """The last link's error, after as many as a frame may be sent over."""
    return type(error)(f"sent {MAX_SENDS} times over links that failed, the last: {error}")
