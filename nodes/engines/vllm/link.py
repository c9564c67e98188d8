"""The agent's end of the link to the connector inside its vLLM: a unix socket in a directory that only we can enter.

The connector of one vLLM is taken, of our own user, in each of its workers; when one of them is lost the engine is,
whatever the HTTP server still says: nobody else may touch the arena. What every worker does for itself has happened
when the last one says so.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import socket
import struct
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

from nodes.engines.served import OnSaved, OnStarted
from nodes.engines.vllm.frames import (
    Began,
    FromConnector,
    Grant,
    Hello,
    LoadFailed,
    Refused,
    Revoke,
    Revoked,
    Saved,
    Unpacker,
    Welcome,
    from_connector,
    pack,
)
from nodes.engines.vllm.plan import share
from transfer.errors import EngineFailed, InvalidValue, PhaseplaneError, ProtocolError
from transfer.kv.arena import HostArena

log = logging.getLogger(__name__)

READ_BYTES = 1 << 18
HELLO_S = 10.0
REVOKE_S = 30.0
"""A connector answers within a layer's copy; one that does not may still write, so its engine is given up."""
JOB_BITS = 48
"""Numbers of jobs begin anywhere: a request that outlives its agent in a vLLM's queue is no job of the next one."""
_CREDENTIALS = struct.Struct("3i")


@dataclass(slots=True)
class Watched:
    """One job as the connector tells of it. num_missing: pairs of layer and block not saved yet. ends: of each worker
    that saves, by layer, where in the job's table it has got to. holders: workers that have not given the blocks back.
    """

    on_started: OnStarted
    on_saved: OnSaved
    num_missing: int
    ends: dict[int, list[int]]
    holders: set[int]
    num_cached: int | None = None
    loads_failed: int = 0
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def is_revoked(self) -> bool:
        return not self.holders

    def saved(self, rank: int, layer: int, first: int, count: int) -> None:
        """Raises ProtocolError for what does not follow on what the worker has saved before."""
        ends = self.ends.get(rank, [])
        if not (0 <= layer < len(ends) and first == ends[layer] and count > 0):
            raise ProtocolError(f"worker {rank} saved blocks from {first} on of layer {layer} out of turn")
        before = min(one[layer] for one in self.ends.values())
        ends[layer] += count
        everywhere = min(one[layer] for one in self.ends.values())
        if everywhere > before:
            self.num_missing -= everywhere - before
            self.on_saved(layer, before, everywhere - before)


class Link:
    """welcome: called for one worker after the other that says Hello; makes the arena for the first and gives it to the
    others, or raises InvalidValue, which refuses the vLLM."""

    def __init__(self, path: Path, welcome: Callable[[Hello], Awaitable[HostArena]]) -> None:
        self._path, self._welcome = path, welcome
        self._server: asyncio.Server | None = None
        self._first: Hello | None = None
        self._workers: dict[int, asyncio.StreamWriter] = {}
        self._admitting = asyncio.Lock()
        self._conversations: dict[asyncio.Task[None], asyncio.StreamWriter] = {}
        self._jobs: dict[int, Watched] = {}
        self._next_job = secrets.randbits(JOB_BITS) + 1
        self._said = ""
        loop = asyncio.get_running_loop()
        self.joined: asyncio.Future[Hello] = loop.create_future()
        self.lost: asyncio.Future[str] = loop.create_future()

    async def listen(self) -> None:
        """Raises InvalidValue when the directory is not ours alone."""
        check_private(self._path.parent)
        self._path.unlink(missing_ok=True)
        self._server = await asyncio.start_unix_server(self._serve, self._path)

    def grant(
        self, blocks: list[int], num_loaded: int, save_from: int, num_tokens: int, arena: HostArena,
        on_started: OnStarted, on_saved: OnSaved,
    ) -> tuple[int, Watched]:  # fmt: skip
        """The number of a new job that may use these blocks from now until `revoke`."""
        job, self._next_job = self._next_job, self._next_job + 1
        layout = arena.layout
        read = blocks[: layout.num_blocks(num_loaded)]
        watched = Watched(
            on_started, on_saved, layout.num_layers * max(0, len(blocks) - save_from),
            {rank: [save_from] * layout.num_layers for rank in self._savers(layout.num_kv_heads)}, set(self._workers),
        )  # fmt: skip
        self._jobs[job] = watched
        self._send(
            Grant(
                job=job, blocks=blocks, num_loaded=num_loaded, save_from=save_from, num_tokens=num_tokens,
                generations=[arena.generation(block) for block in read],
            )
        )  # fmt: skip
        return job, watched

    async def revoke(self, job: int) -> None:
        """Returns when nothing reads or writes the job's blocks any more. Idempotent."""
        watched = self._jobs.get(job)
        if watched is None:
            return
        self._send(Revoke(job=job))
        try:
            await asyncio.wait_for(self.until(watched, lambda: watched.is_revoked), REVOKE_S)
        except TimeoutError:
            self._lose(f"its connector did not give blocks back within {REVOKE_S:g} s")
        except EngineFailed:
            pass  # a connector that is gone writes nothing; one that cannot be reached is ended with its vLLM
        finally:
            self._jobs.pop(job, None)

    async def until(self, watched: Watched, is_so: Callable[[], bool]) -> None:
        """Waits for what the connector tells of the job. Raises EngineFailed when the link is lost."""
        while not is_so():
            if self.lost.done():
                raise EngineFailed(self.lost.result())
            watched.changed.clear()
            await watched.changed.wait()

    def absent(self) -> str:
        """Which workers have not come, to be appended to a sentence; empty before any has come and when all have."""
        if self._first is None or len(self._workers) == self._first.world_size:
            return ""
        return f" ({len(self._workers)} of its {self._first.world_size} workers have come to {self._path})"

    async def close(self) -> None:
        """Idempotent."""
        self._lose("the engine is closed")
        if self._server is not None:
            self._server.close()
        for writer in self._conversations.values():
            writer.close()
        await asyncio.gather(*self._conversations)
        self._path.unlink(missing_ok=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if task is not None:
            self._conversations[task] = writer
            task.add_done_callback(lambda done: self._conversations.pop(done, None))
        try:
            await self._converse(reader, writer)
        except (OSError, TimeoutError, PhaseplaneError) as error:
            if not self.lost.done() and str(error) != self._said:  # one that is refused comes again, ten times a second
                self._said = str(error)
                log.warning("a connector at %s: %s", self._path, self._said)
            if writer in self._workers.values():
                self._lose(f"vLLM's connector is gone: {error}")
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        _check_user(writer)
        unpacker = Unpacker()
        async with asyncio.timeout(HELLO_S):
            while not (bodies := unpacker.feed(await _read(reader))):
                pass
        hello = from_connector(bodies[0])
        if not isinstance(hello, Hello):
            raise ProtocolError(f"it began with {type(hello).__name__} instead of Hello")
        async with self._admitting:
            await self._admit(hello, writer)
        bodies = bodies[1:]
        while True:
            for body in bodies:
                self._take(from_connector(body), hello.rank)
            bodies = unpacker.feed(await _read(reader))

    async def _admit(self, hello: Hello, writer: asyncio.StreamWriter) -> None:
        """Raises InvalidValue, with the connector told why."""
        first = self._first or hello
        is_other = hello.engine != first.engine or hello.rank in self._workers
        try:
            if is_other:
                raise InvalidValue("another vLLM has joined this agent already; give each a socket of its own")
            self._first = first
            self._workers[hello.rank] = writer
            handle = (await self._welcome(hello)).handle
            if handle is None:
                raise InvalidValue("the agent's arena is private; make it shared")
        except InvalidValue as error:
            writer.write(pack(Refused(reason=str(error))))
            if not is_other and not self.joined.done():
                self.joined.set_exception(error)
            raise
        writer.write(pack(Welcome(arena=handle)))
        if len(self._workers) == first.world_size and not self.joined.done():
            self.joined.set_result(first)

    def _savers(self, num_kv_heads: int) -> list[int]:
        num_workers = len(self._workers)
        return [rank for rank in range(num_workers) if share(rank, num_workers, num_kv_heads).saves]

    def _take(self, frame: FromConnector, rank: int) -> None:
        if isinstance(frame, Hello):
            raise ProtocolError("it said Hello twice")
        watched = self._jobs.get(frame.job)
        if watched is None or watched.is_revoked:
            return
        match frame:
            case Began(num_cached=num_cached):
                is_first, watched.num_cached = watched.num_cached is None, num_cached
                if is_first:
                    watched.on_started()
            case Saved(layer=layer, first=first, count=count):
                watched.saved(rank, layer, first, count)
            case LoadFailed(reason=reason):
                watched.loads_failed += 1
                log.warning("vLLM computes what it could not load: %s", reason)
            case Revoked():
                watched.holders.discard(rank)
        watched.changed.set()

    def _send(self, frame: Grant | Revoke) -> None:
        if self.lost.done():
            return
        data = pack(frame)
        for writer in self._workers.values():
            writer.write(data)

    def _lose(self, reason: str) -> None:
        if not self.lost.done():
            self.lost.set_result(reason)
        if not self.joined.done():
            self.joined.set_exception(EngineFailed(reason))
            self.joined.exception()  # whoever waits for it still gets it; nobody has to
        for writer in self._workers.values():
            writer.close()  # which takes every grant back from those that are still there
        for watched in self._jobs.values():
            watched.changed.set()


def check_private(directory: Path) -> None:
    """Raises InvalidValue unless only our user can enter the directory."""
    try:
        found = directory.stat()
    except OSError as error:
        raise InvalidValue(
            f"cannot use {directory} for vLLM's link ({error.strerror}); create it with mode 700"
        ) from None
    if found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise InvalidValue(f"others can enter {directory}; chown it to the agent's user and chmod it to 700")


def _check_user(writer: asyncio.StreamWriter) -> None:
    link = writer.get_extra_info("socket")
    _, uid, _ = _CREDENTIALS.unpack(link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    if uid != os.getuid():
        raise ProtocolError(f"it runs as user {uid}, not as ours")


async def _read(reader: asyncio.StreamReader) -> bytes:
    data = await reader.read(READ_BYTES)
    if not data:
        raise ProtocolError("it closed the link, as when vLLM has ended or was killed")
    return data
