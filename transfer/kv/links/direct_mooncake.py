"""Reading by Mooncake's transfer engine: over RDMA where there are such cards, else over its own TCP.

Its handshake and data ports are its own: unauthenticated, on every address of the machine. Whoever reaches them can
read and write the registered memories, so they belong on a network of your own.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transfer.errors import ConfigError, KvTransferFailed
from transfer.kv.links.direct import (
    Region,
    Span,
    address_of,
    decode_region,
    encode_region,
    import_package,
    register,
)

NEEDS = "mooncake-transfer-engine-non-cuda, and libibverbs1, libnl-3-200, libnl-route-3-200 of the system"
RDMA_CARDS = Path("/sys/class/infiniband")


class MooncakeReader:
    """DirectReader. host: where peers reach this process."""

    name = "mooncake"

    def __init__(self, host: str) -> None:
        self._host = host
        self._engine: Any = None
        self._memories: list[memoryview] = []
        self._staging = 0

    def start(self, instance_id: str, arena: memoryview | None, staging: memoryview) -> bytes:
        engine = import_package("mooncake.engine", self.name, NEEDS).TransferEngine()
        protocol = "rdma" if RDMA_CARDS.is_dir() and any(RDMA_CARDS.iterdir()) else "tcp"
        if engine.initialize(self._host, "P2PHANDSHAKE", protocol, "") != 0:
            raise ConfigError(
                f"mooncake's transfer engine did not start for {instance_id} on {self._host} over {protocol}; "
                "its log says why; use the backend tcp"
            )
        self._engine = engine
        for memory in (staging, arena):
            if memory is not None:
                self._register(memory)
        self._staging = address_of(staging)
        if arena is None:
            return b""
        where = f"{self._host}:{engine.get_rpc_port()}".encode()
        return encode_region(Region(where, address_of(arena), arena.nbytes))

    def read(self, descriptor: bytes, spans: Sequence[Span]) -> None:
        region = decode_region(descriptor, spans)
        code = self._engine.batch_transfer_sync_read(
            region.where.decode(errors="replace"),
            [self._staging + span.local for span in spans],
            [region.address + span.remote for span in spans],
            [span.num_bytes for span in spans],
        )
        if code != 0:
            raise KvTransferFailed(f"mooncake could not read the peer's KV (code {code}); its log says why")

    def stop(self) -> None:
        for memory in self._memories:
            self._engine.unregister_memory(address_of(memory))
        self._engine = None  # ends its threads, so that none reads memory that is gone
        self._memories.clear()

    def _register(self, memory: memoryview) -> None:
        if self._engine.register_memory(address_of(memory), memory.nbytes) != 0:
            raise ConfigError(f"mooncake's transfer engine did not take {memory.nbytes} bytes of memory to register")
        self._memories.append(memory)


register(MooncakeReader.name, MooncakeReader)
