"""The client of a KV pool: put, get, look up and pin blocks by content from any engine, in its own process.

Values travel through shared memory on one host and over TCP otherwise. See docs/kv.md for what a pool guarantees.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import TypeVar

from transfer.errors import InvalidValue, KvError, KvTransferFailed
from transfer.keys import load_data_key
from transfer.kv.arena import HostArena, KvArena, remove_stale_arenas
from transfer.kv.block import HASH_BYTES
from transfer.kv.links.shm import local_host_id
from transfer.kv.links.tcp import TcpKvPort
from transfer.kv.port import KvAnswer, KvAsk, KvAskKind, KvFetch, KvKind, KvOffer, KvTrailer
from transfer.kv.staging import Array, Staging, Values, finish, opaque_layout, rows
from transfer.terms import MAX_ID_CHARS, KvLayout
from transfer.wire.messages import KvPeer

TIMEOUT_S = 10.0
STAGING_BYTES = 64 << 20
LOAD_BYTES, GET_BYTES = 4 << 20, 16 << 20
"""A put is copied to staging memory and a get out of it in parts of this size, while other parts travel."""
MAX_KEYS = 1 << 16
"""Of one message to the pool; a larger one would end the connection, with everything else on it."""
BACKOFF_S, MAX_BACKOFF_S = 0.02, 0.5
EPOCH_BITS = 48

T = TypeVar("T")


def block_key(fingerprint: bytes, name: bytes) -> bytes:
    """A pool's key for a block that the caller calls `name`: SHA-256(fingerprint + name), 32 bytes."""
    return hashlib.sha256(fingerprint + name).digest()


class KvPoolClient:
    """`async with KvPoolClient(endpoint, block_bytes=..., fingerprint=...) as pool:`; for one event loop.

    layout or block_bytes: what a block is; it must be the pool's. fingerprint: 32 bytes that name everything that
    changes the bytes of a block (terms.kv_fingerprint). Keys are 32 bytes and must depend on it: the chain of
    kv/block.py, or `block_key`. key_file: the secret of pools beyond loopback. staging_bytes: shared memory of this
    client, through which values go. arena: the caller's own memory in its place; then only put_blocks and get_blocks
    can be used. timeout_s: of every call that is not given its own. shm: use shared memory on one host.

    Every call has a deadline and raises only transfer.errors: InvalidValue for a wrong argument or a closed client,
    KvTransferFailed when the pool refuses (in its words), is lost or late, KvCorrupt when bytes arrived damaged twice.
    A lost or restarted pool is connected again, and the call tried again, until the deadline: all calls are
    idempotent. Pins do not survive the pool's restart.
    """

    def __init__(
        self, endpoint: str, *, fingerprint: bytes, layout: KvLayout | None = None, block_bytes: int | None = None,
        key_file: Path | None = None, arena: KvArena | None = None, staging_bytes: int = STAGING_BYTES,
        timeout_s: float = TIMEOUT_S, shm: bool = True,
    ) -> None:  # fmt: skip
        if (layout is None) == (block_bytes is None):
            raise InvalidValue("give a KV pool client either layout or block_bytes, to say what a block is")
        if len(fingerprint) != HASH_BYTES:
            raise InvalidValue(f"a fingerprint has {HASH_BYTES} bytes, got {len(fingerprint)}; use kv_fingerprint")
        self.layout = layout if layout is not None else opaque_layout(block_bytes or 0)
        if arena is not None and arena.layout != self.layout:
            raise InvalidValue("the arena has another KV layout than the client was given; give both the same")
        self._endpoint, self._fingerprint, self._timeout_s, self._shm = endpoint, fingerprint, timeout_s, shm
        self._key = None if key_file is None else load_data_key(key_file)
        self._arena, self._staging_bytes = arena, staging_bytes
        self._own: HostArena | None = None
        self._staging: Staging | None = None
        self._pool: _Pool | None = None
        self._name, self._epoch = f"client-{secrets.token_hex(6)}", secrets.randbits(EPOCH_BITS)
        self._numbers = itertools.count(1)

    async def __aenter__(self) -> KvPoolClient:
        """Connect. Raises KvTransferFailed at once when there is no pool, or it is of another layout or fingerprint."""
        if self._arena is None:
            num_blocks = max(1, self._staging_bytes // self.layout.block_bytes)
            if self._shm:
                remove_stale_arenas()  # of clients that were killed: nobody else may come by
            self._arena = self._own = HostArena(self.layout, num_blocks, shared=self._shm)
            self._staging = Staging(self._own)
        port = TcpKvPort(
            instance_id=self._name, epoch=self._epoch, arena=self._arena, auth_key=self._key, shm=self._shm
        )
        self._pool = _Pool(port, self._endpoint, self._name, self._fingerprint)
        try:
            await self._pool.meet(self._timeout_s)
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """End the connection and give the memory back. Idempotent."""
        pool, self._pool = self._pool, None
        if pool is not None:
            await pool.close()
        if self._own is not None and self._staging is not None:
            self._staging.close()
            self._own.close()
            self._arena = self._own = self._staging = None

    @property
    def arena(self) -> KvArena:
        """The memory that put_blocks and get_blocks name blocks of."""
        if self._arena is None:
            raise InvalidValue("the KV pool client is not open; use `async with`")
        return self._arena

    # --- values -------------------------------------------------------------------------------------------------

    async def put(self, keys: Sequence[bytes], values: Values, *, timeout_s: float | None = None) -> int:
        """Store values under keys; returns how many were new to the pool. values: block_bytes for each key.

        What the pool has, or another client is storing at this moment, is left as it is. Each block is stored whole or
        not at all; in a put larger than the staging memory some may be stored before a failure is raised.
        """
        staging, clock = self._staged(), _Deadline(self._timeout_s if timeout_s is None else timeout_s)
        data = rows(values, len(_checked(keys)), staging.block_bytes)
        stored, step = 0, min(staging.num_blocks, MAX_KEYS)
        for first in range(0, len(keys), step):
            part, part_rows = keys[first : first + step], data[first : first + step]
            blocks = await staging.take(len(part), clock.left_s)
            try:
                stored += await self._retried(
                    clock, lambda peer, k=part, b=blocks, v=part_rows: self._push(peer, k, b, clock, v)  # type: ignore[misc]
                )  # fmt: skip
            finally:
                staging.give(blocks)
        return stored

    async def get(self, keys: Sequence[bytes], into: Values, *, timeout_s: float | None = None) -> int:
        """Read the values of leading keys into the caller's memory; returns how many were there, verified and copied.

        Counting ends at the first miss. What follows those values in `into` is not to be used.
        """
        staging, clock = self._staged(), _Deadline(self._timeout_s if timeout_s is None else timeout_s)
        data = rows(into, len(_checked(keys)), staging.block_bytes, writable=True)
        step = min(staging.num_blocks, MAX_KEYS, max(1, GET_BYTES // staging.block_bytes))
        found, copying = 0, None
        try:
            for first in range(0, len(keys), step):
                part = keys[first : first + step]
                blocks = await staging.take(len(part), clock.left_s)
                try:
                    count = await self._retried(clock, lambda peer, k=part, b=blocks: self._fetch(peer, k, b, clock))  # type: ignore[misc]
                except BaseException:
                    staging.give(blocks)
                    raise
                before, copying = copying, asyncio.create_task(_unload(staging, blocks, data[first : first + count]))
                if before is not None:
                    await finish(before)
                found += count
                if count < len(part):
                    break
        finally:
            if copying is not None:
                await finish(copying)
        return found

    async def put_blocks(self, keys: Sequence[bytes], blocks: Sequence[int], *, timeout_s: float | None = None) -> int:
        """As put, out of blocks of `arena`, which are read until this returns: no copy on this side."""
        clock = _Deadline(self._timeout_s if timeout_s is None else timeout_s)
        return await self._retried(clock, lambda peer: self._push(peer, _few(keys), blocks, clock, None))

    async def get_blocks(self, keys: Sequence[bytes], blocks: Sequence[int], *, timeout_s: float | None = None) -> int:
        """As get, straight into blocks of `arena`: no copy beyond the transfer itself."""
        clock = _Deadline(self._timeout_s if timeout_s is None else timeout_s)
        return await self._retried(clock, lambda peer: self._fetch(peer, _few(keys), blocks, clock))

    @contextlib.asynccontextmanager
    async def reserve(self, count: int, *, timeout_s: float | None = None) -> AsyncIterator[list[int]]:
        """`count` blocks of this client's own memory for put_blocks and get_blocks, while the `async with` lasts."""
        staging = self._staged()
        blocks = await staging.take(count, self._timeout_s if timeout_s is None else timeout_s)
        try:
            yield blocks
        finally:
            staging.give(blocks)

    # --- questions ----------------------------------------------------------------------------------------------

    async def lookup(self, keys: Sequence[bytes], *, timeout_s: float | None = None) -> int:
        """How many leading keys the pool has, in memory or on SSD."""
        return (await self._ask(KvAskKind.LOOKUP, timeout_s, hashes=tuple(_few(keys)))).num_blocks

    async def pin(self, name: str, keys: Sequence[bytes], ttl_s: float, *, timeout_s: float | None = None) -> int:
        """Keep leading keys from eviction for ttl_s; returns how many. name: the client's own; repeated: renewed."""
        answer = await self._ask(
            KvAskKind.PIN, timeout_s, hashes=tuple(_few(keys)), name=self._pin_name(name), ttl_s=ttl_s
        )
        return answer.num_blocks

    async def unpin(self, name: str, *, timeout_s: float | None = None) -> None:
        """End a pin of this client's."""
        await self._ask(KvAskKind.UNPIN, timeout_s, name=self._pin_name(name))

    async def stats(self, *, timeout_s: float | None = None) -> dict[str, float]:
        """Sizes and counters of the pool, named in docs/kv.md."""
        return (await self._ask(KvAskKind.STATS, timeout_s)).stats

    # --- the pool -----------------------------------------------------------------------------------------------

    async def _ask(
        self, kind: KvAskKind, timeout_s: float | None, *, hashes: tuple[bytes, ...] = (), name: str = "",
        ttl_s: float = 0.0,
    ) -> KvAnswer:  # fmt: skip
        clock = _Deadline(self._timeout_s if timeout_s is None else timeout_s)

        async def work(peer: KvPeer) -> KvAnswer:
            ask = KvAsk(
                kind=kind, source=self._name, target_epoch=peer.epoch, fingerprint=self._fingerprint, hashes=hashes,
                name=name, ttl_s=ttl_s,
            )  # fmt: skip
            return await self._open_pool().port.ask(peer, ask, clock.left_s)

        return await self._retried(clock, work)

    async def _push(
        self, peer: KvPeer, keys: Sequence[bytes], blocks: Sequence[int], clock: _Deadline, data: list[Array] | None
    ) -> int:
        """data: what is to be copied into the blocks first; None: they hold it already."""
        if not keys:
            return 0
        offer = KvOffer(
            kind=KvKind.STORE, request_id=self._request_id("put"), generation=0, source=self._name,
            source_epoch=self._epoch, target_epoch=peer.epoch, fingerprint=self._fingerprint, first_block=0,
            num_blocks=len(keys), hashes=tuple(keys),
        )  # fmt: skip
        sender = await self._open_pool().port.open(peer, offer, blocks, clock.left_s)
        try:
            step = len(keys) if data is None else max(1, LOAD_BYTES // self.layout.block_bytes)
            for first in range(0, len(keys), step):
                count = min(step, len(keys) - first)
                if data is not None:
                    await self._staged().load(blocks[first : first + count], data[first : first + count])
                for layer in range(self.layout.num_layers):
                    sender.push(layer, first, count)
            trailer = KvTrailer(num_tokens=len(keys) * self.layout.block_size)
            sent = await sender.commit(trailer, clock.left_s)
        except BaseException:
            sender.abort("the client gave the put up")
            raise
        return sent.num_bytes // self.layout.block_bytes

    async def _fetch(self, peer: KvPeer, keys: Sequence[bytes], blocks: Sequence[int], clock: _Deadline) -> int:
        fetch = KvFetch(
            request_id=self._request_id("get"), target_epoch=peer.epoch, fingerprint=self._fingerprint,
            hashes=tuple(keys),
        )  # fmt: skip
        return await self._open_pool().port.fetch(peer, fetch, blocks, clock.left_s)

    async def _retried(self, clock: _Deadline, work: Callable[[KvPeer], Awaitable[T]]) -> T:
        return await self._open_pool().retried(clock, work)

    def _pin_name(self, name: str) -> str:
        most = MAX_ID_CHARS - len(self._name) - 1
        if not 0 < len(name) <= most:
            raise InvalidValue(f"a pin needs a name of 1 to {most} characters, got {len(name)}")
        return f"{self._name}/{name}"

    def _request_id(self, what: str) -> str:
        """No other client's: the pool ends puts by this name."""
        return f"{self._name}/{what}-{next(self._numbers)}"

    def _open_pool(self) -> _Pool:
        if self._pool is None:
            raise InvalidValue("the KV pool client is closed; use `async with`")
        return self._pool

    def _staged(self) -> Staging:
        if self._staging is None:
            raise InvalidValue("this client has no staging memory: it is closed, or works on the caller's arena")
        return self._staging


class _Pool:
    """Who answers at the endpoint: met at first, and again after every failure."""

    def __init__(self, port: TcpKvPort, endpoint: str, name: str, fingerprint: bytes) -> None:
        self.port, self._endpoint, self._name, self._fingerprint = port, endpoint, name, fingerprint
        self._peer: KvPeer | None = None
        self._meeting = asyncio.Lock()
        self._closed = False

    async def close(self) -> None:
        """Calls under way fail."""
        self._closed = True
        await self.port.close()

    async def retried(self, clock: _Deadline, work: Callable[[KvPeer], Awaitable[T]]) -> T:
        """Do it; after a failure meet the pool again and repeat: once with the same pool, and with each new life."""
        peer = self._peer or await self._met_again(clock, None)
        repeated = False
        while True:
            try:
                return await work(peer)
            except KvError as error:
                if self._closed or clock.left_s <= 0.0:
                    raise
                met = await self._met_again(clock, peer)
                if met.epoch == peer.epoch and repeated:
                    raise error
                repeated, peer = met.epoch == peer.epoch, met

    async def _met_again(self, clock: _Deadline, failed: KvPeer | None) -> KvPeer:
        """The pool that answers now, whoever it is; one connects for all. Raises KvTransferFailed at the deadline."""
        try:
            async with asyncio.timeout(clock.left_s):
                await self._meeting.acquire()
        except TimeoutError:
            raise KvTransferFailed(f"the pool at {self._endpoint} is lost and did not come back in time") from None
        try:
            if self._peer is not None and self._peer is not failed:
                return self._peer
            self._peer, backoff_s = None, BACKOFF_S
            while self._peer is None:
                try:
                    await self.meet(clock.left_s)
                except KvError:
                    if self._closed or clock.left_s <= backoff_s:
                        raise
                    await asyncio.sleep(backoff_s)
                    backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)
            return self._peer
        finally:
            self._meeting.release()

    async def meet(self, timeout_s: float) -> KvPeer:
        """Which life answers, and whether its blocks are like ours. Raises KvTransferFailed with its sentence."""
        clock = _Deadline(timeout_s)
        stranger = KvPeer(instance_id="the pool", epoch=0, data_endpoint=self._endpoint, host_id=local_host_id())
        ask = KvAsk(kind=KvAskKind.LOOKUP, source=self._name, target_epoch=0, fingerprint=self._fingerprint)
        answer = await self.port.ask(stranger, ask, timeout_s)
        peer = KvPeer(
            instance_id="the pool", epoch=answer.epoch, data_endpoint=self._endpoint, host_id=stranger.host_id
        )
        nothing = KvFetch(request_id="meet", target_epoch=peer.epoch, fingerprint=self._fingerprint, hashes=())
        await self.port.fetch(peer, nothing, (), clock.left_s)  # the layouts are compared
        self._peer = peer
        return peer


class _Deadline:
    """How long a call may still take."""

    def __init__(self, timeout_s: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._at_s = self._loop.time() + timeout_s

    @property
    def left_s(self) -> float:
        return max(0.0, self._at_s - self._loop.time())


async def pool_stats(endpoint: str, *, key_file: Path | None = None, timeout_s: float = TIMEOUT_S) -> dict[str, float]:
    """Sizes and counters of the pool at `endpoint`, whatever its layout. Raises KvTransferFailed."""
    arena = HostArena(opaque_layout(2), 1)
    key = None if key_file is None else load_data_key(key_file)
    port = TcpKvPort(instance_id="stats", epoch=1, arena=arena, auth_key=key, shm=False)
    try:
        peer = KvPeer(instance_id="the pool", epoch=0, data_endpoint=endpoint, host_id=local_host_id())
        answer = await port.ask(peer, KvAsk(kind=KvAskKind.STATS, source="stats", target_epoch=0), timeout_s)
    finally:
        await port.close()
        arena.close()
    return answer.stats


async def _unload(staging: Staging, blocks: list[int], values: list[Array]) -> None:
    try:
        await staging.store(blocks[: len(values)], values)
    finally:
        staging.give(blocks)


def _few(keys: Sequence[bytes]) -> Sequence[bytes]:
    """Checked, and few enough for one message."""
    if len(keys) > MAX_KEYS:
        raise InvalidValue(f"one call takes up to {MAX_KEYS} keys, got {len(keys)}; make several")
    return _checked(keys)


def _checked(keys: Sequence[bytes]) -> Sequence[bytes]:
    for key in keys:
        if not isinstance(key, bytes):
            raise InvalidValue(f"keys are a list of bytes, {HASH_BYTES} each; one of them is {type(key).__name__}")
        if len(key) != HASH_BYTES:
            raise InvalidValue(f"a key has {HASH_BYTES} bytes, got {len(key)}; use block_hashes or block_key")
    return keys
