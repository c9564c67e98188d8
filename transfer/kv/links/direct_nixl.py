"""Reading by NIXL's UCX backend, over whatever UCX finds between two machines.

UCX's ports are its own and unauthenticated, so they belong on a network of your own. NIXL's Python serialises its
descriptor lists with pickle: these are never sent, the lists are made here from checked numbers.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
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

NEEDS = "nixl and nixl-cu12"
MAX_PEERS = 256
FIRST_LOOK_S = 20e-6
LONGEST_LOOK_S = 1e-3


class NixlReader:
    """DirectReader. One agent; its calls are short and made one at a time, the transfers run beside each other."""

    name = "nixl"

    def __init__(self, _host: str) -> None:
        self._agent: Any = None
        self._registered: list[tuple[Any, memoryview]] = []
        self._peers: OrderedDict[bytes, str] = OrderedDict()  # metadata -> the peer's name for itself
        self._staging = 0
        self._lock = threading.Lock()

    def start(self, instance_id: str, arena: memoryview | None, staging: memoryview) -> bytes:
        api = import_package("nixl._api", self.name, NEEDS)
        name = f"{instance_id}/{secrets.token_hex(8)}"  # of this life: another must not be taken for it
        try:
            self._agent = api.nixl_agent(name, api.nixl_agent_config(backends=["UCX"]))
            for memory in (staging, arena):
                if memory is not None:
                    region = [(address_of(memory), memory.nbytes, 0, "kv")]
                    self._registered.append((self._agent.register_memory(region, "DRAM"), memory))
            shown = self._registered[-1][0]  # the arena: staging memory is nobody else's business
            metadata = self._agent.get_partial_agent_metadata(shown, True, ["UCX"])
        except Exception as error:  # its errors share no class of their own
            raise ConfigError(f"nixl did not start for {instance_id} ({error!r}); use the backend tcp") from error
        self._staging = address_of(staging)
        return b"" if arena is None else encode_region(Region(metadata, address_of(arena), arena.nbytes))

    def read(self, descriptor: bytes, spans: Sequence[Span]) -> None:
        region = decode_region(descriptor, spans)
        handle = None
        try:
            with self._lock:
                handle, state = self._begin(region, spans)
            look_s = FIRST_LOOK_S
            while state == "PROC":  # also past any deadline: until it ends, it may write
                time.sleep(look_s)
                look_s = min(2 * look_s, LONGEST_LOOK_S)
                with self._lock:
                    state = self._agent.check_xfer_state(handle)
        except Exception as error:  # its errors share no class of their own
            self._forget(region)
            raise KvTransferFailed(f"nixl could not read the peer's KV ({error!r})") from error
        finally:
            if handle is not None:
                with self._lock, contextlib.suppress(Exception):  # it is over; what cannot be freed is only memory
                    self._agent.release_xfer_handle(handle)
        if state != "DONE":
            self._forget(region)
            raise KvTransferFailed(f"nixl could not read the peer's KV ({state}); its log says why")

    def stop(self) -> None:
        with self._lock:
            for registered, _memory in self._registered:
                self._agent.deregister_memory(registered)
            self._agent = None  # ends its threads, so that none reads memory that is gone
            self._registered.clear()
            self._peers.clear()

    def _begin(self, region: Region, spans: Sequence[Span]) -> tuple[Any, str]:
        agent = self._agent
        local = agent.get_xfer_descs([(self._staging + span.local, span.num_bytes, 0) for span in spans], "DRAM")
        remote = agent.get_xfer_descs([(region.address + span.remote, span.num_bytes, 0) for span in spans], "DRAM")
        name = self._peers.get(region.where)
        if name is None:
            name = self._peers[region.where] = agent.add_remote_agent(region.where)
            if len(self._peers) > MAX_PEERS:
                self._peers.popitem(last=False)  # NIXL keeps its connection, which costs little
        self._peers.move_to_end(region.where)
        handle = agent.initialize_xfer("READ", local, remote, name)
        return handle, agent.transfer(handle)

    def _forget(self, region: Region) -> None:
        """The peer is met anew next time."""
        with self._lock:
            name = self._peers.pop(region.where, None)
            if name is not None:
                with contextlib.suppress(Exception):  # it may be gone already
                    self._agent.remove_remote_agent(name)


register(NixlReader.name, NixlReader)
