"""A DirectReader within this process: it really reads the other arena, and can be held, broken and told to lie."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from kv_helpers import LAYOUT, Pair

from transfer.errors import ConfigError, KvTransferFailed
from transfer.kv.links.direct import Span
from transfer.kv.links.direct_ring import DirectRing, RingLimits
from transfer.kv.links.tcp import TcpKvPort

QUICK_RING = RingLimits(num_slots=2, slot_bytes=256 << 10, read_s=5.0)
_arenas: dict[bytes, memoryview] = {}


class FakeReader:
    """name: two with different names cannot read each other. `open` cleared: reads have written, but do not return."""

    def __init__(self, name: str = "fake") -> None:
        self.name = name
        self.open = threading.Event()
        self.open.set()
        self.failing = self.wrong = self.refuse_start = False
        self.error: Exception = KvTransferFailed("the network card is on fire")
        self.num_reads = self.running = self.most_running = self.num_stops = 0
        self.done: list[Sequence[Span]] = []
        self._lock = threading.Lock()
        self._staging = memoryview(b"")
        self._key = b""

    def start(self, instance_id: str, arena: memoryview | None, staging: memoryview) -> bytes:
        if self.refuse_start:
            raise ConfigError("the backend fake cannot start here")
        self._staging = staging
        self._key = f"{instance_id}/{id(self)}".encode()
        if arena is not None:
            _arenas[self._key] = arena
        return self._key

    def read(self, descriptor: bytes, spans: Sequence[Span]) -> None:
        with self._lock:
            self.num_reads += 1
            self.running += 1
            self.most_running = max(self.running, self.most_running)
        try:
            if self.failing:
                raise self.error
            for span in spans:
                here = self._staging[span.local : span.local + span.num_bytes]
                here[:] = _arenas[descriptor][span.remote : span.remote + span.num_bytes]
                here[0] ^= self.wrong
            assert self.open.wait(20)
        finally:
            with self._lock:
                self.running -= 1
                self.done.append(spans)

    def stop(self) -> None:
        assert self.running == 0
        self.num_stops += 1
        _arenas.pop(self._key, None)
        self._staging = memoryview(b"")


class DirectPair(Pair):
    """A Pair whose ports have a FakeReader each; `reader` is the receiver's for pushes."""

    def __init__(
        self, num_blocks: int = 16, *, via: str = "tcp", names: tuple[str, str] = ("fake", "fake"), **options: Any
    ) -> None:
        self.readers = FakeReader(names[0]), FakeReader(names[1])
        super().__init__(num_blocks, via=via, direct=self.readers[0], **({"ring_limits": QUICK_RING} | options))
        self.rings = self.ring_of(self.prefill), DirectRing(
            self.readers[1], self.target, options.get("ring_limits", QUICK_RING)
        )  # fmt: skip
        self.decode._context.direct = self.rings[1]

    @staticmethod
    def ring_of(port: TcpKvPort) -> DirectRing:
        assert port._context.direct is not None
        return port._context.direct

    @property
    def ring(self) -> DirectRing:
        """The receiver's for pushes."""
        return self.rings[1]

    @property
    def usable(self) -> bool:
        """Whether a new push would be read by the backend."""
        handle = self.rings[0].handle
        return handle is not None and self.ring.usable(handle)

    @property
    def reader(self) -> FakeReader:
        return self.readers[1]

    async def __aexit__(self, *error: object) -> None:
        for reader in self.readers:
            reader.open.set()
        await super().__aexit__(*error)


def num_slabs(num_blocks: int, slot_bytes: int = QUICK_RING.slot_bytes) -> int:
    """Reads that a push of so many blocks needs."""
    per_slab = slot_bytes // (2 * LAYOUT.slab_bytes)
    return LAYOUT.num_layers * -(-num_blocks // per_slab)
