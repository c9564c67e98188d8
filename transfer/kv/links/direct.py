"""Other projects' transfer engines as movers of KV: what one must do (DirectReader), and which there are, by name.

A receiver reads spans of the sender's registered arena into registered staging memory of its own; what it does with
them is direct_ring.py's business. A backend's package is imported only when its reader starts.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, NamedTuple, Protocol

import msgspec
import numpy as np

from transfer.errors import ConfigError, KvTransferFailed
from transfer.kv.arena import KvArena

BACKENDS = ("mooncake", "nixl")


class Span(NamedTuple):
    """`num_bytes` at `remote` bytes into the sender's arena go to `local` bytes into this side's staging memory."""

    remote: int
    local: int
    num_bytes: int


class DirectReader(Protocol):
    """One backend, for one port. `read` may run in several threads at once; the others run alone."""

    name: str

    def start(self, instance_id: str, arena: memoryview | None, staging: memoryview) -> bytes:
        """Start the backend; let peers read `arena`, and this side read into `staging`. Returns what peers need to
        read `arena` (at most frames.MAX_DESCRIPTOR_BYTES). Raises ConfigError when that cannot be."""

    def read(self, descriptor: bytes, spans: Sequence[Span]) -> None:
        """Read the spans; blocks until the backend writes to staging no more, whether it did well or not.
        Raises KvTransferFailed."""

    def stop(self) -> None:
        """Let go of both memories. Not called while a read runs."""


Maker = Callable[[str], DirectReader]
_makers: dict[str, Maker] = {}


def register(name: str, make: Maker) -> None:
    """Make a backend known; make(host): a reader that peers reach at this host. Built-in ones do it by themselves."""
    _makers[name] = make


def make_reader(name: str, host: str) -> DirectReader:
    """Raises ConfigError for an unknown name."""
    if name in BACKENDS:
        importlib.import_module(f"transfer.kv.links.direct_{name}")
    if name not in _makers:
        raise ConfigError(f"the KV backend must be tcp, {' or '.join(BACKENDS)}, got {name!r}")
    return _makers[name](host)


# --- what backends share ----------------------------------------------------------------------------------------------


class Region(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A descriptor of the built-in backends. where: what the backend needs to find the process."""

    where: bytes
    address: int
    num_bytes: int


def encode_region(region: Region) -> bytes:
    return msgspec.msgpack.encode(region)


def decode_region(descriptor: bytes, spans: Sequence[Span]) -> Region:
    """Raises KvTransferFailed for bytes that are none, or spans outside of it."""
    try:
        region = msgspec.msgpack.decode(descriptor, type=Region)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise KvTransferFailed(f"the peer's memory is not described as this backend does it: {error}") from None
    if any(span.remote < 0 or span.num_bytes < 1 or span.remote + span.num_bytes > region.num_bytes for span in spans):
        raise KvTransferFailed(f"the peer named memory outside the {region.num_bytes} bytes that it registered")
    return region


def import_package(module: str, backend: str, needs: str) -> ModuleType:
    """needs: in words. Raises ConfigError with them when the module is missing, or cannot be loaded."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"the KV backend {backend} cannot be loaded here ({error}); install {needs}, or use the backend tcp"
        ) from None


def address_of(memory: memoryview) -> int:
    return int(np.frombuffer(memory, np.uint8).ctypes.data)


def whole_arena(arena: KvArena) -> memoryview | None:
    """All KV bytes of an arena whose blocks lie as HostArena's do, by their addresses; None for another."""
    layout, count = arena.layout, arena.num_blocks
    half = count * layout.slab_bytes
    first = arena.views(0, 0, count)[0]
    start = address_of(first)
    for layer in range(layout.num_layers):
        k, v = arena.views(layer, 0, count)
        if address_of(k) != start + 2 * layer * half or address_of(v) != start + (2 * layer + 1) * half:
            return None
    whole: Any = first.obj
    try:
        view = memoryview(whole).cast("B")[: 2 * layout.num_layers * half]
    except (TypeError, ValueError):
        return None
    return view if view.nbytes == 2 * layout.num_layers * half and address_of(view) == start else None
