"""Host memory that holds KV blocks, optionally mapped by other processes on the same host.

Layout: [num_layers, 2, num_blocks, block_size, num_kv_heads, head_dim], so that consecutive blocks
of one layer are contiguous for attention and for vectored I/O. A second region holds one uint64
generation a block: bumped by the owner before a block's bytes may change hands, checked by a
reader after it has copied, so that a slow reader never serves somebody else's bytes. A shared one
ends with a token that its handle repeats, so that nobody has us read memory they only know the name of.
"""

from __future__ import annotations

import contextlib
import hmac
import mmap
import os
import secrets
from pathlib import Path
from typing import Protocol

from transfer.errors import InvalidValue, KvCorrupt
from transfer.terms import KvLayout, Struct

SHM_DIR = Path("/dev/shm")
SHM_PREFIX = "phaseplane-kv-"
GENERATION_BYTES, TOKEN_BYTES = 8, 16
MAP_FLAGS = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
"""A peer names the file: one that is a pipe must not hold us up, nor a link lead elsewhere."""
MADV_POPULATE_WRITE = 23
"""Linux 5.14: map every page now. A copy into pages touched for the first time is ten times slower."""


class ArenaHandle(Struct, frozen=True):
    """What another process on the same host needs to map an arena read-only. token: what the arena ends with."""

    name: str
    layout: KvLayout
    num_blocks: int
    token: bytes = b""


class KvArena(Protocol):
    """Block memory as the transfer layer sees it. Single owner; not thread-safe across one block."""

    layout: KvLayout
    num_blocks: int

    @property
    def handle(self) -> ArenaHandle | None:
        """How to map this arena from another process; None when it is private."""

    def views(self, layer: int, first_block: int, count: int) -> tuple[memoryview, memoryview]:
        """Writable K and V bytes of `count` consecutive blocks, each count * slab_bytes long."""

    def prepare_read(self, layer: int, blocks: list[int]) -> None:
        """Make `views` current (device to host staging); a no-op for host memory."""

    def commit_write(self, layer: int, blocks: list[int]) -> None:
        """Make what was written through `views` visible to the engine; a no-op for host memory."""

    def generation(self, block: int) -> int:
        """How often `block` has changed hands."""

    def bump(self, block: int) -> None:
        """Record that `block` changes hands: readers of the old bytes will notice."""


class HostArena:
    """KvArena over anonymous memory, or over a file in /dev/shm when `shared`.

    Raises InvalidValue when the size is not positive or /dev/shm has no room for it.
    """

    def __init__(self, layout: KvLayout, num_blocks: int, *, shared: bool = False) -> None:
        if num_blocks < 1:
            raise InvalidValue(f"an arena needs at least one block, got {num_blocks}; raise the KV memory")
        self.layout, self.num_blocks = layout, num_blocks
        self._path: Path | None = None
        self._token = secrets.token_bytes(TOKEN_BYTES)
        size = arena_bytes(layout, num_blocks)
        if shared:
            self._path = SHM_DIR / f"{SHM_PREFIX}{os.getpid()}-{secrets.token_hex(6)}"
            self._map = _create_file(self._path, size + TOKEN_BYTES)
            self._map[size:] = self._token
        else:
            self._map = mmap.mmap(-1, size)
        self._view = memoryview(self._map)
        self._generations = self._view[layout.block_bytes * num_blocks : size].cast("Q")

    @property
    def buffer(self) -> memoryview:
        """All KV bytes, for an engine to build its tensor on without a copy."""
        return self._view[: self.layout.block_bytes * self.num_blocks]

    @property
    def handle(self) -> ArenaHandle | None:
        if self._path is None:
            return None
        return ArenaHandle(
            name=self._path.name, layout=self.layout, num_blocks=self.num_blocks, token=self._token
        )  # fmt: skip

    def views(self, layer: int, first_block: int, count: int) -> tuple[memoryview, memoryview]:
        return _slab_views(self._view, self.layout, self.num_blocks, layer, first_block, count)

    def prepare_read(self, layer: int, blocks: list[int]) -> None:
        pass

    def commit_write(self, layer: int, blocks: list[int]) -> None:
        pass

    def generation(self, block: int) -> int:
        return self._generations[block]

    def bump(self, block: int) -> None:
        self._generations[block] += 1

    def close(self) -> None:
        """Unlink the shared file. Idempotent. Memory goes when the last view does."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)
            self._path = None
        with contextlib.suppress(BufferError):  # an engine's tensor may still look at it
            self._generations.release()
            self._view.release()
            self._map.close()


class MappedArena:
    """View of another process's shared HostArena. Reads are checked by generation.

    writable: for the engine of the arena's owner, in a process of its own; everybody else reads.
    """

    def __init__(self, handle: ArenaHandle, *, writable: bool = False) -> None:
        if not handle.name.startswith(SHM_PREFIX) or "/" in handle.name:
            raise InvalidValue(f"{handle.name!r} is not the name of a KV arena")
        size = arena_bytes(handle.layout, handle.num_blocks)
        path = SHM_DIR / handle.name
        try:
            fd = os.open(path, MAP_FLAGS | (os.O_RDWR if writable else os.O_RDONLY))
        except FileNotFoundError:
            raise KvCorrupt(f"arena {handle.name} is gone; its owner has ended") from None
        try:
            if os.fstat(fd).st_size != size + TOKEN_BYTES:
                raise KvCorrupt(f"arena {handle.name} is not of {size} bytes; its owner was replaced")
            access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
            self._map = mmap.mmap(fd, size + TOKEN_BYTES, access=access)
        finally:
            os.close(fd)
        if not hmac.compare_digest(self._map[size:], handle.token):
            self._map.close()
            raise KvCorrupt(f"arena {handle.name} is not the peer's to name: it has another token")
        self.layout, self.num_blocks = handle.layout, handle.num_blocks
        self._view = memoryview(self._map)
        self._generations = self._view[handle.layout.block_bytes * handle.num_blocks : size].cast("Q")

    @property
    def buffer(self) -> memoryview:
        """All KV bytes, as HostArena.buffer."""
        return self._view[: self.layout.block_bytes * self.num_blocks]

    def views(self, layer: int, first_block: int, count: int) -> tuple[memoryview, memoryview]:
        """K and V bytes, as HostArena.views; read-only unless writable."""
        return _slab_views(self._view, self.layout, self.num_blocks, layer, first_block, count)

    def generation(self, block: int) -> int:
        return self._generations[block]

    def generations(self, first_block: int, count: int) -> bytes:
        """Of neighbouring blocks, uint64 each."""
        return self._generations[first_block : first_block + count].tobytes()

    def close(self) -> None:
        with contextlib.suppress(BufferError):
            self._generations.release()
            self._view.release()
            self._map.close()


def arena_bytes(layout: KvLayout, num_blocks: int) -> int:
    """Bytes of an arena: the blocks and one generation each, without the token."""
    return num_blocks * (layout.block_bytes + GENERATION_BYTES)


def remove_stale_arenas() -> int:
    """Unlink arenas whose owner process is dead (after SIGKILL) and that are ours to remove. Returns how many."""
    removed = 0
    for path in SHM_DIR.glob(f"{SHM_PREFIX}*"):
        pid = path.name.removeprefix(SHM_PREFIX).split("-")[0]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists():
            with contextlib.suppress(OSError):  # another user's, or another process was quicker
                path.unlink()
                removed += 1
    return removed


def _create_file(path: Path, size: int) -> mmap.mmap:
    fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    try:
        os.posix_fallocate(fd, 0, size)
        mapped = mmap.mmap(fd, size)
        with contextlib.suppress(OSError, ValueError):  # an older kernel: pages are then mapped one by one, as touched
            mapped.madvise(MADV_POPULATE_WRITE)
        return mapped
    except OSError as error:
        path.unlink(missing_ok=True)
        raise InvalidValue(f"/dev/shm has no room for {size} bytes of KV ({error}); lower the KV memory") from None
    finally:
        os.close(fd)


def _slab_views(
    view: memoryview, layout: KvLayout, num_blocks: int, layer: int, first_block: int, count: int
) -> tuple[memoryview, memoryview]:
    if not (0 <= layer < layout.num_layers and first_block >= 0 and first_block + count <= num_blocks and count >= 0):
        raise InvalidValue(
            f"blocks {first_block}..{first_block + count} of layer {layer} lie outside an arena of "
            f"{num_blocks} blocks and {layout.num_layers} layers"
        )
    slab = layout.slab_bytes
    k = (2 * layer * num_blocks + first_block) * slab
    v = k + num_blocks * slab
    return view[k : k + count * slab], view[v : v + count * slab]
