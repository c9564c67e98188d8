"""A network inside one process, for virtual time: seeded latency, drops, duplicates, partitions, crashes.

Its endpoints obey endpoint.py and every message really is encoded and decoded. No timer ticks while nothing
happens: silence is computed, not pinged.
"""

from __future__ import annotations

import asyncio
import bisect
import itertools
import math
import random
from dataclasses import dataclass, field
from enum import StrEnum

from transfer.errors import ConfigError, MailboxFull, PeerLost, ProtocolError
from transfer.wire.codec import WIRE, Codec
from transfer.wire.endpoint import QUEUE_SIZE, OnBad, OnMessage, OnPeer, PeerEvent
from transfer.wire.messages import CONTROL, Message


class Fate(StrEnum):
    DELIVERED = "delivered"
    DUPLICATED = "duplicated"
    """Delivered once more than it was sent."""
    DROPPED = "dropped"
    """By Faults.drop."""
    LOST = "lost"
    """Its session ended before it arrived."""
    REFUSED = "refused"
    """It arrived and was not a message."""


@dataclass(frozen=True)
class Delivery:
    """What became of one message, at `time` (seconds, the loop's clock)."""

    time: float
    sender: str
    receiver: str
    tag: str
    fate: Fate


@dataclass
class Faults:
    """What goes wrong; may be changed while the network runs.

    drop, duplicate: probabilities per message. TCP does neither inside a session, so these model worse
    networks than ZeroMQ's and break the endpoint's promise on purpose. The delay is uniform, in seconds.
    reorder: deliver by delay alone; otherwise order per pair is kept, as on one connection.
    """

    drop: float = 0.0
    duplicate: float = 0.0
    min_delay_s: float = 0.0002
    max_delay_s: float = 0.001
    reorder: bool = False


@dataclass(order=True)
class _Item:
    due: float
    order: int
    session: int = field(compare=False)
    tag: str = field(compare=False)
    data: bytes | None = field(compare=False)
    """None: the news that the session is open."""
    duplicate: bool = field(compare=False, default=False)


class _Channel:
    """One direction of one link: items by due time. `held` while partitioned; `opened` by the session's first item."""

    def __init__(self) -> None:
        self.items: list[_Item] = []
        self.opened = 0.0
        self.last_due = 0.0
        self.held = False


class InprocEndpoint:
    """A router or a dealer of an InprocNetwork. Guarantees: see Endpoint; made by the network's factories."""

    def __init__(
        self, network: InprocNetwork, identity: str, on_message: OnMessage, on_peer: OnPeer, on_bad: OnBad | None
    ) -> None:
        self.identity = identity
        self.address = f"inproc://{CONTROL}"
        self._network = network
        self._on_message, self._on_peer, self._on_bad = on_message, on_peer, on_bad
        self.sessions: dict[str, int] = {}
        self.alive = False

    async def start(self) -> None:
        self.alive = True
        self._network.joined(self)

    async def close(self) -> None:
        if self.alive:
            self._network.left(self)

    def send(self, peer: str, message: Message) -> None:
        session = self.sessions.get(peer)
        if session is None or not self.alive:
            raise PeerLost(f"{peer} is not connected, so a {type(message).__name__} was not sent")
        self._network.carry(self.identity, peer, session, message)

    def connected(self, peer: str, session: int) -> None:
        self.lost(peer)
        self.sessions[peer] = session
        self._on_peer(peer, PeerEvent.CONNECTED)

    def lost(self, peer: str, session: int | None = None) -> None:
        """The session (any when None) with `peer` is over. Nothing when it was over already."""
        if peer in self.sessions and session in (None, self.sessions[peer]):
            del self.sessions[peer]
            self._on_peer(peer, PeerEvent.LOST)

    def received(self, peer: str, message: Message) -> None:
        self._on_message(peer, message)

    def bad(self, peer: str, error: ProtocolError) -> None:
        if self._on_bad:
            self._on_bad(peer, error)


class InprocNetwork:
    """One router named CONTROL at a time and any number of dealers. Deterministic for a seed and a program.

    liveness_s: how long either side of a cut link takes to say LOST. A partition that heals sooner only
    delays what was sent. A crashed end is LOST after liveness_s or as soon as its successor connects; what
    it sent before may still arrive. An end that closes is LOST after one delay.
    """

    def __init__(
        self,
        seed: int = 0,
        faults: Faults | None = None,
        *,
        liveness_s: float = 3.0,
        queue_size: int = QUEUE_SIZE,
        codec: Codec = WIRE,
    ) -> None:
        self.faults = faults or Faults()
        self.history: list[Delivery] = []
        self._random = random.Random(seed)
        self._liveness_s, self._queue_size, self._codec = liveness_s, queue_size, codec
        self._ends: dict[str, InprocEndpoint] = {}
        self._channels: dict[tuple[str, str], _Channel] = {}
        self._cuts: dict[frozenset[str], int] = {}
        self._links: dict[str, tuple[int, InprocEndpoint]] = {}
        """By dealer: its newest session and which life of it."""
        self._ids = itertools.count(1)

    def router(self, *, on_message: OnMessage, on_peer: OnPeer, on_bad: OnBad | None = None) -> InprocEndpoint:
        return InprocEndpoint(self, CONTROL, on_message, on_peer, on_bad)

    def dealer(
        self, identity: str, *, on_message: OnMessage, on_peer: OnPeer, on_bad: OnBad | None = None
    ) -> InprocEndpoint:
        if identity == CONTROL:
            raise ConfigError(f"{CONTROL} is the router's name; give the dealer another")
        return InprocEndpoint(self, identity, on_message, on_peer, on_bad)

    def partition(self, a: str, b: str) -> None:
        """Cut the link between two ends, both ways, until heal()."""
        if CONTROL not in (a, b):
            raise ConfigError(f"{a} and {b} share no link; every link has {CONTROL} at one end")
        pair = frozenset((a, b))
        if pair in self._cuts:
            return
        cut = self._cuts[pair] = next(self._ids)
        for one, other in ((a, b), (b, a)):
            self._channel(one, other).held = True
            end = self._ends.get(one)
            if end and other in end.sessions:
                asyncio.get_running_loop().call_later(
                    self._liveness_s, self._cut_noticed, pair, cut, end, other, end.sessions[other]
                )

    def heal(self) -> None:
        """Mend every cut link; what was held goes on its way, ends that had lost each other reconnect."""
        cuts, self._cuts = self._cuts, {}
        for pair in cuts:
            for one, other in itertools.permutations(sorted(pair)):
                channel = self._channel(one, other)
                channel.held = False
                for item in channel.items:
                    item.due = max(item.due, self._now() + self.faults.min_delay_s)
                    channel.last_due = max(channel.last_due, item.due)
                    self._at(item.due, one, other)
            for name in sorted(pair - {CONTROL}):
                self._connect_later(name)

    def crash(self, identity: str) -> None:
        """The end vanishes: no callback of it runs any more, its peers find out after liveness_s."""
        self._vanish(self._ends[identity], self._liveness_s)

    # For the endpoints.

    def joined(self, end: InprocEndpoint) -> None:
        before = self._ends.get(end.identity)
        if before is not None and before.alive and before is not end:
            if end.identity == CONTROL:
                raise ConfigError(f"{end.address} is in use by another router; close or crash that one first")
            before.alive = False
        self._ends[end.identity] = end
        names = tuple(self._ends) if end.identity == CONTROL else (end.identity,)
        for name in names:
            self._connect_later(name)

    def left(self, end: InprocEndpoint) -> None:
        self._vanish(end, self._delay_s())

    def carry(self, sender: str, receiver: str, session: int, message: Message) -> None:
        data, tag = self._codec.encode(message), type(message).__name__
        channel = self._channel(sender, receiver)
        if len(channel.items) >= self._queue_size:
            raise MailboxFull(f"{receiver} reads too slowly: {self._queue_size} messages wait for it; send later")
        if self._random.random() < self.faults.drop:
            self._record(sender, receiver, tag, Fate.DROPPED)
            return
        self._enqueue(sender, receiver, session, tag, data)
        if self._random.random() < self.faults.duplicate:
            self._enqueue(sender, receiver, session, tag, data, duplicate=True)

    # Inside.

    def _enqueue(
        self, sender: str, receiver: str, session: int, tag: str, data: bytes | None, duplicate: bool = False
    ) -> None:
        channel = self._channel(sender, receiver)
        due = self._now() + self._delay_s()
        due = max(due, math.nextafter(channel.opened if self.faults.reorder else channel.last_due, math.inf))
        channel.last_due = max(channel.last_due, due)
        if data is None:
            channel.opened = channel.last_due
        bisect.insort(channel.items, _Item(due, next(self._ids), session, tag, data, duplicate))
        self._at(due, sender, receiver)

    def _at(self, due: float, sender: str, receiver: str) -> None:
        asyncio.get_running_loop().call_at(due, self._deliver_due, sender, receiver, due)

    def _deliver_due(self, sender: str, receiver: str, due: float) -> None:
        channel = self._channel(sender, receiver)  # a loop may call a hair before `due`
        while not channel.held and channel.items and channel.items[0].due <= max(due, self._now()):
            self._deliver(sender, receiver, channel.items.pop(0))

    def _deliver(self, sender: str, receiver: str, item: _Item) -> None:
        end = self._ends.get(receiver)
        if item.data is None:
            if end and end.alive and self._links.get(receiver) == (item.session, end):
                end.connected(sender, item.session)
            return
        if end is None or not end.alive or end.sessions.get(sender) != item.session:
            self._record(sender, receiver, item.tag, Fate.LOST)
            return
        try:
            message = self._codec.decode(item.data)
        except ProtocolError as error:
            self._record(sender, receiver, item.tag, Fate.REFUSED)
            end.bad(sender, error)
            self._drop(sender, receiver, item.session)
            return
        self._record(sender, receiver, item.tag, Fate.DUPLICATED if item.duplicate else Fate.DELIVERED)
        end.received(sender, message)

    def _connect_later(self, name: str) -> None:
        asyncio.get_running_loop().call_later(self._delay_s(), self._connect, name)

    def _connect(self, name: str) -> None:
        dealer, router = self._ends.get(name), self._ends.get(CONTROL)
        if name == CONTROL or dealer is None or router is None or not (dealer.alive and router.alive):
            return
        if frozenset((name, CONTROL)) in self._cuts or self._is_linked(dealer, router):
            return
        session = next(self._ids)
        self._links[name] = (session, dealer)
        dealer.lost(CONTROL)
        router.connected(name, session)
        if router.sessions.get(name) == session:
            self._enqueue(CONTROL, name, session, "", None)

    def _is_linked(self, dealer: InprocEndpoint, router: InprocEndpoint) -> bool:
        """Whether both ends share a session, or the dealer is about to hear of the one the router has."""
        session = router.sessions.get(dealer.identity)
        if session is None or self._links.get(dealer.identity) != (session, dealer):
            return False
        news = (item.session for item in self._channel(CONTROL, dealer.identity).items if item.data is None)
        return dealer.sessions.get(CONTROL) == session or session in news

    def _drop(self, one: str, other: str, session: int) -> None:
        """End a session on both sides, as after traffic that was refused; the dealer then reconnects."""
        for name, peer in ((one, other), (other, one)):
            end = self._ends.get(name)
            if end and end.alive:
                end.lost(peer, session)
            self._connect_later(name)

    def _cut_noticed(self, pair: frozenset[str], cut: int, end: InprocEndpoint, other: str, session: int) -> None:
        if self._cuts.get(pair) == cut and end.alive:
            end.lost(other, session)

    def _vanish(self, end: InprocEndpoint, noticed_after_s: float) -> None:
        end.alive = False
        for other, session in end.sessions.items():
            arrived = math.nextafter(self._channel(end.identity, other).last_due, math.inf)
            due = max(self._now() + noticed_after_s, arrived)  # what it sent before is heard first
            asyncio.get_running_loop().call_at(due, self._gone_noticed, end.identity, other, session)

    def _gone_noticed(self, gone: str, other: str, session: int) -> None:
        end = self._ends.get(other)
        if end and end.alive:
            end.lost(gone, session)

    def _channel(self, sender: str, receiver: str) -> _Channel:
        return self._channels.setdefault((sender, receiver), _Channel())

    def _record(self, sender: str, receiver: str, tag: str, fate: Fate) -> None:
        self.history.append(Delivery(self._now(), sender, receiver, tag, fate))

    def _delay_s(self) -> float:
        return self._random.uniform(self.faults.min_delay_s, self.faults.max_delay_s)

    def _now(self) -> float:
        return asyncio.get_running_loop().time()
