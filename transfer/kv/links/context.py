"""What all connections of one KV port share, what they need of a link, and whom they refuse at the door."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from transfer.errors import KvError, Refused
from transfer.kv.arena import KvArena
from transfer.kv.frames import Frame
from transfer.kv.links.choice import LinkLimits
from transfer.kv.port import KvDelegate
from transfer.kv.stream import SendLimits
from transfer.terms import OPAQUE, KvLayout

if TYPE_CHECKING:
    from transfer.kv.links.direct_ring import DirectRing

log = logging.getLogger("transfer.kv")


@dataclass(slots=True)
class PortContext:
    """delegate: the role behind the port, replaced when the role changes.

    window_bytes, mapped_window_bytes: KV in flight on one stream over the wire, and in shared memory.
    checksum, shm_checksum: ask senders for one with each slab, over the wire and in shared memory. shm: offer and use
    shared memory. fingerprint: refuse any other; None leaves that to the delegate, which knows tenants' salts.
    """

    instance_id: str
    epoch: int
    arena: KvArena
    host_id: str
    delegate: KvDelegate | None = None
    window_bytes: int = 8 << 20
    mapped_window_bytes: int = 32 << 20
    limits: SendLimits = field(default_factory=SendLimits)
    link_limits: LinkLimits = field(default_factory=LinkLimits)
    checksum: bool = True
    shm: bool = True
    shm_checksum: bool = False
    """Off, as nothing can change the bytes on the way: a processor copies them once from memory to memory, out of an
    arena that was mapped by its unguessable name and has the size its layout says; and a block that changed hands
    meanwhile is found by its generation, which is named before and read again after the copy. What is at rest for long
    (a pool's SSD tier) has checksums of its own."""
    direct: DirectRing | None = None
    """Another project's transfer engine that moves KV where memory is not shared."""
    fingerprint: bytes | None = None
    tasks: dict[asyncio.Future[Any], None] = field(default_factory=dict)
    """What roles were asked to read and what is still at it, on any connection; a port waits for it when it closes."""

    def role(self) -> KvDelegate:
        """Raises Refused while there is none."""
        if self.delegate is None:
            raise Refused(f"{self.instance_id} has no role yet; try again later")
        return self.delegate

    def check_peer(self, target_epoch: int, fingerprint: bytes, layout: KvLayout) -> None:
        """Raises Refused for another life, another memory layout or other weights."""
        self._check_epoch(target_epoch)
        own = self.arena.layout
        if layout != own:
            opaque = layout.rope == own.rope == OPAQUE  # such blocks are known by their size alone
            names = ("block_bytes",) if opaque else KvLayout.__struct_fields__
            pairs = ((name, getattr(layout, name), getattr(own, name)) for name in names)
            different = ", ".join(f"{name} {theirs} against {ours}" for name, theirs, ours in pairs if theirs != ours)
            raise Refused(f"{self.instance_id} has another KV layout: {different}; only equal layouts exchange KV")
        self._check_fingerprint(fingerprint)

    def check_asker(self, target_epoch: int, fingerprint: bytes) -> None:
        """Raises Refused for another life or other weights; 0 and no bytes mean any."""
        if target_epoch:
            self._check_epoch(target_epoch)
        if fingerprint:
            self._check_fingerprint(fingerprint)

    def _check_epoch(self, target_epoch: int) -> None:
        if target_epoch != self.epoch:
            raise Refused(
                f"{self.instance_id} is in epoch {self.epoch}, the peer was told {target_epoch}; place it again"
            )

    def _check_fingerprint(self, fingerprint: bytes) -> None:
        if self.fingerprint is not None and fingerprint != self.fingerprint:
            raise Refused(f"{self.instance_id} has another KV fingerprint: other weights, tokenizer, dtype or tenant")


class Link(Protocol):
    """What moves a session's frames. striped: over several connections, so that slabs may come in any order, also after
    their commit, and more than once; control frames come in the order they were sent."""

    striped: bool

    def wake(self) -> None:
        """There are frames to send: call Session.next_frame until it returns None."""

    def flush(self) -> None:
        """Send what there is to send now rather than at the end of this turn of the loop, if possible."""

    def divert(self, stream: int, link: int | None = None) -> None:
        """Write no further received byte of `stream` into the memory it was meant for; link: on this one only."""

    def drop(self, stream: int) -> None:
        """Read no further byte of `stream`'s memory; frames of it that are not begun need not be sent."""

    def close(self, error: KvError) -> None:
        """End the connection; Session.lost is called before this returns. Idempotent."""


class Wire:
    """A session's outgoing control frames. `send` does nothing once the connection is lost."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.control: deque[Frame] = deque()
        self.failure: KvError | None = None

    def send(self, frame: Frame) -> None:
        if self.failure is None:
            self.control.append(frame)
            self.link.wake()


def guard(callback: Callable[[], None]) -> None:
    """Run one of many callbacks to roles: a broken one must not keep the others from hearing that KV is lost."""
    try:
        callback()
    except Exception:  # supervision boundary: whatever one role raises, the other streams must be told
        log.exception("a role failed while it was told that its KV stream ended")
